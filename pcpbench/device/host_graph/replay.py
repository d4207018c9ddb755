"""A captured graph: straight-line code over baked addresses, and what it touches outside its pool.

Owns one graph's life after capture; does not know how it was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pcpbench.device.graph import ExternalUse
from pcpbench.device.host_graph import torch_private
from pcpbench.device.host_graph.pool import Block, HostPool
from pcpbench.device.host_graph.statement import Node
from pcpbench.device.host_graph.straight_line import compile_nodes


class HostGraph:
    """One captured graph. Keeps its pool and every outside storage alive. Not re-entrant.

    Replays below autograd: nothing is tracked, and version counters of written tensors stay put,
    as in inference mode. A dispatch mode around `replay` sees every kernel.

    The intra-op thread count is part of what is baked, since kernels may split sums by it. A
    replay under another count sets the captured one and puts the caller's back; looking costs
    about 0.06 us, changing twice about 0.5 us.
    """

    def __init__(
        self,
        pool: HostPool,
        nodes: Sequence[Node],
        externals: tuple[ExternalUse, ...],
        pins: list[object],
    ) -> None:
        self._pool = pool
        self._nodes = tuple(nodes)
        self._externals = externals
        self._pins = pins
        self._num_threads = torch.get_num_threads()
        self._below = torch_private.below_autograd()
        self._run, self._node_at = compile_nodes(nodes)

    @property
    def num_ops(self) -> int:
        """Operations that one replay issues; constants made once at capture are not among them."""
        return len(self._nodes)

    @property
    def externals(self) -> tuple[ExternalUse, ...]:
        """Every storage outside the pool that the graph touches, in order of first use.

        A written argument counts as read too unless the op is known to overwrite it.
        """
        return self._externals

    @property
    def listing(self) -> tuple[str, ...]:
        """One line per op: its name and the source line that asked for it."""
        return tuple(f"{node.op} at {node.source}" for node in self._nodes)

    def replay(self) -> None:
        """Issue the recorded ops again on whatever the baked addresses hold now.

        An error of an op (an index out of range, say) passes through with a note that names the op
        and its source line.
        """
        num_threads = torch.get_num_threads()
        if num_threads == self._num_threads:
            self._replay()
            return
        torch.set_num_threads(self._num_threads)
        try:
            self._replay()
        finally:
            torch.set_num_threads(num_threads)

    def _replay(self) -> None:
        try:
            with self._below():
                self._run()
        except Exception as error:
            node = self._failed_node(error)
            if node is not None:
                error.add_note(f"while replaying {node.op}, captured at {node.source}")
            raise

    def _failed_node(self, error: Exception) -> Node | None:
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_code is self._run.__code__:
                return self._node_at.get(step.tb_lineno)
            step = step.tb_next
        return None


def settle(nodes: Sequence[Node], drop_unread: bool) -> tuple[Node, ...]:
    """The nodes that a replay needs, now that it is known what the caller kept.

    Constants that nothing else writes and that the caller cannot reach hold their values from now
    on and are left out. Copies of results that nothing reads and nobody kept are left out of
    their nodes if `drop_unread`; the op itself still runs.
    """
    num_writers: dict[Block, int] = {}
    for node in nodes:
        for block in node.writes:
            num_writers[block] = num_writers.get(block, 0) + 1
    read = frozenset().union(*(node.reads for node in nodes))
    kept: list[Node] = []
    for node in nodes:
        own = node.constant
        if own is not None and num_writers[own] == 1 and not own.is_lent:
            for statement in node.statements:
                statement.call()
            continue
        if drop_unread:
            node = replace(
                node,
                statements=tuple(
                    replace(
                        each,
                        keeps=tuple(k for k in each.keeps if k.block.is_lent or k.block in read),
                    )
                    for each in node.statements
                ),
            )
        kept.append(node)
    return tuple(kept)
