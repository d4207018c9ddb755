"""Keys of prefills on every rank: gathers of equal size, positions in order, no context."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pcpbench.engine import prefill_keys as module
from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.input_batch import InputBatch, InputBuffers
from pcpbench.engine.prefill_keys import part_of, prefill_keys

CPU = torch.device("cpu")
BLOCK = 4


def tables_of(dcp, rank, interleave, lengths):
    """Tables whose request q holds blocks 20q + 1, 20q + 2, ... backwards."""
    tables = BlockTables([BLOCK], 8, 64, [12], CPU, dcp, rank, interleave)
    for slot, length in enumerate(lengths):
        count = -(-length // (BLOCK * dcp))
        ids = [20 * slot + 1 + number for number in range(count)][::-1]
        tables.append_block_ids(slot, (ids,), overwrite=True)
    tables.apply_staged_writes()
    return tables


def batch_of(rows):
    """rows: (computed, scheduled, prefills), request slots from the last to the first."""
    scheduled = np.array([row[1] for row in rows], dtype=np.int32)
    batch = InputBatch.make_dummy(len(rows), int(scheduled.sum()), InputBuffers(8, 64, CPU))
    starts = np.concatenate(([0], scheduled.cumsum())).astype(np.int32)
    slots = np.arange(len(rows), dtype=np.int32)[::-1].copy()
    return replace(
        batch,
        num_scheduled_tokens=scheduled,
        query_start_loc_np=starts,
        num_computed_tokens_np=np.array([row[0] for row in rows], dtype=np.int32),
        is_prefilling_np=np.array([row[2] for row in rows]),
        idx_mapping_np=slots,
        idx_mapping=torch.from_numpy(slots),
    )


def slot_of(position, request, dcp, interleave):
    """(owner, slot) of a position, counted one by one."""
    owner = position // interleave % dcp
    local = sum(p // interleave % dcp == owner for p in range(position))
    return owner, local // BLOCK, local % BLOCK


ROWS = [(30, 1, False), (5, 9, True), (0, 3, True), (17, 1, True)]
LENGTHS = [18, 3, 14, 31]  # by request slot


@pytest.mark.parametrize("dcp", [2, 4])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_gathered_shares_are_all_keys_in_the_order_of_positions(dcp, interleave):
    batch = batch_of(ROWS)
    shares, keys = [], None
    for rank in range(dcp):
        tables = tables_of(dcp, rank, interleave, LENGTHS)
        restore = torch.arange(14, dtype=torch.int32)
        keys = prefill_keys(batch, batch, np.arange(4), restore, tables, is_cut=False)
        (slots,) = keys.slots
        ids = tables.block_tables[0].numpy()
        held = {}
        for request, length in enumerate(LENGTHS):
            for position in range(length):
                owner, column, offset = slot_of(position, request, dcp, interleave)
                if owner == rank:
                    held[int(ids[request, column]) * BLOCK + offset] = (request, position)
        shares.append([held.get(slot) if slot >= 0 else None for slot in slots.tolist()])
    assert len({len(share) for share in shares}) == 1, "all ranks gather equally much"
    gathered = [key for share in shares for key in share]
    found = [gathered[place] for place in keys.index.tolist()]
    assert found == [
        (request, position)
        for request, length in ((2, 14), (1, 3), (0, 18))
        for position in range(length)
    ]
    assert (keys.num_rows, keys.num_tokens, keys.has_decodes) == (1, 1, True)
    assert [int(row[0]) for row in keys.table] == [0, 14, 17]
    assert keys.table[2, :18].tolist() == list(range(17, 35))
    assert int(keys.table.max()) < len(keys.index)


def test_without_any_context_the_keys_are_the_tokens_of_the_step():
    batch = batch_of([(30, 1, False), (0, 9, True), (0, 3, True)])
    restore = torch.tensor([5, 7, 9, 11, 13, 1, 2, 3, 4, 6, 8, 10, 12], dtype=torch.int32)
    tables = tables_of(2, 0, 1, LENGTHS)
    keys = prefill_keys(batch, batch, np.arange(3), restore, tables, is_cut=False)
    assert keys.slots is None
    assert keys.index.tolist() == restore.tolist()[1:]
    cut = prefill_keys(batch, batch, np.arange(3), restore, tables, is_cut=True)
    assert cut.slots is not None, "a half gathers some of the step's tokens only"


@pytest.mark.parametrize("rank", range(4))
def test_one_token_of_context_keeps_the_gather_on_ranks_that_own_none_of_it(rank):
    batch = batch_of([(1, 8, True), (0, 3, True)])
    restore = torch.arange(11, dtype=torch.int32)
    tables = tables_of(4, rank, 4, [3, 9])
    keys = prefill_keys(batch, batch, np.arange(2), restore, tables, is_cut=False)
    assert keys.slots is not None
    assert len(keys.slots[0]) == 4 + 3  # rank 0's share of 9 and of 3


def test_a_step_of_decodes_has_none():
    batch = batch_of([(30, 1, False), (8, 1, False)])
    restore = torch.arange(2, dtype=torch.int32)
    tables = tables_of(2, 0, 1, LENGTHS)
    assert prefill_keys(batch, batch, np.arange(2), restore, tables, is_cut=False) is None
    assert part_of(None, np.array([0]), np.array([0, 1])) is None


def test_a_microbatch_has_all_keys_and_its_own_rows():
    batch = batch_of(ROWS)
    tables = tables_of(2, 0, 1, LENGTHS)
    restore = torch.arange(14, dtype=torch.int32)
    keys = prefill_keys(batch, batch, np.arange(4), restore, tables, is_cut=True)
    first = part_of(keys, np.array([0, 1]), np.array([0, 1, 7]))
    second = part_of(keys, np.array([1, 2, 3]), np.array([0, 3, 6, 7]))
    assert (first.num_rows, first.num_tokens, first.has_decodes) == (1, 1, True)
    assert (second.num_rows, second.num_tokens, second.has_decodes) == (0, 0, True)
    assert torch.equal(first.table, keys.table[:1])
    assert torch.equal(second.table, keys.table)
    assert first.index is second.index is keys.index


def test_runs_count_up_from_each_start():
    assert module._runs(np.array([0, 7]), np.array([2, 3])).tolist() == [0, 1, 7, 8, 9]
