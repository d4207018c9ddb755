"""Does launch overhead mean something? Plants known costs in a step and reads them back.

One engine runs the steps of a scenario over and over: as it is, with 100 us of Python in each step,
with a kernel of 200 us, and with both, in turn. Python must appear in launch overhead and not in
kernel time, the kernel the other way round. One engine, because two equal ones differ by tens of
microseconds for where their memory lies. Walls and floors are taken in pairs, as in a compare.
Prints what was read back, with the standard error.

Run: python benchmarks/launch_overhead.py [--repetitions N] [--scenario NAME]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence

import numpy as np
import torch

from pcpbench.device.backends import resolve_backend
from pcpbench.device.clock import make_clock, one_thread
from pcpbench.engine.engine import StepOutput
from pcpbench.engine.plan_steps import make_plan
from pcpbench.engine_options import EngineOptions
from pcpbench.model.presets import model_shape
from pcpbench.modes import ARM_MODES, CUDAGraphMode
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.scenarios.loader import load_scenario
from pcpbench.session.ladder import ArmSpec, Ladder
from pcpbench.session.stand import StandBuilder
from pcpbench.session.timing import record_kernels
from pcpbench.targets.builtin import BuiltinArm, BuiltinTarget

PYTHON_S, KERNEL_S = 100e-6, 200e-6
PLANTED = {
    "nothing": (0.0, 0.0),
    "100 us Python": (PYTHON_S, 0.0),
    "200 us kernel": (0.0, KERNEL_S),
    "both": (PYTHON_S, KERNEL_S),
}
CPU = torch.device("cpu")

_library = torch.library.Library("pcpbench_benchmarks", "DEF")
_library.define("wait(Tensor x, float seconds) -> ()")


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _wait(x: torch.Tensor, seconds: float) -> None:
    spin(seconds)


_library.impl("wait", _wait, "CompositeExplicitAutograd")


class Planted:
    """An arm whose steps cost more by what `costs` says: (Python, kernel) in seconds."""

    def __init__(self, arm: BuiltinArm) -> None:
        self.arm, self.costs = arm, (0.0, 0.0)
        self._token, self._execute = torch.zeros(1), arm.engine.execute
        arm.engine.execute = self._slower  # type: ignore[method-assign]

    def _slower(self, step: StepPlan, *feed: Sequence[int] | None) -> StepOutput:
        python_s, kernel_s = self.costs
        if python_s:
            spin(python_s)
        if kernel_s:
            torch.ops.pcpbench_benchmarks.wait(self._token, kernel_s)
        return self._execute(step, *feed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--scenario", default="s2-capture-edges")
    arguments = parser.parse_args()
    options = EngineOptions()
    vocab_size = model_shape(options.model).vocab_size
    plan = make_plan(load_scenario(arguments.scenario), vocab_size=vocab_size)
    with one_thread(CPU):
        for like in ("eager", "full"):
            measure(like, build(like, plan, options), plan, arguments.repetitions)


def build(like: str, plan: ScenarioPlan, options: EngineOptions) -> BuiltinArm:
    mode = ARM_MODES[like]
    spec = ArmSpec(like, mode, replays=mode is not CUDAGraphMode.NONE)
    target = BuiltinTarget(CPU, resolve_backend("auto", CPU))
    stand = StandBuilder(target, Ladder((spec,), (), like, like), options, "cpu").stand_for(plan)
    arm = stand.arms[like]
    assert isinstance(arm, BuiltinArm)
    return arm


def measure(like: str, arm: BuiltinArm, plan: ScenarioPlan, repetitions: int) -> None:
    """Time all variants in turn, as a compare does, and print what was planted and what is seen."""
    clock, planted = make_clock(CPU), Planted(arm)
    names = list(PLANTED)
    kernels = {}
    for name in names:
        planted.costs = PLANTED[name]
        kernels[name] = record_kernels([arm], plan, None, clock)
    launches: dict[str, Samples] = {name: {} for name in names}
    floors: dict[str, Samples] = {name: {} for name in names}
    gc.collect()
    gc.disable()
    for repetition in range(repetitions):
        for turn in range(len(names)):
            name = names[(turn + repetition) % len(names)]
            planted.costs = PLANTED[name]
            arm.start(plan)
            for step in plan.steps:
                start = clock.now()
                arm.execute(step)
                wall_s = clock.now() - start
                floor = kernels[name].get((like, step.index))
                if floor is not None:
                    kernel_s = floor.seconds()
                    floors[name].setdefault(step.index, []).append(kernel_s)
                    launches[name].setdefault(step.index, []).append(wall_s - kernel_s)
    gc.enable()
    report(like, launches, floors)


Samples = dict[int, list[float]]


def report(like: str, launches: dict[str, Samples], floors: dict[str, Samples]) -> None:
    base = "nothing"
    launch, kernel = (
        1e6 * np.median([np.median(values) for values in samples[base].values()])
        for samples in (launches, floors)
    )
    print(f"\n{like}: launch overhead {launch:.0f} us a step, kernels {kernel:.0f} us (medians)")
    print(f"{'planted':<16}{'launch overhead, us':>22}{'kernel time, us':>22}")
    for name in [name for name in PLANTED if name != base]:
        cells = [read_back(samples, name, base) for samples in (launches, floors)]
        print(f"{name:<16}{cells[0]:>22}{cells[1]:>22}")


def read_back(samples: dict[str, Samples], name: str, base: str) -> str:
    """Median over steps and repetitions of what a planted step took more, with its error."""
    more = 1e6 * np.concatenate(
        [np.subtract(samples[name][step], samples[base][step]) for step in samples[base]]
    )
    return f"{np.median(more):+.0f} +- {error_of_median(more):.0f}"


def error_of_median(samples: np.ndarray) -> float:
    """Standard error of a median, by 500 resamples."""
    generator = np.random.default_rng(0)
    draws = generator.choice(samples, size=(500, len(samples)))
    return float(np.median(draws, axis=1).std())


if __name__ == "__main__":
    main()
