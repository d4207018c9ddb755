"""Plain values against a struct, key by key: the first that does not fit, with its path.

Owns the sentences about keys, types and ranges; they come from the struct itself, so that schema,
check and message cannot part. Knows no file and no scenario.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import msgspec
from msgspec import inspect

_BOUNDS = ("ge", "le", "min_length", "max_length", "pattern")


def first_problem(value: Any, struct: type[msgspec.Struct]) -> tuple[str, str] | None:
    """(path, reason) of the first value that `struct` cannot hold, or None."""
    return _check(value, inspect.type_info(struct), "")


def field_problem(struct: type[msgspec.Struct], name: str, value: Any) -> str | None:
    """Why `value` cannot be the field `name` of `struct`, or None."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    field = next(field for field in info.fields if field.name == name)
    found = _check(value, field.type, name)
    return None if found is None else found[1]


def _check(value: Any, info: inspect.Type, path: str) -> tuple[str, str] | None:
    rule, info = _unwrap(info)
    if isinstance(info, inspect.UnionType):  # only `X | None` occurs
        if value is None:
            return None
        info = next(t for t in info.types if not isinstance(t, inspect.NoneType))
        return _check(value, info, path)
    if isinstance(info, inspect.StructType):
        return _check_struct(value, info, path)
    if isinstance(info, inspect.VarTupleType):
        return _check_list(value, info, path)
    expected: Any = _leaf_type(info)
    if _fits(value, expected, info):
        return None
    return path, f"is {_show(value)}: it must be {rule or expected.__name__}"


def _unwrap(info: inspect.Type) -> tuple[str, inspect.Type]:
    """The innermost rule that a Meta carries, and the bare type."""
    rule = ""
    while isinstance(info, inspect.Metadata):
        rule = (info.extra or {}).get("rule", rule)
        info = info.type
    return rule, info


def _check_struct(value: Any, info: inspect.StructType, path: str) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return path, f"is {_show(value)}: it must be a mapping of keys to values"
    known = [field.name for field in info.fields]
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"the nearest is {near[0]!r}" if near else f"the keys here are {', '.join(known)}"
            )
            return _join(path, key), f"is not a known key: {hint}"
    for field in info.fields:
        if field.name in value:
            found = _check(value[field.name], field.type, _join(path, field.name))
            if found is not None:
                return found
        elif field.required:
            return path, f"lacks the key {field.name!r}: add it"
    return None


def _check_list(value: Any, info: inspect.VarTupleType, path: str) -> tuple[str, str] | None:
    if not isinstance(value, list):
        return path, f"is {_show(value)}: it must be a list"
    low, high = info.min_length or 0, info.max_length
    if len(value) < low or (high is not None and len(value) > high):
        return path, f"has {len(value)} entries: it needs {low} to {high}"
    for i, item in enumerate(value):
        found = _check(item, info.item_type, f"{path}[{i}]")
        if found is not None:
            return found
    return None


def _leaf_type(info: inspect.Type) -> type:
    kinds: dict[type, type] = {
        inspect.IntType: int,
        inspect.FloatType: float,
        inspect.BoolType: bool,
    }
    return kinds.get(type(info), str)


def _fits(value: Any, expected: type, info: Any) -> bool:
    """Whether msgspec takes the bare value: no bool for a number, no nan where there is a range."""
    if expected is bool:
        return isinstance(value, bool)
    bounds = {key: getattr(info, key, None) for key in _BOUNDS}
    try:
        msgspec.convert(value, Annotated[expected, msgspec.Meta(**bounds)])
    except (msgspec.ValidationError, OverflowError):
        return False
    return True


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = "empty" if value is None else str(value).lower() if value is True else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
