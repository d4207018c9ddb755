"""Fills memory that a step must not read with values that show if it does (SPEC 12, C16).

Owns what is filled and with what. Is told which KV slots are unread; what else is unread follows
from the engine's own order of work: every input buffer is rewritten in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcpbench.engine.buffers import MOE_IS_PADDING
from pcpbench.engine.draft_model import DraftWorker
from pcpbench.engine.engine import Engine
from pcpbench.engine.input_batch import InputBuffers
from pcpbench.engine.kv_cache import NULL_BLOCK_ID
from pcpbench.engine.worker import Worker
from pcpbench.errors import UsageError

POOL_BYTES = {"nan": 0xFF, "large": 0x7B}
"""0xFF.. is NaN in every float type; 0x7B.. is large and finite in each, 61,000 in float16."""

Masks = Sequence[Sequence[NDArray[np.bool_]]]


def poison_engine(engine: Engine, unread: Masks, kind: str) -> None:
    """Fill what the next step may not read, before it is prepared.

    unread: [rank][KV group][slots of a cache], True where nothing may be read. kind: `nan` or
    `large`. Integer memory gets valid values that are wrong: other tokens' slots, foreign blocks,
    the longest lengths. The padding tokens of the next step's batch get other ids and positions
    once the batch is prepared.
    """
    if kind not in POOL_BYTES:
        raise UsageError(f"poison {kind!r} is unknown: use {' or '.join(POOL_BYTES)}.")
    for worker, masks in zip(engine.workers, unread, strict=True):
        with torch.inference_mode():
            _poison_worker(worker, masks, kind)
    for rank, masks in zip(engine.drafts.ranks if engine.drafts else (), unread, strict=False):
        with torch.inference_mode():
            _poison_draft(rank, masks)
    if engine.graphs is not None:
        fill = getattr(engine.graphs.pool, "poison", None)  # a device's own pool has no such door
        if fill is not None:
            fill(POOL_BYTES[kind], used=True)
    for scratch in engine.address_book.scratch():
        _poison_scratch(scratch, kind)


def churn_memory(device: torch.device) -> None:
    """Allocate memory of several sizes, fill it with NaN and free it: 64 B to 4 MiB.

    Whoever reads memory that was freed before may then find NaN in it.
    """
    sizes = [1 << power for power in range(4, 21, 2)] * 2
    blocks = [torch.full((size,), float("nan"), device=device) for size in sizes]
    del blocks


def wipe_slots(engine: Engine, slots: Sequence[Sequence[NDArray[np.integer[Any]]]]) -> None:
    """Zero KV slots on all layers, [rank][KV group][slots]; those past a cache are left out."""
    for worker, groups in zip(engine.workers, slots, strict=True):
        for layer, cache in enumerate(worker.kv_caches):
            rows = cache.view(-1, cache.shape[-1])
            chosen = groups[worker.context.kv_group(layer)]
            index = torch.from_numpy(chosen[chosen < len(rows)].astype(np.int64))
            with torch.inference_mode():
                rows.index_fill_(0, index.to(cache.device), 0)


def poison_padding(engine: Engine) -> None:
    """Give the padding tokens of the prepared batch other ids and positions.

    Their slots are PAD and their rows have length 0, so nobody may notice. Ids run through the
    vocabulary, so that some of them have larger embeddings than the batch's own tokens.
    """
    limit = engine.config.model_config.max_model_len
    for worker in engine.workers:
        batch = worker.local_batch
        assert batch is not None
        count = batch.num_tokens_after_padding - batch.num_tokens
        if count <= 0:
            continue
        numbers = torch.arange(count, device=worker.device)
        first = batch.num_tokens
        ids = (numbers * 37 + 13 * batch.num_tokens + 5) % engine.shape.vocab_size
        batch.input_ids[first:].copy_(ids)
        batch.positions[first:].copy_((numbers * 11 + 3) % limit)


def _poison_worker(worker: Worker, masks: Sequence[NDArray[np.bool_]], kind: str) -> None:
    largest = torch.finfo(worker.model.dtype).max / 8
    value = float("nan") if kind == "nan" else largest
    for layer, cache in enumerate(worker.kv_caches):
        mask = masks[worker.context.kv_group(layer)]
        slots = torch.from_numpy(np.flatnonzero(mask)).to(worker.device)
        cache.view(-1, cache.shape[-1]).index_fill_(0, slots, value)
    for buffers in {id(b): b for b in (worker.input_buffers, worker.local_buffers)}.values():
        _poison_buffers(buffers, worker)
    for own in worker.microbatches.buffers if worker.microbatches else ():
        own.query_start_loc.fill_(len(worker.hidden_states))
        own.seq_lens.fill_(worker.config.model_config.max_model_len)
        own.dcp_local_seq_lens.fill_(worker.config.model_config.max_model_len)
    tables, manager = worker.block_tables, worker.pcp_manager
    for group, mask in enumerate(masks):
        foreign = _foreign_block(mask, tables.block_sizes[group])
        wrong_slot = _wrong_slot(mask, foreign, tables.block_sizes[group])
        _poison_columns(worker, group, foreign)
        tables.input_block_tables[group].fill_(foreign)
        tables.slot_mappings[group].fill_(wrong_slot)
        for own in worker.microbatches.buffers if worker.microbatches else ():
            own.block_tables[group].fill_(foreign)
            own.slot_mappings[group].fill_(wrong_slot)
        if manager is not None:
            manager.input_block_tables[group].fill_(foreign)
            if manager.slot_mappings is not None:
                manager.slot_mappings[group].fill_(wrong_slot)
    gathered = None if manager is None else manager.persistent_buffers().get(MOE_IS_PADDING)
    if gathered is not None:
        gathered.fill_(True)


def _poison_draft(rank: DraftWorker, masks: Sequence[NDArray[np.bool_]]) -> None:
    """What the passes of a draft model read is written for each of them; its caches are above."""
    _poison_buffers(rank.input_buffers, rank.worker)
    for group, mask in enumerate(masks):
        block_size = rank.worker.block_tables.block_sizes[group]
        foreign = _foreign_block(mask, block_size)
        rank.input_block_tables[group].fill_(foreign)
        rank.slot_mappings[group].fill_(_wrong_slot(mask, foreign, block_size))


@torch.inference_mode()
def _poison_scratch(scratch: Tensor, kind: str) -> None:
    if not scratch.dtype.is_floating_point:
        scratch.fill_(True if scratch.dtype is torch.bool else torch.iinfo(scratch.dtype).max)
    else:
        largest = torch.finfo(scratch.dtype).max / 8
        scratch.fill_(float("nan") if kind == "nan" else largest)


def _poison_buffers(buffers: InputBuffers, worker: Worker) -> None:
    limit = worker.config.model_config.max_model_len
    buffers.input_ids.fill_(worker.model.shape.vocab_size - 1)
    buffers.positions.fill_(limit - 1)
    buffers.is_padding.fill_(True)
    buffers.query_start_loc.fill_(buffers.max_num_tokens)
    buffers.seq_lens.fill_(limit)
    buffers.dcp_local_seq_lens.fill_(limit)


def _poison_columns(worker: Worker, group: int, foreign: int) -> None:
    """Columns past the last block of each request slot, and whole rows of free slots.

    With a sliding window, those of blocks that were given back, too.
    """
    table: Tensor = worker.block_tables.block_tables[group]
    held = np.zeros(table.shape[0], dtype=np.int64)
    taken = list(worker.request_state.req_id_to_index.values())
    held[taken] = worker.block_tables.num_blocks_np[group, taken]
    columns = np.arange(table.shape[1])
    unread = columns >= held[:, None]
    tables, reach = worker.block_tables, worker.block_tables.sliding_window_reach[group]
    if reach and taken:
        span = tables.block_sizes[group] * tables.group_cp_size(group)
        computed = worker.request_state.num_computed_tokens.cpu().numpy()[taken]
        unread[taken] |= columns < (np.maximum(computed + 1 - reach, 0) // span)[:, None]
    table.masked_fill_(torch.from_numpy(unread).to(table.device), foreign)


def _foreign_block(mask: NDArray[np.bool_], block_size: int) -> int:
    """A block of which nothing may be read, other than the null block where there is one."""
    free = np.flatnonzero(mask.reshape(-1, block_size).all(axis=1))
    return int(free[-1]) if len(free) else NULL_BLOCK_ID


def _wrong_slot(mask: NDArray[np.bool_], foreign: int, block_size: int) -> int:
    """A slot that holds a live token, so that a write to it is noticed."""
    live = np.flatnonzero(~mask)
    return int(live[0]) if len(live) else foreign * block_size
