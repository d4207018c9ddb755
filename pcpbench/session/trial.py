"""One scenario on all arms: run it once under the judge, then time the two arms that were asked.

Owns the order of a scenario's passes. Knows no file and no console.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast

import msgspec
import numpy as np

from pcpbench.checks.dense import DenseCheck
from pcpbench.checks.dense_drafts import DraftDenseCheck
from pcpbench.checks.feeding import Given
from pcpbench.checks.judge import ScenarioJudge
from pcpbench.checks.kv import KvArrays
from pcpbench.checks.metrics import samples_of
from pcpbench.checks.poison import POISONS, LiveSlots, Rows, broken_by_poison, compare_poisoned
from pcpbench.checks.write_set import Tables
from pcpbench.device.clock import Clock
from pcpbench.device.memory import memory_errors
from pcpbench.errors import MeasuredFailure
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import Notice, StepRecord, Violation
from pcpbench.results import ArmSummary, PlaceDrift, ScenarioResult, StepAudit, StepDrift
from pcpbench.session.placed_arm import PlacedArm
from pcpbench.session.second_looks import SecondLooks
from pcpbench.session.stand import Stand, kv_view
from pcpbench.session.timing import time_arms
from pcpbench.session.tracing import trace_arms
from pcpbench.session.what_stands import notice_of
from pcpbench.targets.protocol import Arm, DraftingArm
from pcpbench.timings import Phase, Sample, StepTiming


class Watcher(Protocol):
    """Looks at the arms after each step, in the order of the plan."""

    def start(self, views: Mapping[str, KvArrays]) -> None:
        """The caches before the first step."""

    def observe(
        self,
        step: StepPlan,
        judge: ScenarioJudge,
        records: Mapping[str, StepRecord],
        views: Mapping[str, KvArrays],
    ) -> None:
        """A step that all arms have run and the judge has judged."""


class _Nobody:
    """A watcher that does not look."""

    def start(self, views: Mapping[str, KvArrays]) -> None:
        pass

    def observe(self, *_: object) -> None:
        pass


class Trial:
    """Runs one scenario; afterwards `records` and `timings` hold what its steps left.

    tokens: what to feed on, one list a step, where no arm of the stand is the teacher.
    timed: labels of the arms to time in turn; base and candidate where none is named.
    traces: watch the two arms once more after they were timed; `phases` then holds what was seen.
    """

    def __init__(
        self,
        plan: ScenarioPlan,
        stand: Stand,
        clock: Clock,
        *,
        dtype: str,
        teacher_forced: bool,
        repetitions: int,
        async_device: bool = False,
        checks: str = "quick",
        on_step: Callable[[], None] = lambda: None,
        tokens: Sequence[Sequence[int]] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
        watcher: Watcher | None = None,
        timed: Sequence[str] = (),
        traces: bool = False,
    ) -> None:
        self.plan, self.stand, self.clock, self._dtype = plan, stand, clock, dtype
        self.repetitions, self.on_step = repetitions, on_step
        self.is_full = checks == "full"
        self.teacher = "reference" if teacher_forced else None
        self._given, self._given_drafts = tokens, drafts
        self._timed = tuple(timed) or (stand.base, stand.candidate)
        self._watcher, self._traces = watcher or _Nobody(), traces
        self.records: list[StepRecord] = []
        self.timings: list[StepTiming] = []
        self.phases: list[Phase] = []
        self._notices: list[Notice] = []
        self._doing = "the beginning"
        self._tokens: list[list[int]] = []
        self._drafts: list[list[int]] = []
        self._judged: dict[tuple[str, int], list[int]] = {}
        self._written: dict[str, list[Rows]] = {}
        self._judge = ScenarioJudge(
            plan,
            stand.setups,
            stand.pairs,
            base=stand.base,
            candidate=stand.candidate,
            dtype=dtype,
            teacher=self.teacher,
            async_device=async_device,
            cost=checks,
        )

    def run(self) -> ScenarioResult:
        """Judge every step, then time base and candidate if nothing stopped them.

        Raises what kept the scenario from being judged while nothing in it has failed; once
        something has, that is the verdict, and what came after it is a notice.
        """
        start = time.perf_counter()
        try:
            with memory_errors():
                self._look()
        except Exception as error:
            if not self._judge.has_failed:
                raise
            self._break_off(error)
        wall_s = time.perf_counter() - start
        with memory_errors():
            result = self._judge.finish(self.timings, notices=self._notices, wall_s=wall_s)
        return msgspec.structs.replace(result, arms=tuple(map(self._with_capture, result.arms)))

    def _look(self) -> None:
        self._find_unowned()
        if self._find_broken() or self._verify():
            return
        self._doing = "the dense forward pass"
        self._verify_dense()
        if self.is_full:
            self._doing = "the run over poisoned memory"
            self._verify_poisoned()
        # A scenario that failed has no speed to quote.
        if self.repetitions and not self._judge.has_failed:
            self._doing = "the timing"
            self._time()

    def _time(self) -> None:
        """Time the arms; one that raises fails the scenario, and no time of it is kept."""
        arms = [cast(Arm, PlacedArm(self.stand.arms[label], self._accuse_timed))
                for label in self._timed]  # fmt: skip
        forced = self._tokens if self.teacher is not None else None
        drafts = self._drafts if self.teacher is not None else self._own_drafts()
        try:
            self.timings = time_arms(
                arms,
                self.plan,
                forced,
                self.clock,
                self.repetitions,
                self.on_step,
                self._check_timed,
                drafts,
            )
            if self._traces:
                given = (forced, self.clock, drafts, self.on_step)
                self.phases = trace_arms(arms, self.plan, *given)
        except MeasuredFailure:
            if not self._judge.has_failed:  # raised by none of the arms
                raise
            self._drop_times()

    def _accuse_timed(self, arm: Arm, step: StepPlan, failure: MeasuredFailure) -> None:
        message = f"in a timed run: {failure}"
        self._accuse(failure.contract, arm, step, failure.tensor, message)

    def _drop_times(self) -> None:
        self.timings, self.phases = [], []

    def _break_off(self, error: Exception) -> None:
        """What was seen stands; say what was not."""
        self._drop_times()
        self._notices.append(notice_of(error, f"{self._doing} was not finished"))

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens that fed all arms, one list a finished step; empty where each fed itself."""
        return [] if self.teacher is None else self._tokens

    @property
    def drafts(self) -> list[list[int]]:
        """Draft tokens that all arms were given, one list a finished step."""
        return [] if self.teacher is None else self._drafts

    @property
    def samples(self) -> list[Sample]:
        """Every measured time, before any statistic."""
        return samples_of(self.plan, self.timings, self.stand.is_async)

    @property
    def place_drifts(self) -> list[PlaceDrift]:
        """Worst drift of every tensor and layer of every step and pair of arms."""
        return [drift for tally in self._judge.pairs for drift in tally.place_drifts()]

    @property
    def step_drifts(self) -> list[StepDrift]:
        """Worst drift of every step and pair of arms."""
        return list(self._judge.step_drifts)

    @property
    def step_audits(self) -> list[StepAudit]:
        """Dispatch and broken contracts of every step and arm."""
        return self._judge.step_audits

    def _own_drafts(self) -> dict[str, list[list[int]]]:
        """Draft tokens that each arm found for itself in its judged run, one list a step."""
        found: dict[str, list[list[int]]] = {}
        for record in self.records:
            drafts = [] if record.draft_tokens is None else record.draft_tokens.tolist()
            found.setdefault(record.arm, []).append(drafts)
        return found

    def _with_capture(self, summary: ArmSummary) -> ArmSummary:
        captured = {label: len(arm.captured) for label, arm in self.stand.arms.items()}
        return msgspec.structs.replace(
            summary,
            num_graphs=captured.get(summary.arm, 0),
            capture_s=self.stand.capture_s.get(summary.arm),
        )

    def _find_broken(self) -> bool:
        """Accuse arms that could not be captured; where there is one, no step is run."""
        for label, failure in self.stand.broken.items():
            arm, first = self.stand.arms[label], self.plan.steps[0]
            self._accuse(failure.contract, arm, first, failure.tensor, f"in capture: {failure}")
        return bool(self.stand.broken)

    def _find_unowned(self) -> None:
        """Accuse graphs that touch memory which no persistent buffer owns (C8)."""
        unowned = [
            (arm, use)
            for arm in self.stand.arms.values()
            for use in arm.addresses
            if use.name is None
        ]
        for arm, use in unowned:
            message = (
                f"{use.graph} uses memory that nobody owns: {list(use.shape)} {use.dtype} at "
                f"{use.address:#x}, first by {use.op} at {use.source}"
            )
            self._accuse("C8", arm, self.plan.steps[0], "address", message)

    def _check_timed(self, arm: Arm, step: StepPlan) -> None:
        """A timed run of a step must sample what its judged run sampled (C14)."""
        sampled, judged = arm.sampled(), self._judged[arm.label, step.index]
        if sampled != judged:
            message = f"a timed run sampled {sampled[:8]}, its judged run {judged[:8]}"
            self._accuse("C14", arm, step, "sampled", message)

    def _accuse(self, contract: str, arm: Arm, step: StepPlan, tensor: str, message: str) -> None:
        self._judge.observe_failure(
            Violation(
                contract=contract,
                arm=arm.label,
                scenario=self.plan.scenario,
                step=step.index,
                rank=None,
                tensor=tensor,
                message=message,
            )
        )

    def _start(self) -> bool:
        """Begin the scenario on all arms; False, and the arm accused, where one cannot."""
        for arm in self.stand.arms.values():
            self._doing = f"the start of {arm.label}"
            try:
                arm.start(self.plan)
            except MeasuredFailure as failure:
                step, message = self.plan.steps[0], f"at the start: {failure}"
                self._accuse(failure.contract, arm, step, failure.tensor, message)
                return False
        return True

    def _verify(self) -> bool:
        """Run all arms step by step under the judge; True when a step could not be finished."""
        if not self._start():
            return True
        views = self._views()
        self._judge.observe_start(views, self._tables(), self.stand.captures)
        self._watcher.start(views)
        live = self._live_slots() if self.is_full else {}
        looks = SecondLooks(self._judge, self.plan.scenario)
        for step in self.plan.steps:
            records: dict[str, StepRecord] = {}
            forced = _given_at(self._given, step)
            drafts = _given_at(self._given_drafts, step)
            for label, arm in self.stand.arms.items():
                record = self._execute(arm, step, forced, drafts)
                if record is None:
                    return True
                records[label] = record
                self._judged[label, step.index] = arm.sampled()
                if label == self.teacher and self._given is None:
                    forced, drafts = arm.sampled(), arm.drafts()
                self.on_step()
            self._doing = f"the judging of step {step.index}"
            self._tokens.append(list(forced or []))
            self._drafts.append(list(drafts or []))
            views = self._views()
            given = None  # nothing for a step that the first run never finished
            if forced is not None:
                given = Given(np.array(forced, np.int64), np.array(drafts or [], np.int64))
            self._judge.observe_step(step, records, views, self._tables(), given)
            self._judge.observe_kv(step, records, views)
            self._watcher.observe(step, self._judge, records, views)
            self.records.extend(records.values())
            for label, slots in live.items():
                slots.advance(step)
                rows = slots.written_rows(step, views[label])
                self._written.setdefault(label, []).append(rows)
            for label, arm in self.stand.arms.items() if self.is_full else ():
                self._doing = f"a second look at step {step.index} of {label}"
                try:
                    looks.at(arm, step, records[label])
                except MeasuredFailure as failure:
                    self._accuse(failure.contract, arm, step, failure.tensor, str(failure))
                    return True
        return False

    def _execute(
        self,
        arm: Arm,
        step: StepPlan,
        forced: Sequence[int] | None,
        drafts: Sequence[int] | None,
    ) -> StepRecord | None:
        """One arm's record of one step; None, and the arm accused, where it could not finish it."""
        self._doing = f"step {step.index} of {arm.label}"
        try:
            arm.execute(step, forced, drafts)
            return arm.record(step, self.plan.scenario)
        except MeasuredFailure as failure:
            self._accuse(failure.contract, arm, step, failure.tensor, str(failure))
            return None

    def _verify_dense(self) -> None:
        """Contract C18: the arm that all others are held against, computed again without cache.

        That is the reference; a ladder without one has its base arm looked at, unless that was fed
        tokens that are not its own.
        """
        arm = self.stand.arms.get("reference", self.stand.arms[self.stand.base])
        if self._given is not None and arm.label != "reference":
            return
        mine = [record for record in self.records if record.arm == arm.label]
        check = DenseCheck(self.plan, mine, self._dtype)
        if not check.token_ids:  # a plan cut short before its first output
            return
        dense = arm.dense_logits(check.token_ids, check.positions)
        if dense is None:
            message = f"C18 was not checked: {arm.label} has no dense forward pass to compare with."
            self._notices.append(Notice(setting="check", message=message))
            return
        for violation in check.compare(dense):
            self._judge.observe_failure(violation)
        self._verify_dense_drafts(arm, mine)

    def _verify_dense_drafts(self, arm: Arm, records: Sequence[StepRecord]) -> None:
        """The same of a draft model's first pass, where one runs."""
        if not isinstance(arm, DraftingArm) or not arm.num_draft_caches:
            return
        check = DraftDenseCheck(self.plan, records, self._dtype)
        if not check.token_ids:
            return
        dense = arm.dense_draft_logits(check.token_ids, check.positions)
        for violation in [] if dense is None else check.compare(dense):
            self._judge.observe_failure(violation)

    def _views(self) -> dict[str, KvArrays]:
        return {label: kv_view(arm) for label, arm in self.stand.arms.items()}

    def _tables(self) -> dict[str, Tables]:
        return {label: arm.block_tables() for label, arm in self.stand.arms.items()}

    def _live_slots(self) -> dict[str, LiveSlots]:
        """For each arm that is poisoned, what it may read."""
        return {setup.name: LiveSlots(self.plan, setup) for setup in self.stand.poisoned}

    def _verify_poisoned(self) -> None:
        """Contract C16: arms run the scenario again over poisoned memory."""
        for poison in POISONS:
            for label, live in self._live_slots().items():
                for violation in self._run_poisoned(self.stand.arms[label], live, poison):
                    self._judge.observe_failure(violation)

    def _run_poisoned(self, arm: Arm, live: LiveSlots, poison: str) -> Iterator[Violation]:
        """One arm, one poison. Ends with the first step that cannot be run."""
        clean = [record for record in self.records if record.arm == arm.label]
        drafts = self._drafts if self.teacher is not None else self._own_drafts()[arm.label]
        for number, step in enumerate(self.plan.steps):
            live.advance(step)
            forced = None if self.teacher is None else self._tokens[number]
            if arm.label == self.teacher:
                forced = None
            try:
                if not number:
                    arm.start(self.plan)
                arm.poison(live.unread(), poison)
                arm.execute(step, forced, drafts[number])
                record = arm.record(step, self.plan.scenario)
            except MeasuredFailure as error:
                yield broken_by_poison(clean[number], poison, error)
                return
            view = kv_view(arm)
            rows = live.written_rows(step, view)
            written = self._written[arm.label][number]
            yield from compare_poisoned(clean[number], record, written, rows, poison, view)
            live.leave(step)
            self.on_step()


def _given_at(given: Sequence[Sequence[int]] | None, step: StepPlan) -> Sequence[int] | None:
    """What was settled before for this step; None for a step that was never finished."""
    if given is None or step.index >= len(given):
        return None
    return given[step.index] if step.scheduled else None
