"""What an operator's schema says about it: what it writes, what it returns, its `out` twin.

Owns facts about operators, cached per operator; knows nothing of memory, pools or graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._ops import OpOverload

from pcpbench.device.host_graph import torch_private

_NATIVE = frozenset({"aten", "prims", "prim"})
_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "index_copy_", "index_fill_", "masked_fill_", "index_put_"}
    | {"scatter_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
)


@dataclass(frozen=True)
class OutVariant:
    """An overload that computes the same thing into tensors that the caller gives.

    names: its output arguments, in the order of the functional operator's results. native: it was
    written to fill them directly, as opposed to a generated one that calls and copies.
    """

    func: OpOverload
    names: tuple[str, ...]
    native: bool


class Facts:
    """Facts about one operator overload, read from its schema, its tags and its kernels."""

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.func = func
        self.name = str(func)
        self.base = schema.name.split("::")[1]
        self.namespace = func.namespace
        self.arg_names = tuple(arg.name for arg in schema.arguments)
        self.arg_types = tuple(str(arg.type) for arg in schema.arguments)
        self.written = frozenset(a.name for a in schema.arguments if _is_written(a))
        self.out_names = tuple(a.name for a in schema.arguments if _is_written(a) and a.kwarg_only)
        self.num_returns = len(schema.returns)
        self.returns_host_values = any("Tensor" not in str(each.type) for each in schema.returns)
        self.aliased_returns = tuple(_aliased_arg(schema, each) for each in schema.returns)
        self.changes_metadata = torch.Tag.inplace_view in func.tags
        self.reads_data = torch.Tag.data_dependent_output in func.tags
        self.sizes_from_data = torch.Tag.dynamic_output_shape in func.tags
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags

    @property
    def is_custom(self) -> bool:
        """Whether the operator comes from outside torch: a device kernel, replayed whole."""
        return self.namespace not in _NATIVE

    @property
    def returns_fresh(self) -> bool:
        """Whether some result is not one of the written arguments."""
        return any(each is None for each in self.aliased_returns)

    @cached_property
    def is_composite(self) -> bool:
        """Whether eager would take the operator apart before any kernel runs."""
        return torch_private.is_composite(self.func)

    @cached_property
    def out_variant(self) -> OutVariant | None:
        """The overload that writes into given tensors, if a functional operator has one."""
        if self.written or self.num_returns == 0:
            return None
        packet = self.func.overloadpacket
        for overload in packet.overloads():
            candidate = getattr(packet, overload)
            outs = _outs_if_twin(self.func._schema, candidate._schema)
            if outs is not None:
                return OutVariant(candidate, outs, torch.Tag.generated not in candidate.tags)
        return None

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name; those left at their defaults are absent."""
        return dict(zip(self.arg_names, args, strict=False)) | kwargs

    def reads(self, name: str, named: dict[str, Any]) -> bool:
        """Whether a call reads what the argument called `name` holds.

        One that is written counts as read too unless the operator is known to overwrite it; what
        it leaves as it was does not count as read. An operator of torch's that overwrites may be
        told to add instead: by `accumulate`, or by the name of a reduction.
        """
        if name not in self.written:
            return True
        if name in self.out_names:
            return False
        adds = named.get("accumulate") is True or isinstance(named.get("reduce"), str)
        return self.is_custom or adds or self.base not in _OVERWRITES

    def aliases(self, named: dict[str, Any]) -> Any:
        """What the operator returns if it only returns written arguments: None, one, or a tuple."""
        found = tuple(named[each] for each in self.aliased_returns if each is not None)
        return found[0] if self.num_returns == 1 else (found or None)

    def with_aliases(self, result: Any, named: dict[str, Any]) -> Any:
        """`result` with the written arguments themselves in the places that stand for them."""
        if self.num_returns == 1:
            return result
        pairs = zip(result, self.aliased_returns, strict=True)
        return tuple(each if name is None else named[name] for each, name in pairs)


class SchemaBook:
    """Facts for every operator met so far."""

    def __init__(self) -> None:
        self._facts: dict[OpOverload, Facts] = {}

    def facts(self, func: OpOverload) -> Facts:
        """Facts about `func`, read once."""
        found = self._facts.get(func)
        if found is None:
            found = self._facts[func] = Facts(func)
        return found


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an argument or result: itself, or inside lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same argument with every tensor replaced by `change(tensor)`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [map_tensors(each, change) for each in value]
    if isinstance(value, tuple):
        return tuple(map_tensors(each, change) for each in value)
    if isinstance(value, dict):
        return {name: map_tensors(each, change) for name, each in value.items()}
    return value


def _is_written(arg: Any) -> bool:
    return arg.alias_info is not None and arg.alias_info.is_write


def _aliased_arg(schema: Any, result: Any) -> str | None:
    """Name of the written argument that a result is, or None for a result of its own."""
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    for arg in schema.arguments:
        if _is_written(arg) and arg.alias_info.before_set == result.alias_info.before_set:
            return str(arg.name)
    return None


def _outs_if_twin(functional: Any, candidate: Any) -> tuple[str, ...] | None:
    """Output names of `candidate` if its other arguments are exactly those of `functional`."""
    outs = [a for a in candidate.arguments if _is_written(a)]
    if len(outs) != len(functional.returns) or not all(a.kwarg_only for a in outs):
        return None
    if [str(a.type) for a in outs] != [str(r.type) for r in functional.returns]:
        return None
    rest = [(a.name, str(a.type)) for a in candidate.arguments if not _is_written(a)]
    own = [(a.name, str(a.type)) for a in functional.arguments]
    if rest != own:
        return None
    return tuple(a.name for a in outs)
