"""The directory of one run: its name, whole files written at once, and tables that grow by rows.

Owns how bytes reach the disk: a file is either the old one or the new one, and a table that a
killed run leaves behind ends with a complete line. Knows no result.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pcpbench.errors import CannotMeasure, UsageError

RESULTS = Path("results")
CLAIM: Final = "manifest.json"
"""The file that a run begins with: whose create succeeds has the directory."""


class RunDir:
    """An existing directory that belongs to one run. `files`: the names written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[str] = []

    @classmethod
    def create(cls, command: str, out: Path | None = None, root: Path = RESULTS) -> RunDir:
        """Make `out`, or `root/<UTC time>-<command>-<suffix>` where no directory was named.

        Nothing that exists is ever written over: raises UsageError if `out` is a file, holds
        anything or is being taken by another run at this moment, and if it cannot be made.
        """
        try:
            if out is not None:
                _make_named(out)
                if not os.access(out, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                return cls(out)
            return cls(_make_new(command, root))
        except OSError as error:
            where = out or root
            raise UsageError(
                f"results cannot be written to {str(where)!r} ({error.strerror}): pass --out with "
                "a directory that can be made."
            ) from error

    def write_text(self, name: str, text: str) -> None:
        """Write a whole file, or replace it: a reader finds the old text or the new, never half."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """The same for any file; `name` may begin with a directory, which is made."""
        target = self.path / name
        part = target.with_name(f".{target.name}.part")
        with self._told(name):
            try:
                if target.parent != self.path:
                    target.parent.mkdir(exist_ok=True)
                with part.open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(part, target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        self._note(name)

    def append_text(self, name: str, text: str) -> None:
        """Add whole lines to a file and wait until they are on disk.

        Where that fails half-way (a full disk), what was added is taken back.
        """
        if text and not text.endswith("\n"):
            raise ValueError(f"{name}: rows must end with a newline")
        with self._told(name):
            fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                size = os.fstat(fd).st_size
                try:
                    _write_all(fd, text.encode())
                    os.fsync(fd)
                except BaseException:
                    os.ftruncate(fd, size)
                    raise
            finally:
                os.close(fd)
        self._note(name)

    def _note(self, name: str) -> None:
        if name not in self.files:
            self.files.append(name)

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CannotMeasure(
                f"{str(self.path / name)!r} cannot be written ({error.strerror}): make room or "
                "pass --out with another directory."
            ) from error


def _make_named(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out is {str(out)!r}, which is a file: name a new or empty directory.")
    out.mkdir(parents=True, exist_ok=True)
    if next(out.iterdir(), None) is not None:
        raise _not_empty(out)
    try:
        os.close(os.open(out / CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        raise _not_empty(out) from None
    if [each.name for each in out.iterdir()] != [CLAIM]:
        (out / CLAIM).unlink()
        raise _not_empty(out)


def _not_empty(out: Path) -> UsageError:
    return UsageError(
        f"--out is {str(out)!r}, which is not empty: name a new or empty directory, so that "
        "no earlier result is written over."
    )


def _make_new(command: str, root: Path) -> Path:
    """A directory that no other run has: two runs of one second differ in their suffix."""
    while True:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = root / f"{stamp}-{command}-{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
