"""Judges a comparison for the gate: the whole ladder once, times aside.

Owns what the gate keeps of a verdict. The judging itself is that of `pcpbench compare`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import make_clock, one_thread
from pcpbench.gate_jobs import SampleJob
from pcpbench.gate_samples import JudgedScenario
from pcpbench.plan import ScenarioPlan
from pcpbench.results import ScenarioResult
from pcpbench.session.ladder import build_ladder
from pcpbench.session.sampling import hash_of, plans_of
from pcpbench.session.stand import StandBuilder
from pcpbench.session.trial import Trial
from pcpbench.targets.builtin import BuiltinTarget


def judge_job(job: SampleJob) -> tuple[JudgedScenario, ...]:
    """Run every scenario of a job under the judge, in this process."""
    device = resolve_device(job.options.device)
    with one_thread(device):
        return tuple(_judge(job, device))


def _judge(job: SampleJob, device: torch.device) -> Iterable[JudgedScenario]:
    target = BuiltinTarget(device, resolve_backend(job.options.backend, device))
    ladder = build_ladder(job.base, job.candidate)
    builder = StandBuilder(target, ladder, job.options, str(device))
    plans = plans_of(job.scenarios, job.options)
    for plan in plans:
        builder.check(plan)
    for plan in plans:
        stand = builder.stand_for(plan)
        result = Trial(
            plan,
            stand,
            make_clock(device),
            dtype=job.options.dtype,
            teacher_forced=True,
            repetitions=0,
            checks=job.checks,
            async_device=stand.is_async,
        ).run()
        yield judged(result, plan, ladder.candidate)


def judged(result: ScenarioResult, plan: ScenarioPlan, candidate: str) -> JudgedScenario:
    """What the gate keeps of a scenario's verdict. candidate: the arm's label."""
    arm = next((arm for arm in result.arms if arm.arm == candidate), None)
    violations = sum(result.num_violations.values()) or len(result.violations)
    return JudgedScenario(
        scenario=plan.scenario,
        plan_hash=hash_of(plan),
        outcome=result.outcome.value,
        reasons=result.reasons,
        num_drifts=sum(not drift.ok for drift in result.drifts),
        num_violations=violations,
        decode_steps=0 if arm is None else arm.decode_steps,
        steps_full=0 if arm is None else arm.coverable_full,
    )
