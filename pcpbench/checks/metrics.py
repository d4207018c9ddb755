"""Times of requests and steps on the worker's clock, and how two arms compare (SPEC 13).

Formulas, in seconds. The worker clock of a repetition is the running sum of its steps' wall times,
dummy steps included. A token's time is the end of the step that sampled it, for each of the tokens
that a verification accepted alike.
    TPOT of a request = (last token time - first token time) / (output tokens - 1)
    ITL               = gap between successive steps that gave a request tokens; that is the gap
                        between tokens where no step gives it more than one (no draft tokens)
    TTFT              = first token time - start of the request's arrival step
    launch overhead   = wall time of a step - its kernel floor in the same repetition (CPU), or
                        its submit time (a device that runs behind the host)
The arrival step is the first step that starts, on the scenario's clock, at or after the request's
arrival, and never later than the step that admitted it: waiting for a place in the batch counts,
waiting for a step to begin does not. All ranks of a process run one after the other, so these times
are for comparing arms with each other (scope = worker), never with a served system.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.stats import stat_of
from pcpbench.plan import ScenarioPlan
from pcpbench.results import Stat
from pcpbench.timings import Sample, StepTiming

Samples = dict[tuple[str, int], float]
"""(what, repetition) -> seconds; `what` is a request, `request#gap`, or a step number."""


@dataclass(frozen=True)
class RequestTimes:
    """Arrival and token times of one request on the worker clock of one repetition, in seconds."""

    arrival_s: float
    token_s: tuple[float, ...]


@dataclass
class ArmTimes:
    """Samples of one arm over its repetitions, keyed so that two arms can be paired."""

    tpot: Samples = field(default_factory=dict)
    itl: Samples = field(default_factory=dict)
    ttft: Samples = field(default_factory=dict)
    step: Samples = field(default_factory=dict)
    launch: Samples = field(default_factory=dict)
    kernel: Samples = field(default_factory=dict)

    def stats(self) -> dict[str, Stat | None]:
        """A Stat of each kind of sample, None where there is none; keys as in ArmSummary."""
        kinds = ("tpot", "itl", "ttft", "step", "launch", "kernel")
        return {kind: stat_of(list(getattr(self, kind).values())) for kind in kinds}


def arm_times(
    plan: ScenarioPlan, timings: Iterable[StepTiming], arm: str, async_device: bool = False
) -> ArmTimes:
    """Collect the samples of one arm; repetitions that lack a step of the plan are left out of the
    request metrics, since their clock has a hole."""
    by_repetition: dict[int, dict[int, StepTiming]] = {}
    for timing in timings:
        if timing.arm == arm:
            by_repetition.setdefault(timing.repetition, {})[timing.step] = timing
    times = ArmTimes()
    busy = [step.index for step in plan.steps if not step.idle and step.scheduled]
    for repetition, steps in sorted(by_repetition.items()):
        for index in busy:
            if index in steps:
                key, timing = (str(index), repetition), steps[index]
                times.step[key] = timing.wall_s
                if timing.kernel_s is not None:
                    times.kernel[key] = timing.kernel_s
                launch_s = timing.launch_s(async_device)
                if launch_s is not None:
                    times.launch[key] = launch_s
        if all(step.index in steps for step in plan.steps):
            walls = [steps[step.index].wall_s for step in plan.steps]
            _add_requests(times, request_times(plan, walls), repetition)
    return times


def request_times(plan: ScenarioPlan, walls: Sequence[float]) -> dict[str, RequestTimes]:
    """Arrival and token times of every request, given the wall time of each step of the plan.

    Example: steps of 2, 1 and 1 s; a request that arrives before step 0, is admitted with it and
    samples in steps 0, 1 and 2 has arrival 0 and tokens at 2, 3 and 4: TTFT 2, TPOT 1.
    """
    ends = np.cumsum(np.array(walls, dtype=np.float64))
    starts = ends - np.array(walls, dtype=np.float64)
    admitted: dict[str, int] = {}
    tokens: dict[str, list[float]] = {}
    for number, step in enumerate(plan.steps):
        for request in step.new_requests:
            admitted.setdefault(request.req_id, number)
        for scheduled in step.scheduled:
            admitted.setdefault(scheduled.req_id, number)
            times = [float(ends[number])] * scheduled.num_output_tokens
            if times:
                tokens.setdefault(scheduled.req_id, []).extend(times)
    return {
        req_id: RequestTimes(
            float(starts[_arrival_step(plan, req_id, number)]), tuple(tokens.get(req_id, ()))
        )
        for req_id, number in admitted.items()
    }


def samples_of(
    plan: ScenarioPlan, timings: Sequence[StepTiming], async_device: bool = False
) -> list[Sample]:
    """Every sample behind the statistics, arm after arm, in the order in which they were timed."""
    ends = _token_steps(plan)
    samples = []
    for arm in dict.fromkeys(timing.arm for timing in timings):
        times = arm_times(plan, timings, arm, async_device)
        for measure in ("tpot", "ttft"):
            for (request, repetition), value in getattr(times, measure).items():
                samples.append(_sample(arm, repetition, measure, request, None, value))
        for (what, repetition), value in times.itl.items():
            request, _, gap = what.rpartition("#")
            step = ends[request][int(gap)]
            samples.append(_sample(arm, repetition, "itl", request, step, value))
        for measure, kind in (
            ("step", "step"),
            ("kernel", "kernel"),
            ("launch_overhead", "launch"),
        ):
            for (what, repetition), value in getattr(times, kind).items():
                samples.append(_sample(arm, repetition, measure, None, int(what), value))
    return samples


def _sample(
    arm: str, repetition: int, measure: str, request: str | None, step: int | None, value: float
) -> Sample:
    return Sample(
        arm=arm,
        repetition=repetition,
        measure=measure,
        request=request,
        step=step,
        value_s=value,
    )


def _token_steps(plan: ScenarioPlan) -> dict[str, list[int]]:
    """Indices of the steps that give each request tokens."""
    steps: dict[str, list[int]] = {}
    for step in plan.steps:
        for request in step.scheduled:
            if request.num_output_tokens:
                steps.setdefault(request.req_id, []).append(step.index)
    return steps


def _arrival_step(plan: ScenarioPlan, req_id: str, admitted: int) -> int:
    arrival = plan.arrivals_s.get(req_id)
    if arrival is None:
        return admitted
    for number, step in enumerate(plan.steps[:admitted]):
        if step.time_s >= arrival:
            return number
    return admitted


def _add_requests(times: ArmTimes, requests: Mapping[str, RequestTimes], repetition: int) -> None:
    for req_id, request in requests.items():
        tokens = request.token_s
        if not tokens:
            continue
        times.ttft[(req_id, repetition)] = tokens[0] - request.arrival_s
        if len(tokens) > 1:
            times.tpot[(req_id, repetition)] = (tokens[-1] - tokens[0]) / (len(tokens) - 1)
        ends = list(dict.fromkeys(tokens))
        for gap in range(1, len(ends)):
            times.itl[(f"{req_id}#{gap}", repetition)] = ends[gap] - ends[gap - 1]


def paired(base: Samples, candidate: Samples) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """candidate / base of every key that both hold, and each pair's repetition.

    Pairs whose base is not positive have no ratio and are left out (a launch overhead can be lost
    in noise); where fewer than half remain the answer is empty.
    """
    keys = [key for key in base if key in candidate]
    sound = [key for key in keys if base[key] > 0]
    if len(sound) * 2 < len(keys):
        sound = []
    ratios = np.array([candidate[key] / base[key] for key in sound], dtype=np.float64)
    return ratios, np.array([key[1] for key in sound], dtype=np.int64)
