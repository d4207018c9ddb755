"""Turns records into values that JSON knows. Owns what happens to non-finite numbers.

JSON has no inf and no nan, and a reader must not take a missing number for a sound one. So a
non-finite number becomes null, and next to it stands a flag that says which it was:

    {"max_abs": inf}        ->  {"max_abs": null, "max_abs_non_finite": "inf"}
    {"sizes": [1.0, nan]}   ->  {"sizes": [1.0, null], "sizes_non_finite": [null, "nan"]}
"""

from __future__ import annotations

import dataclasses
import json
import math
from enum import Enum
from pathlib import PurePath
from typing import Any

import msgspec

from pcpbench.report.printable import printable_json

FLAG = "_non_finite"


def to_json(value: Any) -> str:
    """JSON text of a record, a mapping or a sequence of them, ending with a newline."""
    text = json.dumps(to_plain(value), indent=2, allow_nan=False, ensure_ascii=False)
    return printable_json(text) + "\n"


def to_plain(value: Any) -> Any:
    """dicts, lists, strings, finite numbers, booleans and None; see the module's docstring.

    Raises TypeError for what is neither a record nor a value.
    """
    return _convert(value)[0]


def _convert(value: Any) -> tuple[Any, Any]:
    """The plain value, and the flag that its owner has to carry (None for nothing to tell)."""
    if value is None or isinstance(value, bool | int | str):
        return value, None
    if isinstance(value, float):
        return _convert_float(value)
    if isinstance(value, list | tuple):
        pairs = [_convert(item) for item in value]
        flags = [flag for _, flag in pairs]
        told = flags if any(flag is not None for flag in flags) else None
        return [plain for plain, _ in pairs], told
    if isinstance(value, Enum):
        return (value.value if isinstance(value.value, str) else value.name.lower()), None
    if isinstance(value, PurePath):
        return str(value), None
    if getattr(value, "ndim", None) == 0:
        return _convert(value.item())  # a numpy scalar
    return _convert_items(_items_of(value)), None


def _convert_float(value: float) -> tuple[float | None, str | None]:
    if math.isfinite(value):
        return float(value), None
    return None, "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _items_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no place in a report")


def _convert_items(items: dict[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in items.items():
        name = str(key)
        plain[name], flag = _convert(value)
        if flag is not None:
            plain[name + FLAG] = flag
    return plain
