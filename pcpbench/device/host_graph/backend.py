"""Capture on the host: the modes go around the function, a graph comes out.

Owns the order of things at capture; the parts it puts together are told in the package docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from pcpbench.device.graph import GraphPool
from pcpbench.device.host_graph import torch_private
from pcpbench.device.host_graph.lowering import Lowering
from pcpbench.device.host_graph.pool import HostPool
from pcpbench.device.host_graph.recorder import Recorder
from pcpbench.device.host_graph.refusals import HostReadGuard, refuse_compiled
from pcpbench.device.host_graph.replay import HostGraph, settle
from pcpbench.device.host_graph.schema import SchemaBook
from pcpbench.device.host_graph.tape import Tape
from pcpbench.errors import CaptureError, UsageError

T = TypeVar("T")


class HostGraphBackend:
    """Makes graphs that record and replay on a CPU.

    plain: replay every functional op as itself followed by a copy into its block, with nothing
    rewritten, hoisted or left out; slower, for hunting a fault in the fast path. One capture at a
    time; a backend is not meant to be shared by threads.
    """

    def __init__(self, *, plain: bool = False) -> None:
        self._plain = plain
        self._schemas = SchemaBook()
        self._lowering = Lowering(self._schemas, plain)
        self._capturing = False

    @property
    def name(self) -> str:
        """`host`."""
        return "host"

    def new_pool(self) -> HostPool:
        """A fresh, empty pool."""
        return HostPool()

    def capture(self, fn: Callable[[], T], pool: GraphPool) -> tuple[HostGraph, T]:
        """Run `fn` once under capture and return its graph with what `fn` returned.

        Tensors in the result live in the pool and hold the graph's outputs after each replay; a
        result that is an outside tensor, or a view of one, stays that. Nothing outside the pool
        is written, and random generators end where they began; random ops draw from the same
        generator at each replay. Gradients are off. Values that `fn` sees are meaningless.

        Raises CaptureError, with op, shapes, reason and source line, for what a graph cannot hold
        (SPEC section 6), and UsageError for a pool of another backend. Errors of the ops
        themselves pass through. After any error the pool is as usable as before.
        """
        if not isinstance(pool, HostPool):
            raise UsageError(
                f"the host backend captures into its own pools, not into a {type(pool).__name__}; "
                "make one with new_pool()"
            )
        if self._capturing:
            raise CaptureError("a capture began inside another capture; let the first one end")
        tape = Tape(pool)
        guard = HostReadGuard(tape.is_on_host)
        recorder = Recorder(tape, self._schemas, self._lowering, guard, hoists=not self._plain)
        random_state = torch.get_rng_state()
        self._capturing = True
        try:
            with torch.no_grad(), recorder, guard:
                result = fn()
        except Exception as error:
            compiled = refuse_compiled(error)
            if compiled is not None:
                raise compiled from error
            raise
        finally:
            self._capturing = False
            torch.set_rng_state(random_state)
            for generator, state in reversed(recorder.generators):
                generator.set_state(state)
        with torch_private.below_autograd()():
            nodes = settle(tape.nodes, drop_unread=not self._plain)
        return HostGraph(pool, nodes, tape.externals, tape.pins), result
