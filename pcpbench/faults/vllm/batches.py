"""Padding of vLLM's batches: lengths (K01), flags (K07), counts (K09) of rows that are not real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from pcpbench.faults.fault import Site
from pcpbench.faults.vllm.worlds import DCP, SHARDED, entry


def _partition(site: Site, change: Callable[[Any, Any], Any]) -> None:
    """change(manager, rank-local batch) -> the batch that the runner goes on with."""

    def faulty(partition: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        return change(self, partition(self, *args, **named))

    site.wrap(site.api.PCPManager, "partition_batch", faulty)


def stale_lengths(site: Site) -> None:
    """Padding rows of the rank-local batch keep the lengths of a larger one."""

    def faulty(partition: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        before = self.input_buffers.seq_lens.clone()
        batch = partition(self, *args, **named)
        first, last = batch.num_reqs, batch.num_reqs_after_padding
        batch.seq_lens[first:].copy_(before[first:last])
        if before[first:last].any():
            site.hit()
        return batch

    site.wrap(site.api.PCPManager, "partition_batch", faulty)


def stale_lengths_without_pcp(site: Site) -> None:
    """The same in the runner's own buffers."""

    def faulty(prepare: Callable[..., None], idx_mapping: Tensor, *args: Any) -> None:
        lengths, first = args[-1], idx_mapping.shape[0]
        before = lengths[first:].clone()
        prepare(idx_mapping, *args)
        lengths[first:].copy_(before)
        if before.any():
            site.hit()

    site.wrap(site.api.modules["model_runner"], "prepare_pos_seq_lens", faulty)


def length_one(site: Site) -> None:
    """Padding rows get length 1."""

    def change(manager: Any, batch: Any) -> Any:
        if batch.num_reqs < batch.num_reqs_after_padding:
            site.hit()
        batch.seq_lens[batch.num_reqs :].fill_(1)
        return batch

    _partition(site, change)


def starts_fall(site: Site) -> None:
    """The padded tail of query_start_loc is 0."""

    def change(manager: Any, batch: Any) -> Any:
        if batch.num_reqs < batch.num_reqs_after_padding:
            site.hit()
        batch.query_start_loc[batch.num_reqs + 1 :].zero_()
        return batch

    _partition(site, change)


def starts_at_padded_count(site: Site) -> None:
    """The padded tail of query_start_loc is the padded token count."""

    def change(manager: Any, batch: Any) -> Any:
        if batch.num_tokens < batch.num_tokens_after_padding:
            site.hit()
        batch.query_start_loc[batch.num_reqs + 1 :].fill_(batch.num_tokens_after_padding)
        return batch

    _partition(site, change)


def padding_not_flagged(site: Site) -> None:
    """The padding mask that the forward pass is handed is all False.

    Under PCP it is that of all ranks' tokens, but for expert parallelism.
    """

    def change(manager: Any, batch: Any) -> Any:
        flags = batch.is_padding
        if flags.any():
            site.hit()
        flags.fill_(False)
        return batch

    _partition(site, change)


def padded_rows_as_real(site: Site) -> None:
    """The rank-local batch says num_reqs_after_padding for num_reqs."""

    def change(manager: Any, batch: Any) -> Any:
        if batch.num_reqs < batch.num_reqs_after_padding:
            site.hit()
        return replace(batch, num_reqs=batch.num_reqs_after_padding)

    _partition(site, change)


def padding_tokens_kept(site: Site) -> None:
    """Ids of padding tokens are not zeroed: those of the batch's first token stay."""

    def change(manager: Any, batch: Any) -> Any:
        tail = batch.input_ids[batch.num_tokens :]
        if tail.numel():
            site.hit()
        tail.fill_(7)
        return batch

    _partition(site, change)


FAULTS: Final = (
    entry("K01", "stale-padded-seq-lens", "PCPManager.partition_batch leaves the seq_lens of a "
          "larger batch in padding rows.", stale_lengths, "C1"),
    entry("K01", "stale-padded-seq-lens-without-pcp", "prepare_pos_seq_lens leaves the seq_lens of "
          "a larger batch past num_reqs.", stale_lengths_without_pcp, "C1", setting=DCP),
    entry("K01", "padded-seq-lens-one", "PCPManager.partition_batch gives padding rows seq_len 1.",
          length_one, "C1"),
    entry("K01", "query-start-loc-falls", "PCPManager.partition_batch pads query_start_loc with "
          "0.", starts_fall, "C2"),
    entry("K07", "padding-not-flagged", "PCPManager.partition_batch marks no token as padding.",
          padding_not_flagged, "C3", setting=SHARDED),
    entry("K07", "padding-tokens-kept", "PCPManager.partition_batch does not zero the ids of "
          "padding tokens.", padding_tokens_kept, "C3", setting=SHARDED),
    entry("K09", "starts-end-at-padded-count", "PCPManager.partition_batch pads query_start_loc "
          "with the padded token count.", starts_at_padded_count, "C2"),
    entry("K09", "padded-rows-reported-real", "PCPManager.partition_batch calls the padded row "
          "count num_reqs.", padded_rows_as_real, "C7"),
)  # fmt: skip
