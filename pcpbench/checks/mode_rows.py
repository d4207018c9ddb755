"""One row for each graph mode of a task run: tokens, what served its steps, times.

Owns the arithmetic from records and timings to a row. Knows no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from pcpbench.checks import metrics
from pcpbench.checks.metrics import ArmTimes, Samples
from pcpbench.checks.stats import ratio_of
from pcpbench.checks.token_trace import TokenAt, num_equal
from pcpbench.modes import CUDAGraphMode
from pcpbench.modes_results import ModeRow, Served, Speed, TokenTrace
from pcpbench.plan import ScenarioPlan
from pcpbench.records import StepRecord
from pcpbench.results import Ratio
from pcpbench.timings import StepTiming

NUM_RUNS: Final = 20
"""Runs of consecutive steps that a repetition is cut into, to set two throughputs side by side."""


def mode_row(
    mode: str,
    arm: str,
    plan: ScenarioPlan,
    records: Iterable[StepRecord],
    none: Mapping[str, list[TokenAt]],
    found: Mapping[str, list[TokenAt]],
    traces: Sequence[TokenTrace],
) -> ModeRow:
    """The row of one mode, without times. records: of its arm; none, found: generations."""
    steps, tokens = served(plan, records)
    same = [
        req_id
        for req_id, theirs in none.items()
        if [at.token for at in theirs] == [at.token for at in found.get(req_id, [])]
    ]
    return ModeRow(
        mode=mode,
        arm=arm,
        num_tokens=sum(len(each) for each in none.values()),
        num_equal=num_equal(none, found),
        num_requests=len(none),
        num_requests_equal=len(same),
        steps=steps,
        tokens=tokens,
        first=traces[0] if traces else None,
        num_traced=len(traces),
        num_unexplained=sum(not each.explained for each in traces),
    )


def served(plan: ScenarioPlan, records: Iterable[StepRecord]) -> tuple[Served, Served]:
    """Steps, and scheduled tokens, by what ran them."""
    scheduled = {step.index: step.num_tokens for step in plan.steps}
    steps: Counter[CUDAGraphMode] = Counter()
    tokens: Counter[CUDAGraphMode] = Counter()
    for record in records:
        if not record.idle:
            steps[record.descriptor.cg_mode] += 1
            tokens[record.descriptor.cg_mode] += scheduled[record.step]
    return _served(steps), _served(tokens)


def speed_of(
    plan: ScenarioPlan,
    timings: Sequence[StepTiming],
    arm: str,
    base: str,
    num_tokens: int,
    async_device: bool = False,
) -> Speed:
    """Times of one arm, and its ratios to another's; num_tokens: outputs of the whole plan."""
    ours = metrics.arm_times(plan, timings, arm, async_device)
    stats = ours.stats()
    totals = _walls(timings, arm)
    speed = Speed(
        tpot=stats["tpot"],
        ttft=stats["ttft"],
        step=stats["step"],
        launch=stats["launch"],
        tokens_per_s=tuple(num_tokens / sum(walls) for walls in totals.values()),
    )
    if arm == base:
        return speed
    theirs = metrics.arm_times(plan, timings, base, async_device)
    runs = (_inverse(_runs(timings, base)), _inverse(_runs(timings, arm)))
    return replace(speed, throughput_ratio=_ratio(*runs), **_ratios(theirs, ours))


def _ratios(base: ArmTimes, ours: ArmTimes) -> dict[str, Ratio | None]:
    kinds = ("tpot", "ttft", "step", "launch")
    return {f"{kind}_ratio": _ratio(getattr(base, kind), getattr(ours, kind)) for kind in kinds}


def _ratio(base: Samples, ours: Samples) -> Ratio | None:
    return ratio_of(*metrics.paired(base, ours))


def _walls(timings: Iterable[StepTiming], arm: str) -> dict[int, list[float]]:
    """Wall times of an arm's steps in order, idle ones too, by repetition."""
    walls: dict[int, list[float]] = {}
    for timing in timings:
        if timing.arm == arm:
            walls.setdefault(timing.repetition, []).append(timing.wall_s)
    return walls


def _runs(timings: Iterable[StepTiming], arm: str) -> Samples:
    """Seconds of each run of consecutive steps: 180 steps make 20 runs of 9."""
    found: Samples = {}
    for repetition, walls in _walls(timings, arm).items():
        for number, wall_s in enumerate(walls):
            key = (str(number * NUM_RUNS // len(walls)), repetition)
            found[key] = found.get(key, 0.0) + wall_s
    return found


def _inverse(seconds: Samples) -> Samples:
    return {key: 1.0 / value for key, value in seconds.items() if value > 0}


def _served(counts: Mapping[CUDAGraphMode, int]) -> Served:
    return Served(
        full=counts.get(CUDAGraphMode.FULL, 0),
        piecewise=counts.get(CUDAGraphMode.PIECEWISE, 0),
        none=counts.get(CUDAGraphMode.NONE, 0),
    )
