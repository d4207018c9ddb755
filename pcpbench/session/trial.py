"""One scenario on all arms: run it once under the judge, then time the two arms that were asked.

Owns the order of a scenario's passes. Knows no file and no console.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pcpbench.checks.judge import ScenarioJudge
from pcpbench.checks.kv import KvArrays
from pcpbench.device.clock import Clock
from pcpbench.errors import MeasuredFailure
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import StepRecord, StepTiming, Violation
from pcpbench.results import ScenarioResult, StepDrift
from pcpbench.session.stand import Stand
from pcpbench.session.timing import time_arms
from pcpbench.targets.protocol import Arm


class Trial:
    """Runs one scenario; afterwards `records` and `timings` hold what its steps left."""

    def __init__(
        self,
        plan: ScenarioPlan,
        stand: Stand,
        clock: Clock,
        *,
        dtype: str,
        teacher_forced: bool,
        repetitions: int,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self.stand, self.clock = plan, stand, clock
        self.repetitions, self.on_step = repetitions, on_step
        self.teacher = "reference" if teacher_forced else None
        self.records: list[StepRecord] = []
        self.timings: list[StepTiming] = []
        self._tokens: list[list[int]] = []
        self._judge = ScenarioJudge(
            plan,
            stand.setups,
            stand.pairs,
            base=stand.base,
            candidate=stand.candidate,
            dtype=dtype,
            teacher=self.teacher,
        )

    def run(self) -> ScenarioResult:
        """Judge every step, then time base and candidate if nothing stopped them."""
        start = time.perf_counter()
        broken = self._verify()
        if not broken and self.repetitions:
            arms = [self.stand.arms[self.stand.base], self.stand.arms[self.stand.candidate]]
            forced = self._tokens if self.teacher is not None else None
            self.timings = time_arms(
                arms, self.plan, forced, self.clock, self.repetitions, self.on_step
            )
        return self._judge.finish(self.timings, wall_s=time.perf_counter() - start)

    @property
    def step_drifts(self) -> list[StepDrift]:
        """Worst drift of every step and pair of arms."""
        return list(self._judge.step_drifts)

    def _verify(self) -> bool:
        """Run all arms step by step under the judge; True when a step could not be finished."""
        for arm in self.stand.arms.values():
            arm.start(self.plan)
        for step in self.plan.steps:
            records: dict[str, StepRecord] = {}
            forced: list[int] | None = None
            for label, arm in self.stand.arms.items():
                try:
                    arm.execute(step, forced)
                    records[label] = arm.record(step, self.plan.scenario)
                except MeasuredFailure as failure:
                    self._judge.observe_failure(_as_violation(failure, arm, step, self.plan))
                    return True
                if label == self.teacher:
                    forced = arm.sampled()
                self.on_step()
            self._tokens.append(forced or [])
            views = {label: KvArrays(arm.kv_caches()) for label, arm in self.stand.arms.items()}
            self._judge.observe_step(step, records, views)
            self._judge.observe_kv(step, records, views)
            self.records.extend(records.values())
        return False


def _as_violation(
    failure: MeasuredFailure, arm: Arm, step: StepPlan, plan: ScenarioPlan
) -> Violation:
    return Violation(
        contract=failure.contract,
        arm=arm.label,
        scenario=plan.scenario,
        step=step.index,
        rank=None,
        tensor=failure.tensor,
        message=str(failure),
    )
