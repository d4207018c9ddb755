"""Faults of block tables: rows and blocks of somebody else (K03)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from pcpbench.engine import block_table
from pcpbench.engine.block_table import BlockTables
from pcpbench.faults.classes import PCP, TP, shipped
from pcpbench.faults.fault import Site


def stale_rows(site: Site) -> None:
    """Rows past the real ones keep what a larger batch left."""

    def faulty(gather: Callable[..., None], table: Tensor, rows: Tensor, out: Tensor) -> None:
        num_reqs = rows.shape[0]
        stale = out[num_reqs:].clone()
        gather(table, rows, out)
        out[num_reqs:].copy_(stale)
        if stale.any():
            site.hit()

    site.wrap(block_table, "gather_rows", faulty)


def neighbours_row(site: Site) -> None:
    """Each row gets the table of the row before it."""

    def faulty(gather: Callable[..., None], table: Tensor, rows: Tensor, out: Tensor) -> None:
        if rows.shape[0] > 1:
            site.hit()
        gather(table, rows.roll(1), out)

    site.wrap(block_table, "gather_rows", faulty)


def first_block_of_last_tenant(site: Site) -> None:
    """A new tenant's first block is not written: the slot's last tenant's stays."""

    def faulty(append: Callable[..., None], self: BlockTables, *args: Any, **kw: Any) -> None:
        append(self, *args, **kw)
        if not kw.get("overwrite"):
            return
        for group, staged in enumerate(self._staged):
            slot, start, ids = staged.pop()
            if int(self.block_tables[group][slot, start]) not in (0, ids[0]):
                site.hit()
                start, ids = start + 1, ids[1:]
            staged.append((slot, start, ids))

    site.wrap(BlockTables, "append_block_ids", faulty)


def appended_behind_last_tenant(site: Site) -> None:
    """A new tenant's blocks are put behind those of the slot's last tenant."""

    def faulty(
        append: Callable[..., None], self: BlockTables, slot: int, ids: Any, overwrite: bool
    ) -> None:
        held = int(self.num_blocks_np[0, slot])
        room = self.max_num_blocks_per_group[0] - held - len(ids[0])
        if overwrite and held and room >= 4:  # so that the tenant's later blocks fit, too
            site.hit()
            overwrite = False
        room_left = self.max_num_blocks_per_group[0] - int(self.num_blocks_np[0, slot])
        append(self, slot, (ids[0][:room_left],) if not overwrite else ids, overwrite=overwrite)

    site.wrap(BlockTables, "append_block_ids", faulty)


FAULTS: Final = (
    shipped("K03", "stale-block-rows", "Block-table rows past num_reqs keep what a larger batch "
            "left.", stale_rows, "C5"),
    shipped("K03", "stale-block-rows-without-pcp", "The same in the tables of a rank without PCP.",
            stale_rows, "C5", setting=replace(TP, scenario="s2-capture-edges")),
    shipped("K03", "block-row-of-neighbour", "Each row is given the block table of the row before "
            "it.", neighbours_row, "C5"),
    shipped("K03", "first-block-of-last-tenant", "A request begins with the block of its slot's "
            "last tenant.", first_block_of_last_tenant, "C5", "C4"),
    shipped("K03", "appended-behind-last-tenant", "A new request's blocks stand behind those of "
            "its slot's last tenant.", appended_behind_last_tenant, "C5", "C4",
            setting=replace(PCP, scenario="s3-idle-and-reuse")),
)  # fmt: skip
