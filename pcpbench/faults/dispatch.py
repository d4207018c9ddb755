"""Faults of dispatch: ranks that choose differently, or all of them wrongly (K21)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from pcpbench.device.collectives import run_lockstep
from pcpbench.engine.dispatcher import BatchCounts, Dispatcher
from pcpbench.engine.engine import Engine
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.pcp_manager import PCPManager

UNEVEN: Final = replace(PCP, scenario="s14-uneven-ranks")


def own_counts(site: Site) -> None:
    """Each rank dispatches on its own rows and tokens."""

    def faulty(prepare: Callable[..., BatchCounts], self: Worker, *args: Any) -> BatchCounts:
        counts, batch, manager = prepare(self, *args), self.global_batch, self.pcp_manager
        if batch is None or manager is None:
            return counts
        grid = manager._row_grid(batch.num_scheduled_tokens, batch.is_prefilling_np)
        rows = max(1, int(grid.rows_per_rank()[manager.pcp_rank]))
        own = replace(
            counts, num_reqs=rows, num_tokens=int(grid.tokens_per_rank()[manager.pcp_rank])
        )
        if own != counts:
            site.hit()
        return own

    site.wrap(Worker, "prepare_inputs", faulty)


def global_requests(site: Site) -> None:
    """The global request count stands next to the rank-local token count."""

    def faulty(
        count: Callable[..., tuple[int, int]], self: PCPManager, num_tokens: Any, *args: Any
    ) -> tuple[int, int]:
        counts = count(self, num_tokens, *args)
        if len(num_tokens) != counts[0]:
            site.hit()
        return len(num_tokens), counts[1]

    site.wrap(PCPManager, "get_counts_for_dispatch", faulty)


def largest_graph(site: Site) -> None:
    """The largest graph of the chosen mode is taken for the smallest that covers."""

    def faulty(
        dispatch: Callable[..., BatchExecutionDescriptor], self: Dispatcher, *args: Any, **kw: Any
    ) -> BatchExecutionDescriptor:
        chosen = dispatch(self, *args, **kw)
        same = [d for d in self.descriptors if d.cg_mode is chosen.cg_mode]
        if not same or same[-1] == chosen:
            return chosen
        site.hit()
        return same[-1]

    site.wrap(Dispatcher, "dispatch", faulty)


def silently_eager(site: Site) -> None:
    """A chosen graph is not replayed: the step runs eagerly under its name."""

    def faulty(
        forward: Callable[..., list[Tensor]], self: Engine, descriptor: BatchExecutionDescriptor
    ) -> list[Tensor]:
        if self.graphs is None or descriptor.cg_mode is CUDAGraphMode.NONE:
            return forward(self, descriptor)
        site.hit()
        return run_lockstep([worker.forward(into_buffer=False) for worker in self.workers])

    site.wrap(Engine, "_forward", faulty)


def reason_lost(site: Site) -> None:
    """A step that misses FULL gives no reason."""

    def faulty(reason: Callable[..., str], self: Dispatcher, *args: Any) -> str:
        if reason(self, *args):
            site.hit()
        return ""

    site.wrap(Dispatcher, "_miss_reason", faulty)


def reason_untrue(site: Site) -> None:
    """A step that misses FULL always says that its queries are not uniform."""

    def faulty(reason: Callable[..., str], self: Dispatcher, *args: Any) -> str:
        told = reason(self, *args)
        if told:
            site.hit()
        return told and "queries are not uniform"

    site.wrap(Dispatcher, "_miss_reason", faulty)


def never_uniform(site: Site) -> None:
    """Decodes are never called uniform, so that no FULL graph serves them."""

    def faulty(prepare: Callable[..., BatchCounts], self: Worker, *args: Any) -> BatchCounts:
        counts = prepare(self, *args)
        if counts.uniform_token_count is not None:
            site.hit()
        return replace(counts, uniform_token_count=None)

    site.wrap(Worker, "prepare_inputs", faulty)


FAULTS: Final = (
    shipped("K21", "rank-dispatches-on-own-counts", "Each rank dispatches on its own row and token "
            "counts.", own_counts, "C10", setting=UNEVEN),
    shipped("K21", "global-count-for-dispatch", "Dispatch sees the global request count next to "
            "the rank-local token count.", global_requests, "C10"),
    shipped("K21", "largest-graph-chosen", "The largest graph runs where a smaller one covers the "
            "batch.", largest_graph, "C10"),
    shipped("K21", "graph-silently-eager", "A graph is chosen and reported, and the step runs "
            "eagerly.", silently_eager, "C10"),
    shipped("K21", "miss-reason-lost", "A step that misses FULL gives no reason for it.",
            reason_lost, "C10"),
    shipped("K21", "miss-reason-untrue", "A step that misses FULL gives a reason that does not "
            "hold.", reason_untrue, "C10"),
    shipped("K21", "decodes-never-uniform", "Decode batches are never seen as uniform and miss "
            "their graphs.", never_uniform, "C10"),
)  # fmt: skip
