"""Buffers of vLLM's that move after capture (K10), and a host value frozen at capture (K16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench.errors import NothingToDamage
from pcpbench.faults.fault import Site
from pcpbench.faults.graphs import skip_ranks_without_context
from pcpbench.faults.vllm.worlds import DCP, entry


def _managers(site: Site) -> list[Any]:
    """vLLM's PCPManager of every rank that replays."""
    views: list[Any] = [worker.pcp_manager for worker in site.workers(site.replaying)]
    return [view.inner for view in views]


def lengths_moved(site: Site) -> None:
    """The manager's seq_lens are made anew after capture."""
    for manager in _managers(site):
        buffers = manager.input_buffers
        site.set(buffers, "seq_lens", buffers.seq_lens.clone())
        site.hit()


def tables_moved(site: Site) -> None:
    """The manager's tables, and their addresses with them, are made anew after capture."""
    for manager in _managers(site):
        tables = tuple(table.clone() for table in manager._local_block_tables)
        pointers = manager._local_block_table_ptrs
        fresh = [table.data_ptr() for table in tables]
        site.set(manager, "_local_block_tables", tables)
        site.set(
            manager,
            "_local_block_table_ptrs",
            torch.tensor(fresh, dtype=pointers.dtype, device=pointers.device),
        )
        site.hit()


def slots_moved(site: Site) -> None:
    """The manager's gathered slots are made anew after capture."""
    for manager in _managers(site):
        slots = manager._gathered_kv_slot_mappings
        site.set(manager, "_gathered_kv_slot_mappings", slots.clone())
        site.hit()


def runner_positions_moved(site: Site) -> None:
    """The runner's positions are made anew after capture (no PCP)."""
    for worker in site.workers(site.replaying):
        buffers: Any = worker.input_buffers
        site.set(buffers, "positions", buffers.positions.clone())
        site.hit()


def dcp_lengths_elsewhere(site: Site) -> None:
    """The runner has DCP-local lengths prepared in a fresh tensor."""

    def faulty(prepare: Callable[..., Any], out: Tensor, *args: Any, **named: Any) -> Any:
        site.hit()
        return prepare(torch.empty_like(out), *args, **named)

    site.wrap(site.api.modules["model_runner"], "prepare_dcp_local_seq_lens", faulty)


def captured_without_context(site: Site) -> None:
    """FULL graphs are captured without DCP context, and a host-side skip is baked in."""

    def no_context(_: Callable[..., None], *args: Any, **named: Any) -> None:
        site.hit()

    module = site.api.modules["cudagraph_utils"]
    if not hasattr(module, "set_dummy_context"):  # as in 0.31 and 0.32
        raise NothingToDamage(
            f"the captures of vllm {site.api.version} set no dummy context in {module.__name__}, "
            "as 0.33 does"
        )
    site.wrap(module, "set_dummy_context", no_context)
    skip_ranks_without_context(site)


def staged_elsewhere(site: Site) -> None:
    """Inputs to capture are staged in tensors of their own, not in the manager's."""

    def faulty(stage: Callable[..., Any], self: Any, batch: Any) -> Any:
        staged = stage(self, batch)
        staged.seq_lens = staged.seq_lens.clone()
        site.hit()
        return staged

    site.wrap(site.api.PCPManager, site.api.pads_in_manager, faulty)


FAULTS: Final = (
    entry("K10", "seq-lens-moved", "The PCPManager's seq_lens are re-created after capture.",
          lengths_moved, "C8", "C13"),
    entry("K10", "block-tables-moved", "The PCPManager's block tables are re-created after "
          "capture.", tables_moved, "C8", "C13"),
    entry("K10", "slot-mapping-moved", "The PCPManager's gathered slots are re-created after "
          "capture.", slots_moved, "C8", "C13"),
    entry("K10", "positions-moved-without-pcp", "The runner's positions are re-created after "
          "capture.", runner_positions_moved, "C8", "C13", setting=DCP),
    entry("K10", "dcp-lengths-in-fresh-tensor", "execute_model has DCP-local lengths prepared in a "
          "fresh tensor.", dcp_lengths_elsewhere, "C8", "C13"),
    entry("K10", "captured-on-a-copy", "Inputs to capture have their lengths in a copy of the "
          "PCPManager's buffer.", staged_elsewhere, "C8", "C13", at_capture=True),
    entry("K16", "captured-without-dcp-context", "set_dcp_capture_context sets none, and a skip of "
          "ranks without context is baked into FULL graphs.", captured_without_context, "C13",
          setting=DCP, at_capture=True),
)  # fmt: skip
