"""Faults of dummy runs and of the null block: garbage in it (K05), live state touched (K06)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pcpbench.engine import dummy_run
from pcpbench.engine import engine as engine_module
from pcpbench.engine.block_table import PAD_SLOT_ID
from pcpbench.engine.engine import Engine
from pcpbench.engine.input_batch import InputBatch
from pcpbench.engine.kv_cache import NULL_BLOCK_ID
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import DCP, PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.faults.padding import padded_length_one
from pcpbench.model import attention, sparse_attention
from pcpbench.pcp_manager import PCPManager

IDLE: Final = replace(PCP, scenario="s3-idle-and-reuse")
IDLE_DCP: Final = replace(DCP, scenario="s3-idle-and-reuse")
EDGES: Final = replace(PCP, scenario="s2-capture-edges")


def _fill_null_block(site: Site, value: float) -> None:
    """What a capture left in the null block of the engine that captured."""

    def faulty(start: Callable[..., None], self: Engine, *args: Any) -> None:
        start(self, *args)
        if self.graphs is None:
            return
        for cache in (cache for worker in self.workers for cache in worker.kv_caches):
            cache[NULL_BLOCK_ID].fill_(value)
            site.hit()

    site.wrap(Engine, "start", faulty)


def null_block_nan(site: Site) -> None:
    """Capture leaves NaN in the null block."""
    _fill_null_block(site, torch.nan)


def null_block_large(site: Site) -> None:
    """Capture leaves a large finite number in the null block, as it may: 0 x 1e30 is 0."""
    _fill_null_block(site, 1e30)


def padding_reads_null_block(site: Site) -> None:
    """Padding rows attend to a null block that holds NaN."""
    _fill_null_block(site, torch.nan)
    padded_length_one(site)


def unseen_keys_from_null_block(site: Site) -> None:
    """Keys past a row's length are read from the null block and given weight zero."""
    _fill_null_block(site, torch.nan)

    def faulty(
        gather: Callable[..., Tensor], cache: Tensor, table: Any, num_keys: list[int], *first: Any
    ) -> Tensor:
        keys = gather(cache, table, num_keys, *first)
        if min(num_keys) == keys.shape[1]:
            return keys
        site.hit()
        seen = np.arange(keys.shape[1]) < np.array(num_keys)[:, None]
        null = cache[NULL_BLOCK_ID, 0].float()
        return torch.where(torch.from_numpy(seen).unsqueeze(-1), keys, null)

    def filled(fill: Callable[..., Any], named: Any, is_key: Any) -> Any:
        if not is_key.all():
            site.hit()
        return np.where(is_key, named, NULL_BLOCK_ID)

    site.wrap(attention, "_gather_keys", faulty)
    site.wrap(sparse_attention, "_without_gaps", filled)


def dummy_with_real_slots(site: Site) -> None:
    """A dummy batch is given the slots that the last step left."""

    def faulty(_: Callable[..., Tensor], self: PCPManager, num_tokens: int) -> Tensor:
        assert self.slot_mappings is not None
        slots = self.slot_mappings[:, : num_tokens * self.pcp_world_size]
        if (slots >= 0).any():
            site.hit()
        return slots

    site.wrap(PCPManager, "get_dummy_slot_mappings", faulty)


def dummy_clears_global_tables(site: Site) -> None:
    """A dummy run zeroes the global block tables along with the rank-local ones."""

    def faulty(make: Callable[..., Any], self: PCPManager, num_reqs: int) -> Any:
        assert self.block_tables is not None
        for table in self.block_tables.block_tables:
            if table[:num_reqs].any():
                site.hit()
            table[:num_reqs].zero_()
        return make(self, num_reqs)

    site.wrap(PCPManager, "get_dummy_block_tables", faulty)


def dummy_keeps_tables(site: Site) -> None:
    """The tables of a dummy batch are those of the last step."""

    def faulty(_: Callable[..., Any], self: PCPManager, num_reqs: int) -> tuple[Tensor, ...]:
        tables = tuple(table[:num_reqs] for table in self.input_block_tables)
        if any(table.any() for table in tables):
            site.hit()
        return tables

    site.wrap(PCPManager, "get_dummy_block_tables", faulty)


def dummy_keeps_lengths(site: Site) -> None:
    """Only the tokens of a dummy batch reach the buffers that graphs read."""

    def faulty(stage: Callable[..., InputBatch], self: PCPManager, batch: InputBatch) -> InputBatch:
        buffers = self.input_buffers
        rows = batch.num_reqs_after_padding
        stale = (buffers.seq_lens[:rows].clone(), buffers.query_start_loc[: rows + 1].clone())
        local = stage(self, batch)
        if not torch.equal(stale[0], local.seq_lens):
            site.hit()
        local.seq_lens.copy_(stale[0])
        local.query_start_loc.copy_(stale[1])
        return local

    site.wrap(PCPManager, "prepare_inputs_to_capture", faulty)


def dummy_not_flagged(site: Site) -> None:
    """Dummy tokens are not marked as padding."""

    def faulty(make: Callable[..., InputBatch], *args: Any) -> InputBatch:
        site.hit()
        return make(*args, is_padding=False)

    site.wrap(InputBatch, "make_dummy", faulty)


def dummy_context_short(site: Site) -> None:
    """The context of a dummy batch leaves the interleave out."""

    def faulty(
        set_context: Callable[..., None], batch: InputBatch, tables: Any, length: int, *args: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        site.hit()
        set_context(batch, tables, length // IDLE_DCP.interleave, *args, **kwargs)

    site.wrap(dummy_run, "set_dummy_context", faulty)


def _write_in_dummy(site: Site, only_replaying: bool) -> None:
    replaying = {id(worker) for worker in site.workers(site.replaying)}

    def faulty(stage: Callable[..., Any], worker: Worker, *args: Any) -> Any:
        if not only_replaying or id(worker) in replaying:
            worker.kv_caches[0][1, 0].fill_(7.0)
            site.hit()
        return stage(worker, *args)

    site.wrap(engine_module, "stage_dummy_batch", faulty)


def idle_step_writes_kv(site: Site) -> None:
    """An idle step writes to block 1, on every arm."""
    _write_in_dummy(site, only_replaying=False)


def idle_replay_writes_kv(site: Site) -> None:
    """An idle step writes to block 1 where graphs are replayed."""
    _write_in_dummy(site, only_replaying=True)


def pad_fill_too_late(site: Site) -> None:
    """PAD is filled in after the metadata was built, over the last real slot as well."""

    def faulty(prepare: Callable[..., None], self: Worker, *args: Any) -> None:
        prepare(self, *args)
        metadata = self.context.metadata
        assert metadata is not None
        (written,) = torch.nonzero(metadata.slot_mappings[0] >= 0, as_tuple=True)
        if len(written):
            metadata.slot_mappings[0, written[-1]] = PAD_SLOT_ID
            site.hit()

    site.wrap(Worker, "prepare_attention", faulty)


FAULTS: Final = (
    shipped("K05", "null-block-nan", "Capture leaves NaN in the null block.", null_block_nan,
            "C9", setting=EDGES),
    shipped("K05", "null-block-large", "Not a fault: capture leaves 1e30 in the null block, which "
            "nothing reads but with weight zero.", null_block_large, setting=EDGES),
    shipped("K05", "padding-reads-null-block", "Padding rows attend to a null block of NaN.",
            padding_reads_null_block, "C1", setting=EDGES),
    shipped("K05", "unseen-keys-from-null-block", "Keys past a row's length come from a null block "
            "of NaN, with weight 0.", unseen_keys_from_null_block, "C13", "C16"),
    shipped("K06", "dummy-with-real-slots", "A dummy run keeps the last step's slots and writes "
            "live KV.", dummy_with_real_slots, "C4", "C9", setting=IDLE),
    shipped("K06", "dummy-clears-global-tables", "A dummy run zeroes rows of the global block "
            "tables.", dummy_clears_global_tables, "C9", setting=IDLE),
    shipped("K06", "idle-step-writes-kv", "An idle step writes to KV block 1 on every arm.",
            idle_step_writes_kv, "C9", "C15", setting=IDLE),
    shipped("K06", "idle-replay-writes-kv", "An idle step writes to KV block 1 where graphs are "
            "replayed.", idle_replay_writes_kv, "C13", "C9", "C15", setting=IDLE),
    shipped("K06", "dummy-keeps-tables", "A dummy run reads the last step's block tables.",
            dummy_keeps_tables, "C5", setting=IDLE, max_dcp=1),
    shipped("K06", "dummy-keeps-lengths", "Lengths and starts of a dummy batch stay those of the "
            "last step.", dummy_keeps_lengths, "C1", "C2", setting=IDLE),
    shipped("K06", "dummy-not-flagged", "Dummy tokens are not marked as padding.",
            dummy_not_flagged, "C3", setting=IDLE),
    shipped("K16", "dummy-context-too-short", "An idle step under DCP has dcp tokens of context, "
            "not dcp x interleave.", dummy_context_short, "C1", "C6", setting=IDLE_DCP),
    shipped("K06", "pad-fill-too-late", "PAD is filled in after the metadata was built and takes a "
            "real token's slot.", pad_fill_too_late, "C4"),
)  # fmt: skip
