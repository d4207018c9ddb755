import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpbench.checks.oracle_partition import is_replicated, rank_rows
from pcpbench.plan import ScheduledRequest, StepPlan
from pcpbench.world import World


def step_of(*shares):
    """Shares are ("d", tokens) for decodes and ("p", tokens) for prefills."""
    return StepPlan(
        index=0,
        scheduled=tuple(
            ScheduledRequest(
                req_id=f"r{i}",
                num_scheduled_tokens=count,
                num_computed_tokens=50 if kind == "d" else 0,
                prefill_len=50 if kind == "d" else count,
                prompt_len=50 if kind == "d" else count,
            )
            for i, (kind, count) in enumerate(shares)
        ),
    )


def rows(step, world, rank):
    return [(r.req_index, r.start, r.num_tokens) for r in rank_rows(step, world, rank)]


def test_three_decodes_and_a_prefill_of_seven_on_two_ranks():
    step, world = step_of(("d", 1), ("d", 1), ("d", 1), ("p", 7)), World(pcp_size=2)
    assert rows(step, world, 0) == [(0, 0, 1), (2, 0, 1), (3, 0, 2), (3, 6, 1)]
    assert rows(step, world, 1) == [(1, 0, 1), (3, 2, 2), (3, 4, 2)]


def test_a_prefill_of_eighteen_on_four_ranks_has_chunks_of_three_and_an_empty_pair():
    # ceil(18 / 8) = 3: chunks start at 0, 3, 6, 9, 12, 15; chunks 6 and 7 are empty.
    step, world = step_of(("p", 18)), World(pcp_size=4)
    assert rows(step, world, 0) == [(0, 0, 3)]
    assert rows(step, world, 1) == [(0, 3, 3)]
    assert rows(step, world, 2) == [(0, 6, 3), (0, 15, 3)]
    assert rows(step, world, 3) == [(0, 9, 3), (0, 12, 3)]


def test_a_rank_can_have_nothing_to_do():
    step, world = step_of(("d", 1), ("p", 1)), World(pcp_size=4)
    assert [rows(step, world, r) for r in range(4)] == [[(0, 0, 1), (1, 0, 1)], [], [], []]


def test_under_dcp_decodes_and_short_prefills_are_on_every_rank():
    step = step_of(("d", 1), ("p", 5), ("p", 7))
    world = World(pcp_size=2, dcp_size=2)
    assert rows(step, world, 0) == [(0, 0, 1), (1, 0, 5), (2, 0, 2), (2, 6, 1)]
    assert rows(step, world, 1) == [(0, 0, 1), (1, 0, 5), (2, 2, 2), (2, 4, 2)]


@pytest.mark.parametrize(
    ("length", "replicated"), [(1, True), (3, True), (4, False), (5, True), (6, True), (7, False)]
)
def test_which_prefills_fill_four_chunks(length, replicated):
    request = step_of(("p", length)).scheduled[0]
    assert is_replicated(request, World(pcp_size=2, dcp_size=2)) is replicated
    assert is_replicated(request, World(pcp_size=2)) is False


def test_without_pcp_every_request_is_one_row():
    step, world = step_of(("d", 3), ("p", 5)), World(tp_size=4, dcp_size=2)
    assert rows(step, world, 0) == [(0, 0, 3), (1, 0, 5)]


shares = st.lists(st.tuples(st.sampled_from("dp"), st.integers(1, 40)), min_size=1, max_size=12)


@given(shares=shares, pcp=st.sampled_from([1, 2, 4, 8]), dcp=st.booleans())
def test_sharded_tokens_lie_on_one_rank_and_replicated_ones_on_all(shares, pcp, dcp):
    world = World(pcp_size=pcp, dcp_size=pcp if dcp else 1)
    step = step_of(*shares)
    seen = {}
    for rank in range(pcp):
        for row in rank_rows(step, world, rank):
            for token in range(row.start, row.start + row.num_tokens):
                seen.setdefault((row.req_index, token), []).append((rank, row.replicated))
    assert len(seen) == step.num_tokens
    for places in seen.values():
        expected = range(pcp) if places[0][1] else range(places[0][0], places[0][0] + 1)
        assert [rank for rank, _ in places] == list(expected)
