"""What one capture has written down: its nodes, its record tensors, and where results moved to.

Owns the move of fresh results into pool blocks and the bookkeeping of reads and writes; does not
decide how an op is classified or replayed.
"""

from __future__ import annotations

from typing import Any

import torch

from pcpbench.device.graph import ExternalUse
from pcpbench.device.host_graph.book import AddressBook, over
from pcpbench.device.host_graph.pool import Block, HostPool
from pcpbench.device.host_graph.schema import Facts, map_tensors, tensors_in
from pcpbench.device.host_graph.statement import Keep, Node, Statement


class Tape:
    """Nodes in the order of capture, over one pool."""

    def __init__(self, pool: HostPool) -> None:
        self.nodes: list[Node] = []
        self.pins: list[object] = []
        self._pool = pool
        self._book = AddressBook(pool)
        self._mine: set[Block] = set()
        self._on_host: set[Block] = set()

    @property
    def externals(self) -> tuple[ExternalUse, ...]:
        """Outside storages in order of first use."""
        return self._book.externals

    def is_external(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has bytes, and they are not the pool's."""
        return self._book.is_external(tensor)

    def is_mine(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's block was taken by this very capture."""
        return self._book.block_of(tensor) in self._mine

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor would be in host memory on a device too, with values known there."""
        return self._book.block_of(tensor) in self._on_host

    def made_on_host(self, tensor: torch.Tensor) -> None:
        """Note that a tensor that has just moved in was made of host values, in host memory."""
        block = self._book.block_of(tensor)
        if block is not None:
            self._on_host.add(block)

    def baked(self, value: Any) -> Any:
        """An argument with its tensors replaced by record tensors."""
        return map_tensors(value, self._book.record)

    def move_in(
        self, result: Any, inputs: Any, exclusive: bool
    ) -> tuple[Any, tuple[Keep, ...], tuple[torch.Tensor, ...]]:
        """Give every fresh storage of `result` a block.

        Returns the result over the blocks for the caller, one Keep per moved tensor, and the
        original tensors. The blocks hold nothing yet. Tensors over a storage of `inputs`, and
        tensors without bytes, stay as they are.
        """
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(inputs)}
        move = _Move(self._pool, known, exclusive)
        moved = move.visit(result, ())
        for block, _ in move.homes.values():
            self._mine.add(block)
            if exclusive:
                self.pins.append(block.pin())
        return moved, tuple(move.keeps), tuple(move.values)

    def add(
        self,
        facts: Facts,
        named: dict[str, Any],
        source: str,
        statements: tuple[Statement, ...],
        keeps: tuple[Keep, ...] = (),
        constant: Block | None = None,
    ) -> None:
        """Append one node; `named` are the caller's arguments by name."""
        reads: set[Block] = set()
        writes = {keep.block for keep in keeps}
        stays_on_host = not facts.is_random and all(map(self.is_on_host, tensors_in(named)))
        for name, value in named.items():
            written = name in facts.written
            read = facts.reads(name, named)
            for tensor in tensors_in(value):
                self._book.note(tensor, read, written, facts.name, source)
                block = self._book.block_of(tensor)
                if block is not None:
                    reads.add(block)
                    if written:
                        writes.add(block)
                        if not stays_on_host:
                            self._on_host.discard(block)
        self.nodes.append(
            Node(facts.name, source, statements, frozenset(reads), frozenset(writes), constant)
        )


class _Move:
    """Moves the fresh storages of one result; `known` are the addresses of those that stay."""

    def __init__(self, pool: HostPool, known: set[int], exclusive: bool) -> None:
        self.homes: dict[int, tuple[Block, torch.UntypedStorage]] = {}
        self.keeps: list[Keep] = []
        self.values: list[torch.Tensor] = []
        self._pool = pool
        self._known = known
        self._exclusive = exclusive

    def visit(self, value: Any, path: tuple[int, ...]) -> Any:
        """`value` with its tensors over blocks; `path` leads to it from the whole result."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.visit(each, (*path, at)) for at, each in enumerate(value))
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in self._known:
            return value
        if storage.data_ptr() not in self.homes:
            block = self._pool.take(storage.nbytes(), self._exclusive)
            self.homes[storage.data_ptr()] = block, block.lend()
        block, lent = self.homes[storage.data_ptr()]
        self.keeps.append(Keep(path, over(block.storage, value), block))
        self.values.append(value)
        return over(lent, value)
