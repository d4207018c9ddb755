"""The `accelerator` graph backend: real device graphs through torch.cuda.

Owns capture on a side stream into a shared private pool. What a graph touches is seen at dispatch
level while it is captured. Knows nothing of models or batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pcpbench.device.address_recorder import AddressRecorder
from pcpbench.device.graph import ExternalUse, GraphPool
from pcpbench.device.memory import is_no_memory, no_memory
from pcpbench.errors import CaptureError, DeviceMissing

T = TypeVar("T")


class AcceleratorPool:
    """A private pool of the caching allocator."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments that belong to the pool."""
        return sum(segment["total_size"] for segment in self._segments())

    def owns(self, address: int) -> bool:
        """Whether an address lies inside one of the pool's segments."""
        return any(
            segment["address"] <= address < segment["address"] + segment["total_size"]
            for segment in self._segments()
        )

    def _segments(self) -> list[dict[str, Any]]:
        snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return [s for s in snapshot if tuple(s.get("segment_pool_id", ())) == tuple(self.handle)]


class AcceleratorGraph:
    """One captured device graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, recorder: AddressRecorder) -> None:
        self._graph = graph
        self._externals = recorder.externals
        self._num_ops = recorder.num_ops

    @property
    def num_ops(self) -> int:
        """Dispatched operations that were captured (a lower bound of the graph's nodes)."""
        return self._num_ops

    @property
    def externals(self) -> tuple[ExternalUse, ...]:
        """Every storage outside the capture that the graph touches."""
        return self._externals

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class AcceleratorGraphBackend:
    """Captures graphs on the current CUDA (or ROCm) device."""

    name = "accelerator"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DeviceMissing(
                "--backend is accelerator, but torch finds no CUDA device here: use --backend host."
            )

    def new_pool(self) -> AcceleratorPool:
        """A fresh private pool."""
        return AcceleratorPool()

    def capture(self, fn: Callable[[], T], pool: GraphPool) -> tuple[AcceleratorGraph, T]:
        """Capture `fn`; see GraphBackend.capture.

        After an error inside, to end the capture may raise again; what `fn` raised is what counts.
        """
        if not isinstance(pool, AcceleratorPool):
            raise TypeError("an accelerator graph needs a pool of its own backend")
        graph = torch.cuda.CUDAGraph()
        recorder = AddressRecorder()
        torch.cuda.synchronize()
        raised: BaseException | None = None
        try:
            with torch.cuda.graph(graph, pool=pool.handle), recorder:
                try:
                    result = fn()
                except BaseException as error:
                    raised = error
                    raise
        except Exception as error:
            first = raised or error
            if is_no_memory(first):
                raise no_memory(first) from first
            if isinstance(first, RuntimeError):
                raise CaptureError(f"the device refused the capture: {first}") from first
            raise first from first.__cause__
        return AcceleratorGraph(graph, recorder), result
