"""C1-C3, C5 and C6 in idle steps: sound dummy batches, and each part of one that is not."""

from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks.contracts import check_step
from pcpbench.checks.findings import StepView
from pcpbench.plan import StepPlan
from pcpbench.traits import Traits

IDLE = StepPlan(index=4, scheduled=(), idle=True)
WORLDS = {
    "one rank": {},
    "pcp": {"pcp": 2},
    "dcp": {"tp": 4, "dcp": 4, "interleave": 2},
}


def found(setup, record):
    view = StepView(plan=IDLE, record=record, setup=setup, expected=None)
    return [(v.contract, v.rank, v.message) for v in check_step(view)]


def put(array, place, value):
    changed = array.copy()
    changed[place] = value
    return changed


@pytest.fixture
def dcp(kit):
    return kit.setup(**WORLDS["dcp"])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shape", ["full", "piecewise", "none"])
def test_a_sound_dummy_batch_is_accepted(kit, world, shape):
    setup = kit.setup(**WORLDS[world], max_model_len=256)
    chosen = {"full": kit.full(4), "piecewise": kit.piecewise(8), "none": kit.NONE}[shape]
    assert found(setup, kit.idle_record(setup, chosen)) == []


def test_uneven_queries_and_a_context_cut_at_max_model_len_are_accepted(kit, dcp):
    record = kit.idle_record(dcp, kit.piecewise(7), num_reqs=3)
    assert record.ranks[0].query_start_loc.tolist() == [0, 2, 4, 7]
    assert found(dcp, record) == []
    # 1 token and 8 of context would be 9: at most 5 fit, of which each rank has its share.
    short = replace(dcp, max_model_len=5)
    record = kit.idle_record(short, kit.full(1))
    assert {message for _, _, message in found(short, record)} == {
        "seq_lens[0] is 9, expected 5 (dummy row with 8 tokens of context); 1 of 1 wrong"
    }
    for rank, share in enumerate((2, 2, 1, 0)):
        record = kit.change_rank(
            record, rank, seq_lens=np.array([5]), dcp_local_seq_lens=np.array([share])
        )
    assert found(short, record) == []


@pytest.mark.parametrize(
    ("contract", "field", "place", "value", "words"),
    [
        ("C1", "seq_lens", 1, 17, "seq_lens[1] is 17, expected 9 (dummy row"),
        ("C1", "seq_lens", 0, 1, "seq_lens[0] is 1, expected 9"),
        ("C2", "query_start_loc", 2, 1, "query_start_loc[2] is 1, expected 2"),
        ("C3", "is_padding", 3, False, "is_padding[3] is False, expected True (dummy token"),
        ("C3", "input_ids", 2, 5, "input_ids[2] is 5, expected 0"),
        ("C3", "positions", 0, 9, "positions[0] is 9, expected 0"),
        ("C6", "dcp_local_seq_lens", 3, 0, "dcp_local_seq_lens[3] is 0, expected 2"),
    ],
)
def test_what_the_last_step_left_is_named(kit, dcp, contract, field, place, value, words):
    record = kit.idle_record(dcp, kit.full(4))
    stale = put(getattr(record.ranks[2], field), place, value)
    hits = found(dcp, kit.change_rank(record, 2, **{field: stale}))
    assert hits[0][:2] == (contract, 2)
    assert hits[0][2].startswith(words)


def test_flags_of_all_ranks_tokens_are_all_padding(kit):
    setup = kit.setup(pcp=2)
    record = kit.idle_record(setup, kit.full(2))
    for wrong, right in (({}, []), ({3: False}, [("C3", 1)])):
        flags = np.ones(4, dtype=np.bool_)
        for place, value in wrong.items():
            flags[place] = value
        changed = kit.change_rank(record, 1, gathered_is_padding=flags)
        assert [place[:2] for place in found(setup, changed)] == right


def test_a_stale_table_row_is_named_also_past_the_first(kit, dcp):
    record = kit.idle_record(dcp, kit.full(4))
    stale = (put(record.ranks[0].block_tables[0], (3, 1), 8),)
    assert found(dcp, kit.change_rank(record, 0, block_tables=stale)) == [
        ("C5", 0, "block_tables[0][3, 1] is 8, expected 0 (row of an idle step); 1 of 24 wrong")
    ]


def test_a_table_of_fewer_rows_than_the_dummy_batch_is_named(kit, dcp):
    record = kit.idle_record(dcp, kit.full(4))
    short = (record.ranks[0].block_tables[0][:3],)
    assert found(dcp, kit.change_rank(record, 0, block_tables=short)) == [
        ("C5", 0, "block_tables[0] has 3 rows for 4 dummy rows")
    ]


def test_full_is_never_without_attention_and_piecewise_may_be(kit, dcp):
    bare = {"block_tables": (), "dcp_local_seq_lens": None}
    record = kit.change_rank(kit.idle_record(dcp, kit.full(4)), 1, **bare)
    assert [hit[:2] for hit in found(dcp, record)] == [("C5", 1), ("C6", 1)]
    record = kit.change_rank(kit.idle_record(dcp, kit.piecewise(4)), 1, **bare)
    assert found(dcp, record) == []


def test_a_batch_of_another_size_than_its_graph_is_named(kit):
    setup = kit.setup(pcp=2)
    other = kit.idle_record(setup, kit.full(2)).ranks[1]
    record = kit.idle_record(setup, kit.full(4))
    ranks = (record.ranks[0], replace(other, descriptor=kit.full(4)))
    messages = [message for _, _, message in found(setup, replace(record, ranks=ranks))]
    assert "2 dummy tokens are staged for FULL[reqs=4,tokens=4]" in messages
    assert "2 dummy rows are staged for FULL[reqs=4,tokens=4]" in messages


def test_a_target_without_dummy_context_is_held_to_none(kit, dcp):
    record = kit.idle_record(dcp, kit.full(4))
    bare = replace(dcp, traits=Traits(idle_has_context=False))
    assert {contract for contract, _, _ in found(bare, record)} == {"C1"}
    for rank, share in enumerate((1, 0, 0, 0)):
        lens, shares = np.ones(4, dtype=np.int64), np.full(4, share)
        record = kit.change_rank(record, rank, seq_lens=lens, dcp_local_seq_lens=shares)
    assert found(bare, record) == []
    assert {contract for contract, _, _ in found(dcp, record)} == {"C1"}
