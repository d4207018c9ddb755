"""Which KV blocks each request owns, and the tables and slots that a step derives from it (SPEC 9).

Owns the block ids of all requests, one table a KV group, and the persistent tensors that attention
reads. Knows no schedule: ids come from the plan. The Triton twins of the functions at the end are
in block_table_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pcpbench.device.staging import to_device
from pcpbench.errors import UsageError

_T = TypeVar("_T")

PAD_SLOT_ID = -1
"""The slot of a token whose KV is not to be written."""


class BlockTables:
    """Block ids of every request and KV group, on the device.

    block_sizes: slots in one block on this rank, one entry a group. Where the group is sharded one
    block id stands for block_size x cp_size positions.
    max_num_reqs: request slots. max_num_batched_tokens: tokens of the largest step.
    max_num_blocks_per_group: columns of each group's table.
    cp_size, cp_rank, cp_interleave: the DCP group and how it deals out positions (SPEC 7).
    slot_mapping_enabled: groups that have slots at all (all by default); the others get PAD.
    dcp_sharded: groups that the DCP group shards (all by default); the others are whole on each
    rank. sliding_window_reach: how many positions a query of each group sees, its own among them; 0
    (the default) for all. Columns that lie before it for good name blocks that the scheduler has
    given to somebody else, and are the null block in the tables that attention gets.
    Raises UsageError for lists of another length than block_sizes and for a negative reach.
    """

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: torch.device,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        slot_mapping_enabled: list[bool] | None = None,
        dcp_sharded: list[bool] | None = None,
        sliding_window_reach: list[int] | None = None,
    ) -> None:
        num_groups = len(block_sizes)
        self.block_sizes, self.max_num_reqs, self.device = block_sizes, max_num_reqs, device
        self.max_num_batched_tokens = max_num_batched_tokens
        self.cp_size, self.cp_rank, self.cp_interleave = cp_size, cp_rank, cp_interleave
        self.num_kv_cache_groups = num_groups
        self.slot_mapping_enabled = _one_a_group(
            "slot_mapping_enabled", slot_mapping_enabled, num_groups, default=True
        )
        self.dcp_sharded = _one_a_group("dcp_sharded", dcp_sharded, num_groups, default=True)
        if len(max_num_blocks_per_group) != num_groups:
            raise UsageError(
                f"max_num_blocks_per_group has {len(max_num_blocks_per_group)} entries: give one "
                f"for each of the {num_groups} block sizes."
            )
        self.sliding_window_reach = _one_a_group(
            "sliding_window_reach", sliding_window_reach, num_groups, default=0
        )
        if min(self.sliding_window_reach, default=0) < 0:
            raise UsageError(
                f"sliding_window_reach is {self.sliding_window_reach}: use whole numbers from 0 "
                "(no window) up."
            )
        self.max_num_blocks_per_group = max_num_blocks_per_group
        self.block_tables = self.make_tables(max_num_reqs)
        self.input_block_tables = self.make_tables(max_num_reqs)
        self._num_rows_in_use = 0
        self.num_blocks_np = np.zeros((num_groups, max_num_reqs), dtype=np.int64)
        self.slot_mappings = torch.full(
            (num_groups, max_num_batched_tokens), PAD_SLOT_ID, dtype=torch.int64, device=device
        )
        self._staged: list[list[tuple[int, int, list[int]]]] = [[] for _ in block_sizes]

    def make_tables(self, num_rows: int) -> tuple[Tensor, ...]:
        """Zeroed tables of this layout, one int32 [num_rows, columns] a group."""
        return tuple(
            torch.zeros((num_rows, columns), dtype=torch.int32, device=self.device)
            for columns in self.max_num_blocks_per_group
        )

    def append_block_ids(
        self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        """Stage new blocks of one request slot, one list a group; `apply_staged_writes` sends them.

        overwrite: the slot has a new tenant, whose table starts here. Ids of the tenant before stay
        behind the new ones; attention never reads past the blocks that a length names.
        Raises ValueError when a table would overflow.
        """
        if len(new_block_ids) != self.num_kv_cache_groups:
            raise ValueError(
                f"got block ids for {len(new_block_ids)} KV groups, there are "
                f"{self.num_kv_cache_groups}"
            )
        for group, block_ids in enumerate(new_block_ids):
            start = 0 if overwrite else int(self.num_blocks_np[group, req_index])
            end = start + len(block_ids)
            columns = self.max_num_blocks_per_group[group]
            if end > columns:
                raise ValueError(
                    f"request slot {req_index} would hold {end} blocks of KV group {group}, whose "
                    f"table has {columns} columns"
                )
            self.num_blocks_np[group, req_index] = end
            if block_ids:
                self._staged[group].append((req_index, start, list(block_ids)))

    def apply_staged_writes(self) -> None:
        """Write what was staged into the device's tables, in order, one copy a group."""
        for table, staged in zip(self.block_tables, self._staged, strict=True):
            if not staged:
                continue
            columns = table.shape[1]
            places: dict[int, int] = {}
            for req_index, start, block_ids in staged:
                first = req_index * columns + start
                places.update(zip(range(first, first + len(block_ids)), block_ids, strict=True))
            packed = np.array([list(places.keys()), list(places.values())], dtype=np.int64)
            where, ids = to_device(packed, self.device)
            table.view(-1).index_copy_(0, where, ids.to(torch.int32))
            staged.clear()

    def group_cp_size(self, group: int) -> int:
        """Ranks that one group's positions are spread over."""
        return self.cp_size if self.dcp_sharded[group] else 1

    def gather_block_tables(
        self,
        idx_mapping: Tensor,
        num_reqs_padded: int,
        out: tuple[Tensor, ...] | None = None,
        num_computed_tokens: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Tables of a step's rows: row i is that of request slot idx_mapping[i].

        idx_mapping: int32 [num_reqs], -1 for a dummy's row, which is zeroed. out: one int32 [at
        least num_reqs_padded, columns] a group; the rank's own `input_block_tables` by default.
        num_computed_tokens: int32 [request slots], where each request's next query begins: columns
        before the reach of that are zeroed in the groups that have one. None leaves
        them. Rows from num_reqs to num_reqs_padded are zeroed on every call, whatever stood there;
        in the own tables those that a larger batch before had, too: a graph of that size may read
        them.
        Whole rows are copied: columns past a row's last block may hold ids of an earlier tenant of
        the slot, and are unread by contract. Returns one [num_reqs_padded, columns] view of `out` a
        group. Raises ValueError when the rows do not fit.
        """
        targets = self.input_block_tables if out is None else out
        num_reqs = idx_mapping.shape[0]
        if not num_reqs <= num_reqs_padded <= targets[0].shape[0]:
            raise ValueError(
                f"{num_reqs} rows, {num_reqs_padded} with padding, do not fit block tables of "
                f"{targets[0].shape[0]} rows"
            )
        num_rows = num_reqs_padded if out is not None else self._use_rows(num_reqs_padded)
        gather, hide = gather_rows, hide_columns
        if idx_mapping.is_cuda:
            from pcpbench.engine import block_table_kernels  # triton only where there is a device

            gather, hide = block_table_kernels.gather_rows, block_table_kernels.hide_columns
        for group, (table, target) in enumerate(zip(self.block_tables, targets, strict=True)):
            gather(table, idx_mapping, target[:num_rows])
            reach = self.sliding_window_reach[group]
            if reach and num_computed_tokens is not None:
                span = self.block_sizes[group] * self.group_cp_size(group)
                hide(target[:num_reqs], idx_mapping, num_computed_tokens, reach, span)
        return tuple(target[:num_reqs_padded] for target in targets)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[Tensor, ...]:
        """Zeroed input tables for a dummy batch: every row points at the null block.

        Rows that a larger batch before had are zeroed, too.
        """
        num_rows = self._use_rows(num_reqs)
        for table in self.input_block_tables:
            table[:num_rows].zero_()
        return tuple(table[:num_reqs] for table in self.input_block_tables)

    def _use_rows(self, num_reqs: int) -> int:
        """Rows of the input tables to write for a batch of these: its own and the last one's."""
        num_rows = max(num_reqs, self._num_rows_in_use)
        self._num_rows_in_use = num_reqs
        return num_rows

    def compute_slot_mappings(
        self,
        idx_mapping: Tensor,
        query_start_loc: Tensor,
        positions: Tensor,
        num_tokens_padded: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Slot of each token on this rank: int64 [num_groups, num_tokens_padded], a view of `out`.

        idx_mapping: int32 [num_reqs]. query_start_loc: int32 [at least num_reqs + 1].
        positions: int64 [tokens]. out: int64 [num_groups, capacity], `slot_mappings` by default,
        is PAD from the last real token to its end after every call. PAD, too, where another rank
        of the DCP group owns the position, for a dummy's row (idx_mapping -1), and past the
        table's last column. Raises ValueError when the tokens do not fit.
        """
        target = self.slot_mappings if out is None else out
        if num_tokens_padded > target.shape[1]:
            raise ValueError(
                f"{num_tokens_padded} tokens do not fit slot mappings of {target.shape[1]}"
            )
        write = write_slots
        if idx_mapping.is_cuda:
            from pcpbench.engine import block_table_kernels  # triton only where there is a device

            write = block_table_kernels.write_slots
        for group, table in enumerate(self.block_tables):
            if not self.slot_mapping_enabled[group]:
                target[group].fill_(PAD_SLOT_ID)
                continue
            cp_size = self.group_cp_size(group)
            write(
                table,
                idx_mapping,
                query_start_loc,
                positions[:num_tokens_padded],
                self.block_sizes[group],
                cp_size,
                self.cp_rank if cp_size > 1 else 0,
                self.cp_interleave,
                target[group],
            )
        return target[:, :num_tokens_padded]

    def get_dummy_slot_mappings(self, num_tokens: int) -> Tensor:
        """All PAD, [num_groups, num_tokens]: a dummy batch writes no KV."""
        self.slot_mappings.fill_(PAD_SLOT_ID)
        return self.slot_mappings[:, :num_tokens]

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Name -> tensor of everything here that a graph may read."""
        named = {f"block_tables.{i}": table for i, table in enumerate(self.block_tables)}
        for i, table in enumerate(self.input_block_tables):
            named[f"input_block_tables.{i}"] = table
        named["slot_mappings"] = self.slot_mappings
        return named


def _one_a_group(name: str, values: Sequence[_T] | None, num_groups: int, default: _T) -> list[_T]:
    if values is None:
        return [default] * num_groups
    if len(values) != num_groups:
        raise UsageError(
            f"{name} has {len(values)} entries: give one for each of the {num_groups} block sizes."
        )
    return list(values)


def gather_rows(table: Tensor, idx_mapping: Tensor, out: Tensor) -> None:
    """Copy rows of `table` into `out` in the order of idx_mapping; zero the rows of `out` after.

    table: int32 [slots, columns]. idx_mapping: int32 [rows]; a row that is -1 is a dummy's and is
    zeroed. out: int32 [at least rows, columns]. Torch twin of `block_table_kernels.gather_rows`.
    """
    num_reqs = idx_mapping.shape[0]
    rows, is_dummy = out[:num_reqs], idx_mapping < 0
    if is_dummy.any():
        torch.index_select(table, 0, idx_mapping.clamp(min=0), out=rows)
        rows.masked_fill_(is_dummy.unsqueeze(1), 0)
    else:
        torch.index_select(table, 0, idx_mapping, out=rows)
    if num_reqs < out.shape[0]:
        out[num_reqs:].zero_()


def hide_columns(
    rows: Tensor, idx_mapping: Tensor, num_computed_tokens: Tensor, reach: int, span: int
) -> None:
    """Zero, in place, the columns of each row that no query from its cursor on reaches back to.

    rows: int32 [num_reqs, columns]. idx_mapping: int32 [num_reqs], each row's slot, -1 for a
    dummy's row, which is zero already. num_computed_tokens: int32 [slots]. span: positions of a
    column. Torch twin of `block_table_kernels.hide_columns`.

    With 40 computed, a reach of 24 and a span of 16 the next query sees 17 .. 40: column 0 is hid.
    """
    cursors = num_computed_tokens.index_select(0, idx_mapping.clamp(min=0))
    first = (cursors + (1 - reach)).clamp_(min=0).div_(span, rounding_mode="floor")
    columns = torch.arange(rows.shape[1], device=rows.device)
    rows.masked_fill_(columns < first.unsqueeze(1), 0)


def write_slots(
    table: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_size: int,
    cp_size: int,
    cp_rank: int,
    cp_interleave: int,
    out: Tensor,
) -> None:
    """Slots of one KV group's tokens, PAD to the end of `out` after them.

    Shapes as in `BlockTables.compute_slot_mappings`; out: int64 [at least tokens]. Torch twin of
    `block_table_kernels.write_slots`.

    Worked example: block_size 4, cp_size 2, interleave 2, so that one block id stands for 8
    positions in runs of 2. Position 13 is in the table's column 13 // 8 = 1 at offset 5; its owner
    is rank 5 // 2 % 2 = 0, where it is at 5 // 4 * 2 + 5 % 2 = 3. With block id 7 its slot on rank
    0 is 7 * 4 + 3 = 31, and PAD on rank 1.
    """
    num_reqs, num_tokens = idx_mapping.shape[0], positions.shape[0]
    if num_reqs == 0 or num_tokens == 0:
        out.fill_(PAD_SLOT_ID)
        return
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=out.device)
    rows = torch.searchsorted(query_start_loc[1 : num_reqs + 1], tokens, right=True)
    span, last_column = block_size * cp_size, table.shape[1] - 1
    columns = positions.div(span, rounding_mode="floor")
    written = (rows < num_reqs).logical_and_(columns <= last_column)
    slots = idx_mapping.index_select(0, rows.clamp_(max=num_reqs - 1))
    written.logical_and_(slots >= 0)
    blocks = table[slots.clamp_(min=0), columns.clamp(max=last_column)]
    offsets = positions - columns * span
    if cp_size > 1:
        owners = offsets.div(cp_interleave, rounding_mode="floor").remainder_(cp_size)
        written.logical_and_(owners == cp_rank)
        lap = cp_size * cp_interleave
        in_run = offsets.remainder(cp_interleave)
        offsets.div_(lap, rounding_mode="floor").mul_(cp_interleave).add_(in_run)
    offsets.add_(blocks, alpha=block_size).masked_fill_(written.logical_not_(), PAD_SLOT_ID)
    out[:num_tokens].copy_(offsets)
    out[num_tokens:].fill_(PAD_SLOT_ID)
