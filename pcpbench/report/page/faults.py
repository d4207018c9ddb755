"""The table of a run of the fault catalogue: what `pcpbench faults run --json` printed to a file.

Owns the refusal of a file that is none, and the table. Draws nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcpbench.errors import UsageError
from pcpbench.fault_results import NO_VERDICT
from pcpbench.report.manifest import SCHEMA_VERSION
from pcpbench.report.page.parts import Section, Table
from pcpbench.report.units import NOTHING

UNJUDGED = {verdict.value for verdict in NO_VERDICT}


@dataclass(frozen=True)
class FaultsFile:
    """One file. document: as on disk, of a known version, with a list of runs."""

    name: str
    document: dict[str, Any]


def read_faults(path: Path) -> FaultsFile:
    """Raises UsageError, naming file and remedy, for one that is foreign, damaged or newer."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise _refusal(path, "is damaged or no JSON") from error
    if not isinstance(document, dict) or document.get("command") != "faults run":
        raise _refusal(path, "is no result of the fault catalogue")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{str(path)!r} has schema version {version!r}, and {SCHEMA_VERSION} is what this "
            "pcpbench reads: read it with the one that made it."
        )
    runs = document.get("runs")
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise _refusal(path, "is damaged: it has no list of runs")
    return FaultsFile(path.name, document)


def faults_section(file: FaultsFile) -> Section:
    """Every fault with its verdict."""
    document = file.document
    clean = [run for run in document.get("clean") or [] if isinstance(run, dict)]
    accused = [run for run in clean if run.get("accused")]
    columns = ["fault", "class", "what goes wrong", "where", "expected", "fired", "verdict"]
    rows = [_cells(run) for run in document["runs"]] + [_clean_cells(run) for run in accused]
    return Section("Fault catalogue", _lead(file), table=Table(columns, rows))


def _lead(file: FaultsFile) -> str:
    """What was judged, and how much was not."""
    document = file.document
    left_out = sum(run.get("verdict") in UNJUDGED for run in document["runs"])
    told = (
        f"{file.name}: {document.get('num_caught')} of {document.get('num_faults')} faults caught, "
        f"{document.get('num_false_alarms')} false alarms"
    )
    if left_out == len(document["runs"]):
        told = f"{file.name}: no fault was judged"
    elif left_out:
        told += f", {left_out} without a verdict"
    return f"{told}. Caught: a finding that was expected of the fault was there (docs/faults.md)."


def _clean_cells(run: dict[str, Any]) -> list[str]:
    """A run without a fault that was accused."""
    where = _where(run)
    return ["none", NOTHING, str(run.get("detail", "")), where, "nothing", NOTHING, "false alarm"]


def _cells(run: dict[str, Any]) -> list[str]:
    fault = run.get("fault")
    entry = fault if isinstance(fault, dict) else {}
    return [
        *(str(entry.get(name, "")) for name in ("name", "class_id", "description")),
        _where(run),
        _joined(entry.get("contracts")) or "nothing",
        _joined(run.get("fired")) or "nothing",
        str(run.get("verdict", "")),
    ]


def _where(run: dict[str, Any]) -> str:
    parts = (run.get("world"), run.get("scenario"))
    return ", ".join(str(part) for part in parts if part) or NOTHING


def _joined(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list) else ""


def _refusal(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r} {what}: name the directory of a run, or a file that "
        "`pcpbench faults run --json` printed."
    )
