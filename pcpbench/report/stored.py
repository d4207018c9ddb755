"""Runs on disk, read back: the manifest and the CSV tables of a run's directory.

Owns the refusal of whatever is no run of ours, damaged, or newer than this program. Reads columns
by name, never by position, and changes nothing. A run that was killed is read up to what had
finished.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pcpbench import __version__
from pcpbench.errors import UsageError
from pcpbench.paths import reachable
from pcpbench.report.manifest import NAME, SCHEMA_VERSION
from pcpbench.report.printable import printable

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "summary.csv": ("scenario", "arm", "role", "outcome"),
    "steps.csv": ("scenario", "arm", "step", "served_as"),
    "samples.csv": ("scenario", "arm", "measure", "value_ms"),
    "drift.csv": ("scenario", "step", "kind", "arm", "tensor", "outcome"),
    "phases.csv": ("scenario", "arm", "step", "rank", "phase", "start_ms", "duration_ms"),
    "gate.csv": ("rule", "metric", "scenario", "verdict"),
}
"""Tables that reports read by column, and the columns without which nothing can be told."""

RUNNING: Final = "running"
"""Outcome of a run that has not ended, and of one that was killed."""

csv.field_size_limit(1 << 24)


class Row:
    """One line of a table. A column that the file lacks (an older run) reads as empty."""

    __slots__ = ("_cells", "_where")

    def __init__(self, cells: dict[str, str], where: str) -> None:
        self._cells, self._where = cells, where

    @property
    def cells(self) -> dict[str, str]:
        """All cells by column."""
        return self._cells

    def text(self, column: str) -> str:
        """The cell as it stands there, "" for an empty one."""
        return self._cells.get(column, "")

    def number(self, column: str) -> float | None:
        """The number in a cell, None for an empty one; raises UsageError for what is none."""
        text = self.text(column)
        if not text:
            return None
        try:
            return float(text)
        except ValueError as error:
            raise UsageError(
                f"{self._where} is damaged: {column} is {text[:40]!r}, which is no number. "
                "Run the command that made it again."
            ) from error

    def whole(self, column: str) -> int | None:
        """The whole number in a cell, None for an empty one; raises UsageError for another one."""
        value = self.number(column)
        if value is None:
            return None
        if not (math.isfinite(value) and value == int(value)):
            raise UsageError(
                f"{self._where} is damaged: {column} is {value}, which is no whole number. "
                "Run the command that made it again."
            )
        return int(value)


@dataclass(frozen=True)
class StoredRun:
    """One run. manifest: as on disk. tables: rows by file name; a file that is not there is not in
    it."""

    path: Path
    manifest: dict[str, Any]
    tables: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its directory's name; behind that of the run it lies in, as the gate of a comparison
        does."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if (path.parent / NAME).is_file() else path.name

    @property
    def command(self) -> str:
        """`compare`, `modes`, ..."""
        return str(self.manifest["command"])

    @property
    def outcome(self) -> str:
        """How it ended; `running` for one that was killed, or has not ended yet."""
        return str(self.manifest.get("outcome") or RUNNING)

    @property
    def started_at(self) -> str:
        """UTC, ISO 8601; runs sort by it."""
        return str(self.manifest.get("started_at") or "")

    def section(self, name: str) -> dict[str, Any]:
        """`settings` or `environment` of the manifest."""
        value = self.manifest.get(name)
        return value if isinstance(value, dict) else {}

    def file(self, name: str) -> Path | None:
        """Where a file of the run is, None for one that it has not; raises UsageError for one that
        its manifest lists and that is gone."""
        file = self.path / name
        if reachable(file).exists():
            return file
        listed = self.manifest.get("files")
        if isinstance(listed, list) and name in listed:
            raise damaged(self.path / NAME, f"it lists {name}, which is not there")
        return None

    def data(self, name: str) -> bytes | None:
        """What stands in a file of the run, None where it has none.

        Raises UsageError as `file` does, and for one that cannot be read.
        """
        file = self.file(name)
        try:
            return None if file is None else _regular(file).read_bytes()
        except OSError as error:
            raise _unreadable(self.path / name, error) from error

    def texts(self, name: str) -> list[str]:
        """`reasons`, or `notices` as sentences."""
        found = self.manifest.get(name)
        items = found if isinstance(found, list) else []
        return [
            f"{item.get('setting')}: {item.get('message')}" if isinstance(item, dict) else str(item)
            for item in items
        ]


def read_run(path: Path, tables: Sequence[str] = tuple(KEYS)) -> StoredRun:
    """A run's directory, with those of `tables` that it holds.

    Raises UsageError, naming file and remedy, for a directory that is no run, or is damaged or
    newer.
    """
    manifest = _read_manifest(path)
    run = StoredRun(path, manifest)
    for name in dict.fromkeys(tables):
        rows = _read_table(run, name)
        if rows is not None:
            run.tables[name] = rows
    return run


def _read_manifest(path: Path) -> dict[str, Any]:
    if not reachable(path).is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        raise UsageError(f"{str(path)!r} {what}: name the directory of a run, such as results/....")
    file = reachable(path / NAME)
    if not file.is_file():
        raise UsageError(
            f"{str(path)!r} holds no {NAME}, so it is no run of pcpbench: name a directory that "
            "one of its commands wrote."
        )
    try:
        manifest = json.loads(_text_of(file))
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is no JSON ({error})") from error
    if not isinstance(manifest, dict) or "pcpbench_version" not in manifest:
        raise UsageError(f"{str(file)!r} was not written by pcpbench: name a run of its own.")
    version = manifest.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise damaged(file, f"its schema_version is {version!r}")
    if version > SCHEMA_VERSION:
        raise UsageError(
            f"{str(file)!r} has schema version {version}, written by pcpbench "
            f"{manifest['pcpbench_version']}, and pcpbench {__version__} reads up to "
            f"{SCHEMA_VERSION}: read it with the newer one."
        )
    if not isinstance(manifest.get("command"), str):
        raise damaged(file, "it names no command")
    return manifest


def _read_table(run: StoredRun, name: str) -> list[Row] | None:
    """Rows of a table, None where the run has no such file."""
    file = run.file(name)
    if file is None:
        return None
    text = _text_of(file)
    if run.outcome == RUNNING:  # killed, or still at it: a line may have been begun
        text = text[: text.rfind("\n") + 1]
    if not text.endswith("\n"):
        raise damaged(file, "it is cut off in the middle of a line")
    return list(_rows(file, printable(text), KEYS.get(name, ())))


def _rows(file: Path, text: str, keys: Sequence[str]) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        names = next(reader, [])
        missing = [key for key in keys if key not in names]
        if missing or len(set(names)) < len(names):
            what = f"it has no column {missing[0]}" if missing else "it names a column twice"
            raise damaged(file, what)
        for cells in reader:
            where = f"{str(file)!r}, line {reader.line_num},"
            if len(cells) != len(names):
                raise damaged(
                    file, f"line {reader.line_num} has {len(cells)} cells for {len(names)} columns"
                )
            yield Row(dict(zip(names, cells, strict=True)), where)
    except csv.Error as error:
        raise damaged(file, f"line {reader.line_num} is no CSV ({error})") from error


def _text_of(file: Path) -> str:
    try:
        text = _regular(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise damaged(file, f"it is no text in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise _unreadable(file, error) from error
    if "\0" in text:
        raise damaged(file, "it holds a NUL byte")
    return text


def _regular(file: Path) -> Path:
    """The file itself: to read a pipe would wait for whoever writes into it."""
    if not file.is_file():
        raise damaged(file, "it is no regular file")
    return file


def _unreadable(file: Path, error: OSError) -> UsageError:
    return UsageError(f"{str(file)!r} cannot be read ({error.strerror}).")


def damaged(file: Path, what: str) -> UsageError:
    """The refusal of a file that is not as it was written."""
    return UsageError(
        f"{str(file)!r} is damaged: {what}. Run the command that made it again, or name another."
    )
