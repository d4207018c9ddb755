"""What an earlier run of the matrix left: its settings and the records that still stand.

Owns every reason why a directory cannot be taken up again: another command, other settings, other
code. Nothing in it is changed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from pcpbench.device.backends import resolve_device
from pcpbench.errors import DeviceMissing, UsageError
from pcpbench.matrix_request import MatrixRequest, MatrixSettings, scenario_digests
from pcpbench.matrix_results import FINISHED, CellRecord
from pcpbench.paths import reachable
from pcpbench.report.manifest import NAME, SCHEMA_VERSION
from pcpbench.report.matrix_files import CELLS

VERSIONS: Final = "versions"
START_NEW: Final = "start a new run"
DROP_CELL: Final = "remove this file to run its cell again, or start a new run"
_FLAGS: Final = {"spec_tokens": "--k", "checks": "--check"}


def kept_settings(request: MatrixRequest, versions: Mapping[str, str]) -> MatrixSettings:
    """Settings of the run in `request.resume`; raises UsageError where it cannot go on."""
    where = request.resume
    assert where is not None
    manifest = _manifest(where)
    stored = dict(manifest["settings"])
    made_by = stored.pop(VERSIONS, {})
    if not isinstance(made_by, dict):
        raise _damaged(where / NAME, f"its {VERSIONS} are {made_by!r}", START_NEW)
    changed = [name for name in sorted({*made_by, *versions}) if made_by.get(name) !=
               versions.get(name)]  # fmt: skip
    if changed:
        told = ", ".join(
            f"{name} {made_by.get(name, '(none)')}, now {versions.get(name, '(none)')}"
            for name in changed
        )
        raise UsageError(
            f"--resume {str(where)!r} was made with another version ({told}): its cells say "
            "nothing of this one, so start a new run."
        )
    try:
        settings = msgspec.convert(stored, MatrixSettings)
    except msgspec.ValidationError as error:
        raise _damaged(where / NAME, str(error), START_NEW) from error
    for name, value in request.typed.items():
        if not _is_same(name, value, getattr(settings, name)):
            raise UsageError(
                f"{_flag(name)} is {_text(value)}, but the run in {str(where)!r} has "
                f"{_text(getattr(settings, name))}: leave it out, or start a new run."
            )
    if scenario_digests(settings.scenario) != settings.scenarios:
        raise UsageError(
            f"--resume {str(where)!r}: a scenario file has changed since: start a new run."
        )
    return settings


def _is_same(name: str, typed: Any, stored: Any) -> bool:
    """Whether a typed setting is the stored one; `auto` is the device that it stands for here."""
    if name != "device" or typed == stored:
        return bool(typed == stored)
    return _device(typed) == _device(stored)


def _device(name: str) -> tuple[str, int]:
    """Type and number: `cuda` is `cuda:0`. Raises UsageError for what is no device."""
    try:
        device = resolve_device(name)
    except DeviceMissing:
        device = torch.device(name)
    return device.type, device.index or 0


def kept_records(where: Path, settings: MatrixSettings) -> dict[str, CellRecord]:
    """Records of finished cells by name; raises UsageError for one that cannot be read."""
    kept = {}
    for cell in settings.cells:
        path = where / CELLS / f"{cell.name}.json"
        if not path.exists():
            continue
        try:
            record = msgspec.json.decode(path.read_bytes(), type=CellRecord)
        except (OSError, ValueError, RecursionError) as error:
            raise _damaged(path, str(error), DROP_CELL) from error
        if record.cell != cell:
            raise _damaged(path, f"it is of {record.cell.name}", DROP_CELL)
        if record.outcome in FINISHED:
            kept[cell.name] = record
    return kept


def _manifest(where: Path) -> dict[str, Any]:
    path = reachable(where / NAME, "--resume")
    if not path.is_file():
        raise UsageError(
            f"--resume is {str(where)!r}, which holds no {NAME}: name the directory of a run of "
            "pcpbench matrix."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        command, version = found["command"], found["schema_version"]
        dict(found["settings"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}", START_NEW) from error
    if command != "matrix":
        raise UsageError(
            f"--resume is {str(where)!r}, a run of pcpbench {command}: name one of pcpbench matrix."
        )
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"--resume is {str(where)!r}, whose files have schema_version {version}, where this "
            f"pcpbench writes {SCHEMA_VERSION}: start a new run."
        )
    manifest: dict[str, Any] = found
    return manifest


def _damaged(path: Path, why: str, remedy: str) -> UsageError:
    return UsageError(f"{str(path)!r} is damaged ({why}): {remedy}.")


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name}")


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
