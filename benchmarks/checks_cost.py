"""What the contracts cost: wall time of one scenario under the judge, quick and full, no timing.

usage: python benchmarks/checks_cost.py [--scenario s1-grow-shrink ...] [--rounds 5]

Rows are worlds and scenarios. `before` judges without following the caches (C9, C15 left out),
`quick` and `full` as `pcpbench compare --repetitions 0 --check ...` does. The three take turns;
cells are the least of the rounds, on one thread: neighbours only ever add to it.
"""

from __future__ import annotations

import argparse
import time
from unittest import mock

import torch

from pcpbench.checks.write_set import WriteSets
from pcpbench.device.backends import resolve_backend
from pcpbench.device.clock import make_clock
from pcpbench.engine.scheduler import make_plan
from pcpbench.model.presets import model_shape
from pcpbench.plan import ScenarioPlan
from pcpbench.request import EngineOptions
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


def judged_s(plan: ScenarioPlan, stand: Stand, checks: str) -> float:
    trial = Trial(
        plan,
        stand,
        make_clock(CPU),
        dtype="float32",
        teacher_forced=True,
        repetitions=0,
        checks="quick" if checks == "before" else checks,
    )
    start = time.perf_counter()
    if checks == "before":
        with (
            mock.patch.object(WriteSets, "start", return_value=None),
            mock.patch.object(WriteSets, "check", return_value=()),
        ):
            result = trial.run()
    else:
        result = trial.run()
    seconds = time.perf_counter() - start
    if result.violations:
        raise SystemExit(f"{plan.scenario}: {result.reasons}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the judge with and without contracts.")
    parser.add_argument("--scenario", nargs="+", default=["s1-grow-shrink", "s11-long-kv"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'world':26}{'scenario':20}{'before s':>10}{'quick s':>10}{'full s':>10}", flush=True)
    for name, options in WORLDS.items():
        target = BuiltinTarget(CPU, resolve_backend("auto", CPU))
        builder = StandBuilder(target, build_ladder("eager", "full"), options, "cpu")
        for scenario in arguments.scenario:
            vocab_size = model_shape(options.model).vocab_size
            loaded = load_scenario(scenario)
            plan = make_plan(loaded, vocab_size=vocab_size, dcp_size=options.dcp)
            stand = builder.stand_for(plan)
            best = dict.fromkeys(("before", "quick", "full"), float("inf"))
            for _ in range(arguments.rounds):
                for checks in best:
                    best[checks] = min(best[checks], judged_s(plan, stand, checks))
            cells = "".join(f"{seconds:10.2f}" for seconds in best.values())
            more = f"  quick +{best['quick'] / best['before'] - 1:.0%}"
            print(f"{name:26}{scenario:20}{cells}{more}", flush=True)


if __name__ == "__main__":
    main()
