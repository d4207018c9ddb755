"""Faults of refreshing: what is on the device is a step old (K17)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from pcpbench.engine import input_batch
from pcpbench.engine import worker as worker_module
from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.input_batch import InputBatch
from pcpbench.faults.classes import DCP, PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.pcp_manager import PCPManager

MOST: Final = 5
"""Every so many steps one refresh is left out."""

LONG: Final = replace(PCP, scenario="s11-long-kv")


def dcp_lengths_skipped(site: Site) -> None:
    """DCP-local lengths are not prepared in every fifth step."""
    calls: Counter[int] = Counter()

    def faulty(
        prepare: Callable[..., Any], out: Tensor, lens: Tensor, num_reqs: int, *args: int, **kw: Any
    ) -> Any:
        calls[out.data_ptr()] += 1
        if args[0] == 1 or calls[out.data_ptr()] % MOST:
            return prepare(out, lens, num_reqs, *args, **kw)
        site.hit()
        return out[: kw["num_reqs_padded"]]

    site.wrap(worker_module, "maybe_prepare_dcp_local_seq_lens", faulty)


def tables_kept(site: Site) -> None:
    """Block tables are not gathered while the number of rows stays the same."""
    rows: dict[int, int] = {}

    def faulty(prepare: Callable[..., Any], self: PCPManager, batch: InputBatch, *more: Any) -> Any:
        num_rows = batch.num_reqs_after_padding
        if rows.get(id(self)) == num_rows:
            site.hit()
            tables = tuple(table[:num_rows] for table in self.input_block_tables)
            return tables, self.prepare_slot_mappings()
        rows[id(self)] = num_rows
        return prepare(self, batch, *more)

    site.wrap(PCPManager, "prepare_attn", faulty)


def slots_kept(site: Site) -> None:
    """Slots are not computed while the layout of the step repeats."""
    layouts: dict[int, object] = {}

    def faulty(prepare: Callable[..., Tensor], self: PCPManager) -> Tensor:
        if layouts.get(id(self)) is self.layout and self.slot_mappings is not None:
            site.hit()
            return self.slot_mappings[:, : self.padded_gather_idx.shape[0]]
        layouts[id(self)] = self.layout
        return prepare(self)

    site.wrap(PCPManager, "prepare_slot_mappings", faulty)


def _positions_and_lengths(site: Site, which: int) -> None:
    calls: Counter[int] = Counter()

    def faulty(prepare: Callable[..., None], *args: Tensor) -> None:
        target = args[which]
        calls[target.data_ptr()] += 1
        before = target.clone()
        prepare(*args)
        if calls[target.data_ptr()] % MOST == 0 and not before.equal(target):
            site.hit()
            target.copy_(before)

    site.wrap(input_batch, "prepare_pos_seq_lens", faulty)


def lengths_kept(site: Site) -> None:
    """seq_lens are those of the step before in every fifth step."""
    _positions_and_lengths(site, 4)


def positions_kept(site: Site) -> None:
    """Positions are those of the step before in every fifth step."""
    _positions_and_lengths(site, 3)


def blocks_late(site: Site) -> None:
    """New block ids reach the device a step late."""
    calls: Counter[int] = Counter()

    def faulty(apply: Callable[..., None], self: BlockTables) -> None:
        calls[id(self)] += any(self._staged)
        if any(self._staged) and calls[id(self)] % 2 == 0:
            site.hit()
            return
        apply(self)

    site.wrap(BlockTables, "apply_staged_writes", faulty)


FAULTS: Final = (
    shipped("K17", "dcp-lengths-not-refreshed", "DCP-local lengths are left as they are in every "
            "fifth step.", dcp_lengths_skipped, "C6", setting=DCP),
    shipped("K17", "tables-kept-for-equal-rows", "Block tables are not gathered while the number "
            "of rows stays the same.", tables_kept, "C5", setting=LONG),
    shipped("K17", "slots-kept-for-equal-layout", "Slots are not computed while the step's layout "
            "repeats.", slots_kept, "C4", "C15"),
    shipped("K17", "seq-lens-not-refreshed", "seq_lens are a step old in every fifth step.",
            lengths_kept, "C1"),
    shipped("K17", "positions-not-refreshed", "Positions are a step old in every fifth step.",
            positions_kept, "C3"),
    shipped("K17", "new-blocks-late", "New block ids reach the device's tables a step late.",
            blocks_late, "C5", "C4"),
)  # fmt: skip
