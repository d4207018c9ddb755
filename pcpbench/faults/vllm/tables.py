"""vLLM's block tables and slot mappings: stale slots (K02), stale or foreign rows (K03)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from pcpbench.faults.fault import Site
from pcpbench.faults.vllm.worlds import DCP, entry


def stale_slots(site: Site) -> None:
    """Gathered slots that should be PAD keep those of the step before."""

    def faulty(prepare: Callable[..., Tensor], self: Any) -> Tensor:
        before = self._gathered_kv_slot_mappings.clone()
        slots = prepare(self)
        tail = ~self._gathered_kv_write_mask
        stale = before[:, : slots.shape[1]][:, tail]
        slots[:, tail] = stale
        if (stale >= 0).any():
            site.hit()
        return slots

    site.wrap(site.api.PCPManager, "prepare_slot_mappings", faulty)


def slot_zero(site: Site) -> None:
    """PAD is slot 0, which writes the null block."""

    def faulty(prepare: Callable[..., Tensor], self: Any) -> Tensor:
        slots = prepare(self)
        if (slots < 0).any():
            site.hit()
        return slots.masked_fill_(slots < 0, 0)

    site.wrap(site.api.PCPManager, "prepare_slot_mappings", faulty)


def stale_slots_without_pcp(site: Site) -> None:
    """Slots past the real tokens keep those of the step before."""

    def faulty(
        compute: Callable[..., Tensor],
        self: Any,
        idx: Tensor,
        starts: Tensor,
        *args: Any,
        **kw: Any,
    ) -> Tensor:
        first = int(starts[idx.shape[0]])
        stale = self.slot_mappings[:, first:].clone()
        slots = compute(self, idx, starts, *args, **kw)
        self.slot_mappings[:, first:].copy_(stale)
        if (stale[:, : slots.shape[1] - first] >= 0).any():
            site.hit()
        return slots

    site.wrap(site.api.BlockTables, "compute_slot_mappings", faulty)


def stale_rows(site: Site) -> None:
    """Rows of the gathered tables past num_reqs keep what stood there."""

    def faulty(gather: Callable[..., Any], self: Any, idx: Tensor, *args: Any, **named: Any) -> Any:
        own = named.get("out") or tuple(self.input_block_tables)
        before = [table.clone() for table in own]
        tables = gather(self, idx, *args, **named)
        for table, kept in zip(tables, before, strict=True):
            first, last = idx.shape[0], table.shape[0]
            table[first:].copy_(kept[first:last])
            if kept[first:last].any():
                site.hit()
        return tables

    site.wrap(site.api.BlockTables, "gather_block_tables", faulty)


def row_of_neighbour(site: Site) -> None:
    """Each row is given the table of the row before it."""

    def faulty(gather: Callable[..., Any], self: Any, idx: Tensor, *args: Any, **named: Any) -> Any:
        if idx.shape[0] > 1 and (idx != idx.roll(1)).any():
            site.hit()
        return gather(self, idx.roll(1), *args, **named)

    site.wrap(site.api.BlockTables, "gather_block_tables", faulty)


def behind_last_tenant(site: Site) -> None:
    """A new request's blocks are appended behind those of its slot's last tenant."""

    def faulty(
        append: Callable[..., None], self: Any, index: int, blocks: Any, overwrite: bool
    ) -> None:
        if overwrite and self.num_blocks.np[:, index].any():
            site.hit()
            overwrite = False
        append(self, index, blocks, overwrite)

    site.wrap(site.api.BlockTables, "append_block_ids", faulty)


FAULTS: Final = (
    entry("K02", "stale-padded-slots", "PCPManager.prepare_slot_mappings leaves the slots of the "
          "step before in padding.", stale_slots, "C4", "C15"),
    entry("K02", "slot-zero-for-pad", "PCPManager.prepare_slot_mappings gives padding slot 0.",
          slot_zero, "C4"),
    entry("K02", "stale-padded-slots-without-pcp", "BlockTables.compute_slot_mappings does not "
          "pad past the real tokens.", stale_slots_without_pcp, "C4", "C15", setting=DCP),
    entry("K03", "stale-block-rows", "BlockTables.gather_block_tables does not clear the manager's "
          "rows past num_reqs.", stale_rows, "C5"),
    entry("K03", "stale-block-rows-without-pcp", "The same in the runner's own tables.", stale_rows,
          "C5", setting=DCP),
    entry("K03", "block-row-of-neighbour", "BlockTables.gather_block_tables gives each row the "
          "table of the row before.", row_of_neighbour, "C5"),
    entry("K03", "appended-behind-last-tenant", "BlockTables.append_block_ids ignores `overwrite`: "
          "a slot's last tenant stays in front.", behind_last_tenant, "C4", "C5"),
)  # fmt: skip
