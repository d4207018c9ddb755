"""vLLM's objects under the names that pcpbench's engine, recorder and poison use for their own.

Owns renaming only: every tensor is vLLM's own, seen through a view or a slice. Nothing is computed
here that a forward pass reads.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import numpy as np
from torch import Tensor

from pcpbench.engine.buffers import MOE_IS_PADDING
from pcpbench.engine.input_batch import InputBatch
from pcpbench.errors import EngineError
from pcpbench.records import IntArray


class StateView:
    """A RequestState of vLLM."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.max_num_reqs, self.max_model_len = inner.max_num_reqs, inner.max_model_len
        self.num_speculative_steps = inner.num_speculative_steps

    @property
    def req_id_to_index(self) -> dict[str, int]:
        """Request -> slot."""
        return cast("dict[str, int]", self.inner.req_id_to_index)

    @property
    def num_computed_tokens(self) -> Tensor:
        """The device's cursors, int32 [slots]."""
        return cast(Tensor, self.inner.num_computed_tokens.gpu)

    def remove_request(self, req_id: str) -> int | None:
        """Free a request's slot."""
        return cast("int | None", self.inner.remove_request(req_id))

    def known_tokens(self, req_id: str) -> list[int]:
        """All tokens of a request so far, prompt first."""
        index = self.req_id_to_index[req_id]
        count = int(self.inner.total_len.gpu[index])
        tokens: list[int] = self.inner.all_token_ids.gpu[index, :count].tolist()
        return tokens


class TablesView:
    """BlockTables of vLLM. dcp_sharded, sliding_window_reach: one entry a KV group, pcpbench's."""

    def __init__(self, inner: Any, dcp_sharded: list[bool], reach: list[int]) -> None:
        self.inner = inner
        self.block_sizes, self.device = list(inner.block_sizes), inner.device
        self.cp_size, self.cp_rank = inner.cp_size, inner.cp_rank
        self.cp_interleave = inner.cp_interleave
        self.num_kv_cache_groups = inner.num_kv_cache_groups
        self.dcp_sharded, self.sliding_window_reach = dcp_sharded, reach

    @property
    def block_tables(self) -> tuple[Tensor, ...]:
        """Tables of all request slots, one int32 [slots, columns] a group."""
        return tuple(table.gpu for table in self.inner.block_tables)

    @property
    def input_block_tables(self) -> tuple[Tensor, ...]:
        """Tables of a step's rows where there is no PCP."""
        return tuple(self.inner.input_block_tables)

    @property
    def slot_mappings(self) -> Tensor:
        """Slots of a step's tokens where there is no PCP."""
        return cast(Tensor, self.inner.slot_mappings)

    @property
    def num_blocks_np(self) -> IntArray:
        """Blocks that each slot holds, [groups, slots]."""
        return cast(IntArray, self.inner.num_blocks.np)

    def group_cp_size(self, group: int) -> int:
        """Ranks that one group's positions are spread over."""
        return self.cp_size if self.dcp_sharded[group] else 1

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Name -> tensor of everything here that a graph may read."""
        named = {f"block_tables.{i}": table for i, table in enumerate(self.block_tables)}
        for i, table in enumerate(self.input_block_tables):
            named[f"input_block_tables.{i}"] = table
        named["slot_mappings"] = self.slot_mappings
        return named


class ManagerView:
    """A PCPManager of vLLM."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def input_buffers(self) -> Any:
        """The rank-local buffers that the forward pass reads."""
        return self.inner.input_buffers

    @property
    def input_block_tables(self) -> tuple[Tensor, ...]:
        """The rank-local tables."""
        return tuple(self.inner._local_block_tables)

    @property
    def slot_mappings(self) -> Tensor:
        """The gathered slots."""
        return cast(Tensor, self.inner._gathered_kv_slot_mappings)

    @property
    def hidden_restore_idx(self) -> Tensor:
        """Each global token's place in what is gathered."""
        return cast(Tensor, self.inner._hidden_restore_idx)

    @property
    def padded_gather_idx(self) -> Tensor:
        """The global token at each place of what is gathered."""
        return cast(Tensor, self.inner._padded_gather_idx)

    @property
    def gathered_kv_write_mask(self) -> Tensor:
        """Which places of what is gathered write KV."""
        return cast(Tensor, self.inner._gathered_kv_write_mask)

    @property
    def their_global_batch(self) -> Any:
        """vLLM's own global batch of the last partition."""
        return self.inner._global_batch

    @property
    def global_batch(self) -> InputBatch:
        """The same under our names."""
        return our_batch(self.their_global_batch)

    @property
    def _rows(self) -> tuple[IntArray, IntArray]:
        return local_rows(self.inner._local_batch, self.their_global_batch)

    @property
    def row_req_index(self) -> IntArray:
        """Each local row's row of the global batch."""
        return self._rows[0]

    @property
    def row_start(self) -> IntArray:
        """Where each local row's tokens begin in that row's query."""
        return self._rows[1]

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Name -> tensor of what a graph may read here besides `input_buffers`."""
        named = {
            f"input_block_tables.{i}": table for i, table in enumerate(self.input_block_tables)
        }
        named["slot_mappings"] = self.slot_mappings
        named["global_slot_mappings"] = self.inner._global_batch_slot_mappings
        if gathers_flags(self.inner):
            named[MOE_IS_PADDING] = self.inner._moe_is_padding
        return named


def local_rows(local: Any, whole: Any) -> tuple[IntArray, IntArray]:
    """(row of the global batch, first token of its query) of each rank-local row, int64.

    vLLM keeps no such list after a partition; its batch says which slot a row is of and how many
    tokens of the request lie before it. A rank with nothing to do has one row of no tokens, of
    request 0, whose start is -1 as in pcpbench's own. A row of a slot that the global batch lacks
    has row -1, which the judge accuses.
    """
    row_of = {int(slot): row for row, slot in enumerate(whole.idx_mapping_np)}
    count = local.num_reqs
    slots = local.idx_mapping_np[:count]
    rows = np.array([row_of.get(int(slot), -1) for slot in slots], dtype=np.int64)
    starts = local.num_computed_tokens_np[:count] - whole.num_computed_tokens_np[rows]
    if local.num_tokens == 0:
        starts = np.full(count, -1)
    return rows, starts.astype(np.int64)


def gathers_flags(manager: Any) -> bool:
    """Whether this PCPManager flags all ranks' tokens, for each rank to route them all.

    vLLM 0.33 does so without expert parallelism.
    """
    return getattr(manager, "_moe_is_padding", None) is not None


def check_flags(manager: Any, expected: bool, version: str) -> None:
    """Raise EngineError for a PCPManager that flags the wrong tokens as padding.

    expected: whether each rank routes all PCP ranks' tokens, as without expert parallelism: a mask
    of its own tokens alone would then be one of other tokens, and the other way round. Generations
    before 0.33 know the own ones only.
    """
    knows = "moe_gathers_tokens" in inspect.signature(type(manager)).parameters
    if knows and gathers_flags(manager) is not expected:
        flagged, routed = ("its own", "all ranks'") if expected else ("all ranks'", "its own")
        raise EngineError(
            f"vllm {version} flags padding among {flagged} tokens of a PCP rank, where the rank "
            f"routes {routed} to experts (expert parallelism {'off' if expected else 'on'})."
        )


def our_batch(theirs: Any, manager: Any = None) -> InputBatch:
    """An InputBatch of vLLM as ours, on the same tensors.

    manager: the PCPManager that made it, if one did. Where it flags all ranks' tokens, one rank's
    after the other, this rank's are is_padding, and all of them gathered_is_padding: of
    [0 0 1 | 0 1 1] rank 1 has [0 1 1].
    """
    is_padding, gathered, total = theirs.is_padding, None, theirs.num_tokens_after_padding
    if manager is not None and gathers_flags(manager):
        gathered = theirs.is_padding
        is_padding = gathered[manager.pcp_rank * total :][:total]
    return InputBatch(
        req_ids=list(theirs.req_ids),
        num_reqs=theirs.num_reqs,
        num_reqs_after_padding=theirs.num_reqs_after_padding,
        idx_mapping=theirs.idx_mapping,
        idx_mapping_np=theirs.idx_mapping_np,
        num_scheduled_tokens=theirs.num_scheduled_tokens,
        num_tokens=theirs.num_tokens,
        num_tokens_after_padding=theirs.num_tokens_after_padding,
        query_start_loc=theirs.query_start_loc,
        query_start_loc_np=theirs.query_start_loc_np,
        seq_lens=theirs.seq_lens,
        seq_lens_cpu_upper_bound=theirs.seq_lens_cpu_upper_bound,
        num_computed_tokens_np=theirs.num_computed_tokens_np,
        prefill_len_np=theirs.prefill_len_np,
        num_computed_prefill_tokens_np=theirs.num_computed_prefill_tokens_np,
        is_prefilling_np=theirs.is_prefilling_np,
        has_prefill=theirs.has_prefill,
        input_ids=theirs.input_ids,
        positions=theirs.positions,
        is_padding=is_padding,
        gathered_is_padding=gathered,
        logits_indices=theirs.logits_indices,
        dcp_local_seq_lens=theirs.dcp_local_seq_lens,
        num_draft_tokens=theirs.num_draft_tokens,
        num_draft_tokens_per_req=theirs.num_draft_tokens_per_req,
        max_query_len=theirs.max_query_len,
    )
