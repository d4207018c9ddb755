"""Sees every tensor that reaches the dispatcher and notes those it did not see being made.

Owns a dispatch mode for backends that cannot look inside their own graphs. Triton kernels are seen
because pcpbench launches them inside custom ops with declared mutations. Knows no graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pcpbench.device.graph import ExternalUse
from pcpbench.device.host_graph.schema import SchemaBook, tensors_in
from pcpbench.device.host_graph.source import calling_source
from pcpbench.device.host_graph.torch_private import QuietDispatchMode


class AddressRecorder(QuietDispatchMode):
    """Collects the storages that a stretch of code uses but did not allocate.

    externals: one entry a storage, in order of first use. num_ops: dispatched ops that were not
    mere views. Storages from outside are held while recording, those made inside are not: a graph
    pool must see them die to use their memory again, and never hands it to anyone outside.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_ops = 0
        self._schemas = SchemaBook()
        self._made: set[int] = set()
        self._external: dict[int, ExternalUse] = {}
        self._held: list[torch.UntypedStorage] = []

    @property
    def externals(self) -> tuple[ExternalUse, ...]:
        """Storages not made inside, in order of first use."""
        return tuple(self._external.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        facts = self._schemas.facts(func)
        named = facts.bind(args, kwargs)
        seen: set[int] = set()
        for name, value in named.items():
            reads, writes = facts.reads(name, named), name in facts.written
            for tensor in tensors_in(value):
                seen.add(tensor.untyped_storage().data_ptr())
                self._note(tensor, reads, writes, facts.name)
        result = func(*args, **kwargs)
        fresh = False
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in seen:
                self._made.add(tensor.untyped_storage().data_ptr())
                fresh = True
        if fresh or facts.written:
            self.num_ops += 1
        return result

    def _note(self, tensor: Tensor, reads: bool, writes: bool, op: str) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address == 0 or address in self._made:
            return
        known = self._external.get(address)
        if known is None:
            self._held.append(storage)
        self._external[address] = ExternalUse(
            address=address,
            num_bytes=storage.nbytes(),
            shape=tuple(tensor.shape) if known is None else known.shape,
            dtype=str(tensor.dtype) if known is None else known.dtype,
            reads=reads if known is None else known.reads or reads,
            writes=writes if known is None else known.writes or writes,
            op=op if known is None else known.op,
            source=calling_source().text if known is None else known.source,
        )
