"""Faults of decode context parallelism: lengths and owners (K22), merge by LSE (K24)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench import dcp
from pcpbench.engine import block_table
from pcpbench.faults.classes import DCP, shipped
from pcpbench.faults.fault import PARTITION_DRIFT, Site
from pcpbench.model import attention, mla

ONE_TOKEN: Final = replace(DCP, scenario="s4-one-token-prompts")


def _lengths(site: Site, change: Callable[..., tuple[Any, ...]]) -> None:
    def faulty(fill: Callable[..., None], *args: Any) -> None:
        site.hit()
        fill(*change(*args))

    site.wrap(dcp, "dcp_local_seq_lens", faulty)


def interleave_off_by_one(site: Site) -> None:
    """Local lengths are those of an interleave that is larger by one."""
    _lengths(site, lambda *args: (*args[:-1], args[-1] + 1))


def neighbours_share(site: Site) -> None:
    """Each rank computes the share of the next one."""
    _lengths(site, lambda o, s, n, size, rank, i: (o, s, n, size, (rank + 1) % size, i))


def without_this_token(site: Site) -> None:
    """Local lengths leave out the token that the step computes."""
    _lengths(site, lambda o, s, *rest: (o, (s - 1).clamp_(min=0), *rest))


def global_lengths(site: Site) -> None:
    """Local lengths are the global ones."""

    def faulty(fill: Callable[..., None], out: Tensor, lens: Tensor, n: int, *rest: int) -> None:
        site.hit()
        fill(out, lens, n, *rest)
        out[:n].copy_(lens[:n])

    site.wrap(dcp, "dcp_local_seq_lens", faulty)


def _slots(site: Site, change: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    """Write slots under another (dcp size, rank, interleave)."""

    def faulty(write: Callable[..., None], *args: Any) -> None:
        if args[5] > 1:
            site.hit()
            args = (*args[:5], *change(*args[5:8]), *args[8:])
        write(*args)

    site.wrap(block_table, "write_slots", faulty)


def owner_without_interleave(site: Site) -> None:
    """Slots are dealt out token by token, whatever the interleave."""
    _slots(site, lambda size, rank, _: (size, rank, 1))


def owner_is_neighbour(site: Site) -> None:
    """Each rank writes the positions of the next one."""
    _slots(site, lambda size, rank, interleave: (size, (rank + 1) % size, interleave))


def visible_prefix_wrong(site: Site) -> None:
    """What a prefill token must not see yet is counted as on the next rank."""

    def faulty(behind: Callable[..., Any], lens: Any, n: int, size: int, rank: int, i: int) -> Any:
        if size > 1:
            site.hit()
        return behind(lens, n, size, (rank + 1) % size, i)

    site.wrap(attention, "_owned_behind", faulty)


def _merge(site: Site, merge: Callable[..., Tensor]) -> None:
    def faulty(original: Callable[..., Tensor], out: Tensor, lse: Tensor, lses: Tensor) -> Tensor:
        site.hit()
        return merge(original, out, lse, lses)

    site.wrap(mla, "rescale_partial", faulty)


def lse_base_two(site: Site) -> None:
    """Partial results come with logarithms to base 2 and are merged as natural ones."""
    scale = 1 / math.log(2)
    _merge(site, lambda merge, out, lse, lses: merge(out, lse * scale, lses * scale))


def empty_shard_counts(site: Site) -> None:
    """A shard without keys comes with LSE 0, not with -inf."""

    def merge(original: Callable[..., Tensor], out: Tensor, lse: Tensor, lses: Tensor) -> Tensor:
        return original(
            out, lse.masked_fill(lse == -torch.inf, 0.0), lses.masked_fill(lses == -torch.inf, 0.0)
        )

    _merge(site, merge)


def equal_weights(site: Site) -> None:
    """Partial results are averaged, whatever their LSE."""
    _merge(site, lambda _, out, lse, lses: out / lses.shape[0])


def last_shard_left_out(site: Site) -> None:
    """The sum of exponentials leaves out the last rank's."""
    _merge(site, lambda merge, out, lse, lses: merge(out, lse, lses[:-1]))


_BOTH: Final = (
    shipped("K22", "interleave-off-by-one", "DCP-local lengths are computed with an interleave "
            "larger by one.", interleave_off_by_one, "C6", setting=DCP),
    shipped("K22", "share-of-next-rank", "Each rank takes the next DCP rank's share for its own.",
            neighbours_share, "C6", setting=DCP),
    shipped("K22", "local-lengths-without-this-token", "DCP-local lengths leave out the step's own "
            "token.", without_this_token, "C6", setting=DCP),
    shipped("K22", "global-lengths-as-local", "Global lengths are handed on as DCP-local ones.",
            global_lengths, "C6", setting=DCP),
    shipped("K22", "owner-without-interleave", "KV slots are dealt out as if the interleave were "
            "1.", owner_without_interleave, "C4", setting=DCP),
    shipped("K22", "owner-is-next-rank", "Each DCP rank writes the positions of the next one.",
            owner_is_neighbour, "C4", setting=DCP),
    shipped("K24", "lse-base-two", "LSE to base 2 is merged as natural.", lse_base_two,
            PARTITION_DRIFT, setting=DCP, at_capture=True),
    shipped("K24", "empty-shard-counts", "A shard without keys counts with LSE 0.",
            empty_shard_counts, PARTITION_DRIFT, setting=ONE_TOKEN, at_capture=True),
    shipped("K24", "partials-averaged", "Partial attention is averaged over ranks, not weighted.",
            equal_weights, PARTITION_DRIFT, setting=DCP, at_capture=True),
    shipped("K24", "last-shard-left-out", "The merge leaves the last rank out of the sum of "
            "exponentials.", last_shard_left_out, PARTITION_DRIFT, setting=DCP, at_capture=True),
)  # fmt: skip

FAULTS: Final = (
    *(replace(fault, max_pcp=None) for fault in _BOTH),
    # With PCP a prefill sees gathered keys, which are nobody's share.
    shipped("K22", "visible-prefix-of-next-rank", "Prefill tokens see keys by the next rank's "
            "ownership.", visible_prefix_wrong, PARTITION_DRIFT, setting=DCP, at_capture=True),
)  # fmt: skip
