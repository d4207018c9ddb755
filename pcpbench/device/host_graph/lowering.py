"""A functional op turned into a write into its block, accepted only when it gives the same bits.

Each way of writing is run once at capture, on the values at hand, and compared with what the op
itself returned; the first that agrees in every bit is kept, and the op followed by a copy is what
remains when none does. Owns the ways; does not know how ops are seen or replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from pcpbench.device.host_graph.binding import fastest_call
from pcpbench.device.host_graph.schema import Facts, SchemaBook
from pcpbench.device.host_graph.statement import Call, Keep, Statement

_COPIES = frozenset({"aten.clone.default", "aten._to_copy.default"})
_CLONE_THEN_WRITE = frozenset({"masked_fill", "index_fill", "index_put"})
_BOXABLE_OPS = frozenset({"add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_"})
_BOXABLE_DTYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
_SCALAR_FORMS = frozenset({f"aten.{base}_.Scalar" for base in ("add", "sub", "mul", "div")})
_STALE = 0xA5

# Ops without an `out` form of their own that call, in torch, an op that has one:
# number of arguments, that op, and the arguments it is called with.
_SAME_KERNEL: dict[str, tuple[int, str, str, Callable[[tuple[Any, ...]], tuple[Any, ...]]]] = {
    "aten.relu.default": (1, "clamp_min", "out", lambda args: (args[0], 0)),
    "aten.sum.default": (1, "sum", "IntList_out", lambda args: (args[0], [])),
    "aten.rsub.Scalar": (2, "sub", "out", lambda args: (_alone(args[1], args[0]), args[0])),
}

Statements = tuple[Statement, ...]


class Lowering:
    """Chooses statements for ops. `plain` keeps every functional op as itself plus a copy."""

    def __init__(self, book: SchemaBook, plain: bool) -> None:
        self._book = book
        self._plain = plain

    def mutation(self, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Statements:
        """Statements for an op that writes its own arguments and returns nothing else."""
        if self._plain:
            return (Statement(Call(facts.func, args, kwargs)),)
        if facts.name in _SCALAR_FORMS and len(args) == 2:  # torch wraps the number and calls it
            facts = self._book.facts(getattr(torch.ops.aten, facts.base).Tensor)
        args = boxed(facts, args, kwargs)
        return (Statement(fastest_call(facts, args, kwargs)),)

    def constant(self, keeps: tuple[Keep, ...], values: tuple[torch.Tensor, ...]) -> Statements:
        """Statements that write the same values again: one fill if they are all alike."""
        (keep,), (value,) = keeps, values
        alike = (keep.record.fill_, (_first(value),))
        filled = (Statement(Call(*alike)),)
        if _agrees(filled, keeps, values):
            return filled
        again = (Statement(Call(keep.record.copy_, (value,))),)
        again[0].call()
        return again

    def functional(
        self,
        facts: Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keeps: tuple[Keep, ...],
        values: tuple[torch.Tensor, ...],
    ) -> Statements:
        """Statements after which every kept result holds the bits of `values`.

        args, kwargs: over record tensors. keeps: one per fresh result. values: what the op
        returned at capture, in the order of `keeps`.
        """
        may_run = not (facts.is_random or facts.written or facts.sizes_from_data)
        if may_run and not self._plain:
            for statements in self._ways(facts, args, kwargs, keeps):
                if _agrees(statements, keeps, values):
                    return statements
        for keep, value in zip(keeps, values, strict=True):
            keep.record.copy_(value)
        call = Call(facts.func, args, kwargs) if self._plain else fastest_call(facts, args, kwargs)
        return (Statement(call, keeps, shapes_may_change=facts.is_custom),)

    def _ways(
        self,
        facts: Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keeps: tuple[Keep, ...],
    ) -> Iterator[Statements]:
        outs = tuple(keep.record for keep in keeps)
        if facts.name in _COPIES:
            yield self._inside("copy_", "default", (outs[0], args[0]))
        if facts.name == "aten.embedding.default" and len(args) == 2:
            yield from self._embedding(args, outs[0])
        if facts.name in _SAME_KERNEL and len(args) == _SAME_KERNEL[facts.name][0] and not kwargs:
            _, base, overload, rearranged = _SAME_KERNEL[facts.name]
            func = getattr(getattr(torch.ops.aten, base), overload)
            target = self._book.facts(func)
            yield (Statement(fastest_call(target, rearranged(args), {"out": outs[0]})),)
        if facts.base in _CLONE_THEN_WRITE:
            yield (
                *self._inside("copy_", "default", (outs[0], args[0])),
                *self._inside(f"{facts.base}_", facts.func._overloadname, (outs[0], *args[1:])),
            )
        variant = facts.out_variant
        if variant is not None and variant.native and len(variant.names) == len(outs):
            target = self._book.facts(variant.func)
            into = kwargs | dict(zip(variant.names, outs, strict=True))
            numbers_boxed = boxed(facts, args, kwargs, outs[0].dtype)
            if numbers_boxed is not args:
                yield (Statement(fastest_call(target, numbers_boxed, into)),)
            yield (Statement(fastest_call(target, args, into)),)

    def _embedding(self, args: tuple[Any, ...], out: torch.Tensor) -> Iterator[Statements]:
        """Rows of a table, without the reshape that the operator itself goes through."""
        table, ids = args
        if ids.is_contiguous() and out.is_contiguous() and ids.numel() > 0:
            func = torch.ops.aten.index_select.out
            call = (table, 0, ids.view(-1)), {"out": out.view(-1, table.shape[1])}
            yield (Statement(fastest_call(self._book.facts(func), *call)),)

    def _inside(self, base: str, overload: str, args: tuple[Any, ...]) -> Statements:
        func = getattr(getattr(torch.ops.aten, base), overload)
        return (Statement(fastest_call(self._book.facts(func), args, {})),)


def boxed(
    facts: Facts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """`args` with a Python number turned once into a 0-dim tensor, if that cannot change a bit.

    Only where torch would make the same tensor on every call: elementwise arithmetic of one dense
    tensor with one number, computed in the tensor's own dtype (fp32, fp64, int32, int64). Sixteen
    bit floats are left alone: their kernels read the number at higher precision.
    """
    if facts.base not in _BOXABLE_OPS or len(args) != 2 or facts.arg_types[1] != "Tensor":
        return args
    tensor, number = args
    if not isinstance(tensor, torch.Tensor) or type(number) not in (int, float):
        return args
    if type(number) is int and abs(number) >= 2**31:
        return args
    same = tensor.dtype == (dtype or tensor.dtype)
    exact = type(number) is int or tensor.dtype.is_floating_point
    if not (same and exact and tensor.dim() > 0 and tensor.dtype in _BOXABLE_DTYPES):
        return args
    return tensor, torch.full((), number, dtype=tensor.dtype)


def _alone(number: float, like: torch.Tensor) -> torch.Tensor:
    """A number as a 0-dim tensor, in the dtype that arithmetic with `like` gives it."""
    return torch.full((), number, dtype=torch.result_type(like, number))


def _agrees(
    statements: Statements, keeps: tuple[Keep, ...], values: tuple[torch.Tensor, ...]
) -> bool:
    """Run the statements over stale blocks and compare every result bit for bit."""
    layouts = [_layout(keep.record) for keep in keeps]
    for keep in keeps:
        keep.block.memory.fill(_STALE)
    try:
        for statement in statements:
            statement.call()
    except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError):
        return False
    return layouts == [_layout(keep.record) for keep in keeps] and all(
        bits_equal(keep.record, value) for keep, value in zip(keeps, values, strict=True)
    )


def bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits (NaN equals itself)."""
    return torch.equal(_as_integers(left), _as_integers(right))


def _first(tensor: torch.Tensor) -> Any:
    return tensor[(0,) * tensor.dim()].item() if tensor.numel() else 0


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
