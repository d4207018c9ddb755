"""The draft model on one rank: its KV caches, its buffers and how each of its passes is staged.

Owns what a pass reads (SPEC 7, 10). The first pass runs on the target's own batch, cut over PCP
ranks and padded as that was: the same rows, tables and slots, with the token behind each position
in place of the one at it. Each later pass has one token of every request of the global batch, on
all PCP ranks alike. All inputs lie in buffers of the draft model's own, DCP-local lengths among
them, which every pass makes anew from its own lengths. Which pass runs when, and as what, is
draft_runner.py's.

R rows, T tokens after padding; n requests of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pcpbench.dcp import maybe_prepare_dcp_local_seq_lens
from pcpbench.device.collectives import InProcessGroup
from pcpbench.engine.batch_inputs import token_rows
from pcpbench.engine.block_table import PAD_SLOT_ID
from pcpbench.engine.input_batch import InputBatch, InputBuffers, set_dummy_context
from pcpbench.engine.kv_cache import allocate_kv_caches
from pcpbench.engine.request_state import RequestState
from pcpbench.engine.worker import Worker
from pcpbench.model.context import AttentionMetadata, PrefillKeys
from pcpbench.model.mtp import MTPModule
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode


@dataclass(frozen=True)
class DraftCounts:
    """Real and padded rows and tokens of one pass on one rank."""

    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int


@dataclass(frozen=True)
class DraftPass:
    """Copies of what one pass read on one rank; see records.DraftPassRecord."""

    counts: DraftCounts
    input_ids: Tensor
    positions: Tensor
    is_padding: Tensor
    hidden_states: Tensor
    metadata: AttentionMetadata | None


class DraftWorker:
    """One rank's draft model. num_steps: drafts that it proposes a request.

    Its caches are added behind the worker's own, so that whatever looks at caches sees them.
    """

    def __init__(self, worker: Worker, model: MTPModule, num_steps: int) -> None:
        self.worker, self.model, self.num_steps = worker, model, num_steps
        shape, device, tables = model.shape, worker.device, worker.block_tables
        widths = [shape.latent_dim] + ([shape.index_head_dim] if shape.is_sparse else [])
        self.kv_caches = [
            allocate_kv_caches(
                1,
                worker.config.cache_config.num_gpu_blocks,
                tables.block_sizes[0],
                width,
                worker.model.dtype,
                device,
            )[0]
            for width in widths
        ]
        worker.kv_caches += self.kv_caches
        max_num_tokens, hidden = worker.hidden_states.shape
        self.input_buffers = InputBuffers(worker.local_buffers.max_num_reqs, max_num_tokens, device)
        # What a pass is fed, and where a replay leaves its result.
        self.hidden_states, self.drafted_states = (
            torch.zeros((max_num_tokens, hidden), dtype=worker.model.dtype, device=device)
            for _ in range(2)
        )
        self.input_block_tables = tables.make_tables(tables.max_num_reqs)
        self.slot_mappings = torch.full(
            (tables.num_kv_cache_groups, max_num_tokens),
            PAD_SLOT_ID,
            dtype=torch.int64,
            device=device,
        )
        selected: Tensor | None = None
        if shape.is_sparse:
            chosen = (1, max_num_tokens, shape.index_topk)
            selected = torch.zeros(chosen, dtype=torch.int32, device=device)
        self.context = replace(
            worker.context,
            kv_caches=self.kv_caches,
            selected=selected,
            metadata=None,
            is_padding=None,
            ep=None,
            routing=None,
            taps=None,
        )
        # A later pass is the same on every PCP rank, each of which writes its own cache.
        self._alone = InProcessGroup((worker.rank,), worker.rank, worker.groups.log)
        self._counts = DraftCounts(0, 0, 0, 0)
        self.draft_rows = torch.zeros(0, dtype=torch.int64, device=device)

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Name -> tensor of what graphs of its passes read, inputs of `input_buffers` aside."""
        named = {f"input_block_tables.{i}": t for i, t in enumerate(self.input_block_tables)}
        named["slot_mappings"] = self.slot_mappings
        return named

    def scratch_buffers(self) -> dict[str, Tensor]:
        """Name -> tensor of what each pass writes before it is read."""
        named = {"hidden_states": self.hidden_states, "drafted_states": self.drafted_states}
        if self.context.selected is not None:
            named["selected_positions"] = self.context.selected
        return named

    def stage_first(self, hidden: Tensor, *, is_dummy: bool = False) -> None:
        """Inputs of the first pass, on the local batch that the target model has just run.

        hidden: [T, hidden], this rank's result. A dummy batch has ids of 0 and no request. Without
        attention inputs (a dummy run that skips attention) this pass has none either.
        """
        worker = self.worker
        batch, given = worker.local_batch, worker.context.metadata
        assert batch is not None
        num_rows, num_tokens = batch.num_reqs_after_padding, batch.num_tokens_after_padding
        self._counts = DraftCounts(batch.num_reqs, num_rows, batch.num_tokens, num_tokens)
        views = self.input_buffers.views(num_rows, num_tokens)
        for name in ("positions", "is_padding", "query_start_loc", "seq_lens"):
            getattr(views, name).copy_(getattr(batch, name))
        if is_dummy:
            views.input_ids.zero_()
        else:
            fill_next_token_ids(
                views.input_ids,
                views.positions,
                batch.idx_mapping,
                views.query_start_loc,
                worker.request_state,
            )
        self.hidden_states[:num_tokens].copy_(hidden[:num_tokens])
        self.context.pcp = worker.groups.pcp
        self.context.metadata = None
        if given is not None:
            self._set_metadata(given.block_tables, given.slot_mappings, given.prefill)

    def choose_rows(self) -> None:
        """Find the token of the global batch that each request is drafted from: the last kept one.

        A query at positions 10 to 13 after which 12 tokens are computed is drafted from its second.
        """
        batch, state = self.worker.global_batch, self.worker.request_state
        assert batch is not None
        starts = batch.query_start_loc[: batch.num_reqs].long()
        computed = state.num_computed_tokens.index_select(0, batch.idx_mapping)
        first = batch.positions.index_select(0, starts)
        self.draft_rows = starts + computed - 1 - first

    def stage_second(self, descriptor: BatchExecutionDescriptor) -> None:
        """Where each request's first one-token pass stands: right behind what is computed."""
        worker = self.worker
        batch, limit = worker.global_batch, worker.config.model_config.max_model_len
        assert batch is not None
        num_reqs, num_rows, num_tokens = batch.num_reqs, batch.num_reqs, batch.num_reqs
        if descriptor.cg_mode is CUDAGraphMode.FULL:
            num_rows, num_tokens = descriptor.num_reqs or 0, descriptor.num_tokens
        self._counts = DraftCounts(num_reqs, num_rows, num_reqs, num_tokens)
        views = self.input_buffers.views(num_reqs, num_reqs)
        computed = worker.request_state.num_computed_tokens.index_select(0, batch.idx_mapping)
        torch.clamp(computed, max=limit - 1, out=views.seq_lens)
        views.positions.copy_(views.seq_lens)
        views.seq_lens.add_(1)
        views.is_padding.fill_(False)
        torch.arange(num_reqs + 1, dtype=torch.int32, out=views.query_start_loc)
        self.input_buffers.pad(num_reqs, num_rows, num_reqs, num_tokens)
        worker.block_tables.gather_block_tables(
            batch.idx_mapping,
            num_rows,
            self.input_block_tables,
            worker.request_state.num_computed_tokens,
        )
        self.context.pcp = self._alone

    def advance(self) -> None:
        """One position further, as far as max_model_len allows."""
        limit = self.worker.config.model_config.max_model_len
        views = self.input_buffers.views(self._counts.num_reqs, self._counts.num_tokens)
        views.positions.add_(1).clamp_(max=limit - 1)
        views.seq_lens.add_(1).clamp_(max=limit)

    def stage_next(self, drafts: Tensor, hidden: Tensor) -> None:
        """Inputs of a one-token pass, wherever it stands.

        drafts: int [n], proposed by the pass before; hidden: [n, hidden], that pass's result.
        """
        batch, counts = self.worker.global_batch, self._counts
        assert batch is not None
        self.input_buffers.input_ids[: counts.num_reqs].copy_(drafts)
        self.hidden_states[: counts.num_reqs].copy_(hidden)
        slots = self.worker.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            self.input_buffers.query_start_loc[: counts.num_reqs + 1],
            self.input_buffers.positions,
            counts.num_tokens_after_padding,
            out=self.slot_mappings,
        )
        tables = tuple(t[: counts.num_reqs_after_padding] for t in self.input_block_tables)
        self._set_metadata(tables, slots)

    def stage_dummy(self, descriptor: BatchExecutionDescriptor) -> None:
        """A dummy batch of a one-token pass (SPEC 6), for warm-up, capture and idle steps.

        Without FULL it skips attention. Under DCP each request of a FULL one gets dcp x interleave
        tokens of context, so that no rank's share is empty when the graph is captured.
        """
        worker, num_rows = self.worker, descriptor.num_reqs or descriptor.num_tokens
        batch = InputBatch.make_dummy(num_rows, descriptor.num_tokens, self.input_buffers, 1)
        self._counts = DraftCounts(num_rows, num_rows, batch.num_tokens, batch.num_tokens)
        self.context.pcp, self.context.metadata = self._alone, None
        if descriptor.cg_mode is not CUDAGraphMode.FULL:
            return
        tables = tuple(table[:num_rows].zero_() for table in self.input_block_tables)
        slots = self.slot_mappings.fill_(PAD_SLOT_ID)[:, : descriptor.num_tokens]
        if worker.dcp_size > 1:
            set_dummy_context(
                batch,
                worker.block_tables,
                worker.dcp_size * worker.cp_interleave,
                worker.config.cache_config.num_gpu_blocks,
                worker.config.model_config.max_model_len,
                input_block_tables=tables,
            )
        self._set_metadata(tables, slots)

    def _set_metadata(
        self, tables: tuple[Tensor, ...], slots: Tensor, prefill: PrefillKeys | None = None
    ) -> None:
        counts, buffers = self._counts, self.input_buffers
        views = buffers.views(counts.num_reqs_after_padding, counts.num_tokens_after_padding)
        self.context.metadata = AttentionMetadata(
            query_start_loc=views.query_start_loc,
            seq_lens=views.seq_lens,
            dcp_local_seq_lens=self._prepare_dcp_lens(views.seq_lens),
            block_tables=tables,
            slot_mappings=slots,
            prefill=prefill,
        )

    def _prepare_dcp_lens(self, seq_lens: Tensor) -> Tensor | None:
        """This rank's shares of the pass's own lengths, never the target's (SPEC 7)."""
        worker, counts = self.worker, self._counts
        return maybe_prepare_dcp_local_seq_lens(
            self.input_buffers.dcp_local_seq_lens,
            seq_lens,
            counts.num_reqs,
            worker.dcp_size,
            worker.dcp_rank,
            worker.cp_interleave,
            num_reqs_padded=counts.num_reqs_after_padding,
        )

    async def forward(self, *, into_buffer: bool) -> Tensor:
        """Run the staged pass; hidden states [T, hidden], in `drafted_states` if asked for."""
        num_tokens = self._counts.num_tokens_after_padding
        views = self.input_buffers.views(0, num_tokens)
        self.context.is_padding = views.is_padding
        drafted: Tensor = await self.model(
            views.input_ids, views.positions, self.hidden_states[:num_tokens], self.context
        )
        if not into_buffer:
            return drafted
        return self.drafted_states[:num_tokens].copy_(drafted)

    async def restore(self, drafted: Tensor) -> Tensor:
        """Of the first pass's result the rows that requests are drafted from, [n, hidden]."""
        manager = self.worker.pcp_manager
        if manager is not None:
            drafted = manager.restore_hidden_states(
                await self.worker.groups.pcp.all_gather(drafted)
            )
        return drafted.index_select(0, self.draft_rows)

    def kept(self) -> DraftPass:
        """Copies of what the staged pass reads."""
        counts, given = self._counts, self.context.metadata
        views = self.input_buffers.views(0, counts.num_tokens_after_padding)
        copies: AttentionMetadata | None = None
        if given is not None:
            local = given.dcp_local_seq_lens
            copies = AttentionMetadata(
                query_start_loc=given.query_start_loc.clone(),
                seq_lens=given.seq_lens.clone(),
                dcp_local_seq_lens=None if local is None else local.clone(),
                block_tables=tuple(table.clone() for table in given.block_tables),
                slot_mappings=given.slot_mappings.clone(),
            )
        return DraftPass(
            counts,
            views.input_ids.clone(),
            views.positions.clone(),
            views.is_padding.clone(),
            self.hidden_states[: counts.num_tokens_after_padding].clone(),
            copies,
        )


def fill_next_token_ids(
    input_ids: Tensor,
    positions: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    state: RequestState,
) -> None:
    """The known token behind each position, in place; 0 where there is none.

    input_ids: int32 [T], positions: int64 [T]. idx_mapping: int32 [num_reqs]. query_start_loc:
    int32 [at least num_reqs + 1]. None is known behind a rejected draft and for padding. After a
    query at 10 .. 13 of which the drafts at 12 and 13 were rejected 13 tokens are known: those at
    11 and 12 stand for positions 10 and 11, and 0 for 12 and 13.
    """
    num_reqs, num_tokens = idx_mapping.shape[0], input_ids.shape[0]
    rows = token_rows(query_start_loc, num_reqs, num_tokens)
    is_real = rows < num_reqs
    slots = idx_mapping.index_select(0, rows.clamp_(max=num_reqs - 1))
    behind = positions + 1
    is_real.logical_and_(behind < state.total_len.index_select(0, slots))
    last = state.all_token_ids.shape[1] - 1
    known = state.all_token_ids[slots, behind.clamp_(max=last)]
    input_ids.copy_(known.masked_fill_(is_real.logical_not_(), 0))
