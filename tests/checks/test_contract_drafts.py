"""C17 and the oracle under draft tokens, on a step made by hand."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pcpbench.checks.contract_drafts import accepted_by_hand, check_drafts
from pcpbench.checks.contracts import check_step
from pcpbench.checks.findings import StepView
from pcpbench.checks.metrics import request_times
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.checks.poison import LiveSlots
from pcpbench.checks.setup import ArmSetup
from pcpbench.traits import Traits
from pcpbench.world import World

SETUP = ArmSetup(name="eager", world=World(pcp_size=2))
# Rows of logits: four of r0, two of r2, and the one of r1's last chunk.
FED = np.array([5, 9, 7, 1, 2, 3, 4])
NAMES = ("r0", "r0", "r0", "r0", "r2", "r2", "r1")
DRAFTS = np.array([5, 10, 7, 2])


@pytest.fixture
def plan(kit):
    """Step 0 prefills r0 (3 tokens), r2 (2) and the head of r1 (3 of 6). In step 1 r0 verifies
    three drafts, one of them right, r2 one, which is right, and r1 ends its prefill."""
    first = kit.make_plan([3, 6, 2], 1)
    shares = [
        kit.scheduled("r0", 3, 0, 3),
        kit.scheduled("r2", 2, 0, 2),
        kit.scheduled("r1", 3, 0, 6),
    ]
    decodes = (
        with_drafts(kit.scheduled("r0", 4, 3, 3), 3, 1),
        with_drafts(kit.scheduled("r2", 2, 2, 2), 1, 1),
    )
    zero = msgspec.structs.replace(first.steps[0], scheduled=tuple(shares))
    one = msgspec.structs.replace(
        first.steps[1],
        scheduled=(*decodes, kit.scheduled("r1", 3, 3, 6)),
        new_block_ids={"r0": ((20,),)},
    )
    return kit.plan_of([zero, one])


def with_drafts(share, drafts, accepted):
    return msgspec.structs.replace(share, num_draft_tokens=drafts, num_accepted_tokens=accepted)


@pytest.fixture
def view(kit, plan):
    """A good record of step 1."""
    feed = TokenFeed()
    bench = kit.Bench(plan, SETUP, feed)
    for step in plan.steps[:2]:
        bench.oracle.advance(step)
        feed.advance(step)
        if step.index == 0:
            feed.take(step, ["r0", "r2"], np.array([3, 8]))
    step = plan.steps[1]
    feed.draft(step, DRAFTS)
    expected = bench.oracle.expect(step, SETUP, kit.NONE, feed)
    record = kit.good_record(plan, step, SETUP, expected)
    logits = np.zeros((7, 11), dtype=np.float32)
    logits[np.arange(7), FED] = 9.0
    record = replace(record, sampled_req_ids=NAMES, sampled=FED, logits=logits, draft_tokens=DRAFTS)
    for rank in range(2):
        record = kit.change_rank(
            record,
            rank,
            num_accepted=np.array([1, 1, 0]),
            num_computed_after=np.array([5, 4, 6]),
            sampled_rows=np.array([0, 1, 2, 3, 4, 5, 8]),
        )
    return StepView(plan=step, record=record, setup=SETUP, expected=expected, fed=FED)


def fired(view):
    return [(v.contract, v.rank, v.tensor) for v in check_step(view)]


def test_the_expected_inputs_are_the_last_token_and_the_drafts(view):
    rows = [(r.req_index, r.num_tokens) for rank in view.expected.ranks for r in rank.rows]
    assert rows == [(0, 4), (2, 1), (1, 2), (2, 1), (2, 1)]
    first = view.expected.ranks[0]
    assert first.input_ids[:4].tolist() == [3, 5, 10, 7]
    assert first.positions[:4].tolist() == [3, 4, 5, 6]
    assert view.expected.ranks[1].input_ids[:2].tolist() == [8, 2]
    assert view.expected.uniform_token_count is None


def test_a_step_that_verifies_as_planned_breaks_nothing(view):
    assert fired(view) == []


def test_acceptance_by_hand(view):
    assert accepted_by_hand(view.plan, DRAFTS, FED) == {"r0": 1, "r1": 0, "r2": 1}


@pytest.mark.parametrize(
    ("tensor", "wrong"),
    [("num_accepted", [2, 1, 0]), ("num_computed_after", [7, 4, 6])],
)
def test_another_acceptance_or_cursor_on_one_rank_breaks_c17(kit, view, tensor, wrong):
    record = kit.change_rank(view.record, 1, **{tensor: np.array(wrong)})
    assert fired(replace(view, record=record)) == [("C17", 1, tensor)]


@pytest.mark.parametrize(("over", "is_right"), [(-1, False), (0, True), (3, True), (4, False)])
def test_the_hosts_bound_is_no_further_off_than_one_step_of_drafts(kit, view, over, is_right):
    view = replace(view, setup=replace(SETUP, decode_query_len=4))
    lengths = view.record.ranks[1].seq_lens
    record = kit.change_rank(view.record, 1, seq_lens_cpu_upper_bound=lengths + over)
    found = [v for v in check_drafts(replace(view, record=record)) if v.rank == 1]
    assert [v.tensor for v in found] == ([] if is_right else ["seq_lens_cpu_upper_bound"])
    if over == 4:
        assert f"has length {lengths[0]} and the host takes it for {lengths[0] + 4}" in (
            found[0].message
        )


@pytest.mark.parametrize("wrong", [[5, 9, 7, 2], [6, 10, 7, 2], [5, 10, 7, 3]])
def test_drafts_that_come_to_another_acceptance_break_c17(view, wrong):
    broken = replace(view, record=replace(view.record, draft_tokens=np.array(wrong)))
    assert ("C17", None, "draft_tokens") in fired(broken)


def test_a_right_draft_behind_a_wrong_one_is_not_accepted(view):
    # 7 is what the model would choose behind 10, and 10 is wrong: it counts for nothing.
    assert DRAFTS[2] == FED[2]
    assert list(check_drafts(view)) == []


def test_drafts_of_another_number_break_c17(view):
    short = replace(view, record=replace(view.record, draft_tokens=DRAFTS[:3]))
    assert fired(short) == [("C17", None, "draft_tokens")]


def test_wrong_rows_of_logits_break_c7(kit, view):
    only_last = kit.change_rank(view.record, 0, sampled_rows=np.array([3, 5, 8]))
    assert fired(replace(view, record=only_last)) == [("C7", 0, "sampled_rows")]


def test_an_input_that_is_not_the_draft_breaks_c3(kit, view):
    ids = view.record.ranks[0].input_ids.copy()
    ids[2] = 9
    record = kit.change_rank(view.record, 0, input_ids=ids)
    assert fired(replace(view, record=record)) == [("C3", 0, "input_ids")]


def test_a_target_that_cannot_tell_breaks_nothing(kit, view):
    record = replace(view.record, draft_tokens=None)
    for rank in range(2):
        record = kit.change_rank(record, rank, num_accepted=None, num_computed_after=None)
    theirs = replace(SETUP, traits=Traits(idle_has_context=False))
    assert fired(replace(view, record=record, setup=theirs)) == []


@pytest.mark.parametrize("tensor", ["num_accepted", "num_computed_after"])
def test_a_rank_of_ours_that_does_not_tell_what_it_accepted_breaks_c17(kit, view, tensor):
    record = kit.change_rank(view.record, 1, **{tensor: None})
    assert fired(replace(view, record=record)) == [("C17", 1, tensor)]


def test_a_step_of_ours_that_does_not_tell_its_drafts_breaks_c17(view):
    record = replace(view.record, draft_tokens=None)
    assert fired(replace(view, record=record)) == [("C17", None, "draft_tokens")]


def test_the_feed_keeps_what_was_accepted_and_the_token_after_it(plan):
    feed = TokenFeed()
    feed.take(plan.steps[1], NAMES, FED)
    assert feed.generated == {"r0": [5, 9], "r1": [4], "r2": [2, 3]}


def test_output_tokens_are_those_kept(view):
    assert view.record.num_accepted == 2
    assert view.record.num_output_tokens == view.plan.num_output_tokens == 5


def test_kv_of_rejected_drafts_is_not_live(plan):
    live = LiveSlots(plan, ArmSetup(name="one", world=World()))
    for step in plan.steps[:2]:
        live.advance(step)
        live.leave(step)
    # r0 has computed 3, then 4 more, of which 2 were rejected: positions 0 to 4 are live.
    table = [*plan.steps[0].new_block_ids["r0"][0], 20]
    unread = live.unread()[0][0].reshape(-1, 4)[table].reshape(-1)
    assert unread.tolist() == [False] * 5 + [True] * 3


def test_tokens_of_one_verification_come_at_one_time(plan):
    times = request_times(plan, [2.0, 1.0])
    assert times["r0"].token_s == (2.0, 3.0, 3.0)
    assert times["r1"].token_s == (3.0,)
