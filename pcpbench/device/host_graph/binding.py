"""The cheapest Python spelling of an operator call, accepted only when a probe agrees.

torch's own bindings (`torch.mul(a, b, out=c)`, a bound `c.add_`) parse arguments faster than an
operator object does. A spelling is accepted if it reaches exactly that operator, once, with the
same addresses, shapes, strides, dtypes and scalars; the probe stops it there, so nothing runs.
Owns spellings; does not know what a graph is.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from pcpbench.device.host_graph import torch_private
from pcpbench.device.host_graph.schema import Facts
from pcpbench.device.host_graph.statement import Call


def fastest_call(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call of operator `facts` with these arguments, in the cheapest spelling that is exact."""
    wanted = _fingerprint(facts.bind(args, kwargs))
    for call in _spellings(facts, args, kwargs):
        if _reaches(call, facts, wanted):
            return call
    return Call(torch_private.raw_callable(facts.func), args, kwargs)


def _spellings(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
    """Candidate calls, the cheapest first."""
    if facts.is_custom:
        return
    if not facts.out_names and args and isinstance(args[0], torch.Tensor):
        method = getattr(args[0], facts.base, None)
        if isinstance(method, types.BuiltinMethodType):
            yield Call(method, args[1:], kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in facts.out_names}
    if facts.out_names:
        outs = tuple(kwargs[name] for name in facts.out_names if name in kwargs)
        rest["out"] = outs[0] if len(outs) == 1 else outs
    for fn in torch_private.builtin_spellings(facts.base):
        yield Call(fn, args, rest)


class _Reached(Exception):
    """Carries the operator call that a spelling led to."""

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.func, self.args_seen, self.kwargs_seen = func, args, kwargs


class _Probe(torch_private.QuietDispatchMode):  # type: ignore[no-untyped-call]
    """Stops at the first operator, before its kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached(func, args, kwargs or {})


def _reaches(call: Call, facts: Facts, wanted: dict[str, Any]) -> bool:
    try:
        with _Probe():  # type: ignore[no-untyped-call]
            call()
    except _Reached as reached:
        seen = facts.bind(reached.args_seen, reached.kwargs_seen)
        return reached.func is facts.func and _fingerprint(seen) == wanted
    except (TypeError, RuntimeError, ValueError, IndexError):
        return False
    return False


def _fingerprint(value: Any) -> Any:
    """Something that is equal for equal arguments: address and layout, or type and value."""
    if isinstance(value, torch.Tensor):
        layout = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        return ("tensor", *layout)
    if isinstance(value, dict):
        return {name: _fingerprint(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return ("list", *(_fingerprint(each) for each in value))
    return (type(value).__name__, repr(value))
