"""One step's batch: the persistent buffers it is written to and the view that a step has of them.

Owns `InputBuffers`, `InputBatch`, its padding and its dummies (SPEC 4, 6). What a step's tokens are
is in batch_inputs.py; how a batch is cut into ranks, in pcp_manager.py.

R rows (requests), T tokens. `_np` names a host copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcpbench.device.staging import to_device
from pcpbench.engine.batch_inputs import fill_input_ids, prepare_pos_seq_lens
from pcpbench.plan import ScheduledRequest
from pcpbench.records import BoolArray, IntArray

if TYPE_CHECKING:
    from pcpbench.engine.block_table import BlockTables
    from pcpbench.engine.request_state import RequestState

__all__ = [
    "InputBatch",
    "InputBuffers",
    "fill_input_ids",
    "pad_batch",
    "prepare_pos_seq_lens",
    "set_dummy_context",
]


class BufferViews(NamedTuple):
    """Leading slices of the buffers, as long as one batch."""

    input_ids: Tensor
    positions: Tensor
    is_padding: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class InputBuffers:
    """The tensors that a forward pass reads; graphs capture their addresses, so they never move.

    input_ids int32 [T], positions int64 [T], is_padding bool [T], query_start_loc int32 [R+1],
    seq_lens int32 [R], dcp_local_seq_lens int32 [R], with R = max_num_reqs, T = max_num_tokens.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: torch.device) -> None:
        self.max_num_reqs, self.max_num_tokens, self.device = max_num_reqs, max_num_tokens, device
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.is_padding = torch.zeros(max_num_tokens, dtype=torch.bool, device=device)
        self.query_start_loc = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.dcp_local_seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def views(self, num_reqs: int, num_tokens: int) -> BufferViews:
        """The first rows and tokens of each buffer that a batch of these sizes is seen through."""
        return BufferViews(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            is_padding=self.is_padding[:num_tokens],
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
        )

    def check_room(self, num_reqs: int, num_tokens: int) -> None:
        """Raise ValueError if a batch of these sizes does not fit."""
        if num_reqs > self.max_num_reqs or num_tokens > self.max_num_tokens:
            raise ValueError(
                f"a batch of {num_reqs} rows and {num_tokens} tokens does not fit buffers of "
                f"{self.max_num_reqs} rows and {self.max_num_tokens} tokens"
            )

    def pad(self, num_reqs: int, num_reqs_padded: int, num_tokens: int, num_padded: int) -> None:
        """Neutralise what lies past the real rows and tokens, whatever the last step left there.

        Lengths, input ids and positions 0, `is_padding` set, query_start_loc at num_tokens.
        """
        if num_reqs < num_reqs_padded:
            self.seq_lens[num_reqs:num_reqs_padded].zero_()
            self.query_start_loc[num_reqs + 1 : num_reqs_padded + 1].fill_(num_tokens)
        if num_tokens < num_padded:
            self.input_ids[num_tokens:num_padded].zero_()
            self.positions[num_tokens:num_padded].zero_()
            self.is_padding[num_tokens:num_padded].fill_(True)


@dataclass(kw_only=True)
class InputBatch:
    """One step's view of its buffers, with host copies of what the host knows.

    num_reqs, num_tokens count what is real; the `_after_padding` twins what the tensors hold.
    idx_mapping int32 [num_reqs]: each row's request slot; idx_mapping_np likewise.
    num_scheduled_tokens int [num_reqs]: query tokens of each row.
    query_start_loc int32 [rows after padding + 1]; query_start_loc_np int [same]: padded entries
    equal num_tokens.
    seq_lens int32 [rows after padding]: length through each row's last query token, 0 in padding.
    seq_lens_cpu_upper_bound int32 CPU tensor [same]: the host's belief, which rejected draft
    tokens can make too large.
    dcp_local_seq_lens int32 [same]: this rank's share; None until it was prepared, or without DCP.
    num_computed_tokens_np, prefill_len_np, num_computed_prefill_tokens_np int [num_reqs],
    is_prefilling_np bool [num_reqs]: the phase is what is left to prefill, not the query's shape.
    has_prefill: whether any request of the *global* batch prefills.
    input_ids int32, positions int64, is_padding bool [tokens after padding]. gathered_is_padding
    [the same x pcp]: flags of all PCP ranks' tokens, where the forward pass is handed those.
    logits_indices int64: last token of each row in the global batch; empty in a rank-local one,
    which nothing is sampled from.
    The rest stands for upstream's fields of the same name: carried, not read here.
    """

    req_ids: list[str]
    num_reqs: int
    num_reqs_after_padding: int
    idx_mapping: Tensor
    idx_mapping_np: IntArray
    num_scheduled_tokens: IntArray
    num_tokens: int
    num_tokens_after_padding: int
    query_start_loc: Tensor
    query_start_loc_np: IntArray
    seq_lens: Tensor
    seq_lens_cpu_upper_bound: Tensor
    num_computed_tokens_np: IntArray
    prefill_len_np: IntArray
    num_computed_prefill_tokens_np: IntArray
    is_prefilling_np: BoolArray
    has_prefill: bool
    input_ids: Tensor
    positions: Tensor
    is_padding: Tensor
    logits_indices: Tensor
    gathered_is_padding: Tensor | None = None
    dcp_local_seq_lens: Tensor | None = None
    num_draft_tokens: int = 0
    num_draft_tokens_per_req: IntArray | None = None
    max_query_len: int | None = None
    expanded_idx_mapping: Tensor | None = None
    expanded_local_pos: Tensor | None = None
    cu_num_logits: Tensor | None = None
    cu_num_logits_np: IntArray | None = None
    decode_graph_eligible: bool = True
    has_structured_output_reqs: bool = False
    prompt_lens: Tensor | None = None
    max_seq_len_np: IntArray | None = None

    @classmethod
    def from_plan(
        cls,
        scheduled: Sequence[ScheduledRequest],
        state: RequestState,
        input_buffers: InputBuffers,
    ) -> InputBatch:
        """The global batch of a step, written into the buffers (SPEC 4).

        Rows are in the plan's order. Query lengths and phases come from the plan; positions,
        lengths and input ids from the device's state; num_computed_tokens_np is what the host
        believes, which drafts rejected in the step before make too large. Raises ValueError for a
        step without requests or one that does not fit the buffers.
        """
        num_reqs = len(scheduled)
        query_lens, computed, prefill_len, num_drafts = _host_facts(scheduled)
        slots = np.array([state.req_id_to_index[r.req_id] for r in scheduled], dtype=np.int32)
        starts = _starts(query_lens)
        num_tokens = int(starts[-1])
        input_buffers.check_room(num_reqs, num_tokens)
        if not num_reqs:
            raise ValueError("a step without requests has no batch: run a dummy step")
        idx_mapping = to_device(slots, input_buffers.device)
        views = input_buffers.views(num_reqs, num_tokens)
        input_buffers.query_start_loc[num_reqs + 1 :].fill_(num_tokens)
        views.query_start_loc.copy_(torch.from_numpy(starts))
        prepare_pos_seq_lens(
            idx_mapping,
            views.query_start_loc,
            state.num_computed_tokens,
            views.positions,
            input_buffers.seq_lens,
        )
        fill_input_ids(views.input_ids, views.positions, idx_mapping, views.query_start_loc, state)
        views.is_padding.fill_(False)
        is_prefilling = computed < prefill_len
        computed = state.num_computed_tokens_np[slots]
        return cls(
            req_ids=[r.req_id for r in scheduled],
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=idx_mapping,
            idx_mapping_np=slots,
            num_scheduled_tokens=query_lens,
            num_tokens=num_tokens,
            num_tokens_after_padding=num_tokens,
            query_start_loc=views.query_start_loc,
            query_start_loc_np=starts,
            seq_lens=views.seq_lens,
            seq_lens_cpu_upper_bound=torch.from_numpy(computed + query_lens),
            num_computed_tokens_np=computed,
            prefill_len_np=prefill_len,
            num_computed_prefill_tokens_np=np.minimum(computed, prefill_len),
            is_prefilling_np=is_prefilling,
            has_prefill=bool(is_prefilling.any()),
            input_ids=views.input_ids,
            positions=views.positions,
            is_padding=views.is_padding,
            logits_indices=views.query_start_loc[1:].long().sub_(1),
            num_draft_tokens=int(num_drafts.sum()),
            num_draft_tokens_per_req=num_drafts,
            max_query_len=int(query_lens.max()),
        )

    @classmethod
    def make_dummy(
        cls,
        num_reqs: int,
        num_tokens: int,
        input_buffers: InputBuffers,
        max_query_len: int | None = None,
        is_padding: bool = True,
    ) -> InputBatch:
        """A batch of no request: zero ids at position 0, no context, staged in the buffers.

        Tokens are spread evenly, the remainder over the last rows: 7 tokens over 3 rows are 2, 2,
        3. max_query_len: the longest query of the descriptor. is_padding: whether the tokens are
        marked as padding, as those of warm-up, capture and idle steps are. Raises ValueError when
        the sizes do not fit the buffers or each other.
        """
        input_buffers.check_room(num_reqs, num_tokens)
        if num_reqs < 1 or num_tokens < num_reqs:
            raise ValueError(
                f"a dummy batch of {num_reqs} rows and {num_tokens} tokens: it needs a row, and a "
                "token for each row"
            )
        query_lens = _spread(num_tokens, num_reqs)
        if max_query_len is not None and query_lens[-1] > max_query_len:
            raise ValueError(
                f"{num_tokens} tokens over {num_reqs} rows need queries longer than {max_query_len}"
            )
        starts = _starts(query_lens)
        views, device = input_buffers.views(num_reqs, num_tokens), input_buffers.device
        views.input_ids.zero_()
        views.positions.zero_()
        views.is_padding.fill_(is_padding)
        views.query_start_loc.copy_(torch.from_numpy(starts))
        input_buffers.query_start_loc[num_reqs + 1 :].fill_(num_tokens)
        views.seq_lens.copy_(torch.from_numpy(query_lens))
        input_buffers.seq_lens[num_reqs:].zero_()
        nothing = np.zeros(num_reqs, dtype=np.int32)
        return cls(
            req_ids=[f"dummy-{row}" for row in range(num_reqs)],
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=torch.arange(num_reqs, dtype=torch.int32, device=device),
            idx_mapping_np=np.arange(num_reqs, dtype=np.int32),
            num_scheduled_tokens=query_lens,
            num_tokens=num_tokens,
            num_tokens_after_padding=num_tokens,
            query_start_loc=views.query_start_loc,
            query_start_loc_np=starts,
            seq_lens=views.seq_lens,
            seq_lens_cpu_upper_bound=torch.from_numpy(query_lens.copy()),
            num_computed_tokens_np=nothing,
            prefill_len_np=nothing.copy(),
            num_computed_prefill_tokens_np=nothing.copy(),
            is_prefilling_np=np.zeros(num_reqs, dtype=np.bool_),
            has_prefill=False,
            input_ids=views.input_ids,
            positions=views.positions,
            is_padding=views.is_padding,
            logits_indices=views.query_start_loc[1:].long().sub_(1),
            max_query_len=max_query_len,
        )


def _host_facts(scheduled: Sequence[ScheduledRequest]) -> IntArray:
    """Tokens scheduled, tokens computed, prefill_len and draft tokens, int32 [4, num_reqs]."""
    facts = [
        (r.num_scheduled_tokens, r.num_computed_tokens, r.prefill_len, r.num_draft_tokens)
        for r in scheduled
    ]
    return np.array(facts, dtype=np.int32).reshape(len(facts), 4).T.copy()


def _starts(query_lens: IntArray) -> IntArray:
    """query_start_loc of these queries: lengths 2, 0, 3 start at 0, 2, 2 and end at 5."""
    starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=starts[1:])
    return starts


def _spread(num_tokens: int, num_reqs: int) -> IntArray:
    """Even query lengths, the remainder over the last rows."""
    query_lens = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int32)
    query_lens[num_reqs - num_tokens % num_reqs :] += 1
    return query_lens


def pad_batch(
    batch: InputBatch, num_tokens_padded: int, num_reqs_padded: int, buffers: InputBuffers
) -> InputBatch:
    """The same batch on the same buffers, padded to these counts (SPEC 4).

    buffers: those that the batch was written to. Raises ValueError when the counts do not cover the
    batch or do not fit the buffers.
    """
    num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
    if num_reqs_padded < num_reqs or num_tokens_padded < num_tokens:
        raise ValueError(
            f"a batch of {num_reqs} rows and {num_tokens} tokens cannot be padded to "
            f"{num_reqs_padded} rows and {num_tokens_padded} tokens"
        )
    buffers.check_room(num_reqs_padded, num_tokens_padded)
    buffers.pad(num_reqs, num_reqs_padded, num_tokens, num_tokens_padded)
    starts = np.full(num_reqs_padded + 1, num_tokens, dtype=batch.query_start_loc_np.dtype)
    starts[: num_reqs + 1] = batch.query_start_loc_np[: num_reqs + 1]
    bound = np.zeros(num_reqs_padded, dtype=np.int32)
    bound[:num_reqs] = batch.seq_lens_cpu_upper_bound.numpy()[:num_reqs]
    return replace(
        batch,
        num_reqs_after_padding=num_reqs_padded,
        num_tokens_after_padding=num_tokens_padded,
        query_start_loc_np=starts,
        seq_lens_cpu_upper_bound=torch.from_numpy(bound),
        dcp_local_seq_lens=None,
        **buffers.views(num_reqs_padded, num_tokens_padded)._asdict(),
    )


def set_dummy_context(
    input_batch: InputBatch,
    block_tables: BlockTables,
    context_len: int,
    num_kv_blocks: int,
    max_model_len: int,
    input_block_tables: Sequence[Tensor] | None = None,
) -> None:
    """Give each row of a dummy batch `context_len` tokens of context, in place (SPEC 6).

    Lengths grow by the context, as far as max_model_len allows. The rows of input_block_tables (the
    global input tables by default; nothing else is written) are zeroed: the whole context lies in
    the null block, which every rank has (num_kv_blocks is at least 1), so no request's KV is read.
    """
    if context_len <= 0:
        return
    if num_kv_blocks < 1:
        raise ValueError("a KV cache without blocks has no null block to stand for a context")
    num_reqs = input_batch.num_reqs
    tables = block_tables.input_block_tables if input_block_tables is None else input_block_tables
    for table in tables:
        table[:num_reqs].zero_()
    room = max_model_len - input_batch.num_scheduled_tokens
    context = np.clip(room, 0, context_len).astype(np.int32)
    longer = torch.from_numpy(input_batch.num_scheduled_tokens.astype(np.int32) + context)
    input_batch.seq_lens[:num_reqs].copy_(longer)
    input_batch.seq_lens_cpu_upper_bound[:num_reqs].copy_(longer)
    input_batch.num_computed_tokens_np = context
