"""Microbatches of one rank: a step cut at the middle of its padded tokens (SPEC 8).

Owns the cut, the persistent buffers of each microbatch, and running their passes in turn. The batch
that is cut is rank-local and padded already; deciding whether it is cut is the dispatcher's.

R rows, T tokens of a microbatch after padding; P PCP ranks; L tokens of the rank after padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pcpbench.config import ParallelConfig
from pcpbench.dcp import maybe_prepare_dcp_local_seq_lens
from pcpbench.device.staging import HostStaging
from pcpbench.device.turns import take_turns
from pcpbench.engine.block_table import PAD_SLOT_ID, BlockTables
from pcpbench.engine.input_batch import BufferViews, InputBatch
from pcpbench.engine.prefill_keys import part_of
from pcpbench.engine.routing import RoutingBuffers
from pcpbench.engine.taps import PartTaps, TapBuffers
from pcpbench.errors import BatchRejected
from pcpbench.model.context import AttentionMetadata, ForwardContext
from pcpbench.model.decoder import MLADecoder
from pcpbench.modes import BatchExecutionDescriptor
from pcpbench.pcp_rows import LocalRows
from pcpbench.records import IntArray


class MicrobatchBuffers:
    """What attention reads of one microbatch; graphs capture the addresses, so they never move.

    query_start_loc int32 [R+1], seq_lens int32 [R], dcp_local_seq_lens int32 [R]; block_tables: one
    int32 [R, columns] a KV group; slot_mappings int64 [num_groups, T * P]. Ids, positions and
    padding flags are slices of the batch that is cut: the cut gives each token to one microbatch.
    """

    def __init__(self, block_tables: BlockTables, max_num_reqs: int, max_num_slots: int) -> None:
        device = block_tables.device
        self.query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.dcp_local_seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.block_tables = block_tables.make_tables(max_num_reqs)
        self.slot_mappings = torch.full(
            (block_tables.num_kv_cache_groups, max_num_slots),
            PAD_SLOT_ID,
            dtype=torch.int64,
            device=device,
        )

    def named(self) -> dict[str, Tensor]:
        """Name -> tensor, for the address book."""
        named = {
            name: getattr(self, name)
            for name in ("query_start_loc", "seq_lens", "dcp_local_seq_lens", "slot_mappings")
        }
        return named | {f"block_tables.{i}": table for i, table in enumerate(self.block_tables)}


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of a step.

    first_token: where its tokens begin in the batch that was cut. rows [num_reqs]: that batch's row
    of each of its own. tokens_before [num_reqs]: tokens of that row's query ahead of its own.
    metadata: None where attention is skipped.
    """

    first_token: int
    rows: IntArray
    tokens_before: IntArray
    batch: InputBatch
    metadata: AttentionMetadata | None


@dataclass(frozen=True)
class _Cut:
    """Rows of one microbatch on the host, [num_reqs] each; see Microbatch.

    num_tokens: real ones. tokens_after: tokens of each row's query past this microbatch.
    """

    first_token: int
    last_token: int
    num_tokens: int
    rows: IntArray
    length: IntArray
    tokens_before: IntArray
    tokens_after: IntArray


def cut_rows(query_start_loc: IntArray, num_reqs: int, first: int, last: int) -> _Cut:
    """The rows that hold tokens in [first, last), with their queries truncated to those.

    query_start_loc: of the batch that is cut, whose num_reqs rows are real. Rows of 3, 4 and 1
    tokens ([0, 3, 7, 8]) cut at 4 give lengths 3, 1 and then 3, 1: row 1 is in both, with 3 tokens
    after it in the first and 1 before it in the second. Without a real token in the range the last
    row is kept, with a query of zero tokens behind its own.
    """
    starts, ends = query_start_loc[:num_reqs], query_start_loc[1 : num_reqs + 1]
    begin, end = starts.clip(first, last), ends.clip(first, last)
    (rows,) = (end > begin).nonzero()
    if len(rows):
        before, after = begin[rows] - starts[rows], ends[rows] - end[rows]
    else:
        rows = np.array([num_reqs - 1])
        before, after = ends[rows] - starts[rows], np.zeros(1, dtype=starts.dtype)
    length = ends[rows] - starts[rows] - before - after
    return _Cut(first, last, int(length.sum()), rows, length, before, after)


def add_cut_twins(
    descriptors: Sequence[BatchExecutionDescriptor], parallel: ParallelConfig
) -> tuple[BatchExecutionDescriptor, ...]:
    """Each descriptor, followed by its twin in microbatches where a step of its size can be cut."""
    least = min(parallel.dbo_decode_token_threshold, parallel.dbo_prefill_token_threshold)
    twins: list[BatchExecutionDescriptor] = []
    for descriptor in descriptors:
        twins.append(descriptor)
        if parallel.enable_dbo and descriptor.num_tokens >= least:
            twins.append(replace(descriptor, num_ubatches=parallel.num_ubatches))
    return tuple(twins)


class Microbatches:
    """The microbatches of one rank: buffers and contexts that stay, and the cut of the last step.

    context: the rank's own; each microbatch has a copy with metadata of its own. max_num_reqs,
    max_num_tokens: limits of the batch that is cut. parts: empty while a step runs whole.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        context: ForwardContext,
        block_tables: BlockTables,
        max_num_reqs: int,
        max_num_tokens: int,
    ) -> None:
        self.context = context
        num_slots = -(-max_num_tokens // 2) * parallel.world.pcp_size
        self.buffers = [
            MicrobatchBuffers(block_tables, max_num_reqs, num_slots)
            for _ in range(parallel.num_ubatches)
        ]
        self.contexts = [replace(context, takes_turns=True) for _ in self.buffers]
        if isinstance(context.routing, RoutingBuffers):
            for own in self.contexts:
                own.routing = context.routing.of_size(-(-max_num_tokens // 2))
        self.parts: list[Microbatch] = []
        self._staging = HostStaging(block_tables.device)

    def cut(
        self, num_ubatches: int, batch: InputBatch, metadata: AttentionMetadata | None, full: bool
    ) -> None:
        """Cut the batch and its attention inputs; with num_ubatches 1 the step runs whole.

        metadata: of the whole batch, None where attention is skipped. full: a FULL graph reads the
        rows, so that they are padded to a number that the shape alone decides. Raises BatchRejected
        for a batch that counts more or fewer requests than it holds.
        """
        self.parts = []
        if num_ubatches == 1:
            return
        if batch.num_reqs != len(batch.req_ids):
            raise BatchRejected(
                f"a batch to be cut calls itself one of {batch.num_reqs} requests and holds "
                f"{len(batch.req_ids)}: num_reqs is wrong"
            )
        total = batch.num_tokens_after_padding
        bounds = [total * i // num_ubatches for i in range(num_ubatches + 1)]
        starts, num_reqs = batch.query_start_loc_np, batch.num_reqs
        cuts = [cut_rows(starts, num_reqs, *span) for span in pairwise(bounds)]
        for cut, buffers in zip(cuts, self.buffers, strict=True):
            num_rows = len(cut.rows)
            if full:
                num_rows = min(batch.num_reqs_after_padding, cut.last_token - cut.first_token)
            self.parts.append(self._stage(batch, metadata, cut, num_rows, buffers))
        self.resume(self.parts)

    def resume(self, parts: list[Microbatch]) -> None:
        """Make these the step's microbatches, as they are in the buffers."""
        self.parts = parts
        total = sum(part.batch.num_tokens_after_padding for part in parts)
        for part, context in zip(parts, self.contexts, strict=False):
            context.metadata = part.metadata
            if self.context.selected is not None:
                context.selected = self.context.selected[:, part.first_token :]
            if isinstance(self.context.taps, TapBuffers):
                context.taps = PartTaps(self.context.taps, part.first_token, total)

    def _stage(
        self,
        batch: InputBatch,
        metadata: AttentionMetadata | None,
        cut: _Cut,
        num_rows: int,
        buffers: MicrobatchBuffers,
    ) -> Microbatch:
        """Write one microbatch into its buffers, up to num_rows rows whatever stood there."""
        num_reqs = len(cut.rows)
        starts = np.full(num_rows + 1, cut.num_tokens, dtype=np.int32)
        starts[0] = 0
        cut.length.cumsum(out=starts[1 : num_reqs + 1])
        starts_on_device, rows, tokens_after = self._staging.send(
            (starts, cut.rows, cut.tokens_after)
        )
        tokens = slice(cut.first_token, cut.last_token)
        views = BufferViews(
            input_ids=batch.input_ids[tokens],
            positions=batch.positions[tokens],
            is_padding=batch.is_padding[tokens],
            query_start_loc=buffers.query_start_loc[: num_rows + 1],
            seq_lens=buffers.seq_lens[:num_rows],
        )
        views.query_start_loc.copy_(starts_on_device)
        views.seq_lens[num_reqs:].zero_()
        # Lengths are the device's: the host's may lag behind rejected tokens.
        lengths = batch.seq_lens.index_select(0, rows).sub_(tokens_after)
        views.seq_lens[:num_reqs].copy_(lengths)
        part = _batch_of(batch, cut, starts, views, rows)
        self._prepare_dcp_lens(part, buffers)
        own = None if metadata is None else self._metadata(part, metadata, cut, rows, buffers)
        return Microbatch(cut.first_token, cut.rows, cut.tokens_before, part, own)

    def _prepare_dcp_lens(self, part: InputBatch, buffers: MicrobatchBuffers) -> None:
        """This rank's share of the truncated lengths, never rows of the batch that was cut."""
        part.dcp_local_seq_lens = maybe_prepare_dcp_local_seq_lens(
            buffers.dcp_local_seq_lens,
            part.seq_lens,
            part.num_reqs,
            self.context.dcp.size,
            self.context.dcp.rank,
            self.context.cp_interleave,
            num_reqs_padded=part.num_reqs_after_padding,
        )

    def _metadata(
        self,
        part: InputBatch,
        metadata: AttentionMetadata,
        cut: _Cut,
        rows: Tensor,
        buffers: MicrobatchBuffers,
    ) -> AttentionMetadata:
        """Tables and slots of one microbatch, out of those of the whole batch."""
        num_rows, num_ranks = part.num_reqs_after_padding, self.context.pcp.size
        tables = tuple(table[:num_rows] for table in buffers.block_tables)
        for table, whole in zip(tables, metadata.block_tables, strict=True):
            torch.index_select(whole, 0, rows, out=table[: part.num_reqs])
            table[part.num_reqs :].zero_()
        # The gathered batch of a microbatch is that of its tokens on every rank: columns
        # [first, last) of each rank's share, not one run of columns.
        slots = buffers.slot_mappings[:, : part.num_tokens_after_padding * num_ranks]
        num_groups = len(slots)
        by_rank = metadata.slot_mappings.view(num_groups, num_ranks, -1)
        mine = by_rank[..., cut.first_token : cut.last_token]
        slots.view(num_groups, num_ranks, -1).copy_(mine)
        return AttentionMetadata(
            query_start_loc=part.query_start_loc,
            seq_lens=part.seq_lens,
            dcp_local_seq_lens=part.dcp_local_seq_lens,
            block_tables=tables,
            slot_mappings=slots,
            prefill=part_of(metadata.prefill, cut.rows, part.query_start_loc_np),
        )

    async def forward(self, model: MLADecoder, out: Tensor | None) -> Tensor:
        """Run the parts in turn; hidden states [L, hidden] in the order of the whole batch.

        out: where to leave them, as code under capture must, or None.
        """
        for context in self.contexts:
            context.breaks = self.context.breaks
        hidden = await take_turns(
            [
                self._forward_one(model, part, context, out)
                for part, context in zip(self.parts, self.contexts, strict=True)
            ]
        )
        if out is None:
            return torch.cat(hidden)
        return out[: sum(len(rows) for rows in hidden)]

    async def _forward_one(
        self, model: MLADecoder, part: Microbatch, context: ForwardContext, out: Tensor | None
    ) -> Tensor:
        context.is_padding = part.batch.is_padding
        hidden: Tensor = await model(part.batch.input_ids, part.batch.positions, context)
        if out is None:
            return hidden
        return out[part.first_token : part.first_token + len(hidden)].copy_(hidden)


def _batch_of(
    batch: InputBatch, cut: _Cut, starts: IntArray, views: BufferViews, rows: Tensor
) -> InputBatch:
    """The InputBatch of one microbatch on these views."""
    num_reqs, num_rows = len(cut.rows), len(starts) - 1
    local = LocalRows(
        request=cut.rows,
        start=cut.tokens_before,
        length=cut.length,
        tokens_before=cut.tokens_before,
        tokens_after=cut.tokens_after,
        gather_idx=np.arange(cut.first_token, cut.first_token + cut.num_tokens),
        query_start_loc=starts,
        num_reqs=num_reqs,
        num_reqs_padded=num_rows,
        num_tokens=cut.num_tokens,
        num_tokens_padded=cut.last_token - cut.first_token,
    )
    idx_mapping = batch.idx_mapping.index_select(0, rows)
    slots = batch.idx_mapping_np[cut.rows]
    part = local.batch(batch, views, idx_mapping, slots, batch.logits_indices[:0])
    # The one row of a microbatch of padding is a request's, and keeps its length.
    bound = batch.seq_lens_cpu_upper_bound.numpy()[cut.rows] - cut.tokens_after
    part.seq_lens_cpu_upper_bound[:num_reqs] = torch.from_numpy(bound)
    return part
