"""Faults of the PCP partition: rows, restore index, writers (K26)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from torch import Tensor

from pcpbench import pcp_manager
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.pcp_manager import PCPManager
from pcpbench.pcp_partition import Layout, RowGrid
from pcpbench.pcp_rows import LocalRows

CHUNKS: Final = replace(PCP, scenario="chunked-prefill")
UNEVEN: Final = replace(PCP, scenario="s14-uneven-ranks")


def _wrap(site: Site, name: str, faulty: Callable[..., Any]) -> None:
    """Patch a function that makes layouts, and have every rank forget the layout it knows."""

    def forget() -> None:
        for worker in site.workers():
            if worker.pcp_manager is not None:
                worker.pcp_manager._planned = None

    forget()
    site.on_restore(forget)
    site.wrap(pcp_manager, name, faulty)


def relayout(site: Site, change: Callable[[Layout], Layout]) -> None:
    """Give every rank a changed layout of each step."""

    def faulty(build: Callable[..., Layout], *args: Any) -> Layout:
        layout = build(*args)
        changed = change(layout)
        if any(
            not np.array_equal(new, old) for new, old in zip(changed[5:], layout[5:], strict=True)
        ):
            site.hit()
        return changed

    _wrap(site, "build_layout", faulty)


def restore_off_by_one(site: Site) -> None:
    """The restore index is rotated by one token."""
    relayout(site, lambda o: o._replace(hidden_restore_idx=np.roll(o.hidden_restore_idx, 1)))


def gather_off_by_one(site: Site) -> None:
    """The gather index is rotated by one place."""
    relayout(site, lambda o: o._replace(padded_gather_idx=np.roll(o.padded_gather_idx, 1)))


def _write_mask(site: Site, value: bool) -> None:
    """Set the last place of the write mask that is not `value` to it."""

    def change(layout: Layout) -> Layout:
        mask = layout.gathered_kv_write_mask.copy()
        (places,) = (mask != value).nonzero()
        mask[places[-1:]] = value
        return layout._replace(gathered_kv_write_mask=mask)

    relayout(site, change)


def two_writers(site: Site) -> None:
    """One more place is marked as a writer of KV."""
    _write_mask(site, True)


def no_writer(site: Site) -> None:
    """Nobody writes the last token's KV."""
    _write_mask(site, False)


def tail_in_length(site: Site) -> None:
    """The length of a chunk runs to the end of the whole query."""

    def faulty(cut: Callable[..., LocalRows], *args: Any) -> LocalRows:
        rows = cut(*args)
        if rows.tokens_after.any():
            site.hit()
        return rows._replace(tokens_after=np.zeros_like(rows.tokens_after))

    _wrap(site, "local_rows", faulty)


def chunks_not_mirrored(site: Site) -> None:
    """Rank r takes chunks r and P + r, so that the last rank has the latest tokens twice."""

    def faulty(deal: Callable[..., RowGrid], lens: Any, is_prefilling: Any, *args: Any) -> RowGrid:
        grid = deal(lens, is_prefilling, *args)
        first = grid.length.shape[1] - 1 - 2 * int(is_prefilling.sum())
        second = slice(first + 1, -1, 2)
        for array in (grid.request, grid.start, grid.length, grid.is_written):
            array[:, second] = array[::-1, second].copy()
        if is_prefilling.any():
            site.hit()
        return grid

    _wrap(site, "row_grid", faulty)


def restore_on_one_rank(site: Site) -> None:
    """Rank 1 restores its hidden states a row off."""

    def faulty(restore: Callable[..., Tensor], self: PCPManager, hidden: Tensor) -> Tensor:
        restored = restore(self, hidden)
        if self.pcp_rank != 1 or restored.shape[0] < 2:
            return restored
        site.hit()
        return restored.roll(1, 0)

    site.wrap(PCPManager, "restore_hidden_states", faulty)


FAULTS: Final = (
    shipped("K26", "restore-index-off-by-one", "The restore index is off by one token.",
            restore_off_by_one, "C7"),
    shipped("K26", "gather-index-off-by-one", "The gather index is off by one place.",
            gather_off_by_one, "C3", "C7", setting=UNEVEN),
    shipped("K26", "two-writers-for-a-token", "Two places write the KV of one token.",
            two_writers, "C7", "C4", setting=UNEVEN),
    shipped("K26", "token-without-writer", "Nobody writes the KV of a step's last token.",
            no_writer, "C7", "C4"),
    shipped("K26", "chunk-length-with-tail", "The seq_len of a prefill chunk runs to the end of "
            "the whole query.", tail_in_length, "C1", setting=CHUNKS),
    shipped("K26", "chunks-not-mirrored", "Ranks take chunks r and P + r, not r and 2P - 1 - r.",
            chunks_not_mirrored, "C7", setting=CHUNKS),
    shipped("K26", "restore-wrong-on-one-rank", "One rank restores its hidden states a row off.",
            restore_on_one_rank, "C7"),
)  # fmt: skip
