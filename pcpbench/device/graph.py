"""What a graph backend is: the seam between capture and the device. Owns no implementation.

`host` (device/host_graph.py) records and replays on a CPU; `accelerator` (device/accelerator.py)
captures real device graphs. Both obey the same rules: addresses, shapes and host scalars are baked
at capture, Python does not run again at replay, and intermediate tensors live in a pool that
graphs of one pool share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ExternalUse:
    """One storage outside the pool that a captured graph reads or writes.

    address: first byte of the storage. num_bytes: its size. shape, dtype: of the tensor as the
    first op that touched it saw it. reads, writes: what the graph does with it. op: the first op
    that touched it, e.g. `aten.index_select.default`. source: `file.py:line` of the call.
    """

    address: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    reads: bool
    writes: bool
    op: str
    source: str


class GraphPool(Protocol):
    """Memory that graphs share for their intermediates."""

    @property
    def num_bytes(self) -> int:
        """Bytes the pool holds now."""

    def owns(self, address: int) -> bool:
        """Whether an address lies inside the pool."""


class Graph(Protocol):
    """One captured graph."""

    @property
    def num_ops(self) -> int:
        """Operations (host) or nodes (accelerator) that one replay issues."""

    @property
    def externals(self) -> tuple[ExternalUse, ...]:
        """Every storage outside the pool that the graph touches, in order of first use."""

    def replay(self) -> None:
        """Issue the recorded work again on whatever the baked addresses hold now."""


class GraphBackend(Protocol):
    """Makes graphs."""

    @property
    def name(self) -> str:
        """`host` or `accelerator`."""

    def new_pool(self) -> GraphPool:
        """A fresh, empty pool."""

    def capture(self, fn: Callable[[], T], pool: GraphPool) -> tuple[Graph, T]:
        """Run `fn` once under capture and return its graph with what `fn` returned.

        Tensors in the result live in the pool and hold the graph's outputs after each replay.
        Nothing outside the pool is written while capturing on the host backend; values seen by
        `fn` while capturing are meaningless. Raises CaptureError, naming op, shapes, reason and
        source line, for whatever a graph cannot hold (a host sync that depends on data).
        """
