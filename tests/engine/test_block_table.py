"""Block ids of requests, and the tables and slots of a step."""

import pytest
import torch

from pcpbench.engine.block_table import BlockTables
from pcpbench.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def make(block_sizes=(4,), columns=(6,), slots=5, tokens=32, **settings):
    return BlockTables(list(block_sizes), slots, tokens, list(columns), CPU, **settings)


def ids(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_staged_blocks_arrive_only_when_applied_and_extend_the_row():
    tables = make()
    tables.append_block_ids(2, ([7, 8],), overwrite=True)
    assert not tables.block_tables[0].any()
    tables.append_block_ids(2, ([9],), overwrite=False)
    tables.apply_staged_writes()
    tables.append_block_ids(2, ([10, 11],), overwrite=False)
    tables.append_block_ids(0, ([3],), overwrite=True)
    tables.apply_staged_writes()
    assert tables.block_tables[0][2].tolist() == [7, 8, 9, 10, 11, 0]
    assert tables.block_tables[0][0].tolist() == [3, 0, 0, 0, 0, 0]
    assert tables.num_blocks_np[0].tolist() == [1, 0, 5, 0, 0]


def test_new_tenant_starts_its_row_anew():
    tables = make()
    tables.append_block_ids(1, ([1, 2, 3],), overwrite=True)
    tables.apply_staged_writes()
    tables.append_block_ids(1, ([9],), overwrite=True)
    tables.append_block_ids(1, ([8],), overwrite=False)
    tables.apply_staged_writes()
    # The third id is the last tenant's: columns past a row's last block are unread by contract.
    assert tables.block_tables[0][1].tolist() == [9, 8, 3, 0, 0, 0]
    assert tables.num_blocks_np[0, 1] == 2


def test_slot_that_changes_hands_within_one_step_keeps_the_later_ids():
    tables = make()
    tables.append_block_ids(1, ([1, 2, 3],), overwrite=True)
    tables.append_block_ids(1, ([7, 6],), overwrite=True)
    tables.apply_staged_writes()
    assert tables.block_tables[0][1, :2].tolist() == [7, 6]


def test_staging_copies_the_callers_list():
    tables, mine = make(), [5, 6]
    tables.append_block_ids(0, (mine,), overwrite=True)
    mine[0] = 99
    tables.apply_staged_writes()
    assert tables.block_tables[0][0, :2].tolist() == [5, 6]


def test_groups_have_tables_of_their_own():
    tables = make(block_sizes=(4, 8, 2), columns=(6, 3, 12))
    tables.append_block_ids(0, ([1, 2], [10], []), overwrite=True)
    tables.append_block_ids(1, ([3], [11, 12], [5, 6]), overwrite=True)
    tables.apply_staged_writes()
    gathered = tables.gather_block_tables(ids(1, 0), 3)
    assert [table.shape for table in gathered] == [(3, 6), (3, 3), (3, 12)]
    assert gathered[0][:2, :2].tolist() == [[3, 0], [1, 2]]
    assert gathered[1][:2, :2].tolist() == [[11, 12], [10, 0]]
    assert gathered[2][:2, :2].tolist() == [[5, 6], [0, 0]]


@pytest.mark.parametrize(
    ("ids_by_group", "message"), [(([1],) * 2, "2 KV groups"), (([1] * 7,), "7 blocks")]
)
def test_blocks_that_do_not_fit_are_refused(ids_by_group, message):
    with pytest.raises(ValueError, match=message):
        make().append_block_ids(0, ids_by_group, overwrite=True)


def test_gather_zeroes_rows_past_the_real_ones_every_time():
    tables = make()
    for slot in range(5):
        tables.append_block_ids(slot, ([slot + 1] * 6,), overwrite=True)
    tables.apply_staged_writes()
    (first,) = tables.gather_block_tables(ids(4, 0, 2), 5)
    assert first[:, 0].tolist() == [5, 1, 3, 0, 0]
    (second,) = tables.gather_block_tables(ids(1), 3)
    assert second[:, 5].tolist() == [2, 0, 0]
    assert second.data_ptr() == first.data_ptr() == tables.input_block_tables[0].data_ptr()


@pytest.mark.parametrize("dummy_first", [False, True])
@pytest.mark.parametrize("dummy_next", [False, True])
def test_rows_of_a_larger_batch_before_are_cleared(dummy_first, dummy_next):
    tables = make()
    for slot in range(5):
        tables.append_block_ids(slot, ([slot + 1] * 6,), overwrite=True)
    tables.apply_staged_writes()
    own = tables.input_block_tables[0]
    if dummy_first:
        tables.get_dummy_block_tables(5)[0].fill_(77)  # a caller may give a dummy some context
    else:
        tables.gather_block_tables(ids(4, 3, 2, 1, 0), 5)
    for num_reqs in (2, 3, 0):
        if dummy_next:
            tables.get_dummy_block_tables(num_reqs)[0].fill_(77)
        else:
            tables.gather_block_tables(ids(4, 1, 3)[:num_reqs], num_reqs + 1)
        assert own[:num_reqs].all()
        assert not own[num_reqs:].any()


def test_tables_of_the_caller_leave_the_own_ones_and_their_rows_alone():
    tables = make()
    tables.append_block_ids(3, ([9] * 6,), overwrite=True)
    tables.apply_staged_writes()
    own = tables.input_block_tables[0]
    tables.gather_block_tables(ids(3, 3, 3), 3)
    tables.gather_block_tables(ids(3), 1, tables.make_tables(2))
    assert own[:, 0].tolist() == [9, 9, 9, 0, 0]
    tables.gather_block_tables(ids(3), 1)
    assert own[:, 0].tolist() == [9, 0, 0, 0, 0]


def test_gather_into_tables_of_the_caller():
    tables = make()
    tables.append_block_ids(3, ([9],), overwrite=True)
    tables.apply_staged_writes()
    out = tables.make_tables(8)
    out[0].fill_(77)
    (found,) = tables.gather_block_tables(ids(3, -1), 7, out)
    assert found[:, 0].tolist() == [9, 0, 0, 0, 0, 0, 0]  # row 1 is a dummy's
    assert out[0][7].tolist() == [77] * 6
    assert not tables.input_block_tables[0].any()
    with pytest.raises(ValueError, match="do not fit block tables of 8 rows"):
        tables.gather_block_tables(ids(3), 9, out)


def test_dummy_tables_are_zeroed_in_place():
    tables = make()
    tables.input_block_tables[0].fill_(77)
    (dummy,) = tables.get_dummy_block_tables(2)
    assert dummy.tolist() == [[0] * 6] * 2
    assert dummy.data_ptr() == tables.input_block_tables[0].data_ptr()
    assert tables.input_block_tables[0][2].tolist() == [77] * 6


def slots(tables, idx_mapping, lens, positions, padded=None, out=None):
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    return tables.compute_slot_mappings(
        ids(*idx_mapping), starts, torch.tensor(positions), padded or len(positions), out
    )


def test_slots_of_two_requests_without_dcp():
    tables = make()
    tables.append_block_ids(3, ([7, 9],), overwrite=True)
    tables.append_block_ids(1, ([5],), overwrite=True)
    tables.apply_staged_writes()
    found = slots(tables, [3, 1], [3, 1], [2, 3, 4, 0], padded=6)
    assert found.tolist() == [[7 * 4 + 2, 7 * 4 + 3, 9 * 4, 5 * 4, -1, -1]]


def test_slots_in_the_worked_example_of_dcp():
    for rank, expected in ((0, 7 * 4 + 3), (1, -1)):
        tables = make(cp_size=2, cp_rank=rank, cp_interleave=2)
        tables.append_block_ids(0, ([3, 7],), overwrite=True)
        tables.apply_staged_writes()
        assert slots(tables, [0], [1], [13]).tolist() == [[expected]]


@pytest.mark.parametrize("interleave", [1, 2, 4])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_every_position_has_one_slot_in_the_whole_dcp_group(cp_size, interleave):
    block_ids, positions = [4, 2, 5], list(range(4 * 3 * cp_size))
    taken: dict[int, tuple[int, int]] = {}
    for rank in range(cp_size):
        tables = make(cp_size=cp_size, cp_rank=rank, cp_interleave=interleave, tokens=64)
        tables.append_block_ids(0, (block_ids,), overwrite=True)
        tables.apply_staged_writes()
        (found,) = slots(tables, [0], [len(positions)], positions).tolist()
        mine = [position for position, slot in zip(positions, found, strict=True) if slot != -1]
        assert mine == [p for p in positions if p // interleave % cp_size == rank]
        # On its owner the k-th position that it owns is the k-th slot of the blocks in turn.
        in_order = [block * 4 + offset for block in block_ids for offset in range(4)]
        assert [found[position] for position in mine] == in_order
        taken |= {position: (rank, found[position]) for position in mine}
    assert sorted(taken) == positions


def test_group_that_dcp_does_not_shard_is_whole_on_every_rank():
    tables = make((4, 4), (6, 6), cp_size=2, cp_rank=1, dcp_sharded=[True, False])
    tables.append_block_ids(0, ([1, 2], [3, 4]), overwrite=True)
    tables.apply_staged_writes()
    found = slots(tables, [0], [4], [0, 1, 2, 3])
    assert found.tolist() == [[-1, 4, -1, 5], [12, 13, 14, 15]]


def test_group_without_slots_is_pad():
    tables = make((4, 4), (6, 6), slot_mapping_enabled=[False, True])
    tables.append_block_ids(0, ([1], [3]), overwrite=True)
    tables.apply_staged_writes()
    tables.slot_mappings.fill_(77)
    assert slots(tables, [0], [2], [0, 1]).tolist() == [[-1, -1], [12, 13]]


def test_slots_past_the_last_token_are_pad_to_the_end_of_the_buffer():
    tables = make()
    tables.append_block_ids(0, ([1],), overwrite=True)
    tables.apply_staged_writes()
    tables.slot_mappings.fill_(77)
    found = slots(tables, [0, 0], [2, 0], [0, 1, 2, 3], padded=3)
    assert found.tolist() == [[4, 5, -1]]
    assert tables.slot_mappings[0].tolist() == [4, 5] + [-1] * 30


def test_dummy_rows_and_positions_past_the_table_have_no_slot():
    tables = make()
    tables.append_block_ids(0, ([1] * 6,), overwrite=True)
    tables.apply_staged_writes()
    assert slots(tables, [-1, 0], [1, 2], [1, 23, 24]).tolist() == [[-1, 4 + 3, -1]]


def test_batch_without_rows_or_tokens_is_pad():
    tables = make()
    tables.slot_mappings.fill_(77)
    found = tables.compute_slot_mappings(ids(), ids(0), torch.zeros(3, dtype=torch.int64), 3)
    assert found.tolist() == [[-1, -1, -1]]
    assert tables.get_dummy_slot_mappings(2).tolist() == [[-1, -1]]


def test_slots_into_a_tensor_of_the_caller():
    tables = make()
    tables.append_block_ids(0, ([2],), overwrite=True)
    tables.apply_staged_writes()
    out = torch.full((1, 3), 77)
    assert slots(tables, [0], [1], [1], out=out).data_ptr() == out.data_ptr()
    assert out.tolist() == [[9, -1, -1]]
    with pytest.raises(ValueError, match="4 tokens do not fit"):
        slots(tables, [0], [1], [1], padded=4, out=out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": (6, 6)}, "max_num_blocks_per_group has 2 entries"),
        ({"dcp_sharded": [True, True]}, "dcp_sharded has 2 entries"),
        ({"slot_mapping_enabled": []}, "slot_mapping_enabled has 0 entries"),
        ({"sliding_window_reach": [8, 8]}, "sliding_window_reach has 2 entries"),
        ({"sliding_window_reach": [-1]}, "sliding_window_reach is .-1.: use whole numbers from 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        make(**settings)


def test_columns_before_the_reach_are_the_null_block_in_what_attention_gets():
    """Blocks of 4: with 9 computed and a reach of 5 the next query sees 5 .. 9, so not column 0."""
    tables = make((4, 4), (4, 4), sliding_window_reach=[0, 5])
    for slot in range(3):
        tables.append_block_ids(slot, ([11, 12, 13], [21, 22, 23]), overwrite=True)
    tables.apply_staged_writes()
    computed = ids(9, 8, 7, 0, 0)
    whole, sliding = tables.gather_block_tables(ids(2, -1, 0, 1), 5, num_computed_tokens=computed)
    assert whole[0].tolist() == [11, 12, 13, 0]
    assert sliding.tolist() == [
        [21, 22, 23, 0],  # 7: position 3 is still seen
        [0] * 4,  # a dummy's row
        [0, 22, 23, 0],
        [0, 22, 23, 0],  # 8 sees 4 .. 8
        [0] * 4,
    ]
    assert tables.block_tables[1][0].tolist() == [21, 22, 23, 0], (
        "stale ids stay in the worker's own"
    )
    (_, untouched) = tables.gather_block_tables(ids(0), 1)
    assert untouched[0].tolist() == [21, 22, 23, 0]


def test_the_reach_of_a_sharded_group_is_counted_in_positions():
    tables = make((4, 4), (4, 4), cp_size=2, dcp_sharded=[True, False], sliding_window_reach=[5, 5])
    tables.append_block_ids(0, ([11, 12], [21, 22, 23, 24]), overwrite=True)
    tables.apply_staged_writes()
    computed = ids(13, 0, 0, 0, 0)  # sees 9 .. 13
    sharded, whole = tables.gather_block_tables(ids(0), 1, num_computed_tokens=computed)
    assert sharded[0].tolist() == [0, 12, 0, 0]
    assert whole[0].tolist() == [0, 0, 23, 24]


def test_persistent_buffers_are_named():
    tables = make((4, 4), (6, 6))
    named = tables.persistent_buffers()
    assert set(named) == {
        "block_tables.0",
        "block_tables.1",
        "input_block_tables.0",
        "input_block_tables.1",
        "slot_mappings",
    }
    assert named["input_block_tables.1"] is tables.input_block_tables[1]
