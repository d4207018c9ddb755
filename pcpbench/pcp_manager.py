"""Prefill context parallelism on one rank: its share of a step, and the way back (SPEC 5, 6, 9).

Owns the rank-local buffers, tables and gathered slots, the partition of a global batch into them
and the restoring of gathered hidden states. Layouts are made in pcp_partition.py, refusals in
pcp_config.py. Knows no model and issues no collective: gathering is the engine's.

P = pcp_world_size; L = tokens of a rank after padding to the common count; T = global tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pcpbench.device.staging import HostStaging, to_device
from pcpbench.engine.block_table import PAD_SLOT_ID, BlockTables
from pcpbench.engine.input_batch import InputBatch, InputBuffers, pad_batch
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.pcp_config import validate_config
from pcpbench.pcp_partition import (
    Layout,
    RankSegment,
    RowGrid,
    build_layout,
    rank_segments,
    replicated_requests,
    row_grid,
)
from pcpbench.pcp_rows import LocalRows, local_rows
from pcpbench.records import BoolArray, IntArray

__all__ = [
    "PCPManager",
    "RankSegment",
    "descriptor_padding",
    "maybe_partition_pcp_batch",
    "validate_config",
]


class PCPManager:
    """One rank's part of a PCP group.

    shard_decode_requests: each decode has one owner rank a step (PCP without DCP); otherwise every
    rank runs every decode. max_num_reqs, max_num_tokens: limits of a global batch; rank-local
    buffers have room for 2 x max_num_reqs rows, as a request can have two on a rank. Without them
    there are no persistent buffers and each partition makes its own.
    """

    validate_config = staticmethod(validate_config)

    def __init__(
        self,
        pcp_world_size: int,
        pcp_rank: int,
        device: torch.device,
        shard_decode_requests: bool,
        max_num_reqs: int | None = None,
        max_num_tokens: int | None = None,
        block_tables: BlockTables | None = None,
        dcp_world_size: int = 1,
        dcp_rank: int = 0,
        cp_interleave: int = 1,
    ) -> None:
        self.pcp_world_size, self.pcp_rank, self.device = pcp_world_size, pcp_rank, device
        self.shard_decode_requests = shard_decode_requests
        self.dcp_world_size, self.dcp_rank = dcp_world_size, dcp_rank
        self.cp_interleave = cp_interleave
        self._max_num_tokens = max_num_tokens
        self._max_num_local_reqs = None if max_num_reqs is None else 2 * max_num_reqs
        self._input_buffers: InputBuffers | None = None
        if self._max_num_local_reqs is not None and max_num_tokens is not None:
            self._input_buffers = InputBuffers(self._max_num_local_reqs, max_num_tokens, device)
        self._staging = HostStaging(device)
        self._global_batch: InputBatch | None = None
        self._layout: Layout | None = None
        self._planned: tuple[object, tuple[Layout, LocalRows]] | None = None
        self._nothing = torch.zeros(0, dtype=torch.int32, device=device)
        self.hidden_restore_idx = self.padded_gather_idx = self._nothing
        self.gathered_kv_write_mask = torch.zeros(0, dtype=torch.bool, device=device)
        self.row_req_index: IntArray = np.zeros(0, dtype=np.int64)
        self.row_start: IntArray = np.zeros(0, dtype=np.int64)
        self.set_block_tables(block_tables)

    def set_block_tables(self, block_tables: BlockTables | None) -> None:
        """Use these block tables; allocates the rank-local tables and gathered slots they need.

        cp_interleave is theirs from then on: they deal out the positions.
        """
        self.block_tables = block_tables
        self.input_block_tables: tuple[Tensor, ...] = ()
        self.slot_mappings: Tensor | None = None
        if block_tables is None:
            return
        self.cp_interleave = block_tables.cp_interleave
        self.input_block_tables = block_tables.make_tables(
            self._max_num_local_reqs or 2 * block_tables.max_num_reqs
        )
        tokens = self._max_num_tokens or block_tables.max_num_batched_tokens
        self.slot_mappings = torch.full(
            (block_tables.num_kv_cache_groups, tokens * self.pcp_world_size),
            PAD_SLOT_ID,
            dtype=torch.int64,
            device=self.device,
        )

    @property
    def input_buffers(self) -> InputBuffers:
        """The rank-local buffers that the forward pass reads."""
        if self._input_buffers is None:
            raise RuntimeError("this PCPManager was made without max_num_reqs and max_num_tokens")
        return self._input_buffers

    @property
    def global_batch(self) -> InputBatch:
        """The batch that was partitioned last, untouched."""
        if self._global_batch is None:
            raise RuntimeError("no batch has been partitioned yet")
        return self._global_batch

    @property
    def layout(self) -> Layout:
        """The last partition over all ranks."""
        if self._layout is None:
            raise RuntimeError("no batch has been partitioned yet")
        return self._layout

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Name -> tensor of what a graph may read here besides `input_buffers`."""
        named = {
            f"input_block_tables.{group}": table
            for group, table in enumerate(self.input_block_tables)
        }
        if self.slot_mappings is not None:
            named["slot_mappings"] = self.slot_mappings
        return named

    def replicated_requests(
        self, num_scheduled_tokens: IntArray, is_prefilling: BoolArray
    ) -> BoolArray:
        """Which requests every rank runs whole, bool [num_reqs]."""
        return replicated_requests(
            num_scheduled_tokens,
            is_prefilling,
            self.pcp_world_size,
            self.shard_decode_requests,
            self.dcp_world_size > 1,
        )

    def get_counts_for_dispatch(
        self, num_scheduled_tokens: IntArray, is_prefilling: BoolArray
    ) -> tuple[int, int]:
        """(rows, tokens) that every rank hands to the dispatcher (SPEC 3).

        Each is the largest over the PCP ranks, not necessarily of one rank; rows are at least 1.
        """
        grid = self._row_grid(num_scheduled_tokens, is_prefilling)
        return max(1, int(grid.rows_per_rank().max())), int(grid.tokens_per_rank().max())

    def get_num_reqs_for_dispatch(
        self, num_scheduled_tokens: IntArray, is_prefilling: BoolArray
    ) -> int:
        """The rows of `get_counts_for_dispatch`."""
        return self.get_counts_for_dispatch(num_scheduled_tokens, is_prefilling)[0]

    def get_num_tokens_for_dispatch(
        self, num_scheduled_tokens: IntArray, is_prefilling: BoolArray
    ) -> int:
        """The tokens of `get_counts_for_dispatch`."""
        return self.get_counts_for_dispatch(num_scheduled_tokens, is_prefilling)[1]

    def _row_grid(self, num_scheduled_tokens: IntArray, is_prefilling: BoolArray) -> RowGrid:
        return row_grid(
            num_scheduled_tokens,
            is_prefilling,
            self.pcp_world_size,
            self.shard_decode_requests,
            self.dcp_world_size > 1,
        )

    def partition_batch(
        self, input_batch: InputBatch, batch_desc: BatchExecutionDescriptor
    ) -> InputBatch:
        """This rank's share of a global batch, in the rank-local buffers.

        NONE pads tokens to the largest rank only, PIECEWISE to the descriptor, FULL rows too. The
        global batch itself is not written to; `global_batch` gives it back for sampling.
        Raises RuntimeError for FULL with a prefill, ValueError when the descriptor holds fewer rows
        or tokens than a rank needs, whichever rank that is, or the buffers fewer than this one.
        """
        if batch_desc.cg_mode is CUDAGraphMode.FULL and input_batch.has_prefill:
            raise RuntimeError(
                f"{batch_desc.label} was chosen for a batch with a prefill, which PCP cuts over "
                "ranks; only decode batches can run as FULL"
            )
        layout, rows = self._plan(input_batch, batch_desc)
        local = self._stage(input_batch, layout, rows)
        self._global_batch, self._layout = input_batch, layout
        self.row_req_index, self.row_start = rows.request, rows.start
        return local

    def _plan(
        self, batch: InputBatch, batch_desc: BatchExecutionDescriptor
    ) -> tuple[Layout, LocalRows]:
        """The layout of a step and this rank's rows of it.

        Both follow from query lengths, phases and padding alone, and a decode batch repeats these
        until a request comes or goes: the last answer is kept and given again for equal values.
        """
        num_tokens_padded, num_reqs_padded = descriptor_padding(batch_desc)
        query_lens = batch.num_scheduled_tokens[: batch.num_reqs]
        is_prefilling = batch.is_prefilling_np[: batch.num_reqs]
        starts = batch.query_start_loc_np[: batch.num_reqs + 1]
        key = (
            num_tokens_padded,
            num_reqs_padded,
            query_lens.tobytes(),
            is_prefilling.tobytes(),
            starts.tobytes(),
        )
        if self._planned is not None and self._planned[0] == key:
            return self._planned[1]
        grid = self._row_grid(query_lens, is_prefilling)
        if num_reqs_padded is not None:
            most_rows = max(1, int(grid.rows_per_rank().max()))
            if num_reqs_padded < most_rows:
                raise ValueError(
                    f"{batch_desc.label} has {num_reqs_padded} rows, and a PCP rank needs "
                    f"{most_rows}"
                )
        layout = build_layout(grid, starts, num_tokens_padded)
        rows = local_rows(layout, self.pcp_rank, query_lens, num_reqs_padded)
        self._planned = (key, (layout, rows))
        return layout, rows

    def _stage(self, batch: InputBatch, layout: Layout, rows: LocalRows) -> InputBatch:
        """Write the rank's rows into the local buffers: one copy to the device, then gathers."""
        num_tokens, num_padded = rows.num_tokens, layout.num_tokens_padded
        num_reqs, num_rows = rows.num_reqs, rows.num_reqs_padded
        buffers = self._input_buffers or InputBuffers(num_rows, num_padded, self.device)
        buffers.check_room(num_rows, num_padded)
        slots = batch.idx_mapping_np[rows.request]
        starts, request, tokens_after, mine, idx_mapping, gather_idx, restore_idx = (
            self._staging.send(
                (
                    rows.query_start_loc,
                    rows.request,
                    rows.tokens_after,
                    rows.gather_idx,
                    slots,
                    layout.padded_gather_idx,
                    layout.hidden_restore_idx,
                )
            )
        )
        views = buffers.views(num_rows, num_padded)
        views.query_start_loc.copy_(starts)
        real = views
        if num_rows > num_reqs or num_padded > num_tokens:
            real = buffers.views(num_reqs, num_tokens)
            buffers.pad(num_reqs, num_rows, num_tokens, num_padded)
        torch.index_select(batch.input_ids, 0, mine, out=real.input_ids)
        torch.index_select(batch.positions, 0, mine, out=real.positions)
        real.is_padding.fill_(False)
        if num_tokens == 0:
            real.seq_lens.zero_()
        else:
            torch.index_select(batch.seq_lens, 0, request, out=real.seq_lens)
            if batch.has_prefill:
                real.seq_lens.sub_(tokens_after)
        self.padded_gather_idx, self.hidden_restore_idx = gather_idx, restore_idx
        self.gathered_kv_write_mask = to_device(layout.gathered_kv_write_mask, self.device)
        return rows.batch(batch, views, idx_mapping, slots, self._nothing)

    def prepare_inputs_to_capture(self, input_batch: InputBatch) -> InputBatch:
        """The same batch as slices of the persistent rank-local buffers (SPEC 6)."""
        num_rows, num_tokens = (
            input_batch.num_reqs_after_padding,
            input_batch.num_tokens_after_padding,
        )
        self.input_buffers.check_room(num_rows, num_tokens)
        views = self.input_buffers.views(num_rows, num_tokens)
        for name, view in views._asdict().items():
            view.copy_(getattr(input_batch, name)[: len(view)])
        return replace(input_batch, dcp_local_seq_lens=None, **views._asdict())

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[Tensor, ...]:
        """Zeroed rank-local tables, one [num_reqs, columns] a KV group (SPEC 6)."""
        self._tables()
        return tuple(table[:num_reqs].zero_() for table in self.input_block_tables)

    def get_dummy_slot_mappings(self, num_tokens: int) -> Tensor:
        """All PAD, [num_groups, num_tokens x P]: a dummy batch writes no KV (SPEC 6)."""
        _, slots = self._tables()
        return slots[:, : num_tokens * self.pcp_world_size].fill_(PAD_SLOT_ID)

    def prepare_attn(
        self, input_batch: InputBatch, num_computed_tokens: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Attention inputs of a partitioned batch (SPEC 9).

        num_computed_tokens: int32 [request slots], for groups with a sliding window. Returns the
        tables of its rows, one [rows after padding, columns] a KV group, and the gathered
        slots, see `prepare_slot_mappings`.
        """
        block_tables, _ = self._tables()
        tables = block_tables.gather_block_tables(
            input_batch.idx_mapping,
            input_batch.num_reqs_after_padding,
            self.input_block_tables,
            num_computed_tokens,
        )
        return tables, self.prepare_slot_mappings()

    def prepare_slot_mappings(self) -> Tensor:
        """Slots of the last partition, [num_groups, L x P], rank after rank.

        A token has a slot in one place, that of its writer, and PAD wherever else it was computed;
        so have padding and, under DCP, tokens that live on another rank.
        """
        block_tables, slot_mappings = self._tables()
        batch = self.global_batch
        out = slot_mappings[:, : self.padded_gather_idx.shape[0]]
        if batch.num_tokens == 0:
            return out.fill_(PAD_SLOT_ID)
        slots = block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_tokens
        )
        torch.index_select(slots, 1, self.padded_gather_idx, out=out)
        return out.masked_fill_(self.gathered_kv_write_mask.logical_not(), PAD_SLOT_ID)

    def _tables(self) -> tuple[BlockTables, Tensor]:
        if self.block_tables is None or self.slot_mappings is None:
            raise RuntimeError("this PCPManager has no block tables: call set_block_tables first")
        return self.block_tables, self.slot_mappings

    def restore_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Hidden states in the order of the global batch, [T, ...].

        hidden_states: [L x P, ...], already gathered over the PCP group, in rank order. Raises
        ValueError for another number of rows.
        """
        num_gathered = self.padded_gather_idx.shape[0]
        if hidden_states.shape[0] != num_gathered:
            raise ValueError(
                f"{hidden_states.shape[0]} hidden states to restore, and the gathered batch has "
                f"{num_gathered}"
            )
        return hidden_states.index_select(0, self.hidden_restore_idx)

    def restore_for_sampling(self, hidden_states: Tensor) -> tuple[Tensor, InputBatch]:
        """`restore_hidden_states`, and the global batch that sampling is to see."""
        return self.restore_hidden_states(hidden_states), self.global_batch

    def rank_segments(self) -> list[RankSegment]:
        """This rank's rows of the last partition as slices; for people and tests, not for steps."""
        return rank_segments(self.layout, self.pcp_rank, self.global_batch.query_start_loc_np)


def descriptor_padding(batch_desc: BatchExecutionDescriptor) -> tuple[int | None, int | None]:
    """Tokens and rows that a rank-local batch is padded to; None where it is not (SPEC 5)."""
    if batch_desc.cg_mode is CUDAGraphMode.FULL:
        return batch_desc.num_tokens, batch_desc.num_reqs
    if batch_desc.cg_mode is CUDAGraphMode.PIECEWISE:
        return batch_desc.num_tokens, None
    return None, None


def maybe_partition_pcp_batch(
    manager: PCPManager | None,
    input_batch: InputBatch,
    batch_desc: BatchExecutionDescriptor,
    input_buffers: InputBuffers | None = None,
) -> InputBatch:
    """The batch that a step's forward pass runs on: cut over PCP ranks, padded to the descriptor.

    manager: None without PCP; the batch is then padded in place on `input_buffers`, those it was
    written to, and returned as it is where the descriptor pads nothing. Raises as
    `PCPManager.partition_batch` and `pad_batch` do.
    """
    if manager is not None:
        return manager.partition_batch(input_batch, batch_desc)
    num_tokens, num_reqs = descriptor_padding(batch_desc)
    if num_tokens is None:
        return input_batch
    if input_buffers is None:
        raise ValueError(f"padding to {batch_desc.label} needs the buffers that hold the batch")
    return pad_batch(
        input_batch,
        num_tokens,
        input_batch.num_reqs if num_reqs is None else num_reqs,
        input_buffers,
    )
