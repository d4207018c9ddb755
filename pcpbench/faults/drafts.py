"""Faults of speculative decoding: rejected drafts (K34), capture sizes (K20), causality (K22).

Their settings have draft tokens; phases by the look of a query of 1 + k tokens are in phases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pcpbench.engine import engine, request_state
from pcpbench.engine.block_table import PAD_SLOT_ID, BlockTables
from pcpbench.engine.dispatcher import Candidates
from pcpbench.engine.input_batch import InputBatch
from pcpbench.engine.request_state import RequestState
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import DCP, PCP, shipped
from pcpbench.faults.fault import PARTITION_DRIFT, Site
from pcpbench.model import attention
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.records import IntArray

K3: Final = replace(PCP, spec_tokens=3)
UNEVEN_SIZES: Final = replace(PCP, spec_tokens=2, capture_sizes="1,2,4,8,16,32")
DCP_K3: Final = replace(DCP, spec_tokens=3)


def _sizes(site: Site, shape: Callable[[int, int], BatchExecutionDescriptor]) -> None:
    """FULL candidates are shape(capture size, decode query length), for sizes that hold one."""

    def faulty(
        build: Callable[..., Candidates], mode: CUDAGraphMode, sizes: tuple[int, ...], **kw: Any
    ) -> Candidates:
        sound, length = build(mode, sizes, **kw), kw["decode_query_len"]
        kept = [d for d in sound.descriptors if d.cg_mode is not CUDAGraphMode.FULL]
        if len(kept) < len(sound.descriptors):
            site.hit()
            full = [shape(size, length) for size in sorted(sizes) if size >= length]
            kept += [d for d in full[::-1] if (d.num_reqs or 0) <= kw["max_num_seqs"]]
        return replace(sound, descriptors=tuple(kept))

    site.wrap(engine, "build_candidates", faulty)


def size_not_rounded(site: Site) -> None:
    """A decode graph keeps its capture size, whatever the query length."""
    _sizes(
        site,
        lambda size, length: BatchExecutionDescriptor(
            CUDAGraphMode.FULL, size, size // length, length
        ),
    )


def size_counted_as_requests(site: Site) -> None:
    """A decode graph has as many requests as tokens: captured with queries of one token."""
    _sizes(
        site,
        lambda size, length: BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, length),
    )


def host_cursor(site: Site) -> None:
    """Positions and lengths come from the host's cursor, which takes all drafts for accepted."""

    def faulty(
        make: Callable[..., InputBatch], scheduled: Any, state: RequestState, *args: Any
    ) -> InputBatch:
        sound = state.num_computed_tokens
        believed = torch.from_numpy(state.num_computed_tokens_np.copy()).to(sound)
        slots = [state.req_id_to_index[request.req_id] for request in scheduled]
        if not believed[slots].equal(sound[slots]):
            site.hit()
        state.num_computed_tokens = believed
        try:
            return make(scheduled, state, *args)
        finally:
            state.num_computed_tokens = sound

    site.wrap(InputBatch, "from_plan", faulty)


def rejected_kv_kept(site: Site) -> None:
    """Positions that rejected drafts have written count as written and are not written again."""
    written: dict[int, Tensor] = {}

    def prepare(original: Callable[..., Any], self: Worker, plan: Any) -> Any:
        counts, batch = original(self, plan), self.global_batch
        assert batch is not None
        believed = np.repeat(batch.num_computed_tokens_np, batch.num_scheduled_tokens)
        kept = batch.positions < torch.from_numpy(believed).to(batch.positions)
        if kept.any():
            site.hit()
        written[id(self.block_tables)] = kept
        return counts

    def slots(original: Callable[..., Tensor], self: BlockTables, *args: Any, **kw: Any) -> Tensor:
        found, kept = original(self, *args, **kw), written[id(self)]
        found[:, : len(kept)].masked_fill_(kept, PAD_SLOT_ID)
        return found

    site.wrap(Worker, "prepare_inputs", prepare)
    site.wrap(BlockTables, "compute_slot_mappings", slots)


def one_draft_too_many(site: Site) -> None:
    """The first wrong draft is accepted, too."""

    def faulty(
        count: Callable[..., Tensor], drafts: Tensor, targets: Tensor, num_drafts: Tensor
    ) -> Tensor:
        site.hit()
        return torch.minimum(count(drafts, targets, num_drafts) + 1, num_drafts)

    site.wrap(request_state, "count_accepted", faulty)


def any_match_accepted(site: Site) -> None:
    """Right drafts count wherever they stand, also behind a wrong one."""

    def faulty(
        count: Callable[..., Tensor], drafts: Tensor, targets: Tensor, num_drafts: Tensor
    ) -> Tensor:
        offsets = torch.arange(drafts.shape[1], device=drafts.device)
        hits = (drafts == targets[:, :-1]) & (offsets < num_drafts.unsqueeze(1))
        found = hits.sum(1)
        if not found.equal(count(drafts, targets, num_drafts)):
            site.hit()
        return found

    site.wrap(request_state, "count_accepted", faulty)


def cursor_not_taken_back(site: Site) -> None:
    """Rejected drafts stay counted as computed on the device."""

    def faulty(
        verify: Callable[..., Tensor],
        self: RequestState,
        slots: IntArray,
        num_scheduled: IntArray,
        computed: IntArray,
        num_logits: IntArray,
        targets: Tensor,
    ) -> Tensor:
        before = self.num_computed_tokens[slots]
        accepted = verify(self, slots, num_scheduled, computed, num_logits, targets)
        full = before + torch.from_numpy(num_scheduled).to(before)
        if not full.equal(self.num_computed_tokens[slots]):
            site.hit()
        self.num_computed_tokens[slots] = full
        return accepted

    site.wrap(RequestState, "post_verify", faulty)


def host_cursor_not_corrected(site: Site) -> None:
    """The host's cursor goes on from what it believed and never learns what was rejected."""

    def faulty(
        verify: Callable[..., Tensor],
        self: RequestState,
        slots: IntArray,
        num_scheduled: IntArray,
        computed: IntArray,
        *args: Any,
    ) -> Tensor:
        believed = self.num_computed_tokens_np[slots].copy()
        if (believed != computed).any():
            site.hit()
        return verify(self, slots, num_scheduled, believed, *args)

    site.wrap(RequestState, "post_verify", faulty)


def drafts_of_neighbour(site: Site) -> None:
    """Each request verifies the drafts of the request before it."""

    def faulty(
        give: Callable[..., None], self: RequestState, slots: IntArray, drafts: IntArray
    ) -> None:
        if len(slots) > 1:
            site.hit()
        give(self, slots, np.roll(drafts, 1, axis=0))

    site.wrap(RequestState, "set_drafts", faulty)


def query_sees_later_tokens(site: Site) -> None:
    """Under DCP a query of four tokens is not causal: each sees the keys of those after it."""

    def faulty(behind: Callable[..., Any], lens: Any, n: int, size: int, *rest: int) -> Any:
        found = behind(lens, n, size, *rest)
        if size == 1 or n != 4:
            return found
        site.hit()
        return np.zeros_like(found)

    site.wrap(attention, "_owned_behind", faulty)


FAULTS: Final = (
    shipped("K20", "capture-size-not-rounded", "Decode graphs keep a capture size that is no "
            "multiple of the decode query length.", size_not_rounded, "C10",
            setting=UNEVEN_SIZES, at_capture=True),
    shipped("K20", "capture-size-as-requests", "Decode graphs of 1 + k tokens a request are "
            "captured as if each had one.", size_counted_as_requests, "C10",
            setting=UNEVEN_SIZES, at_capture=True),
    shipped("K22", "query-sees-later-tokens", "A query of several tokens is not causal under DCP.",
            query_sees_later_tokens, PARTITION_DRIFT, setting=DCP_K3, at_capture=True),
    shipped("K34", "positions-from-host-cursor", "Positions come from the host's cursor, which "
            "takes rejected drafts for computed.", host_cursor, "C1", "C3", setting=K3),
    shipped("K34", "rejected-kv-kept", "KV that rejected drafts left is not overwritten.",
            rejected_kv_kept, "C4", setting=K3),
    shipped("K34", "one-draft-too-many", "The first wrong draft is accepted, too.",
            one_draft_too_many, "C17", setting=K3),
    shipped("K34", "right-draft-behind-wrong-one", "Right drafts are accepted also behind a wrong "
            "one.", any_match_accepted, "C17", setting=K3),
    shipped("K34", "cursor-not-taken-back", "The device's cursor counts rejected drafts as "
            "computed.", cursor_not_taken_back, "C17", setting=K3),
    shipped("K34", "host-cursor-not-corrected", "The host's cursor never learns of rejected drafts "
            "and runs away.", host_cursor_not_corrected, "C17", setting=K3),
    shipped("K34", "drafts-of-neighbour", "Each request verifies the drafts of the one before it.",
            drafts_of_neighbour, "C3", "C17", setting=K3),
)  # fmt: skip
