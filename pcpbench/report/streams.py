"""stdout and stderr that nobody can read any more: a run's exit code must not depend on them.

Owns three rules. A reader of stdout that has gone away (`| head -1`) has read enough: the rest is
dropped and the run ends with its own exit code. A stdout that cannot take the report (a full disk)
is told once, as a CannotMeasure. Talk on stderr that cannot be written is dropped: an error there
must not end a run, least of all with the 1 that means a regression.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, TextIO

from pcpbench.errors import CannotMeasure

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Raw(io.FileIO):
    """A file descriptor; once a write to it has failed, it takes everything and keeps nothing."""

    def __init__(self, fd: int, *, is_talk: bool) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._is_talk, self._is_lost = is_talk, False

    # None: a pipe that would block, which the stub of IO leaves out.
    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]
        num_bytes = memoryview(data).nbytes
        if self._is_lost:
            return num_bytes
        try:
            return super().write(data)
        except OSError as error:
            self._is_lost = True
            if self._is_talk or isinstance(error, BrokenPipeError):
                return num_bytes
            raise CannotMeasure(
                f"stdout cannot be written ({error.strerror}): send it to where "
                "there is room; the files of a run that has ended are on disk."
            ) from error


def guard_streams() -> None:
    """Put guarded streams in the places of sys.stdout and sys.stderr; for a process of our own."""
    sys.stdout = _guarded(sys.stdout, is_talk=False)
    sys.stderr = _guarded(sys.stderr, is_talk=True)


def _guarded(stream: TextIO, *, is_talk: bool) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # closed (None), or no file
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Raw(stream.fileno(), is_talk=is_talk)),
        encoding=stream.encoding,
        # What a stream cannot encode is shown by its escape: no text is worth losing a verdict.
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
