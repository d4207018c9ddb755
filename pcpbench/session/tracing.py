"""One more run of the two arms of a comparison, watched: the phases of steps (docs/report.md).

Owns the traced pass. It comes after the timed repetitions and is none of them: what a watched step
takes is in no statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pcpbench.device.clock import Clock
from pcpbench.plan import ScenarioPlan
from pcpbench.session.timing import Drafts, drafts_at, no_evidence, tokens_at
from pcpbench.targets.protocol import Arm
from pcpbench.timings import Phase

MAX_TRACED_STEPS = 16
"""Steps of a scenario that are watched, its first: all would cost a twelfth of a compare."""


def trace_arms(
    arms: Sequence[Arm],
    plan: ScenarioPlan,
    forced: Sequence[Sequence[int]] | None,
    clock: Clock,
    drafts: Drafts = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[Phase]:
    """Run the first steps of the scenario once, the arms in turn, and return their phases.

    forced, drafts: as in time_arms. A step ends when its device has done what it was given.
    """
    phases: list[Phase] = []
    with no_evidence(arms):
        for arm in arms:
            arm.start(plan)
        clock.synchronize()
        begin = clock.now()
        for number, step in enumerate(plan.steps[:MAX_TRACED_STEPS]):
            for arm in arms:
                start = clock.now()
                fed = (tokens_at(forced, number), drafts_at(drafts, arm, number))
                stretches = arm.execute_watched(step, *fed, clock.now)
                clock.synchronize()
                whole = ("step", None, start, clock.now())
                phases += _phases(arm.label, step.index, (whole, *stretches), begin)
                on_step()
    return phases


def _phases(
    arm: str,
    step: int,
    stretches: Sequence[tuple[str, int | None, float, float]],
    begin: float,
) -> Iterator[Phase]:
    for name, rank, start, end in stretches:
        yield Phase(
            arm=arm,
            step=step,
            name=name,
            rank=rank,
            start_s=start - begin,
            duration_s=end - start,
        )
