"""The table of a run of the fault catalogue: what `pcpbench faults run --json` printed to a file.

Owns the refusal of a file that is none, and the table. Draws nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcpbench.errors import UsageError
from pcpbench.report.manifest import SCHEMA_VERSION
from pcpbench.report.page.parts import Section, Table


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
    lead = (
        f"{file.name}: {document.get('num_caught')} of {document.get('num_faults')} faults caught, "
        f"{document.get('num_false_alarms')} false alarms. Caught: a finding that was expected of "
        "the fault was there (docs/faults.md)."
    )
    columns = ["fault", "class", "what goes wrong", "where", "expected", "fired", "verdict"]
    rows = [_cells(run) for run in document["runs"]]
    return Section("Fault catalogue", lead, table=Table(columns, rows))


def _cells(run: dict[str, Any]) -> list[str]:
    fault = run.get("fault")
    entry = fault if isinstance(fault, dict) else {}
    return [
        *(str(entry.get(name, "")) for name in ("name", "class_id", "description")),
        f"{run.get('world', '')}, {run.get('scenario', '')}",
        _joined(entry.get("contracts")) or "nothing",
        _joined(run.get("fired")) or "nothing",
        str(run.get("verdict", "")),
    ]


def _joined(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, list) else ""


def _refusal(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{str(path)!r} {what}: name the directory of a run, or a file that "
        "`pcpbench faults run --json` printed."
    )
