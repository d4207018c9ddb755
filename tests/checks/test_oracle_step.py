"""The oracle against metadata worked out by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pcpbench.checks.oracle import Oracle
from pcpbench.checks.oracle_tables import RequestBook, TokenFeed, dcp_share
from pcpbench.plan import NewRequest, StepPlan


def new(kit, req_id, length, num_generated=0):
    return NewRequest(
        req_id=req_id,
        prompt_token_ids=tuple(range(100, 100 + length)),
        max_tokens=8,
        num_generated=num_generated,
    )


def expect(kit, steps, setup, descriptor, block_size, generated=()):
    oracle, feed = Oracle(kit.plan_of(steps, block_size)), TokenFeed()
    for number, step in enumerate(steps):
        oracle.advance(step)
        feed.advance(step)
        if number < len(generated):
            feed.extend(list(generated[number]), np.array(list(generated[number].values())))
    return oracle.expect(steps[-1], setup, descriptor, feed)


def test_two_decodes_and_a_prefill_of_five_on_two_pcp_ranks(kit):
    steps = [
        StepPlan(
            index=0,
            scheduled=(kit.scheduled("a", 3), kit.scheduled("b", 6)),
            new_requests=(new(kit, "a", 3), new(kit, "b", 6)),
            new_block_ids={"a": ((5,),), "b": ((2, 9),)},
        ),
        StepPlan(
            index=1,
            scheduled=(
                kit.scheduled("a", 1, 3, 3),
                kit.scheduled("b", 1, 6, 6),
                kit.scheduled("c", 5),
            ),
            new_requests=(new(kit, "c", 5),),
            new_block_ids={"c": ((7, 3),)},
        ),
    ]
    found = expect(kit, steps, kit.setup(pcp=2), kit.NONE, 4, [{"a": 40, "b": 41}])
    # c is cut in chunks of 2: rank 0 holds c[0:2] (chunk 3 is empty), rank 1 c[2:4] and c[4:5].
    one, two = found.ranks
    assert (one.num_reqs, one.num_tokens) == (2, 3)
    assert (two.num_reqs, two.num_tokens) == (3, 4)
    assert one.num_tokens_after_padding == two.num_tokens_after_padding == 4
    assert one.input_ids.tolist() == [40, 100, 101, 0]
    assert one.positions.tolist() == [3, 0, 1, 0]
    assert one.query_start_loc.tolist() == [0, 1, 3]
    assert one.seq_lens.tolist() == [4, 2]
    assert two.input_ids.tolist() == [41, 102, 103, 104]
    assert two.positions.tolist() == [6, 2, 3, 4]
    assert two.query_start_loc.tolist() == [0, 1, 3, 4]
    assert two.seq_lens.tolist() == [7, 4, 5]
    assert [b.tolist() for b in two.block_ids[0]] == [[2, 9], [7, 3], [7, 3]]
    # a at 3: block 5, offset 3. b at 6: block 9, offset 2. c at 0..3: block 7, at 4: block 3.
    slots = [[23, 28, 29, -1, 38, 30, 31, 12]]
    assert one.slot_mappings.tolist() == two.slot_mappings.tolist() == slots
    assert one.gathered_token.tolist() == [0, 2, 3, -1, 1, 4, 5, 6]
    assert one.write_mask.tolist() == [True, True, True, False, True, True, True, True]
    assert (found.dispatch_num_reqs, found.dispatch_num_tokens) == (3, 4)
    assert found.has_prefill
    assert found.uniform_token_count is None


def test_full_padding_of_three_decodes_on_four_pcp_ranks(kit):
    """Rank 3 has nothing to do: one row of zero tokens, and two padding rows like everyone."""
    names = ("a", "b", "c")
    steps = [
        StepPlan(
            index=0,
            scheduled=tuple(kit.scheduled(n, 1, 9, 5) for n in names),
            new_block_ids={"a": ((1, 2, 3),), "b": ((4, 5, 6),), "c": ((7, 8, 9),)},
        )
    ]
    found = expect(kit, steps, kit.setup(pcp=4), kit.full(2), 4)
    assert [r.num_reqs for r in found.ranks] == [1, 1, 1, 1]
    assert [r.num_tokens for r in found.ranks] == [1, 1, 1, 0]
    assert [r.seq_lens.tolist() for r in found.ranks] == [[10, 0], [10, 0], [10, 0], [0, 0]]
    assert [r.query_start_loc.tolist() for r in found.ranks] == [[0, 1, 1]] * 3 + [[0, 0, 0]]
    assert found.ranks[0].slot_mappings.tolist() == [[13, -1, 25, -1, 37, -1, -1, -1]]
    assert found.ranks[0].input_ids.tolist() == [-1, 0]  # nobody said what was sampled before
    assert (found.dispatch_num_reqs, found.dispatch_num_tokens) == (1, 1)
    assert found.uniform_token_count == 1


def test_dcp_two_with_interleave_two_without_pcp(kit):
    """Physical block size 4, so a block id stands for 8 positions dealt out in runs of two."""
    steps = [
        StepPlan(
            index=0,
            scheduled=(kit.scheduled("a", 1, 10, 10), kit.scheduled("b", 3)),
            new_requests=(new(kit, "b", 3),),
            new_block_ids={"a": ((6, 2),), "b": ((4,),)},
        )
    ]
    setup = kit.setup(tp=2, dcp=2, interleave=2)
    one, two = expect(kit, steps, setup, kit.NONE, 8).ranks
    # a at 10: second block (2), offset 2 -> rank 1, local offset 0 -> slot 2 * 4.
    # b at 0, 1: block 4, rank 0, offsets 0, 1; at 2: rank 1, offset 0.
    assert one.slot_mappings.tolist() == [[-1, 16, 17, -1]]
    assert two.slot_mappings.tolist() == [[8, -1, -1, 16]]
    # 11 positions: 0 1 4 5 8 9 on rank 0, 2 3 6 7 10 on rank 1; of 3: two and one.
    assert one.dcp_local_seq_lens.tolist() == [6, 2]
    assert two.dcp_local_seq_lens.tolist() == [5, 1]
    assert one.write_mask is None


def test_dcp_over_pcp_replicates_a_short_prefill_with_one_writer(kit):
    """pcp 2, dcp 2, interleave 1, physical block size 2: block ids stand for 4 positions."""
    steps = [
        StepPlan(
            index=0,
            scheduled=(kit.scheduled("a", 1, 4, 4), kit.scheduled("b", 3)),
            new_requests=(new(kit, "b", 3),),
            new_block_ids={"a": ((1, 3),), "b": ((5,),)},
        )
    ]
    one, two = expect(kit, steps, kit.setup(pcp=2, dcp=2), kit.NONE, 4).ranks
    assert one.seq_lens.tolist() == two.seq_lens.tolist() == [5, 3]
    assert one.write_mask.tolist() == [True] * 4 + [False] * 4
    # a at 4: block 3, offset 0 -> rank 0, slot 6. b at 0, 1, 2: ranks 0, 1, 0, slots 10, 10, 11.
    assert one.slot_mappings.tolist() == [[6, 10, -1, 11, -1, -1, -1, -1]]
    assert two.slot_mappings.tolist() == [[-1, -1, 10, -1, -1, -1, -1, -1]]
    assert (one.dcp_local_seq_lens.tolist(), two.dcp_local_seq_lens.tolist()) == ([3, 2], [2, 1])


def test_dcp_over_four_ranks_goes_over_pcp_first(kit):
    """pcp 2, tp 2, dcp 4: the group is 0, 2, 1, 3, so global rank 1 is DCP rank 2."""
    steps = [
        StepPlan(
            index=0,
            scheduled=(kit.scheduled("a", 1, 6, 6),),
            new_block_ids={"a": ((1, 2),)},
        )
    ]
    found = expect(kit, steps, kit.setup(pcp=2, tp=2, dcp=4), kit.NONE, 4)
    # Position 6 is owned by DCP rank 2; block 2 has one physical slot: 2.
    assert [r.slot_mappings.tolist() for r in found.ranks] == [
        [[-1, -1]],
        [[2, -1]],
        [[-1, -1]],
        [[-1, -1]],
    ]
    assert [r.dcp_local_seq_lens.tolist() for r in found.ranks] == [[2], [2], [2], [1]]


def test_piecewise_pads_tokens_and_leaves_rows(kit):
    steps = [
        StepPlan(
            index=0,
            scheduled=(kit.scheduled("a", 5),),
            new_requests=(new(kit, "a", 5),),
            new_block_ids={"a": ((1, 2),)},
        )
    ]
    (rank,) = expect(kit, steps, kit.setup(), kit.piecewise(8), 4).ranks
    assert (rank.num_reqs_after_padding, rank.num_tokens_after_padding) == (1, 8)
    assert rank.slot_mappings.tolist() == [[4, 5, 6, 7, 8, -1, -1, -1]]
    assert rank.input_ids.tolist() == [100, 101, 102, 103, 104, 0, 0, 0]


def test_blocks_of_a_request_that_left_are_forgotten_and_reused(kit):
    book = RequestBook(kit.plan_of([], 4))
    book.advance(
        StepPlan(
            index=0,
            scheduled=(),
            new_requests=(new(kit, "a", 3),),
            new_block_ids={"a": ((1, 2),)},
        )
    )
    book.advance(
        StepPlan(
            index=1,
            scheduled=(),
            preempted_req_ids=("a",),
            new_requests=(new(kit, "b", 3),),
            new_block_ids={"b": ((2,),)},
        )
    )
    assert (book.table("a", 0), book.table("b", 0)) == ([], [2])
    book.advance(
        StepPlan(
            index=2,
            scheduled=(),
            new_requests=(new(kit, "a", 3, num_generated=2),),
            new_block_ids={"a": ((1,),)},
        )
    )
    assert book.table("a", 0) == [1]


def test_a_request_that_comes_back_brings_what_it_had_generated(kit):
    book, feed = RequestBook(kit.plan_of([], 4)), TokenFeed()
    feed.extend(["a", "a", "a"], np.array([7, 8, 9]))
    step = StepPlan(
        index=0, scheduled=(), preempted_req_ids=("a",), new_requests=(new(kit, "a", 2, 2),)
    )
    book.advance(step)
    feed.advance(step)
    assert book.tokens("a", 0, 5, feed) == [100, 101, 7, 8, -1]
    feed.advance(StepPlan(index=1, scheduled=(), finished_req_ids=("a",)))
    assert feed.of("a") == []


@given(length=st.integers(0, 200), dcp=st.sampled_from([1, 2, 4, 8]), interleave=st.integers(1, 9))
def test_dcp_shares_count_the_positions_each_rank_owns(length, dcp, interleave):
    owners = [(p // interleave) % dcp for p in range(length)]
    for rank in range(dcp):
        assert dcp_share(length, dcp, rank, interleave) == owners.count(rank)
