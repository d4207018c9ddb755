"""What the contracts cost: wall time of a comparison's scenario without them, quick and full.

usage: python benchmarks/checks_cost.py [--scenario NAME ...] [--rounds 5] [--repetitions 3]

Rows are worlds and scenarios. `none` compares outputs and caches of arms and holds no contract;
`quick` and `full` are `pcpbench compare --check ...`; all time as many repetitions. The three take
turns; cells are the least of the rounds, on one thread: neighbours only ever add to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from pcpbench.checks import judge
from pcpbench.checks.write_set import WriteSets
from pcpbench.device.backends import resolve_backend
from pcpbench.device.clock import make_clock
from pcpbench.engine.plan_steps import make_plan
from pcpbench.engine_options import EngineOptions
from pcpbench.model.presets import model_shape
from pcpbench.plan import ScenarioPlan
from pcpbench.scenarios.loader import load_scenario
from pcpbench.session.ladder import build_ladder
from pcpbench.session.stand import Stand, StandBuilder
from pcpbench.session.trial import Trial
from pcpbench.targets.builtin import BuiltinTarget

CPU = torch.device("cpu")
WORLDS = {
    "pcp 2": EngineOptions(pcp=2),
    "tp 4 dcp 4 interleave 2": EngineOptions(pcp=1, tp=4, dcp=4, interleave=2),
}


@contextmanager
def no_contracts() -> Iterator[None]:
    """The judge without contracts; what compares arms with each other stays."""
    with (
        mock.patch.object(WriteSets, "start", return_value=None),
        mock.patch.object(WriteSets, "check", return_value=()),
        mock.patch.object(judge, "check_step", return_value=[]),
        mock.patch.object(judge, "plan_violations", return_value=()),
        mock.patch.object(judge, "candidate_violations", return_value=()),
        mock.patch.object(Trial, "_verify_dense", return_value=None),
    ):
        yield


def run_s(plan: ScenarioPlan, stand: Stand, checks: str, repetitions: int) -> float:
    trial = Trial(
        plan,
        stand,
        make_clock(CPU),
        dtype="float32",
        teacher_forced=True,
        repetitions=repetitions,
        checks="quick" if checks == "none" else checks,
    )
    start = time.perf_counter()
    with no_contracts() if checks == "none" else nullcontext():
        result = trial.run()
    seconds = time.perf_counter() - start
    if result.violations:
        raise SystemExit(f"{plan.scenario}: {result.reasons}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the judge with and without contracts.")
    parser.add_argument("--scenario", nargs="+", default=["s1-grow-shrink", "s11-long-kv"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'world':26}{'scenario':20}{'none s':>10}{'quick s':>10}{'full s':>10}", flush=True)
    for name, options in WORLDS.items():
        target = BuiltinTarget(CPU, resolve_backend("auto", CPU))
        builder = StandBuilder(target, build_ladder("eager", "full"), options, "cpu")
        for scenario in arguments.scenario:
            vocab_size = model_shape(options.model).vocab_size
            loaded = load_scenario(scenario)
            plan = make_plan(loaded, vocab_size=vocab_size, dcp_size=options.dcp)
            stand = builder.stand_for(plan)
            best = dict.fromkeys(("none", "quick", "full"), float("inf"))
            for _ in range(arguments.rounds):
                for checks in best:
                    best[checks] = min(
                        best[checks], run_s(plan, stand, checks, arguments.repetitions)
                    )
            cells = "".join(f"{seconds:10.2f}" for seconds in best.values())
            more = f"  quick +{best['quick'] / best['none'] - 1:.0%}"
            print(f"{name:26}{scenario:20}{cells}{more}", flush=True)


if __name__ == "__main__":
    main()
