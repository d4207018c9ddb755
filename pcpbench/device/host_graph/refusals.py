"""How what a graph cannot hold is seen and refused: at operators, and at torch's own functions.

Owns the errors, with op, shapes, reason and line, and the mode that sees what reaches no operator.
The rules for operators are in `rules`. Knows nothing of pools or of how an op is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from pcpbench.device.host_graph import torch_private
from pcpbench.device.host_graph.rules import METADATA, READS_VALUE, IsOnHost, reason_against
from pcpbench.device.host_graph.schema import Facts, tensors_in
from pcpbench.device.host_graph.source import calling_source, source_of
from pcpbench.errors import CaptureError

_TRITON = (
    "a bare Triton launch is not an operator and would be recorded wrongly without an error; wrap "
    "the kernel as a torch.library operator that declares what it writes"
)
_LAYOUT = (
    "the host backend records plain dense CPU tensors only (no sparse, quantized, lazily "
    "conjugated or negated ones, and no other device)"
)
_HIGHER_ORDER = "it is a higher-order operator, whose branches the host backend does not record"

_REFUSED_FUNCTIONS = {
    torch.Tensor.tolist: READS_VALUE,
    torch.Tensor.numpy: READS_VALUE,
    torch.Tensor.cpu: READS_VALUE,
    torch.Tensor.__array__: READS_VALUE,
    torch.Tensor.__dlpack__: READS_VALUE,
    torch.Tensor.__deepcopy__: "it copies a tensor's storage on the host; use clone()",
    torch.Tensor.__repr__: READS_VALUE,
    torch.Tensor.data.__set__: METADATA,  # type: ignore[attr-defined]
}
_SPLITTERS = (torch.tensor_split, torch.Tensor.tensor_split)


def refuse(name: str, values: Any, reason: str, through: str) -> CaptureError:
    """The error for op `name`: its shapes, the reason, and the line that called it."""
    shapes = ", ".join(_describe(each) for each in tensors_in(values)) or "no tensors"
    asked = f" (through {through})" if through and through != name else ""
    source = calling_source()
    if source.in_triton:
        return CaptureError(
            f"a raw Triton launch at {source.text} cannot be captured: {_TRITON} "
            f"(seen as {name} on {shapes})"
        )
    return CaptureError(f"{name}{asked} on {shapes} at {source.text} cannot be captured: {reason}")


def check_operator(
    facts: Facts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    guard: HostReadGuard,
    is_on_host: IsOnHost,
) -> None:
    """Raise CaptureError if a graph cannot hold this call.

    is_on_host: whether a tensor would be in host memory on a device too, so that its value is known
    without asking the device. Rules: SPEC section 6 (nothing host-side is baked) and the tags that
    torch itself puts on operators (`data_dependent_output`, `dynamic_output_shape`).
    """
    reason = reason_against(facts, facts.bind(args, kwargs), is_on_host)
    if reason is None and any(map(is_unplain, tensors_in([args, kwargs]))):
        reason = _LAYOUT
    if reason is not None:
        raise refuse(facts.name, [args, kwargs], reason, guard.active)


def check_result(facts: Facts, args: tuple[Any, ...], result: Any, guard: HostReadGuard) -> None:
    """Raise CaptureError if an op made a tensor that has no plain bytes to bake."""
    if any(map(is_unplain, tensors_in(result))):
        raise refuse(facts.name, args, _LAYOUT, guard.active)


def refuse_higher_order(func: Any, args: tuple[Any, ...]) -> CaptureError:
    """The error for something that is not an ordinary operator."""
    return refuse(str(func), args, _HIGHER_ORDER, "")


def refuse_compiled(error: Exception) -> CaptureError | None:
    """The error for code that torch's compiler was asked to trace under capture, else None.

    torch.cond and its like call the compiler before any operator is seen.
    """
    if not type(error).__module__.startswith("torch._dynamo"):
        return None
    return CaptureError(
        f"compiled code at {source_of(error)} cannot be captured: it is a higher-order operator "
        "(torch.cond, for one) or calls torch.compile, and the host backend records neither"
    )


def refuse_moving(facts: Facts, args: tuple[Any, ...], guard: HostReadGuard) -> CaptureError:
    """The error for an op that would reshape, resize or rebase a tensor in place."""
    return refuse(facts.name, args, METADATA, guard.active)


class HostReadGuard(TorchFunctionMode):
    """Sees the torch functions that read CPU memory without calling any operator.

    Also remembers which torch function the captured code is in: for messages, and for where what
    is made there would be, which no operator tells on a machine with one kind of memory.
    """

    def __init__(self, is_on_host: IsOnHost) -> None:
        super().__init__()
        self._is_on_host = is_on_host
        self._has_default = torch_private.has_default_device()
        self._active: Any = None
        self._given: tuple[Any, ...] = ()

    @property
    def active(self) -> str:
        """Name of the torch function that the captured code is in now, empty if none."""
        return _name_of(self._active) if self._active is not None else ""

    @property
    def makes_on_host(self) -> bool:
        """Whether what is made of no tensor now would be in host memory on a device too.

        Not where the code names a device, be it through a tensor that is there or, around the whole
        capture, as the default (one named inside comes as an argument). The number in
        `x[0] = 1.0` is the host's, wherever x is.
        """
        if self._active is torch.Tensor.__setitem__:
            return True
        if self._has_default or _names_device(self._given):
            return False
        return all(map(self._is_on_host, tensors_in(list(self._given))))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse a host read; pass everything else on."""
        kwargs = kwargs or {}
        reason = _REFUSED_FUNCTIONS.get(func)
        if func in _SPLITTERS and not all(map(self._is_on_host, _split_at(args, kwargs))):
            reason = READS_VALUE
        if reason is not None:
            raise refuse(_name_of(func), [args, kwargs], reason, "")
        self._active, self._given = func, (args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self._active, self._given = None, ()


def _split_at(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """What a tensor is to be split at, if that is a tensor; not the tensor itself."""
    named = {name: value for name, value in kwargs.items() if name != "input"}
    return tensors_in([args if "input" in kwargs else args[1:], named])


def _names_device(given: tuple[Any, ...]) -> bool:
    """Whether a function was given a device: by name, or in its place as `to` may be."""
    if not given:
        return False
    args, kwargs = given
    named = kwargs.get("device") is not None
    return named or any(isinstance(each, torch.device) for each in args)


def _name_of(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func))


def is_unplain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is anything but dense bytes in host memory."""
    return (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
    )


def _describe(tensor: torch.Tensor) -> str:
    shape = "[nested]" if tensor.is_nested else list(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"
