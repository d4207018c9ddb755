"""One rank: its request states, tables, buffers, caches and the parts of a step that it runs.

Owns all state of a rank and the order of a step's parts (SPEC 4-7, 9). The engine drives the ranks
in lockstep and decides what a step runs as; a worker never looks at another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pcpbench.config import EngineConfig
from pcpbench.dcp import maybe_prepare_dcp_local_seq_lens
from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.dispatcher import BatchCounts
from pcpbench.engine.groups import RankGroups
from pcpbench.engine.input_batch import InputBatch, InputBuffers
from pcpbench.engine.kv_cache import allocate_kv_caches
from pcpbench.engine.microbatch import Microbatches
from pcpbench.engine.prefill_keys import prefill_keys
from pcpbench.engine.request_state import RequestState
from pcpbench.engine.routing import RoutingBuffers
from pcpbench.engine.sampled import Sampled, logits_rows
from pcpbench.engine.taps import TapBuffers
from pcpbench.model.context import (
    AttentionMetadata,
    ExpertParallel,
    ForwardContext,
    PrefillKeys,
)
from pcpbench.model.decoder import MLADecoder
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.pcp_manager import PCPManager, maybe_partition_pcp_batch
from pcpbench.plan import StepPlan


class Worker:
    """The state of one rank and the parts of a step.

    max_num_tokens: the most tokens one rank-local step holds, padding included.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: RankGroups,
        model: MLADecoder,
        device: torch.device,
        max_num_tokens: int,
    ) -> None:
        parallel, cache = config.parallel_config, config.cache_config
        world, self.config = parallel.world, config
        self.rank, self.groups, self.model, self.device = groups.rank, groups, model, device
        self.dcp_size, self.dcp_rank = world.dcp_size, world.dcp_rank(groups.rank)
        self.cp_interleave = parallel.cp_kv_cache_interleave_size
        self._make_state(max_num_tokens)
        block_sizes = cache.block_sizes(len(model.shape.kv_groups))
        shape = model.shape
        self.kv_caches = allocate_kv_caches(
            shape.num_hidden_layers,
            cache.num_gpu_blocks,
            [block_sizes[group] for group in shape.layer_groups] or block_sizes[0],
            shape.latent_dim,
            model.dtype,
            device,
        )
        selected: Tensor | None = None
        if shape.is_sparse:
            self.kv_caches += allocate_kv_caches(
                shape.num_hidden_layers,
                cache.num_gpu_blocks,
                cache.block_size,
                shape.index_head_dim,
                model.dtype,
                device,
            )
            chosen = (shape.num_hidden_layers, max_num_tokens, shape.index_topk)
            selected = torch.zeros(chosen, dtype=torch.int32, device=device)
        self.context = ForwardContext(
            rank=groups.rank,
            pcp=groups.pcp,
            tp=groups.tp,
            dcp=groups.dcp,
            cp_interleave=self.cp_interleave,
            dcp_backend=parallel.dcp_comm_backend,
            kv_caches=self.kv_caches,
            kv_groups=shape.layer_groups,
            selected=selected,
        )
        if parallel.enable_expert_parallel:
            self.context.ep = ExpertParallel(groups.world, parallel.all2all_backend)
        if shape.moe_layers:
            self.context.routing = RoutingBuffers(shape, parallel, max_num_tokens, device)
        # A replay leaves its result here: the last thing a graph does is to copy into it.
        self.hidden_states = torch.zeros(
            (max_num_tokens, shape.hidden_size), dtype=model.dtype, device=device
        )
        self.taps: TapBuffers | None = None
        self.microbatches: Microbatches | None = None
        if parallel.enable_dbo:
            self.microbatches = Microbatches(
                parallel,
                self.context,
                self.block_tables,
                self.local_buffers.max_num_reqs,
                max_num_tokens,
            )
        self.global_batch: InputBatch | None = None
        self.local_batch: InputBatch | None = None

    def _make_state(self, max_num_tokens: int) -> None:
        """Request states, block tables, input buffers and the PCP manager of this rank."""
        config, model, device = self.config, self.model, self.device
        world, cache = config.parallel_config.world, config.cache_config
        max_num_reqs = config.scheduler_config.max_num_seqs
        max_model_len = config.model_config.max_model_len
        self.request_state = RequestState(
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_tokens,
            num_speculative_steps=config.num_speculative_tokens,
            vocab_size=model.shape.vocab_size,
            device=device,
        )
        groups_of_layers = model.shape.kv_groups
        block_sizes = cache.block_sizes(len(groups_of_layers))
        self.block_tables = BlockTables(
            block_sizes=block_sizes,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_tokens,
            max_num_blocks_per_group=[
                math.ceil(max_model_len / group.span(block_size, world.dcp_size))
                for group, block_size in zip(groups_of_layers, block_sizes, strict=True)
            ],
            device=device,
            cp_size=world.dcp_size,
            cp_rank=self.dcp_rank,
            cp_interleave=self.cp_interleave,
            dcp_sharded=[group.dcp_sharded for group in groups_of_layers],
            sliding_window_reach=[group.sliding_window for group in groups_of_layers],
        )
        self.input_buffers = InputBuffers(max_num_reqs, max_num_tokens, device)
        self.pcp_manager: PCPManager | None = None
        if world.pcp_size > 1:
            self.pcp_manager = PCPManager(
                pcp_world_size=world.pcp_size,
                pcp_rank=world.pcp_rank(self.rank),
                device=device,
                shard_decode_requests=world.shard_decode_requests,
                max_num_reqs=max_num_reqs,
                max_num_tokens=max_num_tokens,
                block_tables=self.block_tables,
                dcp_world_size=world.dcp_size,
                dcp_rank=self.dcp_rank,
                cp_interleave=self.cp_interleave,
            )

    def add_taps(self) -> None:
        """Keep intermediate results from here on; before anything is captured."""
        world = self.config.parallel_config.world
        self.taps = self.context.taps = TapBuffers(
            self.model.shape,
            tp_size=world.tp_size,
            dcp_size=world.dcp_size,
            pcp_size=world.pcp_size,
            max_num_tokens=len(self.hidden_states),
            dtype=self.model.dtype,
            device=self.device,
        )

    def routing_buffers(self) -> list[RoutingBuffers]:
        """Of the whole batch, then of each microbatch; nothing without MoE layers."""
        contexts = [self.context, *(self.microbatches.contexts if self.microbatches else ())]
        found = [context.routing for context in contexts]
        return [buffers for buffers in found if isinstance(buffers, RoutingBuffers)]

    @property
    def local_buffers(self) -> InputBuffers:
        """The persistent buffers that the forward pass reads (the PCP manager's, if any)."""
        return self.input_buffers if self.pcp_manager is None else self.pcp_manager.input_buffers

    def update_states(self, plan: StepPlan, tokens: dict[str, list[int]]) -> None:
        """Let finished and preempted requests go, admit new ones, extend block tables.

        tokens: req_id -> prompt and whatever was generated before a preemption, for each new one.
        """
        for req_id in (*plan.finished_req_ids, *plan.preempted_req_ids):
            self.request_state.remove_request(req_id)
        for request in plan.new_requests:
            self.request_state.add_request(
                req_id=request.req_id,
                prompt_len=len(request.prompt_token_ids),
                all_token_ids=tokens[request.req_id],
                num_computed_tokens=0,
                max_tokens=request.max_tokens,
            )
        fresh = {request.req_id for request in plan.new_requests}
        for req_id, block_ids in plan.new_block_ids.items():
            index = self.request_state.req_id_to_index[req_id]
            ids = tuple(list(group) for group in block_ids)
            self.block_tables.append_block_ids(index, ids, overwrite=req_id in fresh)
        self.request_state.apply_staged_writes()
        self.block_tables.apply_staged_writes()

    def prepare_inputs(self, plan: StepPlan) -> BatchCounts:
        """Write a step's global batch into the input buffers; return what dispatch may know."""
        batch = InputBatch.from_plan(plan.scheduled, self.request_state, self.input_buffers)
        self.global_batch = batch
        query_lens = batch.num_scheduled_tokens
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        if self.pcp_manager is not None:
            num_reqs, num_tokens = self.pcp_manager.get_counts_for_dispatch(
                query_lens, batch.is_prefilling_np
            )
        longest = int(query_lens.max())
        uniform = longest if longest == query_lens.min() and not batch.has_prefill else None
        cut = self.config.parallel_config.num_ubatches_for(num_tokens, batch.has_prefill)
        return BatchCounts(num_reqs, num_tokens, uniform, batch.has_prefill, longest, cut)

    def prepare_attention(self, descriptor: BatchExecutionDescriptor) -> None:
        """Partition and pad the batch, then fill tables, slots and lengths for the forward pass."""
        assert self.global_batch is not None
        batch = maybe_partition_pcp_batch(
            self.pcp_manager, self.global_batch, descriptor, self.input_buffers
        )
        self.local_batch = batch
        self._prepare_dcp_lens(batch)
        cursors = self.request_state.num_computed_tokens
        if self.pcp_manager is not None:
            tables, slots = self.pcp_manager.prepare_attn(batch, cursors)
        else:
            tables = self.block_tables.gather_block_tables(
                batch.idx_mapping,
                batch.num_reqs_after_padding,
                num_computed_tokens=cursors,
            )
            slots = self.block_tables.compute_slot_mappings(
                batch.idx_mapping,
                batch.query_start_loc,
                batch.positions,
                batch.num_tokens_after_padding,
            )
        self._set_metadata(batch, tables, slots, self._prefill_keys(batch, descriptor))
        self.cut_batch(descriptor)

    def _prefill_keys(
        self, batch: InputBatch, descriptor: BatchExecutionDescriptor
    ) -> PrefillKeys | None:
        """Where prefills find their keys, when ranks hold other tokens and other shards."""
        manager = self.pcp_manager
        if manager is None or self.dcp_size == 1:
            return None
        return prefill_keys(
            manager.global_batch,
            batch,
            manager.row_req_index,
            manager.hidden_restore_idx,
            self.block_tables,
            is_cut=descriptor.num_ubatches > 1,
        )

    def cut_batch(self, descriptor: BatchExecutionDescriptor) -> None:
        """Cut the prepared local batch into the descriptor's microbatches; see microbatch.py."""
        if self.microbatches is not None:
            assert self.local_batch is not None
            is_full = descriptor.cg_mode is CUDAGraphMode.FULL
            metadata = self.context.metadata
            self.microbatches.cut(descriptor.num_ubatches, self.local_batch, metadata, is_full)

    def use_batch(self, batch: InputBatch, attention: bool) -> None:
        """Make a dummy batch the one that `forward` runs on; see dummy_run."""
        self.local_batch = batch
        if not attention:
            self.context.metadata = None

    def set_dummy_attention(
        self, batch: InputBatch, tables: Sequence[Tensor], slots: Tensor
    ) -> None:
        """Attention inputs of a dummy batch, DCP lengths included."""
        self._prepare_dcp_lens(batch)
        self._set_metadata(batch, tables, slots)

    def _prepare_dcp_lens(self, batch: InputBatch) -> None:
        batch.dcp_local_seq_lens = maybe_prepare_dcp_local_seq_lens(
            self.local_buffers.dcp_local_seq_lens,
            batch.seq_lens,
            batch.num_reqs,
            self.dcp_size,
            self.dcp_rank,
            self.cp_interleave,
            num_reqs_padded=batch.num_reqs_after_padding,
        )

    def _set_metadata(
        self,
        batch: InputBatch,
        tables: Sequence[Tensor],
        slots: Tensor,
        prefill: PrefillKeys | None = None,
    ) -> None:
        self.context.metadata = AttentionMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            dcp_local_seq_lens=batch.dcp_local_seq_lens,
            block_tables=tuple(tables),
            slot_mappings=slots,
            prefill=prefill,
        )

    async def forward(self, *, into_buffer: bool) -> Tensor:
        """Run the model on the local batch; hidden states [tokens after padding, hidden].

        into_buffer: leave them in the persistent buffer, as code under capture must.
        """
        batch = self.local_batch
        assert batch is not None
        if self.microbatches is not None and self.microbatches.parts:
            out = self.hidden_states if into_buffer else None
            return await self.microbatches.forward(self.model, out)
        self.context.is_padding = batch.is_padding
        hidden: Tensor = await self.model(batch.input_ids, batch.positions, self.context)
        if not into_buffer:
            return hidden
        return self.hidden_states[: hidden.shape[0]].copy_(hidden)

    async def sample(self, hidden: Tensor, plan: StepPlan) -> Sampled:
        """Restore the global order, compute logits where a token is due, and take the best.

        hidden: [local tokens after padding, hidden]. Every rank samples, as each needs the tokens.
        """
        batch = self.global_batch
        assert batch is not None
        if self.pcp_manager is not None:
            gathered = await self.groups.pcp.all_gather(hidden)
            hidden, batch = self.pcp_manager.restore_for_sampling(gathered)
        hidden = hidden[: batch.num_tokens]
        rows = logits_rows(batch, plan)
        logits = self.model.compute_logits(hidden[torch.from_numpy(rows).to(self.device)])
        return Sampled(logits.argmax(-1), logits, hidden, rows)

    def set_drafts(self, plan: StepPlan, drafts: Sequence[int]) -> None:
        """Hand the step's draft tokens, request after request, to the device's state."""
        state = self.request_state
        asked = [request for request in plan.scheduled if request.num_draft_tokens]
        slots = np.array([state.req_id_to_index[request.req_id] for request in asked])
        counts = np.array([request.num_draft_tokens for request in asked])
        table = np.zeros((len(asked), state.num_speculative_steps), dtype=np.int32)
        table[np.arange(state.num_speculative_steps) < counts[:, None]] = drafts
        state.set_drafts(slots, table)

    def post_update(self, plan: StepPlan, tokens: Tensor) -> Tensor | None:
        """Advance the device's cursors and write the sampled (or forced) tokens back.

        tokens: one for each row of logits. Returns the number of drafts that each request which
        samples has accepted, int64 on the device; None for a step without drafts.
        """
        batch = self.global_batch
        assert batch is not None
        if batch.num_draft_tokens:
            return self.request_state.post_verify(
                batch.idx_mapping_np,
                batch.num_scheduled_tokens,
                np.array([request.num_computed_tokens for request in plan.scheduled]),
                np.array([request.num_logits for request in plan.scheduled]),
                tokens,
            )
        samples = np.array([request.samples for request in plan.scheduled], dtype=np.bool_)
        computed = np.array([request.num_computed_tokens for request in plan.scheduled])
        self.request_state.post_update(
            batch.idx_mapping_np, batch.num_scheduled_tokens, samples, tokens
        )
        # Where the step before had drafts the host knows by now what became of them.
        after = computed + batch.num_scheduled_tokens
        self.request_state.num_computed_tokens_np[batch.idx_mapping_np] = after
        return None
