"""vLLM's partition, restore and writers (K26), and cursors after drafts (K34)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench.faults.fault import PARTITION_DRIFT, Site
from pcpbench.faults.vllm.worlds import DRAFTS, SHARDED, entry

Chunks = Iterator[tuple[int, int, int]]
"""(request, offset in its query, length) of what a rank has."""


def _layout(site: Site, change: Callable[[Any, list[int]], None]) -> None:
    """change(manager, tokens of each rank) once a batch is laid out over the ranks."""

    def faulty(build: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        segments, counts = build(self, *args, **named)
        change(self, counts)
        return segments, counts

    site.wrap(site.api.PCPManager, "_build_batch_layout", faulty)


def restore_off_by_one(site: Site) -> None:
    """The last token of the batch is restored from the place before its own."""

    def change(manager: Any, counts: list[int]) -> None:
        index = manager._hidden_restore_idx
        index[-1] = (index[-1] - 1).clamp(min=0) if index[-1] else index[-1] + 1
        site.hit()

    _layout(site, change)


def restore_without_padding(site: Site) -> None:
    """Restoring takes the ranks' tokens for gathered without padding between them."""

    def change(manager: Any, counts: list[int]) -> None:
        index, width = manager._hidden_restore_idx, manager._padded_gather_idx.shape[0]
        width //= manager.pcp_world_size
        shift = 0
        moved = index.clone()
        for rank, count in enumerate(counts):
            moved[index // width == rank] -= shift
            shift += width - count
        if (moved != index).any():
            site.hit()
        index.copy_(moved)

    _layout(site, change)


def copies_write(site: Site) -> None:
    """Every rank's copy of a replicated token is its writer."""

    def change(manager: Any, counts: list[int]) -> None:
        mask = manager._gathered_kv_write_mask.view(manager.pcp_world_size, -1)
        real = torch.arange(mask.shape[1]) < torch.tensor(counts).unsqueeze(1)
        if (mask != real).any():
            site.hit()
        mask.copy_(real)

    _layout(site, change)


def last_has_no_writer(site: Site) -> None:
    """The last token that writes KV does not."""

    def change(manager: Any, counts: list[int]) -> None:
        mask = manager._gathered_kv_write_mask
        mask[mask.nonzero()[-1]] = False
        site.hit()

    _layout(site, change)


def owner_is_next(site: Site) -> None:
    """Chunks and decodes of the next rank are a rank's own."""

    def faulty(
        chunks: Callable[..., Iterator[Any]], self: Any, rank: int, *a: Any
    ) -> Iterator[Any]:
        site.hit()
        return chunks(self, (rank + 1) % self.pcp_world_size, *a)

    site.wrap(site.api.PCPManager, "_iter_rank_chunks", faulty)


def rejected_counted(site: Site) -> None:
    """post_update is told that no draft was rejected."""
    _rejected(site, torch.zeros_like)


def one_less_rejected(site: Site) -> None:
    """post_update is told of one rejected draft fewer."""
    _rejected(site, lambda rejected: (rejected - 1).clamp_(min=0))


def _rejected(site: Site, change: Callable[[Tensor], Tensor]) -> None:
    def faulty(update: Callable[..., None], *args: Any, **named: Any) -> None:
        before = args[6]
        told = change(before)
        if (told != before).any():
            site.hit()
        update(*args[:6], told, *args[7:], **named)

    site.wrap(site.api.modules["input_batch"], "post_update", faulty)


def positions_from_host(site: Site) -> None:
    """A rank's positions are counted from the host's cursor, which lags behind rejected drafts."""

    def faulty(partition: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        batch = partition(self, *args, **named)
        starts, lengths = batch.num_computed_tokens_np, batch.num_scheduled_tokens
        parts = [
            torch.arange(int(first), int(first) + int(count))
            for first, count in zip(starts, lengths, strict=False)
        ]
        wrong = torch.cat(parts)[: batch.num_tokens].to(batch.positions)
        held = batch.positions[: len(wrong)]
        if not torch.equal(held, wrong):
            site.hit()
        held.copy_(wrong)
        return batch

    site.wrap(site.api.PCPManager, "partition_batch", faulty)


FAULTS: Final = (
    entry("K26", "restore-off-by-one", "PCPManager restores the last token from the place before "
          "its own.", restore_off_by_one, "C7"),
    entry("K26", "restore-without-padding", "PCPManager restores as if nothing padded the ranks.",
          restore_without_padding, "C7", setting=SHARDED),
    entry("K26", "two-writers", "PCPManager has every rank's copy of a replicated token write KV.",
          copies_write, "C4", "C7"),
    entry("K26", "token-without-writer", "PCPManager has nobody write the last token's KV.",
          last_has_no_writer, "C4", "C7", "C15"),
    entry("K26", "rows-of-next-rank", "PCPManager deals rows out to the rank after their own.",
          owner_is_next, "C7", setting=SHARDED),
    entry("K34", "positions-from-host-cursor", "PCPManager counts a rank's positions from the "
          "host's cursor.", positions_from_host, "C3", "C17", setting=DRAFTS),
    entry("K34", "rejected-drafts-counted", "post_update is told that no draft was rejected.",
          rejected_counted, "C17", PARTITION_DRIFT, setting=DRAFTS),
    entry("K34", "one-rejected-draft-kept", "post_update is told of one rejected draft fewer.",
          one_less_rejected, "C17", setting=DRAFTS),
)  # fmt: skip
