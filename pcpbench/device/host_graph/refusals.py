"""What a graph cannot hold, and the sentence that says so. Owns the rules and their wording.

The rules are those of a device graph: the host does not run again at replay, so nothing may
depend on a value that the host has read, and a tensor's memory may not change under the graph.
Knows nothing of pools or of how an op is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from pcpbench.device.host_graph.schema import Facts, tensors_in
from pcpbench.device.host_graph.source import calling_source, source_of
from pcpbench.errors import CaptureError

_READS_VALUE = (
    "it brings a tensor's value to the host, and a replay does not run the host again; keep the "
    "value on the device or take it before the capture"
)
_SIZE_FROM_VALUE = (
    "the shape of its result depends on a tensor's values, and a graph bakes shapes; use a "
    "fixed-size form (torch.where with three arguments, masked_fill, an integer index)"
)
_HOST_RESULT = (
    "a custom operator that is given tensors and returns no tensor may return a value read from "
    "them, and a replay does not run the host again; call it outside the captured function"
)
_COLLECTIVE = (
    "collectives of torch.distributed are not recorded by the host backend; use the in-process "
    "group, or leave them outside the captured function"
)
_TRITON = (
    "a bare Triton launch is not an operator and would be recorded wrongly without an error; wrap "
    "the kernel as a torch.library operator that declares what it writes"
)
_METADATA = "it changes a tensor's memory or shape in place, which a baked address cannot follow"
_LAYOUT = (
    "the host backend records plain dense CPU tensors only (no sparse, quantized, lazily "
    "conjugated or negated ones, and no other device)"
)
_HIGHER_ORDER = "it is a higher-order operator, whose branches the host backend does not record"

_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "symm_mem"})

# Arguments whose value a kernel takes to the host if they are tensors, by operator.
_HOST_READS: dict[str, tuple[str, ...]] = {
    "tensor_split": ("tensor_indices_or_sections",),
    "_linalg_check_errors": ("info",),
    "masked_fill": ("value",),
    "masked_fill_": ("value",),
    "index_fill": ("value",),
    "index_fill_": ("value",),
    "linspace": ("start", "end"),
    "logspace": ("start", "end"),
    "normal": ("std",),
}
_MASK_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_MEMORY_CHANGERS = frozenset({"resize_", "resize_as_", "set_", "swap_"})

_REFUSED_FUNCTIONS = {
    torch.Tensor.tolist: _READS_VALUE,
    torch.Tensor.numpy: _READS_VALUE,
    torch.Tensor.cpu: _READS_VALUE,
    torch.Tensor.__array__: _READS_VALUE,
    torch.Tensor.__dlpack__: _READS_VALUE,
    torch.Tensor.__deepcopy__: "it copies a tensor's storage on the host; use clone()",
    torch.Tensor.__repr__: _READS_VALUE,
    torch.Tensor.data.__set__: _METADATA,  # type: ignore[attr-defined]
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
    is_on_host: Callable[[torch.Tensor], bool],
) -> None:
    """Raise CaptureError if a graph cannot hold this call.

    is_on_host: whether a tensor would be in host memory on a device too, so that its value is known
    without asking the device. Rules: SPEC section 6 (nothing host-side is baked) and the tags that
    torch itself puts on operators (`data_dependent_output`, `dynamic_output_shape`).
    """
    reason = _reason(facts, facts.bind(args, kwargs), is_on_host)
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
    return refuse(facts.name, args, _METADATA, guard.active)


def _reason(
    facts: Facts, named: dict[str, Any], is_on_host: Callable[[torch.Tensor], bool]
) -> str | None:
    if facts.namespace in _COLLECTIVE_NAMESPACES:
        return _COLLECTIVE
    read = tensors_in([named.get(name) for name in _HOST_READS.get(facts.base, ())])
    if not facts.is_custom and not all(map(is_on_host, read)):
        return _READS_VALUE
    if facts.is_composite and not facts.is_custom:
        return None  # its parts are judged one by one
    if facts.base in _MASK_INDEXED and not facts.is_custom:
        return None if _has_fixed_size(named, is_on_host) else _SIZE_FROM_VALUE
    if facts.reads_data:
        return _READS_VALUE
    if facts.sizes_from_data and named.get("output_size") is None:
        return _SIZE_FROM_VALUE
    if facts.is_custom:
        takes_tensor = any(True for _ in tensors_in(named))
        return _HOST_RESULT if takes_tensor and facts.returns_host_values else None
    if facts.base in _MEMORY_CHANGERS:
        return _METADATA
    return None


def _has_fixed_size(named: dict[str, Any], is_on_host: Callable[[torch.Tensor], bool]) -> bool:
    """Whether an indexing is done without counting the places that a mask selects.

    One mask and one number that the host knows are a masked_fill to torch.
    """
    indices = list(tensors_in(named["indices"]))
    if not any(each.dtype in (torch.bool, torch.uint8) for each in indices):
        return True
    if len(indices) > 1 or named.get("accumulate") or "values" not in named:
        return False
    return named["values"].numel() == 1 and is_on_host(named["values"])


class HostReadGuard(TorchFunctionMode):
    """Sees the torch functions that read CPU memory without calling any operator.

    Also remembers which torch function the captured code is in, for messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._active: Any = None

    @property
    def active(self) -> str:
        """Name of the torch function that the captured code is in now, empty if none."""
        return _name_of(self._active) if self._active is not None else ""

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
        if reason is None and func in _SPLITTERS and len(list(tensors_in([args, kwargs]))) > 1:
            reason = _READS_VALUE
        if reason is not None:
            raise refuse(_name_of(func), [args, kwargs], reason, "")
        self._active = func
        try:
            return func(*args, **kwargs)
        finally:
            self._active = None


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
