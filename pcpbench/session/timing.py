"""Times the two arms of a comparison side by side (SPEC 13).

Owns the order in which steps are timed: step by step, the two arms in turn, the first of them
changing with every step and repetition, so that a drift of the machine's speed meets both alike.
A pass of its own records the kernels of some steps, because the instrument slows a step down; their
floor is measured right after the timed step of every repetition, for the same reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from pcpbench.device.clock import Clock, Kernels
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.targets.protocol import Arm
from pcpbench.timings import StepTiming

Drafts = Sequence[Sequence[int]] | Mapping[str, Sequence[Sequence[int]]] | None
"""Draft tokens, one list a step: of all arms alike, or by label for arms that feed themselves."""

NUM_RECORD_PASSES = 1
MAX_FLOOR_STEPS = 12
"""Steps of a scenario whose kernel floor is measured, spread evenly over those that compute."""


def time_arms(
    arms: Sequence[Arm],
    plan: ScenarioPlan,
    forced: Sequence[Sequence[int]] | None,
    clock: Clock,
    repetitions: int,
    on_step: Callable[[], None] = lambda: None,
    check: Callable[[Arm, StepPlan], None] = lambda arm, step: None,
    drafts: Drafts = None,
    floor_repetitions: int | None = None,
) -> list[StepTiming]:
    """Run the scenario `repetitions` times on each arm and return the times of every step.

    check: looks at what a timed step left, outside the timed stretch.
    forced: tokens to feed on, one list a step; None lets every arm go on with its own. kernel_s of
    each timing is the step's kernel floor in that repetition, None where it is not measured.
    drafts: see Drafts; no time goes into making them. floor_repetitions: in how many repetitions,
    from the first on, floors are measured, since they take longer than the steps; None for all.
    """
    with _no_collector(), no_evidence(arms):
        chosen = floor_steps(plan) if floor_repetitions != 0 else frozenset()
        kernels = record_kernels(arms, plan, forced, clock, on_step, drafts, chosen)
        timings = []
        for repetition in range(repetitions):
            if repetition == floor_repetitions:
                kernels = {}
            for arm in arms:
                arm.start(plan)
            for number, step in enumerate(plan.steps):
                for arm in _in_turn(arms, number + repetition):
                    fed = (tokens_at(forced, number), drafts_at(drafts, arm, number))
                    run = partial(arm.execute, step, *fed)
                    wall_s, submit_s = _time_step(run, clock)
                    check(arm, step)
                    floor = kernels.get((arm.label, step.index))
                    timings.append(
                        StepTiming(
                            arm=arm.label,
                            scenario=plan.scenario,
                            step=step.index,
                            repetition=repetition,
                            wall_s=wall_s,
                            submit_s=submit_s,
                            kernel_s=None if floor is None else floor.seconds(),
                        )
                    )
                    on_step()
        return timings


def _time_step(run: Callable[[], None], clock: Clock) -> tuple[float, float]:
    clock.synchronize()
    start = clock.now()
    run()
    submitted = clock.now()
    clock.synchronize()
    return clock.now() - start, submitted - start


def record_kernels(
    arms: Sequence[Arm],
    plan: ScenarioPlan,
    forced: Sequence[Sequence[int]] | None,
    clock: Clock,
    on_step: Callable[[], None] = lambda: None,
    drafts: Drafts = None,
    chosen: frozenset[int] | None = None,
) -> dict[tuple[str, int], Kernels]:
    """The kernels of each arm in the steps whose floor is measured, by label and step index.

    Every step runs, since each stands on the ones before; the chosen ones (by index; None for those
    of floor_steps) under the instrument. Without any it warms both arms up.
    """
    kernels: dict[tuple[str, int], Kernels] = {}
    chosen = floor_steps(plan) if chosen is None else chosen
    for arm in arms:
        arm.start(plan)
    for number, step in enumerate(plan.steps):
        for arm in arms:
            fed = (tokens_at(forced, number), drafts_at(drafts, arm, number))
            run = partial(arm.execute, step, *fed)
            if step.index in chosen:
                kernels[arm.label, step.index] = clock.kernels(run)
            else:
                run()
            on_step()
    return kernels


def floor_steps(plan: ScenarioPlan) -> frozenset[int]:
    """Indices of the steps whose kernel floor is measured.

    30 steps that compute give every second or third of them, 12 in all; 5 give all five.
    """
    busy = [step.index for step in plan.steps if step.scheduled]
    count = min(len(busy), MAX_FLOOR_STEPS)
    return frozenset(busy[number * len(busy) // count] for number in range(count))


def tokens_at(forced: Sequence[Sequence[int]] | None, number: int) -> Sequence[int] | None:
    """Of the step with this number; None where an arm goes on with its own."""
    return None if forced is None else forced[number]


def drafts_at(drafts: Drafts, arm: Arm, number: int) -> Sequence[int] | None:
    """An arm's draft tokens of the step with this number."""
    return tokens_at(drafts[arm.label] if isinstance(drafts, Mapping) else drafts, number)


def _in_turn(arms: Sequence[Arm], number: int) -> Sequence[Arm]:
    return arms if number % 2 == 0 else list(reversed(arms))


@contextmanager
def no_evidence(arms: Sequence[Arm]) -> Iterator[None]:
    """Timed and traced steps keep nothing for a judge; nobody looks at it."""
    for arm in arms:
        arm.keep_evidence(False)
    try:
        yield
    finally:
        for arm in arms:
            arm.keep_evidence(True)


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
