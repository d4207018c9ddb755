"""DCP-local lengths and owners of positions in vLLM's worker (K01, K22)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from pcpbench.faults.fault import Site
from pcpbench.faults.vllm.worlds import DCP, entry


def _lengths(site: Site, faulty: Callable[..., Any]) -> None:
    site.wrap(site.api.modules["model_runner"], "prepare_dcp_local_seq_lens", faulty)


def stale_padding(site: Site) -> None:
    """Rows past num_reqs keep what stood there."""

    def faulty(
        prepare: Callable[..., Any], out: Tensor, lens: Tensor, num_reqs: int, *args: Any, **kw: Any
    ) -> Any:
        stale = out[num_reqs:].clone()
        local = prepare(out, lens, num_reqs, *args, **kw)
        out[num_reqs:].copy_(stale)
        if local is not None and local[num_reqs:].any():
            site.hit()
        return local

    _lengths(site, faulty)


def _given(site: Site, change: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    """Lengths are prepared for another (DCP size, rank, interleave)."""

    def faulty(prepare: Callable[..., Any], out: Tensor, *args: Any, **named: Any) -> Any:
        sound = prepare(out, *args, **named).clone()
        local = prepare(out, *args[:2], *change(*args[2:]), **named)
        if (local != sound).any():
            site.hit()
        return local

    _lengths(site, faulty)


def interleave_off_by_one(site: Site) -> None:
    """The interleave is one larger."""
    _given(site, lambda size, rank, interleave: (size, rank, interleave + 1))


def share_of_next(site: Site) -> None:
    """Each rank is given the next one's share."""
    _given(site, lambda size, rank, interleave: (size, (rank + 1) % size, interleave))


def before_partition(site: Site) -> None:
    """Lengths are those of the batch before it was partitioned, row for row."""
    whole: list[Tensor] = []

    def partition(original: Callable[..., Any], self: Any, batch: Any, *args: Any) -> Any:
        whole[:] = [batch.seq_lens.clone()]
        return original(self, batch, *args)

    def faulty(
        prepare: Callable[..., Any], out: Tensor, lens: Tensor, num_reqs: int, *args: Any, **kw: Any
    ) -> Any:
        if not whole:  # a dummy step has no partition
            return prepare(out, lens, num_reqs, *args, **kw)
        lengths, count = lens.clone(), min(num_reqs, whole[0].shape[0])
        lengths[:count].copy_(whole.pop()[:count])
        if (lengths != lens).any():
            site.hit()
        return prepare(out, lengths, num_reqs, *args, **kw)

    site.wrap(site.api.PCPManager, "partition_batch", partition)
    _lengths(site, faulty)


def _slots(site: Site, name: str, change: Callable[[Any], int]) -> None:
    """Slots are computed under another attribute of the tables."""

    def faulty(compute: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        kept = getattr(self, name)
        sound = compute(self, *args, **named).clone()
        setattr(self, name, change(self))
        try:
            slots = compute(self, *args, **named)
        finally:
            setattr(self, name, kept)
        if (slots != sound).any():
            site.hit()
        return slots

    site.wrap(site.api.BlockTables, "compute_slot_mappings", faulty)


def owner_without_interleave(site: Site) -> None:
    """Positions are dealt out one by one."""
    _slots(site, "cp_interleave", lambda tables: 1)


def owner_is_next(site: Site) -> None:
    """Each rank writes the next one's positions."""
    _slots(site, "cp_rank", lambda tables: (tables.cp_rank + 1) % tables.cp_size)


FAULTS: Final = (
    entry("K01", "stale-dcp-lengths", "prepare_dcp_local_seq_lens leaves the lengths of a larger "
          "batch in padding rows.", stale_padding, "C6"),
    entry("K22", "interleave-off-by-one", "prepare_dcp_local_seq_lens is given an interleave "
          "larger by one.", interleave_off_by_one, "C6"),
    entry("K22", "share-of-next-rank", "prepare_dcp_local_seq_lens is given the next rank.",
          share_of_next, "C6", setting=DCP),
    entry("K22", "lengths-before-partition", "prepare_dcp_local_seq_lens is given the lengths of "
          "the batch before its partition.", before_partition, "C6"),
    entry("K22", "owner-without-interleave", "BlockTables.compute_slot_mappings deals positions "
          "out one by one.", owner_without_interleave, "C4"),
    entry("K22", "owner-is-next-rank", "BlockTables.compute_slot_mappings writes the next rank's "
          "positions.", owner_is_next, "C4", setting=DCP),
)  # fmt: skip
