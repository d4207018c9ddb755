"""How far a run is, told on stderr: a bar on a terminal, plain lines elsewhere.

Owns the talk while something runs. A bar is drawn only from inside `advance`, at most a few times a
second and never from a thread of its own: a thread that wakes up during a timed step would be
measured with it. Callers advance between steps, never inside a timed one.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichProgress

from pcpbench.report.console import make_console, plain_is_asked
from pcpbench.report.printable import printable

SECONDS_BETWEEN_DRAWS = 0.2


class Progress(Protocol):
    """What a session tells while it runs; used as a context manager."""

    def start(self, what: str, total: int, unit: str = "steps") -> None:
        """Begin something of `total` units; what ran before is over."""

    def advance(self, num: int = 1) -> None:
        """`num` more units are done."""

    def say(self, text: str) -> None:
        """One line that stays, such as a scenario's outcome."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class _Lines:
    """Plain lines: one when something starts, one for whatever is said."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, what: str, total: int, unit: str = "steps") -> None:
        self.say(f"{what}: {total} {unit}")

    def advance(self, num: int = 1) -> None:
        pass

    def say(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class _Bar:
    """A bar that vanishes when the run ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self._task: TaskID | None = None
        self._waiting = 0
        self._drawn_at = 0.0

    def start(self, what: str, total: int, unit: str = "steps") -> None:
        self._remove()
        self._task = self._bar.add_task(what, total=total, unit=unit)
        self._draw()

    def advance(self, num: int = 1) -> None:
        self._waiting += num
        if time.monotonic() - self._drawn_at >= SECONDS_BETWEEN_DRAWS:
            self._draw()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()
        self._bar.stop()

    def _draw(self) -> None:
        if self._task is not None:
            self._bar.advance(self._task, self._waiting)
        self._waiting = 0
        self._bar.refresh()
        self._drawn_at = time.monotonic()

    def _remove(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task, self._waiting = None, 0


def make_progress(stream: TextIO | None = None) -> Progress:
    """A bar if the stream (default stderr) is a terminal that can move its cursor, else lines.

    Lines also under NO_COLOR: a bar is drawn with escape sequences; and in a file under
    FORCE_COLOR, which has rich take it for a terminal.
    """
    out = sys.stderr if stream is None else stream
    console = make_console(out)
    has_cursor = out.isatty() and console.is_terminal and not console.is_dumb_terminal
    if has_cursor and not plain_is_asked():
        return _Bar(console)
    return _Lines(out)
