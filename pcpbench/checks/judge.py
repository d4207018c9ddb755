"""One scenario on trial: takes steps as they are run and ends with a verdict (SPEC 11-13).

Owns the order of judging a step, what is remembered between steps, and the rules that turn findings
into PASS, FAIL or NOT_COMPARED. Knows no engine; a session feeds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pcpbench.checks import compare, kv, metrics
from pcpbench.checks.candidates import candidate_violations
from pcpbench.checks.contract_draft_model import draft_graph_violations
from pcpbench.checks.contracts import CONTRACTS, Contract, check_step
from pcpbench.checks.drift import is_ok
from pcpbench.checks.feeding import Feeding, Given
from pcpbench.checks.findings import StepView, non_finite_in, non_finite_text
from pcpbench.checks.kv import KvView
from pcpbench.checks.ledger import Ledger
from pcpbench.checks.oracle import Oracle, StepExpectation
from pcpbench.checks.plan_audit import plan_violations
from pcpbench.checks.replays import compare_again, compare_late, slots_of
from pcpbench.checks.setup import KINDS, ArmSetup, Pair
from pcpbench.checks.stats import ratio_of
from pcpbench.checks.tally import ArmTally, PairTally
from pcpbench.checks.write_set import Change, Tables, WriteSets, capture_violations
from pcpbench.errors import UsageError
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import IntArray, NonFinite, Notice, StepRecord, Violation
from pcpbench.results import Outcome, Ratio, ScenarioResult, StepAudit, StepDrift
from pcpbench.timings import StepTiming


class ScenarioJudge:
    """Judges one scenario step by step.

    plan: the steps that every arm runs. setups: every arm that will be recorded. pairs: what to
    compare, such as Pair(kind="capture", arm="full", twin="eager_padded[full]"). base, candidate:
    the arms whose times are set against each other. dtype: of the engines. teacher: the arm whose
    tokens feed all arms, None when each arm feeds itself. cost: `quick` or `full` contracts.
    async_device: whether the device runs behind the host (decides what launch overhead means).
    expected: of each arm in the step judged last, None for an idle step. ledger: what was found.
    """

    def __init__(
        self,
        plan: ScenarioPlan,
        setups: Sequence[ArmSetup],
        pairs: Sequence[Pair],
        *,
        base: str,
        candidate: str,
        dtype: str,
        teacher: str | None = "reference",
        cost: str = "quick",
        contracts: Sequence[Contract] = CONTRACTS,
        async_device: bool = False,
    ) -> None:
        self.plan, self.dtype, self.cost, self.contracts = plan, dtype, cost, contracts
        self.base, self.candidate, self.async_device = base, candidate, async_device
        self.setups = {setup.name: setup for setup in setups}
        self._check_names(pairs)
        self.oracle = Oracle(plan)
        self.teacher, self.feeding = teacher, Feeding(teacher, self.setups)
        self.arms = {setup.name: ArmTally(setup) for setup in setups}
        self.pairs = [PairTally(pair) for pair in pairs]
        self.ledger = Ledger()
        self.non_finite: dict[str, NonFinite] = {}
        self._kv_accused: set[tuple[str, int, kv.CachePlace]] = set()
        self._next_step = 0
        busy = [step.index for step in plan.steps if step.scheduled and not step.idle]
        self._last_busy = busy[-1] if busy else None
        self._before: dict[str, StepRecord] = {}
        self.expected: dict[str, StepExpectation | None] = {}
        self._views: dict[str, StepView] = {}
        self._writes = WriteSets()

    def _check_names(self, pairs: Sequence[Pair]) -> None:
        for pair in pairs:
            if pair.kind not in KINDS:
                raise UsageError(f"drift kind {pair.kind!r}: use one of {', '.join(KINDS)}.")
        asked = [name for pair in pairs for name in (pair.arm, pair.twin)]
        for name in (*asked, self.base, self.candidate):
            if name not in self.setups:
                known = ", ".join(self.setups)
                raise UsageError(f"arm {name!r} is compared but not set up: set up are {known}.")

    def observe_start(
        self,
        kv_views: Mapping[str, KvView],
        tables: Mapping[str, Tables],
        captures: Mapping[str, Sequence[Change]],
    ) -> None:
        """Judge the plan (C19) and the arms' graphs (C10); take in caches and global tables.

        captures: what the capture of each arm changed that it had to leave alone (C9).
        """
        self.ledger.keep(plan_violations(self.plan))
        for setup in self.setups.values():
            self.ledger.keep(candidate_violations(setup, self.plan))
            self.ledger.keep(draft_graph_violations(setup, self.plan))
        for name, view in kv_views.items():
            self._writes.start(name, view, self.setups[name].world.size, tables.get(name))
        for name, changes in captures.items():
            self.ledger.keep(capture_violations(name, changes, self.plan))

    def observe_step(
        self,
        step: StepPlan,
        records: Mapping[str, StepRecord],
        kv_views: Mapping[str, KvView] | None = None,
        tables: Mapping[str, Tables] | None = None,
        given: Given | None = None,
    ) -> list[Violation]:
        """Judge one step, once, in the order of the plan; return what broke in it.

        records: one for each arm that ran. kv_views: caches as they are after this step, to compare
        the slots that it wrote, and to see that it wrote no other once `observe_start` was called.
        tables: global block tables after this step. given: what fed all arms, where no arm that is
        recorded is the teacher. Raises ValueError for a step out of order.
        """
        if step.index != self.plan.steps[self._next_step].index:
            raise ValueError(f"step {step.index} was judged out of the plan's order")
        self._next_step += 1
        self.oracle.advance(step)
        self.feeding.begin(step, records, given)
        found: list[Violation] = []
        self.expected = {}
        for name, record in records.items():
            found += self._check_record(step, name, record, records)
            if kv_views is not None and name in kv_views:
                found += self._writes.check(
                    self._views[name], kv_views[name], None if tables is None else tables.get(name)
                )
        for tally in self.pairs:
            found += self._compare(step, tally, records)
            if kv_views is not None:
                found += self._compare_kv(step, tally, records, kv_views, "written")
        self.feeding.end(step, records)
        self._before = dict(records)
        self.ledger.keep(found)
        return found

    def observe_kv(
        self, step: StepPlan, records: Mapping[str, StepRecord], kv_views: Mapping[str, KvView]
    ) -> list[Violation]:
        """Compare more than a step wrote, after `observe_step` has judged that step.

        Whole caches of a capture pair, bit for bit, every time; in the other pairs every position
        of the requests of the plan's last step that computes, once, after that step.
        """
        is_last = step.index == self._last_busy
        found: list[Violation] = []
        for tally in self.pairs:
            if is_last or tally.pair.kind == "capture":
                found += self._compare_kv(step, tally, records, kv_views, "all")
        self.ledger.keep(found)
        return found

    def observe_again(
        self, record: StepRecord, kv_view: KvView, between: Sequence[str] = ()
    ) -> None:
        """Hold a second replay of the step just observed against the first one (C14).

        between: graphs replayed since the step ran.
        """
        view = self._views[record.arm]
        self.ledger.keep(compare_again(view.record, record, between))
        self.ledger.keep(self._writes.check_again(view, kv_view, between))

    def slots_of(self, name: str) -> list[list[IntArray]]:
        """[rank][KV group]: slots that the step just observed had to write."""
        return slots_of(self._views[name])

    def observe_late(self, record: StepRecord, between: Sequence[str] = ()) -> None:
        """Hold outputs of the step just observed that were read again against the first look."""
        self.ledger.keep(compare_late(self._views[record.arm].record, record, between))

    def observe_idle_replays(
        self, name: str, kv_view: KvView, tables: Tables, between: Sequence[str]
    ) -> None:
        """See that graphs replayed as dummy runs after the last step wrote nothing (C9)."""
        view = self._views[name]
        self.ledger.keep(self._writes.check_idle_replays(view, kv_view, tables, between))

    def observe_failure(self, violation: Violation) -> None:
        """An arm could not finish a step; the scenario ends here and fails."""
        self.ledger.keep([violation])

    @property
    def step_drifts(self) -> list[StepDrift]:
        """Worst drift of every step so far, pair after pair."""
        return [drift for tally in self.pairs for drift in tally.step_drifts()]

    @property
    def step_audits(self) -> list[StepAudit]:
        """Every step of every arm: its dispatch, and all contracts that broke in it so far."""
        return [
            self.ledger.mark(audit) for tally in self.arms.values() for audit in tally.audit.steps
        ]

    @property
    def has_failed(self) -> bool:
        """Whether what was observed so far can no longer pass."""
        return bool(self._failures())

    def finish(
        self,
        timings: Iterable[StepTiming] = (),
        *,
        notices: Sequence[Notice] = (),
        wall_s: float = 0.0,
    ) -> ScenarioResult:
        """The verdict over all steps observed, with times where it is a pass."""
        measured = list(timings)
        times = {
            name: metrics.arm_times(self.plan, measured, name, self.async_device)
            for name in self.arms
        }
        failures, gaps = self._failures(), self._gaps()
        outcome = Outcome.FAIL if failures else Outcome.NOT_COMPARED if gaps else Outcome.PASS
        passed = outcome is Outcome.PASS
        base, candidate = times[self.base], times[self.candidate]

        def ratio(ours: metrics.Samples, theirs: metrics.Samples) -> Ratio | None:
            return ratio_of(*metrics.paired(ours, theirs)) if passed else None

        return ScenarioResult(
            scenario=self.plan.scenario,
            outcome=outcome,
            reasons=tuple(failures + gaps),
            arms=tuple(tally.summary(times[name]) for name, tally in self.arms.items()),
            drifts=tuple(s for tally in self.pairs if (s := tally.summary(self.dtype)) is not None),
            violations=tuple(self.ledger.violations),
            first_differences=tuple(t.first for t in self.pairs if t.first is not None),
            tpot_ratio=ratio(base.tpot, candidate.tpot),
            itl_ratio=ratio(base.itl, candidate.itl),
            launch_ratio=ratio(base.launch, candidate.launch),
            notices=tuple(notices),
            wall_s=wall_s,
            num_violations=self.ledger.num_violations(),
            non_finite=tuple(self.non_finite.values()),
        )

    def _check_record(
        self, step: StepPlan, name: str, record: StepRecord, records: Mapping[str, StepRecord]
    ) -> list[Violation]:
        setup = self.setups[name]
        expected = None
        if step.scheduled and not step.idle:
            descriptor = _padding_of(setup, record, records)
            expected = self.oracle.expect(step, setup, descriptor, self.feeding.feeds[name])
        self.expected[name] = expected
        self.arms[name].observe(step, record, expected)
        bad = non_finite_in(record)
        if bad is not None:
            self.non_finite.setdefault(name, bad)
        fed = self.feeding.tokens_for(record, records)
        view = StepView(plan=step, record=record, setup=setup, expected=expected, fed=fed)
        self._views[name] = view
        return check_step(view, self.contracts, self.cost)

    def _compare(
        self, step: StepPlan, tally: PairTally, records: Mapping[str, StepRecord]
    ) -> list[Violation]:
        pair = tally.pair
        record, twin = records.get(pair.arm), records.get(pair.twin)
        if record is None or twin is None or self.expected.get(pair.arm) is None:
            return []
        tally.diverged.difference_update(step.finished_req_ids)
        own = self.teacher is None and pair.kind != "capture"
        result = compare.compare_steps(
            record, twin, pair.kind, self.dtype, step, tally.diverged, own
        )
        tally.observe(step.index, result, record.descriptor.cg_mode is not CUDAGraphMode.NONE)
        if own:
            tally.diverged |= compare.flipped(record, twin)
        if pair.kind != "capture":
            return []
        stale = compare.stale_hint(record, self._before.get(pair.twin))
        return [
            compare.capture_violation(record, twin, None, drift, stale)
            for drift in result.drifts
            if not is_ok(drift)
        ]

    def _compare_kv(
        self,
        step: StepPlan,
        tally: PairTally,
        records: Mapping[str, StepRecord],
        views: Mapping[str, KvView],
        scope: str,
    ) -> list[Violation]:
        pair = tally.pair
        record, twin = records.get(pair.arm), records.get(pair.twin)
        if record is None or twin is None or not {pair.arm, pair.twin} <= views.keys():
            return []
        broken: list[Violation] = []
        for place in self._kv_places(step, tally, views, scope):
            if is_ok(place.drift):
                tally.note(step.index, (place.drift,), None, place.layer)
                continue
            difference = compare.difference_of(record, twin, place.drift, place.rank, place.layer)
            tally.note(step.index, (place.drift,), difference, place.layer)
            # A slot that went wrong stays wrong: whole caches accuse a layer once.
            cache = kv.CachePlace(place.drift.tensor, place.layer)
            key = (pair.arm, place.rank, cache)
            if pair.kind == "capture" and not (scope == "all" and key in self._kv_accused):
                self._kv_accused.add(key)
                where = f"{cache}, {place.where}"
                broken.append(
                    compare.capture_violation(record, twin, place.rank, place.drift, where)
                )
        return broken

    def _kv_places(
        self, step: StepPlan, tally: PairTally, views: Mapping[str, KvView], scope: str
    ) -> Iterator[kv.KvDifference]:
        """Compare by slot where the twin has the same layout bit for bit, else by position."""
        pair, expected = tally.pair, self.expected.get(tally.pair.arm)
        found, twin = views[pair.arm], views[pair.twin]
        if pair.kind == "capture" and (scope == "all" or expected is not None):
            num_ranks = self.setups[pair.arm].world.size
            slots_of = expected if scope == "written" else None
            yield from kv.compare_kv(found, twin, slots_of, num_ranks, self.dtype)
        elif expected is not None:
            arms, skip = (pair.arm, pair.twin), tally.diverged
            yield from kv.compare_kv_by_position(
                found,
                twin,
                self.oracle,
                step,
                self.setups,
                arms,
                pair.kind,
                self.dtype,
                scope,
                skip,
            )

    def _failures(self) -> list[str]:
        reasons = self.ledger.reasons()
        reasons += [non_finite_text(bad) for bad in self.non_finite.values()]
        for tally in self.pairs:
            if tally.first is not None and tally.pair.kind != "capture":
                reasons.append(tally.reason())
        return reasons

    def _gaps(self) -> list[str]:
        """What keeps the comparison from being one, though nothing broke."""
        if not any(step.scheduled and not step.idle for step in self.plan.steps):
            return ["the scenario has no step that computes anything"]
        reasons = []
        for name, tally in self.arms.items():
            if tally.num_steps < len(self.plan.steps):
                reasons.append(f"{name}: {tally.num_steps} of {len(self.plan.steps)} steps ran")
            elif name in (self.base, self.candidate) or tally.replays:
                reasons += tally.not_as_asked()
        if not self.pairs:
            reasons.append("no pair of arms was compared")
        for pair_tally in self.pairs:
            if not pair_tally.num_steps:
                pair = pair_tally.pair
                reasons.append(f"{pair.arm} and {pair.twin} have no output in common")
        return reasons


def _padding_of(
    setup: ArmSetup, record: StepRecord, records: Mapping[str, StepRecord]
) -> BatchExecutionDescriptor:
    """What a step is padded to: its own descriptor, or for a padded twin that of its model."""
    model = records.get(setup.padded_like) if setup.padded_like is not None else None
    return record.descriptor if model is None else model.descriptor
