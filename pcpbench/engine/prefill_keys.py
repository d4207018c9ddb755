"""Where a step's prefills find their keys under PCP with DCP, from what the host knows (SPEC 6, 9).

Owns the list that all ranks of a DCP group must have alike: which prefills, how long, where each
key lies in what is gathered. Decides whether context is skipped, from global lengths alone. Issues
no collective.

d DCP ranks, i interleave. K keys of all prefills, S places of a rank's padded share of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from pcpbench.dcp import dcp_local_lens, owner_of
from pcpbench.device.staging import to_device
from pcpbench.engine.block_table import PAD_SLOT_ID, BlockTables
from pcpbench.engine.input_batch import InputBatch
from pcpbench.model.context import PrefillKeys
from pcpbench.records import IntArray


class _Prefills(NamedTuple):
    """Prefills of a global batch. row [n]: in it. length [n]: keys of each after this step.
    context [n]: those of them that were there before."""

    row: IntArray
    length: IntArray
    context: IntArray


def prefill_keys(
    global_batch: InputBatch,
    local_batch: InputBatch,
    row_req_index: IntArray,
    restore_idx: Tensor,
    block_tables: BlockTables,
    is_cut: bool,
) -> PrefillKeys | None:
    """The keys of a step's prefills; None for a step without any.

    local_batch: this rank's share, decodes first. row_req_index: each local row's global row.
    restore_idx: int64 [global tokens], each one's place in what PCP gathers. is_cut: whether the
    step runs in microbatches, whose gathers hold a part of the step's tokens only.
    """
    prefills = _prefills(global_batch)
    if not len(prefills.row):
        return None
    starts = prefills.length.cumsum() - prefills.length
    if is_cut or prefills.context.any():
        slots, index = _from_cache(prefills, global_batch, block_tables)
    else:
        first = global_batch.query_start_loc_np[prefills.row]
        tokens = _runs(first.astype(np.int64), prefills.length)
        slots, index = None, restore_idx.index_select(0, to_device(tokens, restore_idx.device))
    decodes = ~local_batch.is_prefilling_np[: local_batch.num_reqs]
    num_rows = int(decodes.sum())
    place = {int(row): int(start) for row, start in zip(prefills.row, starts, strict=True)}
    rows = [place[int(row)] for row in row_req_index[num_rows:]]
    longest = int(prefills.length.max())
    table = np.array(rows, dtype=np.int32)[:, None] + np.arange(longest, dtype=np.int32)
    # Columns past a row's own keys are unread; they stay inside the gathered ones all the same.
    table = np.minimum(table, np.int32(prefills.length.sum() - 1))
    return PrefillKeys(
        num_rows=num_rows,
        num_tokens=int(local_batch.query_start_loc_np[num_rows]),
        has_decodes=num_rows > 0,
        index=index,
        slots=slots,
        table=to_device(table, restore_idx.device),
    )


def part_of(
    keys: PrefillKeys | None, rows: IntArray, query_start_loc_np: IntArray
) -> PrefillKeys | None:
    """The same keys for a microbatch: all of them, as each of its ranks has other rows.

    rows: the parent's row of each of its own. query_start_loc_np: its own.
    """
    if keys is None:
        return None
    mine = rows[rows >= keys.num_rows] - keys.num_rows
    num_rows = len(rows) - len(mine)
    chosen = to_device(mine.astype(np.int64), keys.table.device)
    return replace(
        keys,
        num_rows=num_rows,
        num_tokens=int(query_start_loc_np[num_rows]),
        table=keys.table.index_select(0, chosen),
    )


def _prefills(batch: InputBatch) -> _Prefills:
    count = batch.num_reqs
    (row,) = (batch.is_prefilling_np[:count] & (batch.num_scheduled_tokens[:count] > 0)).nonzero()
    context = batch.num_computed_tokens_np[row].astype(np.int64)
    return _Prefills(row, context + batch.num_scheduled_tokens[row], context)


def _from_cache(
    prefills: _Prefills, batch: InputBatch, tables: BlockTables
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Slots of this rank's share, and where each key lies once all ranks' are gathered.

    Worked example, d = 2, i = 1: prefills of 3 and 2 keys. Rank 0's shares are 2 and 1, so S = 3;
    rank 1 has 1 and 1 and gathers one -1 between them. Key 1 of the second is rank 1's local key 0
    behind 2 places of the first: gathered place 1 * 3 + 2 = 5.
    """
    size, rank, interleave = tables.cp_size, tables.cp_rank, tables.cp_interleave
    largest = dcp_local_lens(prefills.length, size, 0, interleave)
    begins = largest.cumsum() - largest
    positions = _runs(np.zeros_like(prefills.length), prefills.length)
    laps = positions // (size * interleave) * interleave
    local = laps + positions % interleave
    places = owner_of(positions, size, interleave) * int(largest.sum())
    places += begins.repeat(prefills.length) + local
    mine = dcp_local_lens(prefills.length, size, rank, interleave)
    keys = _runs(np.zeros_like(largest), largest)
    is_mine = keys < mine.repeat(largest)
    requests = batch.idx_mapping_np[prefills.row].astype(np.int64).repeat(largest)
    device = tables.device
    packed = np.stack((requests, np.where(is_mine, keys, 0), is_mine))
    whose, which, held = to_device(packed, device)
    slots = tuple(
        _slots(table, whose, which, held, block_size)
        for table, block_size in zip(tables.block_tables, tables.block_sizes, strict=True)
    )
    return slots, to_device(places, device)


def _slots(
    table: Tensor, requests: Tensor, keys: Tensor, is_mine: Tensor, block_size: int
) -> Tensor:
    """Slot of each local key, int64; PAD where there is none."""
    columns = keys.div(block_size, rounding_mode="floor")
    slots = table[requests, columns].long().mul_(block_size).add_(keys.remainder(block_size))
    return slots.masked_fill_(is_mine == 0, PAD_SLOT_ID)


def _runs(first: IntArray, length: IntArray) -> IntArray:
    """first, first + 1, ... for each run: starts 0 and 7 of lengths 2 and 3 give 0, 1, 7, 8, 9."""
    begins = length.cumsum() - length
    runs: IntArray = (first - begins).repeat(length) + np.arange(int(length.sum()))
    return runs
