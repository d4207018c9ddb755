"""The directory of `check partition` and `compare builtin vllm`.

Owns `parts.jsonl` (a line for each piece of work as it ends), `partition.csv`, `fields.csv` and
`partition.json`, and reading pieces back for a run that goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench.errors import UsageError
from pcpbench.partition_results import FieldCount, GroupCount, PartCount, PartitionResult
from pcpbench.records import Environment
from pcpbench.report import columns
from pcpbench.report.csv_files import Row, header, lines
from pcpbench.report.json_out import head
from pcpbench.report.manifest import NAME, Manifest
from pcpbench.report.plain import to_json
from pcpbench.report.run_dir import RESULTS, RunDir
from pcpbench.report.run_files import RunFiles

PARTS: Final = "parts.jsonl"


class PartitionFiles(RunFiles):
    """Use as a context manager: `add_part` for each piece that has ended, then `finish`.

    out: as in every command. resume: the directory of an earlier run to go on in, instead.
    """

    def __init__(
        self,
        command: str,
        out: Path | None,
        *,
        settings: dict[str, Any],
        environment: Environment,
        resume: Path | None = None,
        root: Path = RESULTS,
    ) -> None:
        if resume is None:
            super().__init__(command, out, settings, environment, root)
            return
        self._run_dir = RunDir(resume)
        self._manifest = Manifest(self._run_dir, command, settings, environment)
        self._finished = False

    def keep(self, parts: Iterable[PartCount]) -> None:
        """Leave these pieces alone on disk; a line that was damaged would spoil the next one."""
        text = "".join(msgspec.json.encode(part).decode() + "\n" for part in parts)
        self._run_dir.write_text(PARTS, text)

    def add_part(self, part: PartCount) -> None:
        """Put a piece that has ended on disk."""
        self._run_dir.append_text(PARTS, msgspec.json.encode(part).decode() + "\n")

    def write_tables(self, result: PartitionResult) -> None:
        """Write the tables as far as the run is."""
        groups = lines(columns.PARTITION, map(group_row, result.groups))
        fields = lines(columns.PARTITION_FIELDS, map(field_row, result.fields))
        self._run_dir.write_text("partition.csv", header(columns.PARTITION) + groups)
        self._run_dir.write_text("fields.csv", header(columns.PARTITION_FIELDS) + fields)
        self._run_dir.write_text("partition.json", partition_json(result))

    def finish(self, result: PartitionResult) -> None:
        """Write what the whole run came to."""
        self.write_tables(result)
        self._end(result)


def kept_parts(directory: Path, names: Iterable[str]) -> list[PartCount]:
    """Pieces of an earlier run that count in this one, each once.

    names: the pieces of this run. Lines that a killed run left unfinished, that name none of them,
    or that compared nothing are left out: their pieces run again.
    """
    known, found = set(names), dict[str, PartCount]()
    file = directory / PARTS
    for line in file.read_bytes().splitlines() if file.exists() else ():
        try:
            part = msgspec.json.decode(line, type=PartCount)
        except msgspec.DecodeError:
            continue
        if part.name in known and part.groups:
            found[part.name] = part
    return list(found.values())


def stored_settings(directory: Path) -> dict[str, Any]:
    """The settings of an earlier run; raises UsageError where there is none to go on with."""
    try:
        manifest = json.loads((directory / NAME).read_text())
        settings: dict[str, Any] = dict(manifest["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--resume is {str(directory)!r}, which holds no run of check partition "
            f"({type(error).__name__}): name the directory of one."
        ) from error
    return settings


def partition_json(result: PartitionResult) -> str:
    """One JSON object: counts by group and field, known differences by reason, and the others."""
    document = {
        **head(result.command, result),
        "makers": result.makers,
        "num_parts": result.num_parts,
        "num_parts_done": len(result.parts),
        f"num_{result.what}": result.num_batches,
        "num_compared": result.num_compared,
        "num_different": result.num_different,
        "num_explained": result.num_explained,
        "kernels": result.kernels,
        "groups": result.groups,
        "fields": result.fields,
        "explained": [
            {"reason": reason, "num_explained": number, "first": first}
            for reason, (number, first) in result.explained.items()
        ],
        "differences": result.differences,
    }
    return to_json(document)


def group_row(count: GroupCount) -> Row:
    """Row of `partition.csv`."""
    return msgspec.structs.asdict(count)


def field_row(count: FieldCount) -> Row:
    """Row of `fields.csv`."""
    return msgspec.structs.asdict(count)
