"""Which operator calls a graph cannot hold, and the sentence that says why.

The rules are those of a device graph: the host does not run again at replay, so nothing may
depend on a value that the host has read, and nothing may come from the host's pageable memory.
Owns the rules and their wording; does not know how a call was seen or how it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pcpbench.device.host_graph.schema import Facts, tensors_in

Named = dict[str, Any]
IsOnHost = Callable[[torch.Tensor], bool]

_TO_HOST = "it brings a tensor's value to the host, and a replay does not run the host again; "
READS_VALUE = _TO_HOST + "keep the value on the device or take it before the capture"
_SIZE_FROM_VALUE = (
    "the shape of its result depends on a tensor's values, and a graph bakes shapes; use a "
    "fixed-size form (torch.where with three arguments, masked_fill, an integer index)"
)
_FROM_HOST = (
    "its source was made in the host's memory, and a device refuses to copy from there during a "
    "capture; use fill_ or index_fill_ with the number, or a tensor made with device=..."
)
_HOST_RESULT = (
    "a custom operator that is given tensors and returns something other than tensors may return "
    "a value read from them, and a replay does not run the host again; call it outside the "
    "captured function"
)
_COLLECTIVE = (
    "collectives of torch.distributed are not recorded by the host backend; use the in-process "
    "group, or leave them outside the captured function"
)
METADATA = "it changes a tensor's memory or shape in place, which a baked address cannot follow"

_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "symm_mem"})
_MASK_INDEXED = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)
_MEMORY_CHANGERS = frozenset({"resize_", "resize_as_", "set_", "swap_"})


@dataclass(frozen=True)
class _Read:
    """An operator that takes values to the host.

    names: the arguments whose values it takes if they are tensors; ones that the host has anyway
    do no harm. reason: the sentence. when: whether a call does it. harms_on_host: refuse it for
    values of the host as well.
    """

    names: tuple[str, ...]
    reason: str = READS_VALUE
    when: Callable[[Named], bool] = lambda named: True
    harms_on_host: bool = False


def _drops_duplicates(named: Named) -> bool:
    """Whether `isin` sorts, as torch decides it: 8 elements look for 13 others one by one."""
    elements, others = named.get("elements"), named.get("test_elements")
    count = elements.numel() if isinstance(elements, torch.Tensor) else 1
    if named.get("assume_unique") or not isinstance(others, torch.Tensor) or count == 0:
        return False
    return bool(others.numel() >= int(10.0 * count**0.145))


def _has_no_range(named: Named) -> bool:
    """Whether `histc` has to look for the range itself."""
    return bool(named.get("min", 0) == named.get("max", 0) and named["self"].numel() > 0)


_NUMBER = _TO_HOST + "give it a Python number, or use torch.where"
_HOST_READS: dict[str, _Read] = {
    "tensor_split": _Read(("tensor_indices_or_sections",)),
    "_linalg_check_errors": _Read(("info",)),
    "masked_fill": _Read(("value",), _NUMBER),
    "masked_fill_": _Read(("value",), _NUMBER),
    "index_fill": _Read(("value",), _NUMBER),
    "index_fill_": _Read(("value",), _NUMBER),
    "linspace": _Read(("start", "end"), _NUMBER),
    "logspace": _Read(("start", "end"), _NUMBER),
    "normal": _Read(("std",), _TO_HOST + "use mean + std * torch.randn(...)", harms_on_host=True),
    "isin": _Read(
        ("elements", "test_elements"),
        _TO_HOST + "among so many it drops duplicates, which have to be counted; compare each with "
        "each, or say assume_unique=True of values that are unique",
        _drops_duplicates,
    ),
    "histc": _Read(("self",), _TO_HOST + "give it a range, min below max", _has_no_range),
    "searchsorted": _Read(("sorter",), _TO_HOST + "sort the sequence and leave out the sorter"),
    "segment_reduce": _Read(
        ("lengths",),
        _TO_HOST + "say unsafe=True, or give it offsets",
        lambda named: not named.get("unsafe"),
    ),
}


def reason_against(facts: Facts, named: Named, is_on_host: IsOnHost) -> str | None:
    """Why a graph cannot hold a call with these arguments by name, None if it can.

    is_on_host: whether a tensor would be in host memory on a device too.
    """
    if facts.namespace in _COLLECTIVE_NAMESPACES:
        return _COLLECTIVE
    if not facts.is_custom and (reason := _reads_on_host(facts, named, is_on_host)) is not None:
        return reason
    if facts.is_composite:
        return None  # its parts are judged one by one
    if facts.is_custom:
        return _against_custom(facts, named)
    if facts.base in _MASK_INDEXED:
        return _against_index(named, is_on_host)
    if facts.reads_data:
        return READS_VALUE
    if facts.sizes_from_data and named.get("output_size") is None:
        return _SIZE_FROM_VALUE
    if facts.base == "copy_" and is_on_host(named["src"]) and not is_on_host(named["self"]):
        return _FROM_HOST
    return METADATA if facts.base in _MEMORY_CHANGERS else None


def _reads_on_host(facts: Facts, named: Named, is_on_host: IsOnHost) -> str | None:
    rule = _HOST_READS.get(facts.base)
    if rule is None:
        return None
    read = list(tensors_in([named.get(name) for name in rule.names]))
    harmless = not rule.harms_on_host and all(map(is_on_host, read))
    return rule.reason if read and not harmless and rule.when(named) else None


def _against_custom(facts: Facts, named: Named) -> str | None:
    if facts.reads_data:
        return READS_VALUE
    if facts.sizes_from_data and named.get("output_size") is None:
        return _SIZE_FROM_VALUE
    takes_tensor = any(True for _ in tensors_in(named))
    return _HOST_RESULT if takes_tensor and facts.returns_host_values else None


def _against_index(named: Named, is_on_host: IsOnHost) -> str | None:
    """Indexing is done without counting, except for the places that a mask selects.

    One mask and one number that the host knows are a masked_fill to torch.
    """
    indices = list(tensors_in(named["indices"]))
    from_host = "values" in named and is_on_host(named["values"])
    if not any(each.dtype in (torch.bool, torch.uint8) for each in indices):
        return _FROM_HOST if from_host else None
    if len(indices) > 1 or named.get("accumulate") or "values" not in named:
        return _SIZE_FROM_VALUE
    return None if from_host and named["values"].numel() == 1 else _SIZE_FROM_VALUE
