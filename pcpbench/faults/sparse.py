"""Faults of sparse MLA and of PCP with DCP: choice, owners, index cache, gathered keys (K16 - K27).

What decides over gathers is on the host (engine/prefill_keys.py), what decides over keys in
model/sparse_mla.py; the merge over a DCP group is shared with dense attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pcpbench.dcp import dcp_local_lens
from pcpbench.device import collectives
from pcpbench.engine import engine as engine_module
from pcpbench.engine import microbatch, prefill_keys
from pcpbench.engine import worker as worker_module
from pcpbench.engine.groups import RankGroups
from pcpbench.engine.input_batch import InputBatch
from pcpbench.faults.classes import DCP, SPARSE, shipped
from pcpbench.faults.fault import PARTITION_DRIFT, Site
from pcpbench.faults.partition import relayout
from pcpbench.model import mla, sparse_mla
from pcpbench.model.context import PrefillKeys
from pcpbench.model.mla import MLAAttention
from pcpbench.model.sparse_mla import SparseMLAAttention
from pcpbench.pcp_partition import Layout
from pcpbench.records import IntArray

CONTEXT: Final = replace(SPARSE, scenario="s13-prefill-context", interleave=4)
CHUNKS: Final = replace(SPARSE, scenario="chunked-prefill")
UNEVEN: Final = replace(SPARSE, scenario="s14-uneven-ranks")
SHORT: Final = replace(SPARSE, scenario="s4-one-token-prompts")
HALVES: Final = replace(CHUNKS, microbatch=True)
WIDE: Final = replace(SPARSE, tp=2, dcp=4, interleave=2)
A2A: Final = replace(DCP, dcp_backend="a2a")


def _prefills(site: Site, skips: Callable[[InputBatch, Any], bool]) -> None:
    """Make gathered keys as if no prefill had context, where `skips` says so."""

    def faulty(original: Callable[..., Any], batch: InputBatch, *args: Any, **kw: Any) -> Any:
        rows = batch.is_prefilling_np & (batch.num_computed_tokens_np > 0)
        if rows.any() and skips(batch, args[3]):
            site.hit()
            batch = replace(batch, num_computed_tokens_np=np.zeros_like(rows, dtype=np.int32))
        return original(batch, *args, **kw)

    site.wrap(worker_module, "prefill_keys", faulty)


def context_skipped(site: Site) -> None:
    """Prefills attend to the step's own tokens only, whatever context they have."""
    _prefills(site, lambda *_: True)


def context_skipped_by_share(site: Site) -> None:
    """A rank that owns nothing of the context leaves the gather out."""

    def skips(batch: InputBatch, tables: Any) -> bool:
        context = batch.num_computed_tokens_np[batch.is_prefilling_np]
        dcp = (tables.cp_size, tables.cp_rank, tables.cp_interleave)
        return not dcp_local_lens(context, *dcp).any()

    _prefills(site, skips)


def share_of_own_rank(site: Site) -> None:
    """Each rank gathers as many keys as it owns, not as many as the rank that owns most."""

    def faulty(original: Callable[..., Any], *args: Any) -> Any:
        slots, index = original(*args)
        kept = tuple(one[one >= 0] for one in slots)
        if len(kept[0]) < len(slots[0]):
            site.hit()
        return kept, index

    site.wrap(prefill_keys, "_from_cache", faulty)


def keys_as_gathered(site: Site) -> None:
    """Gathered keys stay in the order of ranks instead of positions."""

    def faulty(original: Callable[..., Any], *args: Any) -> Any:
        slots, index = original(*args)
        rising = index.sort().values
        if not torch.equal(rising, index):
            site.hit()
        return slots, rising

    site.wrap(prefill_keys, "_from_cache", faulty)


def keys_behind_own_share(site: Site) -> None:
    """Keys of a prefill are looked for behind the own shares of those before it, not behind the
    largest, to which all ranks pad."""

    def faulty(original: Callable[..., Any], prefills: Any, batch: Any, tables: Any) -> Any:
        slots, index = original(prefills, batch, tables)
        lengths, size, interleave = prefills.length, tables.cp_size, tables.cp_interleave
        largest = dcp_local_lens(lengths, size, 0, interleave)
        missing = largest - dcp_local_lens(lengths, size, tables.cp_rank, interleave)
        shift = (missing.cumsum() - missing).repeat(lengths)
        if shift.any():
            site.hit()
        return slots, index - torch.from_numpy(shift).to(index.device)

    site.wrap(prefill_keys, "_from_cache", faulty)


def half_without_decodes_goes_ahead(site: Site) -> None:
    """A microbatch without decodes leaves out the meetings that decodes have."""

    def faulty(
        part_of: Callable[..., PrefillKeys | None], keys: Any, rows: IntArray, *args: Any
    ) -> PrefillKeys | None:
        part = part_of(keys, rows, *args)
        if part is None or not part.has_decodes or part.num_rows:
            return part
        site.hit()
        return replace(part, has_decodes=False)

    site.wrap(microbatch, "part_of", faulty)


def first_shard_only(site: Site) -> None:
    """Candidates of the first shard are taken for the best of all."""

    def faulty(merge: Callable[..., Tensor], gathered: Tensor, topk: int) -> Tensor:
        site.hit()
        return gathered[:, :topk].contiguous()

    site.wrap(sparse_mla, "merge_candidates", faulty)


def latest_candidates(site: Site) -> None:
    """Candidates are taken for positions, so that the score is lost: the latest keys win."""

    def faulty(merge: Callable[..., Tensor], gathered: Tensor, topk: int) -> Tensor:
        site.hit()
        known = gathered >= 0
        return merge(torch.where(known, gathered.bitwise_and(2**32 - 1), gathered), topk)

    site.wrap(sparse_mla, "merge_candidates", faulty)


def _localize(site: Site, change: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    def faulty(localize: Callable[..., Tensor], *args: Any) -> Tensor:
        if args[4] > 1:
            site.hit()
            args = (*args[:4], *change(*args[4:]))
        return localize(*args)

    site.wrap(sparse_mla, "localize", faulty)


def localized_without_interleave(site: Site) -> None:
    """Chosen positions are looked up as if dealt out token by token."""
    _localize(site, lambda size, rank, _: (size, rank, 1))


def localized_for_next_rank(site: Site) -> None:
    """Each rank looks up the positions of the next one."""
    _localize(site, lambda size, rank, interleave: (size, (rank + 1) % size, interleave))


def empty_choice_counts(site: Site) -> None:
    """A rank that owns none of the chosen keys comes with LSE 0, not with -inf."""

    def faulty(attend: Callable[..., None], *args: Any) -> None:
        attend(*args)
        site.hit()
        args[-1].masked_fill_(args[-1] == -torch.inf, 0.0)

    site.wrap(sparse_mla, "sparse_mla_attention", faulty)


def padding_chooses(site: Site) -> None:
    """A token for which a rank has no candidate, padding above all, gets position 0 for one."""

    def faulty(choose: Callable[..., None], *args: Any) -> None:
        choose(*args)
        site.hit()
        args[-1].masked_fill_((args[-1] < 0).all(1, keepdim=True), 0)

    site.wrap(sparse_mla, "index_topk", faulty)


def index_keys_not_written(site: Site) -> None:
    """Index keys of decodes are gathered and never written."""

    def faulty(write: Callable[..., None], self: MLAAttention, *args: Any) -> None:
        if args[2] == "index_cache" and args[3].prefill is None:
            site.hit()
            return
        write(self, *args)

    site.wrap(MLAAttention, "_write", faulty)


def index_keys_in_old_slots(site: Site) -> None:
    """Index keys are written through the slots of the step before."""
    before: dict[int, Tensor] = {}
    caches = {
        cache.data_ptr()
        for worker in site.workers()
        for cache in worker.kv_caches[worker.model.shape.num_hidden_layers :]
    }

    def faulty(write: Callable[..., None], keys: Tensor, slots: Tensor, cache: Tensor) -> None:
        if cache.data_ptr() in caches:
            last = before.get(cache.data_ptr())
            before[cache.data_ptr()] = slots.clone()
            if last is not None and last.shape == slots.shape:
                site.hit()
                slots = last
        write(keys, slots, cache)

    site.wrap(mla, "kv_cache_write", faulty)


def one_index_cache(site: Site) -> None:
    """All layers keep their index keys in the first layer's cache."""

    def entry(self: SparseMLAAttention) -> int:
        site.hit()
        return self.shape.num_hidden_layers

    site.set(SparseMLAAttention, "_index_entry", property(entry))


def every_rank_writes(site: Site) -> None:
    """A replicated token is marked as written by each rank that computes it."""

    def change(layout: Layout) -> Layout:
        length = layout.num_tokens_padded
        places = np.arange(len(layout.padded_gather_idx))
        real = places % length < layout.tokens_per_rank.repeat(length)
        return layout._replace(gathered_kv_write_mask=real)

    relayout(site, change)


def group_tp_first(site: Site) -> None:
    """Collectives of a DCP group run over TP first, where its ranks count over PCP first."""

    def faulty(make: Callable[..., list[RankGroups]], world: Any) -> list[RankGroups]:
        handles = make(world)
        for handle in handles:
            rising = tuple(sorted(handle.dcp.ranks))  # type: ignore[attr-defined]
            if rising != handle.dcp.ranks:  # type: ignore[attr-defined]
                site.hit()
                handle.dcp.ranks = rising  # type: ignore[attr-defined]
        return handles

    site.wrap(engine_module, "in_process_groups", faulty)


def _all_to_all(site: Site, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    def faulty(move: Callable[..., list[Tensor]], meetings: list[Any]) -> list[Tensor]:
        moved = move(meetings)
        if meetings[0].kind != "all_to_all":
            return moved
        site.hit()
        return change(moved)

    site.wrap(collectives, "_move", faulty)


def heads_of_next_rank(site: Site) -> None:
    """The exchange hands each rank the heads of the next one."""
    _all_to_all(site, lambda moved: [*moved[1:], moved[0]])


def own_lse_for_all(site: Site) -> None:
    """All exchanged parts are merged with the LSE of the first."""

    def change(moved: list[Tensor]) -> list[Tensor]:
        for parts in moved:
            parts[1:, ..., -1] = parts[:1, ..., -1]
        return moved

    _all_to_all(site, change)


FAULTS: Final = (
    shipped("K16", "context-skipped", "Prefills with context attend to the step's own tokens only.",
            context_skipped, "C20", setting=CHUNKS),
    shipped("K25", "context-skipped-by-own-share", "A rank that owns nothing of the prefills' "
            "context leaves out the gather of keys.", context_skipped_by_share, "C11",
            setting=CONTEXT),
    shipped("K25", "gather-of-own-share", "Ranks gather as many keys as they own, which differ in "
            "number.", share_of_own_rank, "C11", setting=CONTEXT),
    shipped("K26", "gathered-keys-in-rank-order", "Gathered keys stay in the order of ranks, not "
            "of positions.", keys_as_gathered, "C20", setting=CHUNKS),
    shipped("K26", "gathered-keys-behind-own-share", "Keys of a prefill are looked for behind a "
            "rank's own shares of those before it.", keys_behind_own_share, PARTITION_DRIFT,
            setting=CONTEXT),
    shipped("K27", "half-without-decodes-goes-ahead", "A microbatch without decodes leaves out "
            "their collectives, and reads KV before it is written.",
            half_without_decodes_goes_ahead, "C11", "C20", PARTITION_DRIFT, setting=HALVES),
    shipped("K22", "topk-of-first-shard", "Tokens attend to the best keys of the first shard, not "
            "of all.", first_shard_only, "C20", setting=SPARSE, at_capture=True),
    shipped("K22", "topk-without-score", "Candidates are merged by position, their score is lost.",
            latest_candidates, "C20", setting=SPARSE, at_capture=True),
    shipped("K22", "localized-without-interleave", "Chosen positions are looked up as if the "
            "interleave were 1.", localized_without_interleave, PARTITION_DRIFT,
            setting=replace(SPARSE, interleave=2), at_capture=True),
    shipped("K22", "localized-for-next-rank", "Each rank looks up the chosen positions of the next "
            "one.", localized_for_next_rank, PARTITION_DRIFT, setting=SPARSE, at_capture=True),
    replace(shipped("K22", "dcp-group-tp-first", "The DCP group over TP x PCP runs over TP first.",
            group_tp_first, "C20", PARTITION_DRIFT, setting=WIDE, at_capture=True), min_dcp=4),
    shipped("K24", "empty-choice-counts", "A rank that owns none of the chosen keys counts with "
            "LSE 0.", empty_choice_counts, PARTITION_DRIFT,
            setting=replace(SHORT, interleave=2), at_capture=True),
    shipped("K07", "padding-chooses-keys", "Tokens for which a rank has no candidate, padding "
            "above all, get position 0 for one.",
            padding_chooses, "C20", setting=UNEVEN, at_capture=True),
    shipped("K33", "index-keys-not-written", "Index keys of decodes are not written, on every arm.",
            index_keys_not_written, "C15", "C20", setting=SPARSE, at_capture=True),
    shipped("K02", "index-keys-in-old-slots", "Index keys go to the slots of the step before.",
            index_keys_in_old_slots, "C15", setting=CHUNKS),
    shipped("K33", "one-index-cache-for-all-layers", "All layers keep their index keys in one "
            "cache, on every arm.", one_index_cache, "C15", "C20", setting=SPARSE,
            at_capture=True),
    shipped("K26", "replicated-token-written-twice", "A replicated token is written by each rank "
            "that computes it.", every_rank_writes, "C7", setting=SPARSE),
    shipped("K26", "a2a-heads-of-next-rank", "The exchange hands each rank the heads of the next "
            "one.", heads_of_next_rank, PARTITION_DRIFT, setting=A2A, at_capture=True),
    shipped("K24", "a2a-one-lse-for-all", "Exchanged parts are merged with the LSE of the first.",
            own_lse_for_all, PARTITION_DRIFT, setting=A2A, at_capture=True),
)  # fmt: skip
