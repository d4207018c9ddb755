"""Faults of capture: buffers that move (K10, K11, K15) and host values that freeze (K16)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from pcpbench.dcp import dcp_local_lens
from pcpbench.engine import dummy_run, microbatch
from pcpbench.engine import worker as worker_module
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import DCP, PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.faults.passes import changed_metadata, passes_of
from pcpbench.model.context import AttentionMetadata, ForwardContext
from pcpbench.model.mla import MLAAttention

Attend = Callable[..., Coroutine[Any, Any, None]]
Forward = Callable[..., Coroutine[Any, Any, Tensor]]

LONG: Final = replace(PCP, scenario="s11-long-kv")
LARGE: Final = replace(PCP, scenario="s8-large-eager-then-replay")
MIXED: Final = replace(PCP, scenario="s12-equal-tokens", candidate="full_and_piecewise")


def positions_moved(site: Site) -> None:
    """The positions buffer is made anew after capture."""
    for worker in site.workers(site.replaying):
        buffers = worker.local_buffers
        site.set(buffers, "positions", buffers.positions.clone())
        site.hit()


def lengths_made_anew(site: Site) -> None:
    """The seq_lens buffer is made anew in each step."""

    def faulty(prepare: Callable[..., None], self: Worker, *args: Any) -> None:
        buffers = self.local_buffers
        site.set(buffers, "seq_lens", buffers.seq_lens.clone())
        site.hit()
        prepare(self, *args)

    site.wrap(Worker, "prepare_attention", faulty)


def _remake_in_manager(site: Site, name: str, clone: Callable[[Any], Any]) -> None:
    for worker in site.workers(site.replaying):
        site.set(worker.pcp_manager, name, clone(getattr(worker.pcp_manager, name)))
        site.hit()


def tables_moved(site: Site) -> None:
    """The rank-local block tables are made anew after capture."""
    _remake_in_manager(site, "input_block_tables", lambda tables: tuple(t.clone() for t in tables))


def slots_moved(site: Site) -> None:
    """The gathered slot mapping is made anew after capture."""
    _remake_in_manager(site, "slot_mappings", torch.clone)


def dcp_lengths_elsewhere(site: Site) -> None:
    """DCP-local lengths go into a fresh tensor; the buffer that graphs read is never written."""

    def faulty(prepare: Callable[..., Any], out: Tensor, *args: Any, **kw: Any) -> Any:
        site.hit()
        return prepare(torch.empty_like(out), *args, **kw)

    for module in (worker_module, microbatch):
        site.wrap(module, "maybe_prepare_dcp_local_seq_lens", faulty)


def output_moved(site: Site) -> None:
    """The buffer that replays leave their result in is made anew after capture."""
    for worker in site.workers(site.replaying):
        site.set(worker, "hidden_states", worker.hidden_states.clone())
        site.hit()


def cache_moved(site: Site) -> None:
    """The KV cache of the first layer is allocated again after capture."""
    for worker in site.workers(site.replaying):
        site.set_item(worker.kv_caches, 0, worker.kv_caches[0].clone())
        site.hit()


def workspace_grows(site: Site) -> None:
    """Attention works in a shared workspace that a larger batch frees and allocates again."""
    spaces: dict[int, Tensor] = {}

    async def faulty(
        attend: Attend,
        self: MLAAttention,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor,
        context: ForwardContext,
        *index: Any,
    ) -> None:
        size = out.numel()
        held = spaces.get(id(context))
        if held is None or held.numel() < size:
            if held is not None:
                site.hit()
            spaces[id(context)] = held = out.new_zeros(size)
        space = held[:size].view_as(out)
        await attend(self, q, kv, space, lse, context, *index)
        out.copy_(space)

    site.wrap(MLAAttention, "attend", faulty)


def _replace_weight(site: Site, path: str, name: str, factor: float) -> None:
    models = {id(worker.model): worker.model for worker in site.workers()}
    for model in models.values():
        module = model.get_submodule(path)
        old = getattr(module, name)
        fresh = old.detach().clone().mul_(factor)
        is_weight = isinstance(old, nn.Parameter)
        site.set(module, name, nn.Parameter(fresh, requires_grad=False) if is_weight else fresh)
        site.hit()


def weight_rebound(site: Site) -> None:
    """A projection weight is bound to a copy after capture."""
    _replace_weight(site, "layers.0.attention", "w_qkv", 1.0)


def weight_updated(site: Site) -> None:
    """New weights are bound, not copied into the old memory."""
    _replace_weight(site, "layers.1.mlp", "w_down", 1.25)


def rope_rebound(site: Site) -> None:
    """The rotary table is bound to a copy after capture."""
    _replace_weight(site, "rotary", "table", 1.0)


def norm_rebound(site: Site) -> None:
    """A norm's constant is bound to a copy after capture."""
    _replace_weight(site, "norm", "floor", 1.0)


def captured_without_context(site: Site) -> None:
    """Ranks with no context skip attention by a branch on the host, and capture has no context."""

    def no_context(_: Callable[..., None], *args: Any, **kw: Any) -> None:
        site.hit()

    site.wrap(dummy_run, "set_dummy_context", no_context)
    skip_ranks_without_context(site)


def skip_ranks_without_context(site: Site) -> None:
    """The host decides for each pass whether a rank's part of attention is run at all."""
    is_empty: dict[int, bool] = {}

    async def forward(original: Forward, self: Worker, **kw: Any) -> Tensor:
        for batch, context in passes_of(self):
            lengths = batch.num_computed_tokens_np + batch.num_scheduled_tokens
            shares = dcp_local_lens(lengths, self.dcp_size, self.dcp_rank, self.cp_interleave)
            is_empty[id(context)] = not shares.any()
        return await original(self, **kw)

    def local(original: Callable[..., None], self: MLAAttention, *args: Any) -> None:
        _, out, lse, _, context = args
        if is_empty.get(id(context)):
            out.zero_()
            lse.fill_(-torch.inf)
        else:
            original(self, *args)

    site.wrap(Worker, "forward", forward)
    site.wrap(MLAAttention, "_local", local)


def _with_metadata(
    site: Site, change: Callable[[Worker, AttentionMetadata], AttentionMetadata | None]
) -> None:
    """Run every forward pass on changed metadata."""

    async def forward(original: Forward, self: Worker, **kw: Any) -> Tensor:
        with changed_metadata(self, partial(change, self)):
            return await original(self, **kw)

    site.wrap(Worker, "forward", forward)


def longest_baked(site: Site) -> None:
    """Attention is given as many table columns as the longest row needs: a host value."""

    def change(worker: Worker, metadata: AttentionMetadata) -> AttentionMetadata:
        assert worker.local_batch is not None
        batch = worker.local_batch
        longest = int((batch.num_computed_tokens_np + batch.num_scheduled_tokens).max())
        span = worker.block_tables.block_sizes[0] * worker.dcp_size
        columns = max(1, int(np.ceil(longest / span)))
        site.hit()
        return replace(metadata, block_tables=tuple(t[:, :columns] for t in metadata.block_tables))

    _with_metadata(site, change)


def padding_branch_baked(site: Site) -> None:
    """A batch that is all padding skips attention on the host, and capture rows are padding."""

    def change(worker: Worker, metadata: AttentionMetadata) -> AttentionMetadata | None:
        assert worker.local_batch is not None
        if not worker.local_batch.req_ids[0].startswith("dummy-"):
            return metadata
        site.hit()
        return None

    _with_metadata(site, change)


def break_keeps_metadata(site: Site) -> None:
    """Attention between PIECEWISE segments keeps the metadata of its first run."""
    first: dict[int, tuple[Tensor, AttentionMetadata | None]] = {}

    async def faulty(attend: Attend, self: MLAAttention, q: Tensor, *args: Any) -> None:
        context = args[3]
        if context.metadata is None:
            return await attend(self, q, *args)
        _, kept = first.setdefault(id(q), (q, context.metadata))
        now, context.metadata = context.metadata, kept
        if kept is not now:
            site.hit()
        try:
            return await attend(self, q, *args)
        finally:
            context.metadata = now

    site.wrap(MLAAttention, "attend", faulty)


FAULTS: Final = (
    shipped("K10", "positions-buffer-moved", "The positions buffer is re-created after capture.",
            positions_moved, "C8", "C13"),
    shipped("K10", "seq-lens-made-anew", "The seq_lens buffer is re-created in each step.",
            lengths_made_anew, "C8", "C13"),
    shipped("K10", "block-tables-moved", "The rank-local block tables are re-created after "
            "capture.", tables_moved, "C8", "C13"),
    shipped("K10", "slot-mapping-moved", "The gathered slot mapping is re-created after capture.",
            slots_moved, "C8", "C13"),
    shipped("K10", "dcp-lengths-in-fresh-tensor", "DCP-local lengths are prepared in a fresh "
            "tensor, not in the captured buffer.", dcp_lengths_elsewhere, "C13", "C8",
            setting=DCP),
    shipped("K10", "output-buffer-moved", "The buffer of a replay's result is re-created after "
            "capture.", output_moved, "C8", "C13"),
    shipped("K11", "kv-cache-moved", "A layer's KV cache is allocated again after capture.",
            cache_moved, "C8", "C13"),
    shipped("K11", "workspace-grows", "A shared attention workspace is freed and grown by a batch "
            "larger than any captured one.", workspace_grows, "C8", setting=LARGE,
            at_capture=True),
    shipped("K15", "weight-rebound", "A projection weight is rebound to a copy after capture.",
            weight_rebound, "C8"),
    shipped("K15", "weight-updated-by-rebinding", "New weights are rebound, not copied into the "
            "captured memory.", weight_updated, "C8", "C13"),
    shipped("K15", "rope-table-rebound", "The rotary table is rebound to a copy after capture.",
            rope_rebound, "C8"),
    shipped("K15", "norm-constant-rebound", "A constant of the last norm is rebound to a copy "
            "after capture.", norm_rebound, "C8"),
    shipped("K16", "captured-without-dcp-context", "A host-side skip for ranks without context is "
            "baked into graphs captured with none.", captured_without_context, "C13", setting=DCP,
            at_capture=True),
    shipped("K16", "longest-sequence-baked", "The longest row's block count at capture limits what "
            "a replay attends to.", longest_baked, "C13", setting=LONG, at_capture=True),
    shipped("K16", "padding-branch-baked", "A host branch for batches of padding skips attention "
            "in every replay.", padding_branch_baked, "C13", at_capture=True),
    shipped("K16", "break-keeps-metadata", "Attention between PIECEWISE segments keeps the "
            "metadata of its first run.", break_keeps_metadata, "C13", setting=MIXED,
            at_capture=True),
)  # fmt: skip
