"""Blocks of memory that graphs share for their intermediates, and when a block is free again.

The rule is the device allocator's for a private pool: a block belongs to the caller's tensor, and
once that tensor's storage has died, later ops of the same capture and later captures on the same
pool may have it, however often the earlier graph still replays into it. Knows bytes and lifetimes;
does not know ops or graphs. Meant for one thread.
"""

from __future__ import annotations

import bisect
import weakref

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64
_SEGMENT_BYTES = 1 << 19

Bytes = npt.NDArray[np.uint8]


class Block:
    """Some bytes of a pool, lent to one storage of the caller's and to graphs that pin it.

    address: of the first byte. num_bytes: what was asked for. exclusive: the bytes were never and
    will never be another block's while this one is held (for constants, which no op rewrites).
    """

    def __init__(self, pool: HostPool, start: int, memory: Bytes, exclusive: bool) -> None:
        self.address = start
        self.num_bytes = memory.nbytes
        self.exclusive = exclusive
        self.memory = memory
        self.storage = torch.from_numpy(memory[:]).untyped_storage()
        self._pool = weakref.ref(pool)
        self._holds: dict[int, weakref.ref[Bytes]] = {}
        self._lent: weakref.ref[Bytes] | None = None

    def lend(self) -> torch.UntypedStorage:
        """The caller's storage over these bytes; the block is held until that storage dies."""
        view = self._hold()
        self._lent = weakref.ref(view)
        return torch.from_numpy(view).untyped_storage()

    def pin(self) -> object:
        """A token; the block is held until the token dies."""
        return self._hold()

    @property
    def is_lent(self) -> bool:
        """Whether the caller still has a tensor in this block."""
        return self._lent is not None and self._lent() is not None

    def _hold(self) -> Bytes:
        view = self.memory[:]
        hold = weakref.ref(view, self._dropped)
        self._holds[id(hold)] = hold
        return view

    def _dropped(self, hold: weakref.ref[Bytes]) -> None:
        self._holds.pop(id(hold), None)
        pool = self._pool()
        if not self._holds and pool is not None:
            pool.give_back(self)


class _Segment:
    """One allocation, cut into blocks; free spans are (start, length), sorted, never touching."""

    def __init__(self, num_bytes: int) -> None:
        raw: Bytes = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        shift = -raw.ctypes.data % _ALIGNMENT
        self.memory = raw[shift : shift + num_bytes]
        self.base: int = self.memory.ctypes.data
        self.free = [(0, num_bytes)]

    def cut(self, span: tuple[int, int], length: int) -> int:
        self.free.remove(span)
        if span[1] > length:
            bisect.insort(self.free, (span[0] + length, span[1] - length))
        return span[0]

    def join(self, start: int, length: int) -> None:
        at = bisect.bisect(self.free, (start, length))
        if at < len(self.free) and self.free[at][0] == start + length:
            length += self.free.pop(at)[1]
        if at > 0 and sum(self.free[at - 1]) == start:
            start, before = self.free.pop(at - 1)
            length += before
        bisect.insort(self.free, (start, length))


class HostPool:
    """Memory that graphs share. One capture at a time; graphs of one pool replay one at a time."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._exclusive: dict[int, _Segment] = {}
        self._blocks: dict[int, Block] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes the pool holds now, in use or free."""
        every = [*self._segments, *self._exclusive.values()]
        return sum(segment.memory.nbytes for segment in every)

    @property
    def num_bytes_free(self) -> int:
        """Bytes that the next ops or captures may have."""
        return sum(length for segment in self._segments for _, length in segment.free)

    def owns(self, address: int) -> bool:
        """Whether an address lies inside the pool, constants of its graphs included."""
        every = [*self._segments, *self._exclusive.values()]
        return any(each.base <= address < each.base + each.memory.nbytes for each in every)

    def block_at(self, address: int) -> Block | None:
        """The held block that starts at `address`."""
        return self._blocks.get(address)

    def take(self, num_bytes: int, exclusive: bool = False) -> Block:
        """A block of `num_bytes` > 0 bytes at a 64-byte boundary; its contents are undefined."""
        length = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if exclusive:
            segment = _Segment(length)
            self._exclusive[segment.base] = segment
            start = segment.cut((0, length), length)
        else:
            segment, span = self._best_span(length)
            start = segment.cut(span, length)
        memory = segment.memory[start : start + num_bytes]
        block = Block(self, segment.base + start, memory, exclusive)
        self._blocks[block.address] = block
        return block

    def give_back(self, block: Block) -> None:
        """Called by a block that nobody holds any more."""
        del self._blocks[block.address]
        if block.exclusive:
            del self._exclusive[block.address]
            return
        length = -(-block.num_bytes // _ALIGNMENT) * _ALIGNMENT
        for segment in self._segments:
            start = block.address - segment.base
            if 0 <= start < segment.memory.nbytes:
                segment.join(start, length)

    def poison(self, byte: int = 0xFF, *, used: bool = False) -> None:
        """Overwrite all free bytes (0xFF: NaN in every float type, -1 in signed integers).

        used: the intermediates of captured graphs, too, and only constants are left. A replay that
        reads a byte it did not write first gives itself away (SPEC C16).
        """
        for segment in self._segments:
            spans = [(0, len(segment.memory))] if used else segment.free
            for start, length in spans:
                segment.memory[start : start + length] = byte

    def _best_span(self, length: int) -> tuple[_Segment, tuple[int, int]]:
        fits = [
            (span[1], index, span)
            for index, segment in enumerate(self._segments)
            for span in segment.free
            if span[1] >= length
        ]
        if not fits:
            self._segments.append(_Segment(max(length, _SEGMENT_BYTES)))
            return self._segments[-1], self._segments[-1].free[0]
        _, index, span = min(fits)
        return self._segments[index], span
