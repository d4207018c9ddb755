"""Faults of padding: lengths (K01), slots (K02) and counts (K09) of rows that are not real.

All of them hit eager and replayed arms alike: the arms agree, and only a rebuild from the plan can
tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench import dcp
from pcpbench.engine import block_table
from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.input_batch import InputBatch, InputBuffers
from pcpbench.faults.classes import DCP, PCP, TP, shipped
from pcpbench.faults.fault import Site
from pcpbench.pcp_manager import PCPManager

EDGES: Final = "s2-capture-edges"


def stale_seq_lens(site: Site) -> None:
    """Padding rows keep the lengths that a larger batch left."""

    def faulty(pad: Callable[..., None], self: InputBuffers, *sizes: int) -> None:
        num_reqs, num_rows = sizes[:2]
        stale = self.seq_lens[num_reqs:num_rows].clone()
        pad(self, *sizes)
        self.seq_lens[num_reqs:num_rows].copy_(stale)
        if stale.any():
            site.hit()

    site.wrap(InputBuffers, "pad", faulty)


def padded_length_one(site: Site) -> None:
    """Padding rows get length 1, as if each were a request with one token."""

    def faulty(pad: Callable[..., None], self: InputBuffers, *sizes: int) -> None:
        num_reqs, num_rows = sizes[:2]
        pad(self, *sizes)
        self.seq_lens[num_reqs:num_rows].fill_(1)
        if num_reqs < num_rows:
            site.hit()

    site.wrap(InputBuffers, "pad", faulty)


def starts_fall(site: Site) -> None:
    """The padded tail of query_start_loc is zeroed where it should repeat the token count."""

    def faulty(pad: Callable[..., None], self: InputBuffers, *sizes: int) -> None:
        num_reqs, num_rows = sizes[:2]
        pad(self, *sizes)
        self.query_start_loc[num_reqs + 1 : num_rows + 1].zero_()
        if num_reqs < num_rows:
            site.hit()

    site.wrap(InputBuffers, "pad", faulty)


def stale_dcp_lengths(site: Site) -> None:
    """DCP-local lengths past the real rows keep what stood there."""

    def faulty(
        fill: Callable[..., None], out: Tensor, lens: Tensor, num_reqs: int, *r: int
    ) -> None:
        stale = out[num_reqs:].clone()
        fill(out, lens, num_reqs, *r)
        out[num_reqs:].copy_(stale)
        if stale.any():
            site.hit()

    site.wrap(dcp, "dcp_local_seq_lens", faulty)


def stale_slots(site: Site) -> None:
    """Gathered slots that should be PAD keep those of the step before."""

    def faulty(prepare: Callable[..., Tensor], self: PCPManager) -> Tensor:
        assert self.slot_mappings is not None
        before = self.slot_mappings.clone()
        slots = prepare(self)
        tail = ~self.gathered_kv_write_mask
        stale = before[:, : slots.shape[1]][:, tail]
        slots[:, tail] = stale
        if (stale >= 0).any():
            site.hit()
        return slots

    site.wrap(PCPManager, "prepare_slot_mappings", faulty)


def unmasked_slots(site: Site) -> None:
    """The write mask is not applied: padding places write over the batch's first token."""

    def faulty(prepare: Callable[..., Tensor], self: PCPManager) -> Tensor:
        mask = self.gathered_kv_write_mask
        if not mask.all():
            site.hit()
        self.gathered_kv_write_mask = torch.ones_like(mask)
        try:
            return prepare(self)
        finally:
            self.gathered_kv_write_mask = mask

    site.wrap(PCPManager, "prepare_slot_mappings", faulty)


def slot_zero_for_pad(site: Site) -> None:
    """Padding gets slot 0 for PAD, and so writes the null block."""

    def faulty(prepare: Callable[..., Tensor], self: PCPManager) -> Tensor:
        slots = prepare(self)
        if (slots < 0).any():
            site.hit()
        return slots.masked_fill_(slots < 0, 0)

    site.wrap(PCPManager, "prepare_slot_mappings", faulty)


def stale_slots_without_pcp(site: Site) -> None:
    """The slots of padding tokens keep those of the step before (no PCP)."""

    def faulty(write: Callable[..., None], *args: Any) -> None:
        idx_mapping, starts, positions, out = args[1], args[2], args[3], args[-1]
        first, last = int(starts[idx_mapping.shape[0]]), positions.shape[0]
        stale = out[first:last].clone()
        write(*args)
        out[first:last].copy_(stale)
        if (stale >= 0).any():
            site.hit()

    site.wrap(block_table, "write_slots", faulty)


def padded_rows_reported_real(site: Site) -> None:
    """The partition reports its padded row count as the real one."""

    def faulty(partition: Callable[..., InputBatch], self: PCPManager, *args: Any) -> InputBatch:
        batch = partition(self, *args)
        if batch.num_reqs < batch.num_reqs_after_padding:
            site.hit()
        return replace(batch, num_reqs=batch.num_reqs_after_padding)

    site.wrap(PCPManager, "partition_batch", faulty)


def tables_of_real_rows_only(site: Site) -> None:
    """Block tables are gathered for the real rows where a graph reads the padded ones."""

    def faulty(
        gather: Callable[..., Any],
        self: BlockTables,
        rows: Tensor,
        num_padded: int,
        *out: Any,
        **more: Any,
    ) -> Any:
        if rows.shape[0] < num_padded:
            site.hit()
        return gather(self, rows, rows.shape[0], *out, **more)

    site.wrap(BlockTables, "gather_block_tables", faulty)


def starts_end_at_padded_count(site: Site) -> None:
    """The padded tail of query_start_loc holds the padded token count, not the real one."""

    def faulty(pad: Callable[..., None], self: InputBuffers, *sizes: int) -> None:
        num_reqs, num_rows, num_tokens, num_padded = sizes
        pad(self, *sizes)
        self.query_start_loc[num_reqs + 1 : num_rows + 1].fill_(num_padded)
        if num_reqs < num_rows and num_tokens < num_padded:
            site.hit()

    site.wrap(InputBuffers, "pad", faulty)


FAULTS: Final = (
    shipped("K01", "stale-padded-seq-lens", "Padding rows keep the seq_lens of a larger batch.",
            stale_seq_lens, "C1"),
    shipped("K01", "padded-seq-lens-one", "Padding rows get seq_len 1 and attend to the null "
            "block.", padded_length_one, "C1", setting=replace(PCP, scenario=EDGES)),
    shipped("K01", "padded-seq-lens-one-without-pcp", "The same where a batch is padded in place, "
            "without PCP.", padded_length_one, "C1", setting=replace(TP, scenario=EDGES)),
    shipped("K01", "query-start-loc-falls", "The padded tail of query_start_loc is 0.",
            starts_fall, "C2"),
    shipped("K01", "stale-dcp-lengths", "Padding rows keep the DCP-local lengths of a larger "
            "batch.", stale_dcp_lengths, "C6", setting=DCP),
    shipped("K02", "stale-padded-slots", "Slots of padding keep those of the step before.",
            stale_slots, "C4", "C15"),
    shipped("K02", "write-mask-not-applied", "Padding and copies write KV as if each were the "
            "writer.", unmasked_slots, "C4", "C15"),
    shipped("K02", "slot-zero-for-pad", "Padding gets slot 0 and writes the null block.",
            slot_zero_for_pad, "C4"),
    shipped("K02", "stale-padded-slots-without-pcp", "Slots of padding keep those of the step "
            "before, in the table's own slot mapping.", stale_slots_without_pcp, "C4", "C15",
            setting=replace(TP, scenario=EDGES)),
    shipped("K09", "padded-rows-reported-real", "The rank-local batch calls its padded row count "
            "num_reqs.", padded_rows_reported_real, "C7"),
    shipped("K09", "tables-of-real-rows-only", "Block tables are prepared for num_reqs rows, not "
            "for num_reqs_after_padding.", tables_of_real_rows_only, "C5"),
    shipped("K09", "starts-end-at-padded-count", "Padded entries of query_start_loc equal the "
            "padded token count.", starts_end_at_padded_count, "C2",
            setting=replace(PCP, scenario=EDGES)),
)  # fmt: skip
