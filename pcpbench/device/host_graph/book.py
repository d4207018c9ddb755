"""Record tensors: the baked form of every tensor a graph touches, and the list of outside storages.

A record tensor is a plain tensor over the same bytes with the shape and strides baked. Over pool
memory it does not keep the block lent; over outside memory it keeps the storage alive. Knows
addresses and uses; does not know what an op computes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pcpbench.device.graph import ExternalUse
from pcpbench.device.host_graph.pool import Block, HostPool


class AddressBook:
    """Record tensors of one capture, one per distinct (bytes, shape, strides, dtype)."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._records: dict[Any, torch.Tensor] = {}
        self._externals: dict[int, ExternalUse] = {}

    @property
    def externals(self) -> tuple[ExternalUse, ...]:
        """Outside storages in order of first use."""
        return tuple(self._externals.values())

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The pool block that holds the caller's tensor, None for outside memory."""
        return self._pool.block_at(tensor.untyped_storage().data_ptr())

    def is_external(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has bytes, and they are not the pool's."""
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 and self._pool.block_at(storage.data_ptr()) is None

    def record(self, tensor: torch.Tensor) -> torch.Tensor:
        """The record tensor for the caller's tensor."""
        block = self.block_of(tensor)
        storage = tensor.untyped_storage() if block is None else block.storage
        key = (
            storage.data_ptr() if block is None else block,
            tensor.storage_offset(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
        )
        found = self._records.get(key)
        if found is None:
            found = self._records[key] = over(storage, tensor)
        return found

    def note(self, tensor: torch.Tensor, reads: bool, writes: bool, op: str, source: str) -> None:
        """Remember that an op reads or writes the caller's tensor, if that is outside memory."""
        if not self.is_external(tensor):
            return
        storage = tensor.untyped_storage()
        seen = self._externals.get(storage.data_ptr())
        if seen is None:
            seen = ExternalUse(
                address=storage.data_ptr(),
                num_bytes=storage.nbytes(),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                reads=reads,
                writes=writes,
                op=op,
                source=source,
            )
        self._externals[seen.address] = replace(
            seen, reads=seen.reads or reads, writes=seen.writes or writes
        )


def over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A plain tensor over `storage` with the dtype, offset, shape and strides of `like`."""
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())
