"""What a KV group is: layers whose keys share one block table. Pure numbers.

Owns how many positions a block of a group stands for and which of them a query sees. Knows neither
requests nor memory. The judge works these out for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class KVGroup:
    """Layers with one block table, one way of sharding and one window.

    layers: their numbers, in order. sliding_window: how many positions a query sees, its own among
    them; 0 for all. dcp_sharded: whether the ranks of a DCP group share its positions; if not, each
    rank holds all of them.
    """

    layers: tuple[int, ...] = ()
    sliding_window: int = 0
    dcp_sharded: bool = True

    def dcp_size(self, dcp_size: int) -> int:
        """Ranks that the group's positions are spread over, in a DCP group of this size."""
        return dcp_size if self.dcp_sharded else 1

    def span(self, block_size: int, dcp_size: int) -> int:
        """Positions of one block id, where a block has block_size slots on a rank."""
        return block_size * self.dcp_size(dcp_size)

    def num_unseen(self, num_computed_tokens: int) -> int:
        """Positions that no query from num_computed_tokens on sees: 17 at 40, window 24."""
        if not self.sliding_window:
            return 0
        return max(0, num_computed_tokens + 1 - self.sliding_window)


ONE_GROUP: Final = (KVGroup(),)
"""The groups of a model whose layers are all alike."""
