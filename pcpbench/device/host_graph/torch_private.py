"""Every private torch name that the host backend uses, each with a public, slower stand-in.

Owns the look-up of those names; does not know what a graph is. A torch that drops one of them
costs replay speed, never correctness: what is found here is only ever used after a probe.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

Guard = Callable[[], AbstractContextManager[Any]]


class QuietDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not make torch import its compiler on the first op (seconds)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def below_autograd() -> Guard:
    """A context manager that skips autograd and view tracking but not dispatch modes.

    Kernels below it may write inference tensors from any mode. `torch.inference_mode` does the
    same at a few times the price.
    """
    found: Guard | None = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
    return found if found is not None else torch.inference_mode


def has_default_device() -> bool:
    """Whether the code that runs now was told which device its factories are to use."""
    modes: list[Any] = getattr(torch.overrides, "_get_current_function_mode_stack", list)()
    return any(type(mode).__name__ == "DeviceContext" for mode in modes)


def raw_callable(func: OpOverload) -> Callable[..., Any]:
    """The C++ entry behind an operator, without its Python wrapper; dispatch modes still see it."""
    found: Callable[..., Any] = getattr(func, "_op", func)
    return found


def has_kernel(func: OpOverload, key: str) -> bool:
    """Whether `func` has a kernel registered directly for the dispatch key named `key`."""
    ask = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    name: str = func._schema.name
    overload: str = func._schema.overload_name
    full = f"{name}.{overload}" if overload else name
    return bool(ask(full, key)) if ask is not None else False


def is_composite(func: OpOverload) -> bool:
    """Whether `func` is only a recipe over other operators (on a CPU)."""
    if not hasattr(torch._C, "_dispatch_has_kernel_for_dispatch_key"):
        return bool(func._can_decompose())
    return has_kernel(func, "CompositeImplicitAutograd") and not has_kernel(func, "CPU")


def decompose(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the C++ recipe of a composite operator, the one that eager runs."""
    direct = getattr(func, "_op_dk", None)
    if direct is None:
        return func.decompose(*args, **kwargs)
    return direct(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def builtin_spellings(name: str) -> list[Callable[..., Any]]:
    """C functions called `name` in torch's Python bindings, public namespaces first."""
    spaces: list[Any] = [torch, torch.linalg, torch.special, torch.fft]
    for private in ("_nn", "_linalg", "_special", "_fft"):
        space = getattr(torch._C, private, None)
        if space is not None:
            spaces.append(space)
    found = [getattr(space, name, None) for space in spaces]
    return [each for each in found if isinstance(each, types.BuiltinFunctionType)]
