"""vLLM's dummy steps that touch live state (K06)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from pcpbench.faults.fault import Site
from pcpbench.faults.vllm.worlds import DCP, entry


def real_slots(site: Site) -> None:
    """get_dummy_slot_mappings hands out what the last step left."""

    def faulty(_: Callable[..., Tensor], self: Any, num_tokens: int) -> Tensor:
        slots: Tensor = self._gathered_kv_slot_mappings[:, : num_tokens * self.pcp_world_size]
        if (slots >= 0).any():
            site.hit()
        return slots

    site.wrap(site.api.PCPManager, "get_dummy_slot_mappings", faulty)


def real_slots_without_pcp(site: Site) -> None:
    """The same of the runner's own slots."""

    def faulty(_: Callable[..., Tensor], self: Any, num_tokens: int) -> Tensor:
        slots: Tensor = self.slot_mappings[:, :num_tokens]
        if (slots >= 0).any():
            site.hit()
        return slots

    site.wrap(site.api.BlockTables, "get_dummy_slot_mappings", faulty)


def keeps_tables(site: Site) -> None:
    """get_dummy_block_tables hands out the rows of the last step."""

    def faulty(_: Callable[..., Any], self: Any, num_reqs: int) -> Any:
        tables = tuple(table[:num_reqs] for table in self._local_block_tables)
        if any(table.any() for table in tables):
            site.hit()
        return tables

    site.wrap(site.api.PCPManager, "get_dummy_block_tables", faulty)


def clears_global_tables(site: Site) -> None:
    """get_dummy_block_tables zeroes the tables of all requests, too."""

    def faulty(dummy: Callable[..., Any], self: Any, num_reqs: int) -> Any:
        for table in self._block_tables.block_tables:
            if table.gpu.any():
                site.hit()
            table.gpu.zero_()
        return dummy(self, num_reqs)

    site.wrap(site.api.PCPManager, "get_dummy_block_tables", faulty)


def not_flagged(site: Site) -> None:
    """make_dummy does not mark its tokens as padding."""

    def faulty(make: Callable[..., Any], *args: Any, **named: Any) -> Any:
        site.hit()
        return make(*args, **{**named, "is_padding": False})

    site.wrap(site.api.InputBatch, "make_dummy", faulty)


def keeps_lengths(site: Site) -> None:
    """The manager stages a dummy batch without its lengths and starts."""

    def faulty(stage: Callable[..., Any], self: Any, batch: Any) -> Any:
        buffers, rows = self.input_buffers, batch.num_reqs_after_padding
        kept = [t.clone() for t in (buffers.seq_lens, buffers.query_start_loc)]
        staged = stage(self, batch)
        if (kept[0][:rows] != buffers.seq_lens[:rows]).any():
            site.hit()
        buffers.seq_lens.copy_(kept[0])
        buffers.query_start_loc.copy_(kept[1])
        return staged

    site.wrap(site.api.PCPManager, site.api.pads_in_manager, faulty)


FAULTS: Final = (
    entry("K06", "dummy-with-real-slots", "PCPManager.get_dummy_slot_mappings does not fill in "
          "PAD.", real_slots, "C4", "C9"),
    entry("K06", "dummy-with-real-slots-without-pcp", "BlockTables.get_dummy_slot_mappings does "
          "not fill in PAD.", real_slots_without_pcp, "C4", "C9", setting=DCP),
    entry("K06", "dummy-keeps-tables", "PCPManager.get_dummy_block_tables does not clear its rows.",
          keeps_tables, "C5"),
    entry("K06", "dummy-clears-global-tables", "PCPManager.get_dummy_block_tables clears the "
          "tables of all requests, too.", clears_global_tables, "C9"),
    entry("K06", "dummy-not-flagged", "InputBatch.make_dummy does not mark its tokens as padding.",
          not_flagged, "C3"),
    entry("K06", "dummy-keeps-lengths", "PCPManager stages a dummy batch without its lengths and "
          "starts.", keeps_lengths, "C1", "C2"),
)  # fmt: skip
