from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks.judge import ScenarioJudge
from pcpbench.checks.kv import KvArrays
from pcpbench.checks.ledger import MAX_SHOWN
from pcpbench.checks.oracle import Oracle
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.checks.setup import Pair
from pcpbench.errors import UsageError
from pcpbench.modes import CUDAGraphMode
from pcpbench.plan import StepPlan
from pcpbench.records import Violation
from pcpbench.results import Outcome
from pcpbench.timings import StepTiming
from pcpbench.world import World

TWIN = "eager_padded[full]"
PAIRS = (
    Pair(kind="partition", arm="eager", twin="reference"),
    Pair(kind="padding", arm=TWIN, twin="eager"),
    Pair(kind="capture", arm="full", twin=TWIN),
)

LARGE = "more requests than the largest FULL graph"


class Trial:
    """A scenario of three requests on two PCP ranks in the four arms of `compare eager full`.

    `tamper(arm, step, record)` may return a changed record.
    """

    def __init__(self, kit, plan=None, sizes=(4,), **judge):
        self.kit = kit
        self.plan = kit.make_plan([3, 9, 5], 4, block_size=8) if plan is None else plan
        graphs = tuple(kit.full(size) for size in sizes)
        decode_only = CUDAGraphMode.FULL_DECODE_ONLY
        self.setups = (
            kit.setup("reference"),
            kit.setup("eager", pcp=2),
            kit.setup(TWIN, pcp=2, mode=decode_only, candidates=graphs, padded_like="full"),
            kit.setup("full", pcp=2, mode=decode_only, candidates=graphs),
        )
        settings = {"base": "eager", "candidate": "full", "dtype": "float32", **judge}
        self.judge = ScenarioJudge(self.plan, self.setups, PAIRS, **settings)
        self.graphs, self.feed, self.oracle = graphs, TokenFeed(), Oracle(self.plan)
        self.feeds = {}

    def run(self, tamper=lambda arm, step, record: record, kv=None, skip=()):
        for step in self.plan.steps:
            self.oracle.advance(step)
            for feed in (self.feed, *self.feeds.values()):
                feed.advance(step)
            records = {}
            for setup in self.setups:
                if setup.name in skip:
                    continue
                record = tamper(setup.name, step, self.record(step, setup))
                if record is not None:
                    records[setup.name] = record
            self.found = self.judge.observe_step(step, records, kv)
            self.last = (step, records)
            reference = self.record(step, self.setups[0])
            self.feed.extend(reference.sampled_req_ids, reference.sampled)
            for name, feed in self.feeds.items():
                feed.extend(records[name].sampled_req_ids, records[name].sampled)
        return self

    def record(self, step, setup):
        decode = step.scheduled and not step.has_prefill
        serves = bool(setup.candidates) and decode and len(step.scheduled) <= 8
        descriptor = self.graphs[0] if serves else self.kit.NONE
        missed = LARGE if decode else "batch has a prefill"
        reason = missed if setup.candidates and not serves else ""
        feed = self.feeds.get(setup.name, self.feed)
        expected = self.oracle.expect(step, setup, descriptor, feed)
        record = self.kit.good_record(self.plan, step, setup, expected, descriptor, reason)
        return replace(record, sampled=record.logits.argmax(axis=-1))

    def finish(self, timings=()):
        return self.judge.finish(timings)


def timings(plan, speed, repetitions=3):
    return [
        StepTiming(
            arm=arm,
            scenario=plan.scenario,
            step=step.index,
            repetition=repetition,
            wall_s=factor * (1 + 0.01 * step.index),
            submit_s=factor,
            kernel_s=factor / 4,
        )
        for arm, factor in speed.items()
        for repetition in range(repetitions)
        for step in plan.steps
    ]


def test_a_clean_run_passes_with_ratios(kit):
    trial = Trial(kit).run()
    result = trial.finish(timings(trial.plan, {"eager": 2.0, "full": 1.0}))
    assert (result.outcome, result.reasons, result.violations) == (Outcome.PASS, (), ())
    assert [d.kind for d in result.drifts] == ["partition", "padding", "capture"]
    assert all(d.ok and d.worst.outcome == "bitwise" for d in result.drifts)
    # The step with the prefill ran eagerly in both arms of the capture pair.
    assert [d.num_steps_compared for d in result.drifts] == [5, 5, 4]
    assert all(d.top1_agreement == 1.0 for d in result.drifts)
    assert result.tpot_ratio.median == pytest.approx(0.5)
    assert result.itl_ratio.median == pytest.approx(0.5)
    assert result.launch_ratio.median == pytest.approx(0.5)
    arms = {arm.arm: arm for arm in result.arms}
    full, twin = arms["full"], arms[TWIN]
    assert (full.steps_full, full.steps_none, full.decode_steps) == (4, 1, 4)
    assert (full.coverable, full.coverable_full) == (4, 4)
    # Padded to the same sizes, but it never replays: that nothing was served says nothing.
    assert (twin.coverable, twin.coverable_full) == (0, 0)
    assert full.miss_reasons == {"batch has a prefill": 1}
    assert (twin.steps_full, twin.steps_none, twin.miss_reasons) == (0, 5, {})
    assert (full.num_requests, full.num_output_tokens) == (3, 15)
    # Prompts of 3, 9, 5 in chunks of 1, 3, 2 of which the last is empty: 6 and 11 tokens, so 22
    # after padding. Four decode steps of 3 real tokens in 2 ranks x 4.
    assert (full.real_tokens, full.padded_tokens) == (17 + 12, 22 + 32)
    assert full.tpot.median == pytest.approx(1.025, abs=0.02)
    assert arms["reference"].tpot is None


def test_stale_length_in_a_padding_row_fails_and_says_where(kit):
    def stale(arm, step, record):
        if arm in ("full", TWIN) and step.index >= 2:
            return kit.change_rank(
                record, 1, seq_lens=np.array([record.ranks[1].seq_lens[0], 9, 9, 9])
            )
        return record

    trial = Trial(kit).run(stale)
    result = trial.finish(timings(trial.plan, {"eager": 2.0, "full": 1.0}))
    assert result.outcome is Outcome.FAIL
    assert (
        "C1 broken by full 3 times, first at step 2, rank 1, seq_lens: seq_lens[1] is 9"
        in result.reasons[1]
    )
    assert result.tpot_ratio is None
    assert {(v.contract, v.arm) for v in result.violations} == {("C1", "full"), ("C1", TWIN)}
    assert {v.contract for v in trial.found} == {"C1"}


def test_one_bit_of_capture_drift_fails_as_c13(kit):
    def flip(arm, step, record):
        if arm == "full" and step.index == 3:
            hidden = record.hidden.copy()
            hidden.view(np.uint32)[1, 2] ^= 1
            return replace(record, hidden=hidden)
        return record

    trial = Trial(kit).run(flip)
    result = trial.finish()
    assert result.outcome is Outcome.FAIL
    (violation,) = result.violations
    assert (violation.contract, violation.step, violation.tensor) == ("C13", 3, "hidden")
    assert "1 of 18 values differ" in violation.message
    assert "FULL[reqs=4,tokens=4]" in violation.message
    (difference,) = result.first_differences
    assert (difference.kind, difference.step, difference.tensor) == ("capture", 3, "hidden")
    drifts = {(d.arm, d.step): d.worst.outcome for d in trial.judge.step_drifts}
    assert len(drifts) == 3 * 5
    assert [place for place, outcome in drifts.items() if outcome != "bitwise"] == [("full", 3)]
    assert not result.drifts[2].ok


def test_a_replay_of_the_step_before_is_called_stale(kit):
    trial = Trial(kit)
    kept = {}

    def stale(arm, step, record):
        if arm == TWIN:
            kept[step.index] = record
        if arm == "full" and step.index == 3:
            before = kept[2]
            return replace(
                record, hidden=before.hidden, logits=before.logits, sampled=before.sampled
            )
        return record

    result = trial.run(stale).finish()
    assert f"hidden equals that of {TWIN} in step 2: stale" in result.violations[0].message


@pytest.mark.parametrize(("size", "outcome"), [(1e-6, Outcome.PASS), (1e-2, Outcome.FAIL)])
def test_partition_drift_has_a_budget(kit, size, outcome):
    def drift(arm, step, record):
        if arm == "reference":
            return replace(record, hidden=record.hidden + np.float32(size))
        return record

    result = Trial(kit).run(drift).finish()
    assert result.outcome is outcome
    assert result.drifts[0].worst.outcome == (
        "within_budget" if outcome is Outcome.PASS else "exceeds_budget"
    )
    if outcome is Outcome.FAIL:
        assert "partition drift of eager from reference exceeds_budget" in result.reasons[0]
        assert result.violations == ()


def test_non_finite_outputs_fail_even_when_every_arm_agrees(kit):
    def poison(arm, step, record):
        hidden = record.hidden.copy()
        hidden[2] = np.nan
        return replace(record, hidden=hidden) if step.index == 1 else record

    result = Trial(kit).run(poison).finish()
    assert result.outcome is Outcome.FAIL
    assert "eager computed a non-finite value: step 1, tensor hidden, row 2" in result.reasons


def test_an_arm_that_ate_another_token_breaks_c3(kit):
    def wrong(arm, step, record):
        if arm in ("full", TWIN) and step.index == 2:
            ids = record.ranks[0].input_ids.copy()
            ids[0] += 1
            return kit.change_rank(record, 0, input_ids=ids)
        return record

    result = Trial(kit).run(wrong).finish()
    assert {(v.contract, v.tensor) for v in result.violations} == {("C3", "input_ids")}


# a comparison of nothing


def test_no_steps_is_not_a_pass(kit):
    for steps in ([], [StepPlan(index=0, scheduled=(), idle=True)]):
        result = Trial(kit, kit.plan_of(steps)).finish()
        assert result.outcome is Outcome.NOT_COMPARED
        assert result.reasons == ("the scenario has no step that computes anything",)
        assert result.tpot_ratio is None


def test_an_arm_that_never_ran_is_not_a_pass(kit):
    trial = Trial(kit).run(skip=("reference",))
    result = trial.finish(timings(trial.plan, {"eager": 2.0, "full": 1.0}))
    assert result.outcome is Outcome.NOT_COMPARED
    assert "reference: 0 of 5 steps ran" in result.reasons
    assert "eager and reference have no output in common" in result.reasons
    assert result.tpot_ratio is None


def test_an_arm_that_stopped_early_is_not_a_pass(kit):
    result = Trial(kit).run(lambda a, s, r: None if (a, s.index) == ("eager", 4) else r).finish()
    assert result.outcome is Outcome.NOT_COMPARED
    assert result.reasons == ("eager: 4 of 5 steps ran",)


def test_outputs_with_nothing_in_common_are_not_a_pass(kit):
    nothing = np.zeros((0, 0), np.float32)

    def bare(arm, step, record):
        if arm != "reference":
            return record
        return replace(
            record, hidden=nothing, logits=nothing, sampled=np.zeros(0, int), sampled_req_ids=()
        )

    trial = Trial(kit)
    result = trial.run(bare, kv=kv_views(trial)).finish()
    assert result.outcome is Outcome.NOT_COMPARED
    assert "eager and reference have no output in common" in result.reasons
    assert [drift.kind for drift in result.drifts] == ["padding", "capture"]


def test_full_that_never_ran_full_is_not_a_pass(kit):
    plan = kit.make_plan([3] * 12, 3, block_size=8)
    result = Trial(kit, plan).run().finish()
    assert result.outcome is Outcome.NOT_COMPARED
    assert result.reasons == (
        "full: no step was served by FULL, of 3 decode steps; none of them fits a captured size",
    )


def test_full_without_a_decode_step_is_not_a_pass(kit):
    result = Trial(kit, kit.make_plan([3, 9], 0)).run().finish()
    assert result.outcome is Outcome.NOT_COMPARED
    assert "no decode step" in result.reasons[0]


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_graph_modes_with_piecewise_are_as_asked_once_a_graph_ran(kit, mode):
    plan = kit.make_plan([3, 9], 0)
    pieces = (kit.piecewise(16),)
    setups = (
        kit.setup("eager", pcp=2),
        kit.setup("piecewise", pcp=2, mode=mode, candidates=pieces),
    )
    pairs = (Pair(kind="padding", arm="piecewise", twin="eager"),)
    for descriptor, outcome in ((pieces[0], Outcome.PASS), (kit.NONE, Outcome.FAIL)):
        judge = ScenarioJudge(
            plan, setups, pairs, base="eager", candidate="piecewise", dtype="float32"
        )
        oracle = Oracle(plan)
        step = plan.steps[0]
        oracle.advance(step)
        records = {}
        for setup in setups:
            chosen = descriptor if setup.candidates else kit.NONE
            expected = oracle.expect(step, setup, chosen, TokenFeed())
            records[setup.name] = kit.good_record(plan, step, setup, expected, chosen)
        judge.observe_step(step, records)
        result = judge.finish()
        assert result.outcome is outcome
    assert any("no step was served by" in r or "no decode step" in r for r in result.reasons)


# KV caches


def kv_of(trial, ranks=2):
    num_blocks = trial.plan.num_blocks + 1
    arrays = [[np.zeros((num_blocks, 8, 4), np.float32) for _ in range(2)] for _ in range(ranks)]
    return KvArrays(arrays)


def kv_views(trial):
    views = {s.name: kv_of(trial, s.world.size) for s in trial.setups}
    return views


def test_a_written_slot_that_differs_names_rank_layer_and_slot(kit):
    trial = Trial(kit)
    views = kv_views(trial)
    # r0 decodes at position 5 in step 2 (block 1, offset 5).
    views["full"].layer(1, 1)[1, 5, 2] = 1.0
    result = trial.run(kv=views).finish()
    c13 = [v for v in result.violations if v.contract == "C13"]
    assert [(v.step, v.rank, v.tensor) for v in c13] == [(3, 1, "kv_cache")]
    assert "layer 1, slot 13 (block 1)" in c13[0].message
    assert result.first_differences[0].layer == 1


def test_whole_caches_are_compared_when_asked(kit):
    trial = Trial(kit)
    views = kv_views(trial)
    views["full"].layer(0, 0)[-1, 0, 0] = 1.0  # a block that no request has
    trial.run(kv=views)
    (violation,) = trial.judge.observe_kv(*trial.last, views)
    assert (violation.contract, violation.rank, violation.tensor) == ("C13", 0, "kv_cache")
    assert trial.judge.observe_kv(*trial.last, views) == []  # told once
    assert trial.finish().outcome is Outcome.FAIL


def test_old_positions_are_compared_with_the_reference_at_the_end(kit):
    trial = Trial(kit)
    views = kv_views(trial)
    trial.run(kv=views)
    views["eager"].layer(1, 0)[1, 0, 0] = 1.0  # r0's first position, which no decode rewrites
    assert trial.judge.observe_kv(*trial.last, views) == []
    result = trial.finish()
    assert result.outcome is Outcome.FAIL
    places = {(d.kind, d.step, d.rank, d.layer) for d in result.first_differences}
    assert places == {("partition", 4, 1, 0)}


def test_an_arm_that_could_not_finish_a_step_fails(kit):
    trial = Trial(kit)
    trial.judge.observe_failure(
        Violation(
            contract="C11",
            arm="full",
            scenario="made-up",
            step=0,
            rank=None,
            tensor="collectives",
            message="ranks wait for each other",
        )
    )
    result = trial.finish()
    assert result.outcome is Outcome.FAIL
    assert "C11 broken by full 1 time, first at step 0, collectives" in result.reasons[0]


def test_kv_drift_beyond_the_budget_fails_without_a_violation(kit):
    trial = Trial(kit)
    views = kv_views(trial)
    for view in views.values():
        for rank in view.arrays:
            for cache in rank:
                cache[:] = 1.0
    views["reference"].layer(0, 1)[1, 5] = 1.5
    result = trial.run(kv=views).finish()
    assert result.outcome is Outcome.FAIL
    assert (
        "partition drift of eager from reference exceeds_budget, first at step 3"
        in (result.reasons[0])
    )
    assert result.first_differences[0].layer == 1


# how arms are fed


def test_free_running_arms_are_compared_until_they_part(kit):
    """From step 1 on the reference goes on with another token for r1; its rows no longer count."""
    trial = Trial(kit, teacher=None)
    trial.feeds = {setup.name: TokenFeed() for setup in trial.setups}

    def part(arm, step, record):
        if arm != "reference":
            return record
        hidden, logits, tokens = record.hidden.copy(), record.logits.copy(), record.sampled.copy()
        if step.index == 1:
            tokens[1] = (tokens[1] + 1) % 11
            return replace(record, sampled=tokens)
        if step.index > 1:
            hidden[1] += 3
            logits[1] *= 3
        return replace(record, hidden=hidden, logits=logits)

    result = trial.run(part).finish()
    partition = result.drifts[0]
    assert partition.token_mismatches == 1
    named = [(v.contract, v.arm, v.step, v.tensor) for v in result.violations]
    assert named == [("C7", "reference", 1, "sampled")], "a token that its logits do not favour"
    assert result.first_differences[0].step == 1
    assert result.first_differences[0].tensor == "sampled"
    assert partition.worst.tensor == "sampled"


# bookkeeping


def test_steps_are_judged_in_order_and_once(kit):
    trial = Trial(kit)
    with pytest.raises(ValueError, match="step 1"):
        trial.judge.observe_step(trial.plan.steps[1], {})


def test_many_violations_are_counted_and_few_are_kept(kit):
    plan = kit.make_plan([3], MAX_SHOWN + 20, block_size=8)

    def wrong(arm, step, record):
        return kit.change_rank(record, 0, num_tokens=99) if arm == "eager" else record

    trial = Trial(kit, plan).run(wrong)
    result = trial.finish()
    broken = [a.step for a in trial.judge.step_audits if a.arm == "eager"
              and "C7" in a.violated_contracts]  # fmt: skip
    assert broken == list(range(MAX_SHOWN + 21)), "the steps behind the cap are told, too"
    assert not any(a.violated_contracts for a in trial.judge.step_audits if a.arm == "full")
    kept = [v for v in result.violations if (v.contract, v.tensor) == ("C7", "num_tokens")]
    assert 0 < len(kept) <= MAX_SHOWN
    (reason,) = [r for r in result.reasons if r.startswith("C7")]
    assert f"C7 broken by eager {MAX_SHOWN + 21} times" in reason


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (Pair(kind="partition", arm="eager", twin="nobody"), "arm 'nobody'"),
        (Pair(kind="sideways", arm="eager", twin="full"), "drift kind 'sideways'"),
    ],
)
def test_names_that_do_not_fit_are_refused(kit, pair, words):
    trial = Trial(kit)
    with pytest.raises(UsageError, match=words):
        ScenarioJudge(
            trial.plan, trial.setups, [pair], base="eager", candidate="full", dtype="float32"
        )


def test_no_pairs_is_not_a_pass(kit):
    setups = (kit.setup("eager"),)
    plan = kit.make_plan([3], 1)
    judge = ScenarioJudge(plan, setups, (), base="eager", candidate="eager", dtype="float32")
    oracle = Oracle(plan)
    for step in plan.steps:
        oracle.advance(step)
        expected = oracle.expect(step, setups[0], kit.NONE, TokenFeed())
        judge.observe_step(step, {"eager": kit.good_record(plan, step, setups[0], expected)})
    assert judge.finish().reasons == ("no pair of arms was compared",)
    assert setups[0].world == World()
