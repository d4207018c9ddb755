"""stdout and stderr that nobody can read any more: a run's exit code must not depend on them.

Owns four rules. A reader of stdout that has gone away (`| head -1`) has read enough: the rest is
dropped and the run ends with its own exit code. A stdout that cannot take the report (a full disk)
is told once, as a CannotMeasure. Talk on stderr that cannot be written is dropped: an error there
must not end a run, least of all with the 1 that means a regression. A slow reader is waited for,
also where the pipe would not block: on stdout until it reads, for talk a while.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, Final, TextIO

from pcpbench.errors import CannotMeasure

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


MAX_TALK_WAIT_S: Final = 5.0
"""For a reader of stderr that has stopped reading; then nothing more is told."""


class _Raw(io.FileIO):
    """A file descriptor; once a write to it has failed, it takes everything and keeps nothing."""

    def __init__(self, fd: int, *, is_talk: bool) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._is_talk, self._is_lost = is_talk, False

    def write(self, data: ReadableBuffer, /) -> int:
        num_bytes = memoryview(data).nbytes
        if self._is_lost:
            return num_bytes
        try:
            while (written := _written(super().write(data))) is None:
                if not self._wait():
                    self._is_lost = True
                    return num_bytes
            return written
        except OSError as error:
            self._is_lost = True
            if self._is_talk or isinstance(error, BrokenPipeError):
                return num_bytes
            raise CannotMeasure(
                f"stdout cannot be written ({error.strerror}): send it to where "
                "there is room; the files of a run that has ended are on disk."
            ) from error

    def _wait(self) -> bool:
        """Until there is room in the pipe; False where it took too long."""
        limit = MAX_TALK_WAIT_S if self._is_talk else None
        return bool(select.select([], [self], [], limit)[1])


def _written(num_bytes: int | None) -> int | None:
    """What FileIO.write returns: None of a pipe that would block, which its stub leaves out."""
    return num_bytes


def guard_streams() -> None:
    """Put guarded streams in the places of sys.stdout and sys.stderr; for a process of our own.

    What was closed before the start (`2>&-`) goes nowhere: print would send talk to stdout, and the
    next file that is opened would get the descriptor, and with it what libraries write there.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    sys.stdout = _guarded(sys.stdout, is_talk=False)
    sys.stderr = _guarded(sys.stderr, is_talk=True)


def _guarded(stream: TextIO | None, *, is_talk: bool) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):  # no file
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
