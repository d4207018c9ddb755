"""Does launch overhead mean something? Plants known costs in a step and reads them back.

Four engines run the same steps side by side: as it is, with 100 us of Python, with a kernel of
200 us, and with both. Python must appear in launch overhead and not in kernel time, the kernel the
other way round. Prints medians over the steps that were measured, with their spread.

Run: python benchmarks/launch_overhead.py [--repetitions N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from pcpbench.checks.metrics import arm_times
from pcpbench.device.backends import resolve_backend
from pcpbench.device.clock import make_clock, one_thread
from pcpbench.engine.engine import StepOutput
from pcpbench.engine.scheduler import make_plan
from pcpbench.model.presets import model_shape
from pcpbench.modes import ARM_MODES, CUDAGraphMode
from pcpbench.plan import StepPlan
from pcpbench.request import EngineOptions
from pcpbench.scenarios.loader import load_scenario
from pcpbench.session.ladder import ArmSpec, Ladder
from pcpbench.session.stand import StandBuilder
from pcpbench.session.timing import time_arms
from pcpbench.targets.builtin import BuiltinArm, BuiltinTarget

PYTHON_S, KERNEL_S = 100e-6, 200e-6
PLANTED = {
    "as it is": (0.0, 0.0),
    "+100 us Python": (PYTHON_S, 0.0),
    "+200 us kernel": (0.0, KERNEL_S),
    "+both": (PYTHON_S, KERNEL_S),
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


def plant(arm: BuiltinArm, python_s: float, kernel_s: float) -> None:
    """Add Python and a kernel to every step of an arm that schedules something."""
    execute, token = arm.engine.execute, torch.zeros(1)

    def slower(step: StepPlan, forced: Sequence[int] | None = None) -> StepOutput:
        if step.scheduled and python_s:
            spin(python_s)
        if step.scheduled and kernel_s:
            torch.ops.pcpbench_benchmarks.wait(token, kernel_s)
        return execute(step, forced)

    arm.engine.execute = slower  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--scenario", default="s2-capture-edges")
    arguments = parser.parse_args()
    with one_thread(CPU):
        for like in ("eager", "full"):
            measure(like, arguments.scenario, arguments.repetitions)


def measure(like: str, scenario: str, repetitions: int) -> None:
    """Time four engines of one arm side by side and print what was planted against what is seen."""
    options = EngineOptions()
    vocab_size = model_shape(options.model).vocab_size
    plan = make_plan(load_scenario(scenario), vocab_size=vocab_size)
    mode = ARM_MODES[like]
    arms = tuple(
        ArmSpec(f"{like} {name}", mode, replays=mode is not CUDAGraphMode.NONE) for name in PLANTED
    )
    ladder = Ladder(arms, (), arms[0].label, arms[1].label)
    target = BuiltinTarget(CPU, resolve_backend("auto", CPU))
    stand = StandBuilder(target, ladder, options, "cpu").stand_for(plan)
    for spec, costs in zip(arms, PLANTED.values(), strict=True):
        plant(stand.arms[spec.label], *costs)
    timings = time_arms(list(stand.arms.values()), plan, None, make_clock(CPU), repetitions)
    times = {spec.label: arm_times(plan, timings, spec.label) for spec in arms}
    base = times[arms[0].label]
    print(f"\n{like}: differences to `as it is`, us a step, median [quartiles]")
    print(f"{'planted':<24}{'launch overhead':>28}{'kernel time':>28}")
    for spec in arms[1:]:
        cells = []
        for kind in ("launch", "kernel"):
            ours, theirs = getattr(times[spec.label], kind), getattr(base, kind)
            deltas = 1e6 * np.array([ours[key] - theirs[key] for key in theirs if key in ours])
            low, middle, high = np.percentile(deltas, [25, 50, 75])
            cells.append(f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]")
        print(f"{spec.label:<24}{cells[0]:>28}{cells[1]:>28}")
    launch = 1e6 * np.median(list(base.launch.values()))
    kernel = 1e6 * np.median(list(base.kernel.values()))
    print(f"as it is: launch overhead {launch:.0f} us, kernel time {kernel:.0f} us a step")


if __name__ == "__main__":
    main()
