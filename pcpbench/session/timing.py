"""Times the two arms of a comparison side by side (SPEC 13).

Owns the order in which steps are timed: step by step, the two arms in turn, the first of them
changing with every step and repetition, so that a drift of the machine's speed meets both alike.
Kernel floors are measured in passes of their own, because the instrument slows a step down.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pcpbench.device.clock import Clock
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import StepTiming
from pcpbench.targets.protocol import Arm

NUM_FLOOR_PASSES = 2


def time_arms(
    arms: Sequence[Arm],
    plan: ScenarioPlan,
    forced: Sequence[Sequence[int]] | None,
    clock: Clock,
    repetitions: int,
    on_step: Callable[[], None] = lambda: None,
) -> list[StepTiming]:
    """Run the scenario `repetitions` times on each arm and return the times of every step.

    forced: tokens to feed on, one list a step; None lets every arm go on with its own. kernel_s of
    each timing is the arm's kernel floor on that step.
    """
    with _no_collector():
        floors = _floors(arms, plan, forced, clock, on_step)
        timings = []
        for repetition in range(repetitions):
            for arm in arms:
                arm.start(plan)
            for number, step in enumerate(plan.steps):
                for arm in _in_turn(arms, number + repetition):
                    wall_s, submit_s = _time_step(arm, step, _tokens(forced, number), clock)
                    timings.append(
                        StepTiming(
                            arm=arm.label,
                            scenario=plan.scenario,
                            step=step.index,
                            repetition=repetition,
                            wall_s=wall_s,
                            submit_s=submit_s,
                            kernel_s=floors[arm.label, step.index],
                        )
                    )
                    on_step()
        return timings


def _time_step(
    arm: Arm, step: StepPlan, forced: Sequence[int] | None, clock: Clock
) -> tuple[float, float]:
    clock.synchronize()
    start = clock.now()
    arm.execute(step, forced)
    submitted = clock.now()
    clock.synchronize()
    return clock.now() - start, submitted - start


def _floors(
    arms: Sequence[Arm],
    plan: ScenarioPlan,
    forced: Sequence[Sequence[int]] | None,
    clock: Clock,
    on_step: Callable[[], None],
) -> dict[tuple[str, int], float]:
    """The least kernel time seen for each arm and step: disturbances only ever add to it."""
    floors: dict[tuple[str, int], float] = {}
    for repetition in range(NUM_FLOOR_PASSES):
        for arm in arms:
            arm.start(plan)
        for number, step in enumerate(plan.steps):
            tokens = _tokens(forced, number)
            for arm in _in_turn(arms, number + repetition):
                seconds = clock.kernel_floor(lambda a=arm, s=step, t=tokens: a.execute(s, t))
                key = (arm.label, step.index)
                floors[key] = min(seconds, floors.get(key, seconds))
                on_step()
    return floors


def _tokens(forced: Sequence[Sequence[int]] | None, number: int) -> Sequence[int] | None:
    return None if forced is None else forced[number]


def _in_turn(arms: Sequence[Arm], number: int) -> Sequence[Arm]:
    return arms if number % 2 == 0 else list(reversed(arms))


@contextmanager
def _no_collector() -> Iterator[None]:
    """Keep the cycle collector out of the timed steps."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
