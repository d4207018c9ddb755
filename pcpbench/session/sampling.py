"""What a worker process of the gate does: time the two arms of a comparison once, on its own.

Owns one job from its options to a `ProcessSample` (or, for a judging job, to what the judge said).
Knows no baseline and no rule. The times are taken as `pcpbench compare` takes them (timing.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial

import msgspec
import numpy as np
import torch

from pcpbench.checks import metrics
from pcpbench.checks.stats import stat_of
from pcpbench.config import EngineConfig
from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import Clock, one_thread
from pcpbench.device.environment import environment_of
from pcpbench.device.graph import GraphBackend
from pcpbench.device.own_time import make_own_clock
from pcpbench.engine_options import EngineOptions
from pcpbench.gate_jobs import SampleJob
from pcpbench.gate_samples import TIME_METRICS, MetricSample, ProcessSample, ScenarioSample
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.scenarios.loader import choose_scenarios
from pcpbench.session.ladder import Ladder, build_ladder
from pcpbench.session.planning import plan_scenario
from pcpbench.session.stand import Stand, StandBuilder
from pcpbench.session.timing import time_arms
from pcpbench.targets.builtin import BuiltinArm, BuiltinTarget
from pcpbench.targets.protocol import Arm
from pcpbench.timings import StepTiming


def time_job(job: SampleJob) -> ProcessSample:
    """Time base and candidate over the job's scenarios, in this process."""
    start, started_at = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    device = resolve_device(job.options.device)
    backend = resolve_backend(job.options.backend, device)
    with one_thread(device):
        clock = make_own_clock(device)
        arms = two_arms(job.base, job.candidate)
        target = _TimedTarget(device, backend, clock, arms.candidate)
        builder = StandBuilder(target, arms, job.options, str(device))
        plans = plans_of(job.timed_scenarios, job.options)
        for plan in plans:
            builder.check(plan)
        scenarios = tuple(_time_scenario(plan, builder, target, job) for plan in plans)
        environment = environment_of(device)
    return ProcessSample(
        scenarios=scenarios,
        environment=environment,
        wall_s=time.perf_counter() - start,
        started_at=started_at,
    )


def plans_of(scenarios: Sequence[str], options: EngineOptions) -> list[ScenarioPlan]:
    """The steps of each scenario under these options; raises ScenarioError for a bad one."""
    return [plan_scenario(scenario, options) for scenario in choose_scenarios(scenarios)]


def hash_of(plan: ScenarioPlan) -> str:
    """Of all steps and prompts: equal where two runs were given the same work."""
    return hashlib.sha256(msgspec.json.encode(plan, order="deterministic")).hexdigest()[:16]


def two_arms(base: str, candidate: str) -> Ladder:
    """The ladder of a comparison with nothing on it but the two arms that were asked for."""
    ladder = build_ladder(base, candidate)
    asked = {ladder.base, ladder.candidate}
    arms = tuple(spec for spec in ladder.arms if spec.label in asked)
    return Ladder(arms=arms, pairs=(), base=ladder.base, candidate=ladder.candidate)


class _TimedTarget(BuiltinTarget):
    """Builds arms and times the candidate's captures. capture_s: of those since it was last None.

    candidate: its label. What the base captures is not what a change is judged by.
    """

    def __init__(
        self, device: torch.device, backend: GraphBackend, clock: Clock, candidate: str
    ) -> None:
        super().__init__(device, backend)
        self.clock, self.candidate = clock, candidate
        self.capture_s: float | None = None

    def build(
        self, label: str, config: EngineConfig, *, replays: bool, taps: bool = False
    ) -> BuiltinArm:
        """An arm as any other; the candidate's capture is timed, warm-up included."""
        arm = super().build(label, config, replays=replays, taps=taps)
        if replays and label == self.candidate:
            vars(arm)["capture"] = partial(self._capture, arm.capture)
        return arm

    def _capture(self, capture: Callable[[], None]) -> None:
        self.clock.synchronize()
        start = self.clock.now()
        capture()
        self.clock.synchronize()
        self.capture_s = (self.capture_s or 0.0) + self.clock.now() - start


class _Feed:
    """Runs the base arm once, for the tokens and drafts that feed both, and counts later misses."""

    def __init__(self, stand: Stand, plan: ScenarioPlan) -> None:
        self.tokens: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.num_wrong = 0
        self._first: dict[tuple[str, int], list[int]] = {}
        base = stand.arms[stand.base]
        base.start(plan)
        for step in plan.steps:
            base.execute(step)
            self.tokens.append(list(base.sampled()))
            self.drafts.append(list(base.drafts()))

    def check(self, arm: Arm, step: StepPlan) -> None:
        """Count a timed step that sampled what no earlier run of it on its arm did."""
        sampled = arm.sampled()
        if self._first.setdefault((arm.label, step.index), sampled) != sampled:
            self.num_wrong += 1


def _time_scenario(
    plan: ScenarioPlan, builder: StandBuilder, target: _TimedTarget, job: SampleJob
) -> ScenarioSample:
    target.capture_s, clock = None, target.clock
    stand = builder.stand_for(plan)
    stand.check()
    arms = [stand.arms[stand.base], stand.arms[stand.candidate]]
    feed = _Feed(stand, plan)
    with _slowed(arms[1], job.slowdown, clock):
        timings = time_arms(
            arms,
            plan,
            feed.tokens,
            clock,
            job.repetitions,
            check=feed.check,
            drafts=feed.drafts,
            floor_repetitions=job.floor_repetitions,
        )
    return ScenarioSample(
        scenario=plan.scenario,
        plan_hash=hash_of(plan),
        metrics=_metrics(plan, timings, arms, stand.is_async),
        capture_s=target.capture_s,
        num_wrong=feed.num_wrong,
    )


@contextmanager
def _slowed(arm: Arm, share: float, clock: Clock) -> Iterator[None]:
    """Make every step of an arm take longer by a share of its own time, for the `with` block."""
    if not share:
        yield
        return
    execute: Callable[..., None] = arm.execute

    def slower(*args: object) -> None:
        start = clock.now()
        execute(*args)
        clock.synchronize()
        end = clock.now() + share * (clock.now() - start)
        while clock.now() < end:
            pass

    vars(arm)["execute"] = slower
    try:
        yield
    finally:
        del vars(arm)["execute"]


def _metrics(
    plan: ScenarioPlan, timings: Sequence[StepTiming], arms: Sequence[Arm], is_async: bool
) -> dict[str, MetricSample]:
    base, candidate = (metrics.arm_times(plan, timings, arm.label, is_async) for arm in arms)
    found = {}
    for name in TIME_METRICS:
        ours, theirs = getattr(base, name), getattr(candidate, name)
        ratios, _ = metrics.paired(ours, theirs)
        found[name] = MetricSample(
            base=stat_of(list(ours.values())),
            candidate=stat_of(list(theirs.values())),
            ratio=float(np.median(ratios)) if len(ratios) else None,
            num_pairs=len(ratios),
        )
    return found
