"""Who owns which address: names of persistent buffers, and which of them a graph touches.

Owns the registry of an engine's persistent tensors and the check that each is still where a graph
was captured with it (contract C8). Knows no model and no batch; a buffer is a name and a getter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from pcpbench.device.graph import ExternalUse, Graph, GraphPool
from pcpbench.records import AddressChange
from pcpbench.results import AddressUse

Getter = Callable[[], Tensor]


def storage_address(tensor: Tensor) -> int:
    """First byte of the storage under a tensor."""
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Baked:
    """One registered buffer as a captured graph knows it.

    address: of its storage. start: of its first element, which another view of the storage has
    elsewhere.
    """

    graph: str
    name: str
    address: int
    start: int
    op: str


class AddressBook:
    """Names of persistent buffers and the addresses that captured graphs hold on to.

    A buffer is registered with a getter that asks its owner each time, so that an owner who rebinds
    the attribute to another tensor is found out, not only one who moves the memory.
    """

    def __init__(self) -> None:
        self._getters: dict[str, Getter] = {}
        self._scratch: list[str] = []
        self._baked: dict[str, tuple[Baked, ...]] = {}

    def register(self, name: str, getter: Getter, *, scratch: bool = False) -> None:
        """Name a persistent buffer; a name can be registered once.

        scratch: nobody may count on what stands in it when a step begins (an output buffer, a
        workspace), so that C16 poisons it between steps.
        """
        if name in self._getters:
            raise ValueError(f"buffer {name!r} is registered twice")
        self._getters[name] = getter
        if scratch:
            self._scratch.append(name)

    def scratch(self) -> list[Tensor]:
        """Buffers registered as scratch, as they are now."""
        return [self._getters[name]() for name in self._scratch]

    def names(self) -> dict[int, str]:
        """Storage address -> name, as of now; the first name wins when storages are shared."""
        owners: dict[int, str] = {}
        for name, getter in self._getters.items():
            owners.setdefault(storage_address(getter()), name)
        return owners

    def tensor(self, name: str) -> Tensor:
        """The tensor that a name stands for now."""
        return self._getters[name]()

    def bake(self, label: str, graphs: Iterable[Graph], pool: GraphPool) -> list[AddressUse]:
        """Note what a captured descriptor touches, and return it by name (None = unowned)."""
        owners = self.names()
        merged: dict[int, ExternalUse] = {}
        for use in (use for graph in graphs for use in graph.externals):
            if pool.owns(use.address):
                continue
            known = merged.get(use.address)
            merged[use.address] = use if known is None else _merge(known, use)
        baked = [
            Baked(label, name, use.address, self._getters[name]().data_ptr(), use.op)
            for use in merged.values()
            if (name := owners.get(use.address)) is not None
        ]
        self._baked[label] = tuple(baked)
        return [_named(label, owners.get(use.address), use) for use in merged.values()]

    def changes(self, label: str) -> tuple[AddressChange, ...]:
        """Buffers of one captured descriptor that are no longer at their captured address."""
        moved = []
        for baked in self._baked.get(label, ()):
            now = self._getters[baked.name]()
            has_moved = storage_address(now) != baked.address
            if has_moved or now.data_ptr() != baked.start:
                moved.append(
                    AddressChange(
                        graph=label,
                        name=baked.name,
                        captured_address=baked.address if has_moved else baked.start,
                        current_address=storage_address(now) if has_moved else now.data_ptr(),
                        op=baked.op,
                    )
                )
        return tuple(moved)


def _merge(first: ExternalUse, second: ExternalUse) -> ExternalUse:
    return ExternalUse(
        address=first.address,
        num_bytes=first.num_bytes,
        shape=first.shape,
        dtype=first.dtype,
        reads=first.reads or second.reads,
        writes=first.writes or second.writes,
        op=first.op,
        source=first.source,
    )


def _named(label: str, name: str | None, use: ExternalUse) -> AddressUse:
    return AddressUse(
        graph=label,
        name=name,
        address=use.address,
        num_bytes=use.num_bytes,
        shape=use.shape,
        dtype=use.dtype,
        reads=use.reads,
        writes=use.writes,
        op=use.op,
        source=use.source,
    )
