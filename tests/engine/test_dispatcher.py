import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpbench.engine.dispatcher import (
    BatchCounts,
    Dispatcher,
    FollowingDispatcher,
    build_candidates,
    covers,
)
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY


def candidates(mode, sizes=(1, 2, 4, 8), query_len=1, max_num_seqs=16, max_num_tokens=64):
    return build_candidates(
        mode,
        sizes,
        decode_query_len=query_len,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
    )


def decode(num_reqs, query_len=1):
    return BatchCounts(num_reqs, num_reqs * query_len, query_len, False, query_len)


def test_capture_order_is_piecewise_first_and_larger_first():
    found = candidates(BOTH, (1, 4)).descriptors
    assert [(d.cg_mode, d.num_tokens, d.num_reqs) for d in found] == [
        (PIECEWISE, 4, None), (PIECEWISE, 1, None), (FULL, 4, 4), (FULL, 1, 1),
    ]  # fmt: skip


def test_sizes_are_rounded_up_to_the_decode_query_length():
    found = candidates(DECODE_ONLY, (1, 2, 4, 8, 9), query_len=3)
    assert [(d.num_tokens, d.num_reqs) for d in found.descriptors] == [(9, 3), (6, 2), (3, 1)]
    assert all(d.uniform_token_count == 3 for d in found.descriptors)
    assert sum("not a multiple" in notice.message for notice in found.notices) == 4


def test_a_size_that_no_step_has_room_for_does_not_raise_the_limit_of_rounding():
    found = candidates(DECODE_ONLY, (1, 8, 128), query_len=3).descriptors
    assert [d.num_tokens for d in found] == [3]  # 8 would become 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sizes": (1, 32)}, "size 32 is not used: 32 decodes are more than --max-num-seqs 16"),
        ({"sizes": (1, 128)}, "size 128 is not used: a step holds at most 64 tokens"),
        ({"sizes": (3, 4), "query_len": 3}, "size 4 is not used: no multiple"),
    ],
)
def test_a_size_that_cannot_be_used_is_told(arguments, words):
    messages = [notice.message for notice in candidates(DECODE_ONLY, **arguments).notices]
    assert any(words in message for message in messages)


def test_smallest_cover_wins_and_full_goes_first():
    dispatcher = Dispatcher(BOTH, candidates(BOTH).descriptors)
    assert dispatcher.decide(decode(3)).descriptor == BatchExecutionDescriptor(FULL, 4, 4, 1)
    assert dispatcher.decide(decode(4)).descriptor.num_tokens == 4
    assert dispatcher.decide(decode(5)).descriptor.num_tokens == 8
    assert dispatcher.decide(decode(9)).descriptor == BatchExecutionDescriptor(NONE, 9, 9)


def dynamic(sizes=(4, 8), longest=4, max_num_seqs=16):
    return build_candidates(
        DECODE_ONLY,
        sizes,
        decode_query_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_tokens=64,
        dynamic_drafts=True,
    )


def test_where_drafts_vary_each_size_has_a_graph_for_each_length_and_one_for_any():
    found = [(d.num_tokens, d.num_reqs, d.uniform_token_count) for d in dynamic().descriptors]
    assert sorted(found, key=str) == sorted(
        [(4, 1, 4), (8, 2, 4), (6, 2, 3), (4, 2, 2), (8, 4, 2), (4, 4, 1), (8, 8, 1),
         (4, 4, None), (8, 8, None)], key=str)  # fmt: skip
    labels = [d.label for d in dynamic().descriptors if d.max_query_len]
    assert labels == ["FULL[reqs=8,tokens=8,queries<=4]", "FULL[reqs=4,tokens=4,queries<=4]"]
    # Of 3 requests with at most 4 tokens none fills 16; with 2 tokens 8 would be 4 requests.
    few = dynamic((8, 16), max_num_seqs=3).descriptors
    assert [(d.num_tokens, d.num_reqs, d.uniform_token_count) for d in few] == [
        (9, 3, 3), (8, 2, 4), (8, 3, None),
    ]  # fmt: skip


def test_dispatch_is_by_query_length_where_all_are_equal_and_else_varlen():
    dispatcher = Dispatcher(DECODE_ONLY, dynamic().descriptors)
    for length, num_reqs, tokens in ((1, 3, 4), (2, 3, 8), (3, 2, 6), (4, 2, 8)):
        chosen = dispatcher.decide(decode(num_reqs, length)).descriptor
        assert (chosen.num_tokens, chosen.uniform_token_count) == (tokens, length)
    mixed = BatchCounts(3, 6, None, False, 4)
    chosen = dispatcher.decide(mixed).descriptor
    assert (chosen.num_reqs, chosen.num_tokens, chosen.max_query_len) == (8, 8, 4)
    # Five of one token and one of three, where queries of one token would fit the same graph.
    assert dispatcher.decide(decode(8)).descriptor.uniform_token_count == 1
    # Length 3 has room for two: three of them, nine tokens, are more than any graph holds.
    assert dispatcher.decide(decode(3, 3)).miss_reason == "more tokens than the largest FULL graph"
    long = dispatcher.decide(BatchCounts(2, 7, None, False, 5))
    assert long.miss_reason == "no FULL graph with this query length"
    assert dispatcher.decide(BatchCounts(9, 8, None, False, 1)).miss_reason == (
        "more requests than the largest FULL graph"
    )


def test_a_one_token_prompt_is_no_decode():
    dispatcher = Dispatcher(BOTH, candidates(BOTH).descriptors)
    decision = dispatcher.decide(BatchCounts(1, 1, None, True, 1))
    assert decision.descriptor.cg_mode is PIECEWISE
    assert decision.miss_reason == "batch has a prefill"


def test_fewer_rows_than_tokens_can_still_be_covered():
    """A rank without decodes holds an empty row: rows and tokens are covered separately."""
    dispatcher = Dispatcher(DECODE_ONLY, candidates(DECODE_ONLY).descriptors)
    assert dispatcher.decide(BatchCounts(2, 1, 1, False, 1)).descriptor.num_reqs == 2


@pytest.mark.parametrize(
    ("mode", "counts", "reason"),
    [
        (DECODE_ONLY, decode(9), "more requests than the largest FULL graph"),
        (DECODE_ONLY, BatchCounts(2, 5, None, False, 3), "queries are not uniform"),
        (DECODE_ONLY, decode(2, 2), "no FULL graph with this query length"),
        (PIECEWISE, decode(1), "mode captures no FULL graph"),
        (NONE, decode(1), ""),
        (DECODE_ONLY, decode(1), ""),
    ],
)
def test_every_miss_has_its_reason(mode, counts, reason):
    dispatcher = Dispatcher(mode, candidates(mode).descriptors)
    assert dispatcher.decide(counts).miss_reason == reason


@given(
    st.sampled_from([BOTH, DECODE_ONLY, PIECEWISE, NONE]),
    st.sets(st.integers(1, 64), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 20),
    st.booleans(),
)
def test_the_choice_covers_and_nothing_smaller_would_do(
    mode, sizes, query_len, num_reqs, has_prefill
):
    found = candidates(mode, tuple(sizes), query_len).descriptors
    counts = BatchCounts(num_reqs, num_reqs * query_len, query_len, has_prefill, query_len)
    chosen = Dispatcher(mode, found).decide(counts).descriptor
    uniform = None if has_prefill else query_len
    fitting = [d for d in found if covers(d, counts.num_reqs, counts.num_tokens, uniform)]
    if chosen.cg_mode is NONE:
        assert not fitting
        return
    assert not (has_prefill and chosen.cg_mode is FULL)
    assert chosen in fitting
    if any(d.cg_mode is FULL for d in fitting):
        assert chosen.cg_mode is FULL
    same_mode = [d for d in fitting if d.cg_mode is chosen.cg_mode]
    assert chosen.num_tokens == min(d.num_tokens for d in same_mode)


def test_a_following_dispatcher_runs_what_it_is_told_and_keeps_its_own_choice():
    known = (
        BatchExecutionDescriptor(CUDAGraphMode.FULL, 2, 2, uniform_token_count=1),
        BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 4, None),
    )
    following = FollowingDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, known)
    counts = BatchCounts(2, 2, 1, has_prefill=False, max_query_len=1, num_ubatches=2)
    assert following.decide(counts).descriptor == known[0]
    following.told = known[1]
    assert following.decide(counts).descriptor == known[1]
    assert following.own == known[0]
