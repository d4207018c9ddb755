"""Faults that are the same on every arm, the one-rank reference included (K33).

Metadata, plan and arms agree with one another; only the numbers are not the model's. Those of the
forward pass are injected before capture, so that graphs hold them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pcpbench.engine import worker as worker_module
from pcpbench.engine.sampled import Sampled
from pcpbench.engine.scheduler import Request, Scheduler
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.model import mla, sparse_mla
from pcpbench.model.mla import MLAAttention
from pcpbench.model.sparse_mla import SparseMLAAttention

EDGES: Final = replace(PCP, scenario="s2-capture-edges")
SCARCE: Final = replace(PCP, scenario="preemption")
LONG: Final = replace(PCP, scenario="s11-long-kv")


def one_cache_for_all_layers(site: Site) -> None:
    """All layers get the same KV cache tensor."""

    def faulty(allocate: Callable[..., list[Tensor]], *args: Any) -> list[Tensor]:
        site.hit()
        caches = allocate(*args)
        return caches[:1] * len(caches)

    site.wrap(worker_module, "allocate_kv_caches", faulty)


def logits_of_row_before(site: Site) -> None:
    """Logits are computed from the row before the one that the step says it sampled."""

    async def faulty(sample: Callable[..., Any], self: Worker, *args: Any) -> Sampled:
        sampled: Sampled = await sample(self, *args)
        rows = torch.from_numpy(np.maximum(sampled.rows - 1, 0)).to(self.device)
        site.hit()
        logits = self.model.compute_logits(sampled.hidden[rows])
        return replace(sampled, logits=logits, tokens=logits.argmax(-1))

    site.wrap(Worker, "sample", faulty)


def blocks_freed_in_last_step(site: Site) -> None:
    """A request's blocks are free as soon as its last step is scheduled, before that has run."""
    freed: dict[int, set[int]] = {}

    def faulty(
        take: Callable[..., None], self: Scheduler, request: Request, count: int, step: Any
    ) -> None:
        take(self, request, count, step)
        early = freed.setdefault(id(step), set())
        new = {block for ids in step.new_block_ids.get(request.req_id, ()) for block in ids}
        if early & new:
            site.hit()
        num_outputs = request.num_output_tokens + self._share(request, count).num_output_tokens
        if num_outputs == request.max_tokens:
            early.update(block for ids in request.block_ids for block in ids)
            self._release(request)

    def schedule(original: Callable[..., Any], self: Scheduler, *args: Any) -> Any:
        freed.clear()
        return original(self, *args)

    site.wrap(Scheduler, "_take", faulty)
    site.wrap(Scheduler, "schedule", schedule)


def attention_before_write(site: Site) -> None:
    """A layer attends before it writes its KV: no token of the step is seen, itself included."""
    waiting: dict[int, tuple[Callable[..., None], tuple[Tensor, ...]]] = {}

    def write(original: Callable[..., None], *args: Tensor) -> None:
        waiting[args[2].data_ptr()] = original, args

    async def attend(
        original: Callable[..., Coroutine[Any, Any, None]], self: MLAAttention, *args: Any
    ) -> None:
        await original(self, *args)
        for cache in args[-1].kv_caches[self.layer :: self.shape.num_hidden_layers]:
            late, kept = waiting.pop(cache.data_ptr())
            site.hit()
            late(*kept)

    site.wrap(mla, "kv_cache_write", write)
    for kind in (MLAAttention, SparseMLAAttention):
        site.wrap(kind, "attend_keys", attend)


def newest_key_missed(site: Site) -> None:
    """A decode's attention, or its choice of keys, ends one key early, where its metadata ends with
    its own."""

    def faulty(first: int, dcp: slice) -> Callable[..., None]:
        def short(attend: Callable[..., None], *args: Any) -> None:
            starts, lengths, local = args[first : first + 3]
            is_decode = (starts.diff() == 1).logical_and(lengths > 1)
            if local is not None:
                size, rank, interleave = args[dcp]
                owner = (lengths - 1).div(interleave, rounding_mode="floor").remainder(size)
                local = local - is_decode.logical_and(owner == rank).int()
            site.hit()
            lengths = lengths - is_decode.int()
            attend(*args[: first + 1], lengths, local, *args[first + 3 :])

        return short

    site.wrap(mla, "mla_attention", faulty(3, slice(8, 11)))
    site.wrap(sparse_mla, "index_topk", faulty(4, slice(7, 10)))


FAULTS: Final = (
    shipped("K33", "one-cache-for-all-layers", "All layers read and write the same KV cache "
            "tensor, on every arm.", one_cache_for_all_layers, "C18", setting=EDGES,
            at_capture=True),
    shipped("K33", "logits-of-row-before", "Logits come from the row before the sampled one, on "
            "every arm.", logits_of_row_before, "C18", setting=EDGES),
    shipped("K33", "blocks-freed-in-last-step", "A request's blocks are handed out again in its "
            "last step, so that two own them.", blocks_freed_in_last_step, "C18", setting=SCARCE),
    shipped("K33", "attention-before-kv-write", "Attention runs before the KV write, on every "
            "arm: no token of a step is seen.", attention_before_write, "C18", setting=EDGES,
            at_capture=True),
    shipped("K33", "newest-key-missed", "Decode attention ends one key early, on every arm.",
            newest_key_missed, "C18", setting=LONG, at_capture=True),
)  # fmt: skip
