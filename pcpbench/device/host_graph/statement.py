"""What one replayed op is: a callable, its baked arguments, and where its results go.

Knows nothing of how the callable was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pcpbench.device.host_graph.pool import Block


@dataclass(frozen=True)
class Call:
    """A callable and its baked arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Run it once on whatever its tensors hold now."""
        return self.fn(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Keep:
    """One result of a call that is copied into its block.

    path: which result: () when the call returns one tensor, (1,) for the second of several.
    record: the tensor over the block.
    """

    path: tuple[int, ...]
    record: torch.Tensor
    block: Block


@dataclass(frozen=True)
class Statement:
    """A call, and the copies of its results (none when the call writes them itself).

    shapes_may_change: its results are looked at before they are copied, since a copy would spread
    a smaller one over the block.
    """

    call: Call
    keeps: tuple[Keep, ...] = ()
    shapes_may_change: bool = False


@dataclass
class Node:
    """One op of a graph.

    op, source: for messages. statements: what replay runs. reads, writes: pool blocks. constant:
    set if the node only fills a block that nothing else may write, so that it can be run once.
    """

    op: str
    source: str
    statements: tuple[Statement, ...]
    reads: frozenset[Block]
    writes: frozenset[Block]
    constant: Block | None = None
