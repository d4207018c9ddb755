"""Free KV blocks. Owns who may have which id; knows neither requests nor what a block holds.

Block 0 is the null block: dummy runs and padding point at it, so it is never handed out.
"""

from __future__ import annotations


class BlockPool:
    """A stack of free ids: the last block freed is the first handed out again.

    Reuse as soon as possible is on purpose: a stale row or slot of an earlier step then points at a
    block that some live request owns, and the damage shows (FAULTS K02, K03).
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: all ids, the null block among them; ids 1 .. num_blocks - 1 are free."""
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def take(self, num_blocks: int) -> tuple[int, ...]:
        """`num_blocks` ids; the caller has looked at `num_free`."""
        assert num_blocks <= len(self._free), "took more blocks than are free"
        return tuple(self._free.pop() for _ in range(num_blocks))

    def give_back(self, block_ids: list[int]) -> None:
        """Free ids; the next `take` hands them out in the order given here."""
        self._free.extend(reversed(block_ids))
