"""Contract C14 on one step: outputs are read again, other graphs replay, the step runs once more.

Owns the order of these looks. The judge says what must not have changed.
"""

from __future__ import annotations

from pcpbench.checks.judge import ScenarioJudge
from pcpbench.checks.replays import compare_held
from pcpbench.plan import StepPlan
from pcpbench.records import StepRecord
from pcpbench.session.replay_order import ReplayOrder
from pcpbench.session.stand import kv_view
from pcpbench.targets.protocol import Arm, DraftingArm


class SecondLooks:
    """Looks at the steps of one scenario again, for every arm that has captured graphs."""

    def __init__(self, judge: ScenarioJudge, scenario: str) -> None:
        self._judge, self._scenario = judge, scenario
        self._order = ReplayOrder()
        self._last: dict[str, StepRecord] = {}

    def at(self, arm: Arm, step: StepPlan, record: StepRecord) -> None:
        """Look again at the step that this arm has just run and the judge has observed."""
        if not arm.captured:
            return
        last, self._last[arm.label] = self._last.get(arm.label), record
        for violation in compare_held(last, arm.previous_outputs()) if last is not None else ():
            self._judge.observe_failure(violation)
        if record.idle:
            return
        arm.churn_memory()
        self._judge.observe_late(arm.record(step, self._scenario))
        self._run_again(arm, step, ())
        drafts = arm.draft_captured if isinstance(arm, DraftingArm) else ()
        captured = [graph.descriptor for graph in (*arm.captured, *drafts)]
        wanted = self._order.between(arm.label, record.descriptor.label, captured)
        between = arm.replay_idle(wanted)
        if not between:
            return
        kv = kv_view(arm)
        self._judge.observe_idle_replays(arm.label, kv, arm.block_tables(), between)
        self._judge.observe_late(arm.record(step, self._scenario), between)
        self._run_again(arm, step, between)

    def _run_again(self, arm: Arm, step: StepPlan, between: tuple[str, ...]) -> None:
        arm.wipe(self._judge.slots_of(arm.label))
        again = arm.run_again(step, self._scenario)
        if again is not None:
            self._judge.observe_again(again, kv_view(arm), between)
