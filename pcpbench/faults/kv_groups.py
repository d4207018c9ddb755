"""Faults of several KV groups (K40): windows, recycled blocks, groups taken for one another.

What changes the forward pass is injected before capture, so that graphs hold it; it is the same on
every arm unless the fault says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from pcpbench.engine import block_table
from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.scheduler import Request, Scheduler
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import PARTITION_DRIFT, Site
from pcpbench.kv_groups import KVGroup
from pcpbench.model import mla
from pcpbench.model.context import AttentionMetadata, ForwardContext
from pcpbench.model.mla import MLAAttention

SWA: Final = replace(PCP, model="tiny-swa", scenario="s17-window-recycling")
DRAFTS: Final = replace(SWA, spec_tokens=3)
SHARDED: Final = replace(SWA, pcp=1, tp=4, dcp=2, interleave=2)


def _window(site: Site, change: Callable[[int, int], int]) -> None:
    """Attention sees change(window, block size) positions where there is a window."""

    def faulty(attend: Callable[..., None], *args: Any) -> None:
        *before, window, out, lse = args
        if window:
            site.hit()
            window = change(window, args[1].shape[1])
        attend(*before, window, out, lse)

    site.wrap(mla, "mla_attention", faulty)


def window_too_wide(site: Site) -> None:
    """Queries see one position more than their window."""
    _window(site, lambda window, _: window + 1)


def window_too_narrow(site: Site) -> None:
    """Queries see one position fewer than their window."""
    _window(site, lambda window, _: window - 1)


def window_in_whole_blocks(site: Site) -> None:
    """The window is rounded up to whole blocks, so that blocks of others are read."""
    _window(site, lambda window, size: -(-window // size) * size)


def window_ignored(site: Site) -> None:
    """Sliding layers attend to all positions, those in recycled blocks among them."""
    _window(site, lambda window, _: 0)


def _attend(
    site: Site, change: Callable[[AttentionMetadata, ForwardContext], AttentionMetadata | None]
) -> None:
    """The local attention of sliding layers reads other metadata."""

    def faulty(
        local: Callable[..., None],
        self: MLAAttention,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        metadata: AttentionMetadata,
        context: ForwardContext,
    ) -> None:
        changed = change(metadata, context) if self.kv_group.sliding_window else None
        if changed is not None:
            site.hit()
        local(self, q, out, lse, changed or metadata, context)

    site.wrap(MLAAttention, "_local", faulty)


def table_of_other_group(site: Site) -> None:
    """Sliding layers find their keys by the table of the other group."""

    def change(metadata: AttentionMetadata, _: ForwardContext) -> AttentionMetadata:
        return replace(metadata, block_tables=metadata.block_tables[::-1])

    _attend(site, change)


def local_lengths_for_whole_group(site: Site) -> None:
    """Layers whose keys are all here count this rank's share of the lengths."""

    def change(metadata: AttentionMetadata, _: ForwardContext) -> AttentionMetadata | None:
        local = metadata.dcp_local_seq_lens
        return None if local is None else replace(metadata, seq_lens=local)

    _attend(site, change)


def _slots(site: Site, change: Callable[[BlockTables, Tensor], object]) -> None:
    def faulty(compute: Callable[..., Tensor], self: BlockTables, *args: Any, **kw: Any) -> Tensor:
        slots = compute(self, *args, **kw)
        if self.num_kv_cache_groups > 1:
            site.hit()
            change(self, slots)
        return slots

    site.wrap(BlockTables, "compute_slot_mappings", faulty)


def slots_of_other_group(site: Site) -> None:
    """Every group writes to the slots of group 0."""
    _slots(site, lambda _, slots: slots.copy_(slots[:1].clone().expand_as(slots)))


def one_group_for_all_layers(site: Site) -> None:
    """All layers take tables and slots of group 0: consistent, and not what was planned."""

    def faulty(group_of: Callable[..., int], self: ForwardContext, layer: int) -> int:
        if group_of(self, layer):
            site.hit()
        return 0

    site.wrap(ForwardContext, "kv_group", faulty)


def whole_group_sharded(site: Site) -> None:
    """A group that is not sharded gets slots as if its positions were dealt out over DCP ranks."""

    def faulty(size_of: Callable[..., int], self: BlockTables, group: int) -> int:
        if size_of(self, group) != self.cp_size:
            site.hit()
        return self.cp_size

    site.wrap(BlockTables, "group_cp_size", faulty)


def recycled_columns_left(site: Site) -> None:
    """Tables keep the ids of blocks that are somebody else's by now."""

    def faulty(hide: Callable[..., None], rows: Tensor, *args: Any) -> None:
        before = rows.clone()
        hide(rows, *args)
        if not rows.equal(before):
            site.hit()
        rows.copy_(before)

    site.wrap(block_table, "hide_columns", faulty)


def column_too_many_hidden(site: Site) -> None:
    """The block in which a window begins counts as before it."""

    def faulty(
        hide: Callable[..., None],
        rows: Tensor,
        idx_mapping: Tensor,
        computed: Tensor,
        reach: int,
        span: int,
    ) -> None:
        site.hit()
        hide(rows, idx_mapping, computed, reach - span, span)

    site.wrap(block_table, "hide_columns", faulty)


def recycled_early(site: Site) -> None:
    """The scheduler frees blocks one block too early: their last positions are still seen."""

    def faulty(num_unseen: Callable[..., int], self: KVGroup, computed: int) -> int:
        found = num_unseen(self, computed)
        if not found:
            return found
        site.hit()
        return found + min(16, self.sliding_window - 1)

    site.wrap(KVGroup, "num_unseen", faulty)


def recycled_by_host_cursor(site: Site) -> None:
    """Blocks are freed as if all drafts of the step before had been accepted."""
    believed: dict[str, int] = {}

    def advance(original: Callable[..., None], self: Scheduler, step: Any) -> None:
        for request, share in step.scheduled.values():
            believed[request.req_id] = share.num_computed_tokens + share.num_scheduled_tokens
        original(self, step)

    def recycle(
        original: Callable[..., None], self: Scheduler, request: Request, step: Any
    ) -> None:
        known = request.num_computed_tokens
        request.num_computed_tokens = max(known, believed.get(request.req_id, 0))
        sound = [group.num_unseen(known) // span for group, span in self.groups_and_spans]
        original(self, request, step)
        request.num_computed_tokens = known
        if request.num_freed != sound:
            site.hit()

    site.wrap(Scheduler, "_advance", advance)
    site.wrap(Scheduler, "_recycle", recycle)


def never_recycled(site: Site) -> None:
    """Blocks before a window are kept until the request ends."""

    def faulty(recycle: Callable[..., None], self: Scheduler, request: Request, step: Any) -> None:
        if any(g.num_unseen(request.num_computed_tokens) for g, _ in self.groups_and_spans):
            site.hit()

    site.wrap(Scheduler, "_recycle", faulty)


FAULTS: Final = (
    shipped("K40", "window-one-too-wide", "Queries see one position more than their window.",
            window_too_wide, "C18", setting=SWA, at_capture=True),
    shipped("K40", "window-one-too-narrow", "Queries see one position fewer than their window.",
            window_too_narrow, "C18", setting=SWA, at_capture=True),
    shipped("K40", "window-in-whole-blocks", "Windows are rounded up to whole blocks, so that "
            "recycled ones are read.", window_in_whole_blocks, "C18", setting=SWA,
            at_capture=True),
    shipped("K40", "window-ignored", "Sliding layers attend to all positions.", window_ignored,
            "C18", setting=SWA, at_capture=True),
    shipped("K40", "table-of-other-group", "Sliding layers read keys through the table of another "
            "KV group.", table_of_other_group, "C18", setting=SWA, at_capture=True),
    shipped("K40", "slots-of-other-group", "Every KV group writes to the slots of group 0.",
            slots_of_other_group, "C4", setting=SWA),
    shipped("K40", "one-group-for-all-layers", "All layers use tables and slots of KV group 0, "
            "alike in writing and reading.", one_group_for_all_layers, "C15", setting=SWA,
            at_capture=True),
    shipped("K40", "whole-group-sharded", "A KV group that each rank holds whole gets slots as if "
            "DCP sharded it.", whole_group_sharded, "C4", setting=SHARDED),
    shipped("K40", "local-lengths-for-whole-group", "A KV group that each rank holds whole is read "
            "up to the DCP-local lengths.", local_lengths_for_whole_group, PARTITION_DRIFT,
            setting=SHARDED, at_capture=True),
    shipped("K40", "recycled-columns-left", "Block tables keep the ids of blocks that went to "
            "somebody else.", recycled_columns_left, "C5", setting=SWA),
    shipped("K40", "column-too-many-hidden", "The block in which a window begins is taken out of "
            "the tables.", column_too_many_hidden, "C5", setting=SWA),
    shipped("K40", "recycled-one-block-early", "The scheduler frees a block that a window still "
            "reaches.", recycled_early, "C19", setting=SWA),
    shipped("K40", "recycled-by-host-cursor", "The scheduler frees blocks as if all drafts had "
            "been accepted.", recycled_by_host_cursor, "C19", setting=DRAFTS),
    shipped("K40", "never-recycled", "Blocks before a window are kept until their request ends.",
            never_recycled, "C19", setting=SWA),
)  # fmt: skip
