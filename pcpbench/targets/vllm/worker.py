"""One rank whose state and step preparation are vLLM's, and whose forward pass is pcpbench's model.

Owns the seam between the two: what vLLM prepared becomes the metadata that the model reads, tensor
for tensor, and what the model computed goes back through vLLM's restoring and cursors. The engine,
its graphs, the recorder and the poison drive it as they drive the built-in worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pcpbench.config import EngineConfig
from pcpbench.device.staging import to_device
from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.dispatcher import BatchCounts
from pcpbench.engine.groups import RankGroups
from pcpbench.engine.request_state import RequestState
from pcpbench.engine.sampled import Sampled
from pcpbench.engine.verification import count_accepted
from pcpbench.engine.worker import Worker
from pcpbench.errors import CannotMeasure
from pcpbench.model.decoder import MLADecoder
from pcpbench.modes import BatchExecutionDescriptor
from pcpbench.pcp_manager import PCPManager
from pcpbench.plan import StepPlan
from pcpbench.targets.vllm.api import RankView, VllmApi
from pcpbench.targets.vllm.orders import rejected_in, scheduler_output
from pcpbench.targets.vllm.runner import RankRunner, Ready
from pcpbench.targets.vllm.views import ManagerView, StateView, TablesView, our_batch


@dataclass(frozen=True)
class VllmCounts(BatchCounts):
    """What vLLM's runner handed to dispatch, and the descriptor that it got."""

    chosen: BatchExecutionDescriptor | None = None


class VllmWorker(Worker):
    """One rank; see Worker. api: the installed vLLM."""

    def __init__(
        self,
        api: VllmApi,
        config: EngineConfig,
        groups: RankGroups,
        model: MLADecoder,
        device: torch.device,
        max_num_tokens: int,
    ) -> None:
        self.api = api
        self._tokens: dict[str, list[int]] = {}
        self._is_known = False
        self._ready: Ready | None = None
        # Drafts that the step before rejected, of which the scheduler has not heard yet.
        self._late: dict[str, int] = {}
        self._rejected: dict[str, int] = {}
        super().__init__(config, groups, model, device, max_num_tokens)

    def _make_state(self, max_num_tokens: int) -> None:
        groups = self.model.shape.kv_groups
        self.runner = RankRunner(
            self.api, self.config, self.rank, self.device, self.model.shape.vocab_size, groups
        )
        self.request_state = cast(RequestState, StateView(self.runner.request_state))
        self.block_tables = cast(
            BlockTables,
            TablesView(
                self.runner.block_tables,
                [group.dcp_sharded for group in groups],
                [group.sliding_window for group in groups],
            ),
        )
        self.input_buffers = self.runner.input_buffers
        self.pcp_manager: PCPManager | None = None
        if self.runner.pcp_manager is not None:
            self.pcp_manager = cast(PCPManager, ManagerView(self.runner.pcp_manager))

    def update_states(self, plan: StepPlan, tokens: dict[str, list[int]]) -> None:
        """Keep what enters: vLLM's runner updates its states as the step begins.

        A step without tokens has nothing else to do, and is run to its end.
        """
        self._tokens, self._is_known = tokens, False
        self._late, self._rejected = self._rejected, rejected_in(plan)
        if not plan.scheduled:
            self.runner.step(scheduler_output(self.api, plan, tokens))

    def prepare_inputs(self, plan: StepPlan) -> BatchCounts:
        """Run vLLM's execute_model up to the forward pass; what it handed to dispatch.

        All of the step's preparation is done by then, the partition included.
        """
        ready = self.runner.step(
            scheduler_output(self.api, plan, self._tokens, again=self._is_known, late=self._late)
        )
        self._is_known = True
        if ready is None or ready.dispatched is None:
            raise CannotMeasure(
                f"vllm {self.api.version} ended a step of {plan.num_tokens} tokens without a "
                "dispatch, or before its forward pass."
            )
        self._ready, asked = ready, ready.dispatched
        whole = self._their_global_batch()
        self.global_batch = our_batch(whole)
        lengths = whole.num_scheduled_tokens
        return VllmCounts(
            num_reqs=asked.num_reqs,
            num_tokens=asked.num_tokens,
            uniform_token_count=asked.uniform_token_count,
            has_prefill=bool(whole.has_prefill),
            max_query_len=int(lengths.max()),
            chosen=self.api.our_descriptor(asked.descriptor),
        )

    def prepare_attention(self, descriptor: BatchExecutionDescriptor) -> None:
        """Hand the forward pass what vLLM prepared for this descriptor."""
        self._use(self._prepared(), descriptor)

    def _use(self, ready: Ready, descriptor: BatchExecutionDescriptor) -> None:
        """Make a prepared batch the one that `forward` runs on, a dummy one with attention, too."""
        batch = our_batch(ready.batch, self.runner.pcp_manager)
        self.local_batch = batch
        is_real = ready is self._ready
        keys = self._prefill_keys(batch, descriptor) if is_real else None
        self._set_metadata(batch, ready.tables, ready.slots, keys)

    def stage_dummy(self, descriptor: BatchExecutionDescriptor) -> None:
        """A dummy batch of a captured shape, as vLLM stages it for a capture.

        It prepares attention for PIECEWISE ones as well, where it runs between the segments.
        """
        self._use(self.runner.stage_for_capture(self.api.descriptor(descriptor)), descriptor)

    def stage_idle(self) -> VllmCounts:
        """vLLM's dummy run for a step without work; what it handed to dispatch, and got."""
        ready = self.runner.dummy_step()
        asked = ready.dispatched
        if asked is None:
            raise CannotMeasure(f"vllm {self.api.version} ran a dummy step without a dispatch.")
        chosen = self.api.our_descriptor(asked.descriptor)
        self._use(ready, chosen)
        length = self.config.decode_query_len
        return VllmCounts(asked.num_reqs, asked.num_tokens, length, False, length, chosen=chosen)

    async def sample(self, hidden: Tensor, plan: StepPlan) -> Sampled:
        """Gather, let vLLM restore the global order, and take the best token at its logits rows."""
        whole = self._their_global_batch()
        if self.runner.pcp_manager is not None:
            gathered = await self.groups.pcp.all_gather(hidden)
            view = RankView(self.runner.pcp.rank_in_group, self.groups.pcp.size, gathered)
            hidden, whole = self.api.restore(self.runner.pcp_manager, hidden, view)
        hidden = hidden[: whole.num_tokens]
        kept = np.repeat([r.samples for r in plan.scheduled], np.diff(whole.cu_num_logits_np))
        chosen = whole.logits_indices[torch.from_numpy(kept).to(self.device)]
        logits = self.model.compute_logits(hidden[chosen])
        return Sampled(logits.argmax(-1), logits, hidden, chosen.cpu().numpy())

    def set_drafts(self, plan: StepPlan, drafts: Sequence[int]) -> None:
        """Leave the step's draft tokens where vLLM's speculator leaves them.

        Requests that enter with the step have no slot yet, and no drafts either.
        """
        state = self.runner.request_state
        left = list(drafts)
        for request in plan.scheduled:
            count = request.num_draft_tokens
            own, left = left[:count], left[count:]
            if own:
                slot = state.req_id_to_index[request.req_id]
                state.draft_tokens[slot, :count] = torch.tensor(own, device=self.device)

    def post_update(self, plan: StepPlan, tokens: Tensor) -> Tensor | None:
        """Advance vLLM's cursors and token states by its own kernels.

        Which drafts are right is found by pcpbench, greedily; vLLM's kernels count what was
        rejected and move on.
        """
        whole, state = self._their_global_batch(), self.runner.request_state
        width = 1 + state.num_speculative_steps
        counts = np.array([request.num_logits for request in plan.scheduled])
        (rows,) = counts.nonzero()
        sampled = torch.zeros((whole.num_reqs, width), dtype=torch.int64, device=self.device)
        num_sampled = torch.ones(whole.num_reqs, dtype=torch.int32, device=self.device)
        accepted = None
        if len(rows):
            taken = self._by_request(tokens.to(torch.int64), counts[rows], width)
            index = to_device(rows.astype(np.int64), self.device)
            if whole.num_draft_tokens:
                slots = to_device(whole.idx_mapping_np[rows].astype(np.int64), self.device)
                drafts = state.draft_tokens.index_select(0, slots)
                limits = to_device((counts[rows] - 1).astype(np.int64), self.device)
                accepted = count_accepted(drafts, taken, limits)
                num_sampled.index_copy_(0, index, (accepted + 1).to(torch.int32))
            sampled.index_copy_(0, index, taken)
        num_sampled, num_rejected = self.api.function("get_num_sampled_and_rejected")(
            num_sampled,
            whole.seq_lens[: whole.num_reqs],
            whole.cu_num_logits,
            whole.idx_mapping,
            state.prefill_len.gpu,
        )
        self.api.function("post_update")(
            whole.idx_mapping,
            state.num_computed_tokens.gpu,
            state.last_sampled_tokens,
            None,
            sampled,
            num_sampled,
            num_rejected,
            whole.query_start_loc,
            state.all_token_ids.gpu,
            state.total_len.gpu,
        )
        return accepted

    def _by_request(self, tokens: Tensor, counts: Any, width: int) -> Tensor:
        """Tokens row after row as [requests, width]; what lies past a request's own is filler."""
        first = to_device((counts.cumsum() - counts).astype(np.int64), self.device)
        places = first.unsqueeze(1) + torch.arange(width, device=self.device)
        return tokens[places.clamp_(max=tokens.shape[0] - 1)]

    @property
    def prepared_batch(self) -> Any:
        """vLLM's own rank-local batch of the last step."""
        return self._prepared().batch

    def _prepared(self) -> Ready:
        if self._ready is None:
            raise RuntimeError("no step has been prepared yet")
        return self._ready

    def _their_global_batch(self) -> Any:
        """vLLM's global batch of the last step."""
        if self.runner.pcp_manager is not None:
            return self.runner.pcp_manager._global_batch
        return self._prepared().batch
