"""The graph manager: warms up, captures, replays, and keeps the address book of every graph.

Owns the order of capture (SPEC 3, 6), the segments of PIECEWISE graphs and what is known of each
graph. It is handed functions that prepare inputs and run a forward pass; it knows neither model nor
batch nor how a backend records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pcpbench.device.address_book import AddressBook
from pcpbench.device.collectives import Meeting, Work, lockstep, run_lockstep
from pcpbench.device.graph import Graph, GraphBackend, GraphPool
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.results import AddressUse, CapturedGraph

Routine = Coroutine[Meeting, Any, None]
Launch = Callable[[Graph], None]
"""How one graph is launched: by its own `replay`, or by that with a clock around it."""


class StagesInputs(Protocol):
    """What a graph manager asks of an engine."""

    def prepare_inputs_to_capture(self, descriptor: BatchExecutionDescriptor) -> list[Routine]:
        """Stage a fresh dummy batch of this shape; one forward coroutine for each local rank.

        A FULL descriptor's routines do not break; a PIECEWISE descriptor's break at attention.
        """


def _launch(graph: Graph) -> None:
    graph.replay()


@dataclass
class _Segments:
    """Captured segments with the eager work of all ranks between each pair of them."""

    graphs: list[Graph]
    breaks: list[list[Work]]

    def replay(self, launch: Launch) -> None:
        for graph, works in zip(self.graphs, self.breaks, strict=False):
            launch(graph)
            run_lockstep([work() for work in works])
        launch(self.graphs[-1])


class GraphManager:
    """Captured graphs by descriptor, all of them in one shared pool.

    num_replays: graphs launched so far (each segment is one). pool: of another manager, to share;
    a fresh one by default. prefix: of the graphs' labels, where descriptors alone do not tell them
    from another manager's.
    """

    def __init__(
        self,
        backend: GraphBackend,
        address_book: AddressBook,
        pool: GraphPool | None = None,
        prefix: str = "",
    ) -> None:
        self.backend = backend
        self.address_book = address_book
        self.pool = backend.new_pool() if pool is None else pool
        self.prefix = prefix
        self.captured: list[CapturedGraph] = []
        self.addresses: list[AddressUse] = []
        self.num_replays = 0
        self._graphs: dict[BatchExecutionDescriptor, _Segments] = {}

    def capture(
        self,
        engine: StagesInputs,
        descriptors: Sequence[BatchExecutionDescriptor],
        on_captured: Callable[[CapturedGraph], None] | None = None,
    ) -> None:
        """Capture every descriptor in the given order.

        Each gets an eager warm-up on freshly prepared inputs, then fresh inputs again for the
        capture. Raises CaptureError when the forward pass does what a graph cannot hold.
        """
        for descriptor in descriptors:
            _drain(lockstep(engine.prepare_inputs_to_capture(descriptor)))
            start = time.perf_counter()
            segments = self._capture_segments(engine.prepare_inputs_to_capture(descriptor))
            capture_s = time.perf_counter() - start
            self._graphs[descriptor] = segments
            uses = self.address_book.bake(self.label(descriptor), segments.graphs, self.pool)
            self.addresses.extend(uses)
            summary = self._summary(descriptor, segments, uses, capture_s)
            self.captured.append(summary)
            if on_captured is not None:
                on_captured(summary)

    def label(self, descriptor: BatchExecutionDescriptor) -> str:
        """The name of a descriptor's graph in reports and in the address book."""
        return self.prefix + descriptor.label

    def has(self, descriptor: BatchExecutionDescriptor) -> bool:
        """Whether this descriptor was captured."""
        return descriptor in self._graphs

    def replay(self, descriptor: BatchExecutionDescriptor, launch: Launch = _launch) -> None:
        """Replay a captured descriptor on what the persistent buffers hold now."""
        segments = self._graphs[descriptor]
        segments.replay(launch)
        self.num_replays += len(segments.graphs)

    def _capture_segments(self, routines: list[Routine]) -> _Segments:
        steps = lockstep(routines)
        segments = _Segments([], [])
        while True:
            graph, works = self.backend.capture(lambda: next(steps, None), self.pool)
            segments.graphs.append(graph)
            if works is None:
                return segments
            segments.breaks.append(works)

    def _summary(
        self,
        descriptor: BatchExecutionDescriptor,
        segments: _Segments,
        uses: list[AddressUse],
        capture_s: float,
    ) -> CapturedGraph:
        return CapturedGraph(
            descriptor=self.label(descriptor),
            mode=descriptor.cg_mode.name,
            num_tokens=descriptor.num_tokens,
            num_reqs=descriptor.num_reqs,
            uniform_token_count=descriptor.uniform_token_count,
            max_query_len=descriptor.max_query_len,
            capture_s=capture_s,
            num_ops=sum(graph.num_ops for graph in segments.graphs),
            num_segments=len(segments.graphs),
            eager_breaks=len(segments.breaks),
            pool_bytes_after=self.pool.num_bytes,
            num_reads=sum(use.reads for use in uses),
            num_writes=sum(use.writes for use in uses),
        )


def _drain(steps: Generator[list[Work], None, Any]) -> None:
    """Run to the end; attention between segments is skipped, as in every dummy run."""
    for _ in steps:
        pass


def is_graph(descriptor: BatchExecutionDescriptor) -> bool:
    """Whether a descriptor asks for a replay."""
    return descriptor.cg_mode is not CUDAGraphMode.NONE
