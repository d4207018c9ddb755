import pytest
from hypothesis import given
from hypothesis import strategies as st

from pcpbench.errors import UsageError
from pcpbench.world import World


def test_rank_order_is_pcp_major_tp_minor():
    world = World(pcp_size=2, tp_size=3)
    assert [(world.pcp_rank(r), world.tp_rank(r)) for r in range(world.size)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert world.tp_groups() == [[0, 1, 2], [3, 4, 5]]
    assert world.pcp_groups() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("pcp", "tp", "dcp", "groups"),
    [
        (1, 4, 2, [[0, 1], [2, 3]]),
        (1, 4, 4, [[0, 1, 2, 3]]),
        (2, 2, 2, [[0, 2], [1, 3]]),
        (2, 2, 4, [[0, 2, 1, 3]]),
        (2, 2, 1, [[0], [2], [1], [3]]),
    ],
)
def test_dcp_groups(pcp, tp, dcp, groups):
    assert World(pcp_size=pcp, tp_size=tp, dcp_size=dcp).dcp_groups() == groups


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pcp_size": 0}, "--pcp is 0"),
        ({"pcp_size": -1}, "--pcp is -1"),
        ({"pcp_size": 2, "dcp_size": 3}, "use one of 1, 2"),
        ({"tp_size": 4, "dcp_size": 3}, "use one of 1, 2, 4"),
        ({"pcp_size": 2, "tp_size": 4, "dcp_size": 4}, "use one of 1, 2, 8"),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes, words):
    with pytest.raises(UsageError, match=words):
        World(**sizes)


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_every_rank_is_in_exactly_one_group_of_each_kind(pcp, tp, data):
    dcp = data.draw(st.sampled_from(World.legal_dcp_sizes(pcp, tp)))
    world = World(pcp_size=pcp, tp_size=tp, dcp_size=dcp)
    for groups in (world.tp_groups(), world.pcp_groups(), world.dcp_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(world.size))
    assert {len(group) for group in world.dcp_groups()} == {dcp}
    assert world.shard_decode_requests == (pcp > 1 and dcp == 1)


@pytest.mark.parametrize("sizes", [(1, 10**10, 1), (1, 10**10, 3), (10**10, 1, 2), (8, 9, 1)])
def test_too_many_ranks_are_refused_before_anything_is_listed(sizes):
    pcp, tp, dcp = sizes
    with pytest.raises(UsageError, match=f"--pcp {pcp} --tp {tp} makes {pcp * tp} ranks"):
        World(pcp_size=pcp, tp_size=tp, dcp_size=dcp)
