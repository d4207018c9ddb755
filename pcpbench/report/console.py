"""How text looks on a console: the console itself, verdict words, labelled facts.

Owns styles and layout that every view shares. A style only ever repeats what a word says. Widths:
below WIDE columns a view leaves out what the CSV files hold anyway, and wraps what it keeps.
Whatever is printed passes `printable` on its way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pcpbench.records import Notice
from pcpbench.report.printable import printable
from pcpbench.results import Outcome

WIDE: Final = 120
LABEL_WIDTH: Final = 16

STYLES: Final = {Outcome.PASS: "bold green", Outcome.FAIL: "bold red",
                 Outcome.NOT_COMPARED: "bold yellow"}  # fmt: skip
WORDS: Final = {Outcome.PASS: "PASS", Outcome.FAIL: "FAIL", Outcome.NOT_COMPARED: "NOT COMPARED"}


class SafeConsole(Console):
    """A console that shows control characters as their escapes, wherever in a view they stand."""

    def render_str(self, text: str, **settings: Any) -> Text:
        """As rich's, which makes and measures every string."""
        return super().render_str(printable(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich's, which every Text of every table and grid comes through."""
        if isinstance(renderable, Text) and printable(renderable.plain) != renderable.plain:
            renderable = Text(printable(renderable.plain), renderable.style)
        return super().render(renderable, options)


def plain_is_asked() -> bool:
    """Whether NO_COLOR is set: then no escape sequence is printed, on a terminal either."""
    return bool(os.environ.get("NO_COLOR"))


def make_console(stream: TextIO | None = None, width: int | None = None) -> Console:
    """A console on a stream (stdout by default) that prints text as it is.

    Markup, highlighting and emoji codes are off: `FULL[reqs=4]` is a name. Styles are left out when
    NO_COLOR is set or the stream is no terminal. A stream that cannot encode a character gets `?`.
    """
    out = sys.stdout if stream is None else stream
    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure is not None and not (out.encoding or "").lower().startswith("utf"):
        reconfigure(errors="replace")
    return SafeConsole(
        file=out,
        width=width,
        markup=False,
        highlight=False,
        emoji=False,
        color_system=None if plain_is_asked() else "auto",
    )


def is_wide(console: Console) -> bool:
    """Whether there is room for the columns that narrow consoles do without."""
    return console.width >= WIDE


def badge(outcome: Outcome) -> Text:
    """The verdict as a word."""
    return Text(WORDS[outcome], style=STYLES[outcome])


def verdict_line(console: Console, outcome: Outcome, text: str) -> None:
    """The verdict and one sentence; lines that wrap stay clear of the verdict."""
    words_line(console, WORDS[outcome], STYLES[outcome], text)


def words_line(console: Console, words: str, style: str, text: str) -> None:
    """The same for a verdict that has words and a style of its own."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(words, style=style), Text(text, style="bold"))
    console.print(grid)


def new_table(left: Iterable[str] = (), right: Iterable[str] = ()) -> Table:
    """A table with a rule under its header and nothing else; text that is too long folds."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for name in left:
        table.add_column(Text(name), overflow="fold")
    for name in right:
        table.add_column(Text(name), overflow="fold", justify="right")
    return table


class Facts:
    """Lines with a label on the left, printed together; empty ones are left out."""

    def __init__(self) -> None:
        self.grid = Table.grid(padding=(0, 2))
        self.grid.add_column(min_width=LABEL_WIDTH, max_width=LABEL_WIDTH, overflow="fold")
        self.grid.add_column(overflow="fold")

    def add(self, label: str, text: str | Text, style: str = "") -> None:
        """One fact; a label is shown once, lines that follow leave it empty."""
        if text:
            body = text if isinstance(text, Text) else Text(text)
            self.grid.add_row(Text(label, style=style), body)

    def add_all(self, label: str, texts: Iterable[str], style: str = "") -> None:
        """Several lines under one label."""
        for number, text in enumerate(texts):
            self.add("" if number else label, text, style)

    def print(self, console: Console) -> None:
        """Print what was added."""
        if self.grid.row_count:
            console.print(self.grid)


def add_planted(facts: Facts, settings: Mapping[str, Any]) -> None:
    """A fact that stands first wherever a fault was planted: what follows is then meant to fail."""
    if settings.get("inject"):
        told = f"the fault {settings['inject']} was planted on purpose"
        facts.add("Injected", told, style="bold yellow")


def add_notices(facts: Facts, notices: Iterable[Notice]) -> None:
    """Warnings: each names the setting and says what to do."""
    facts.add_all("Notice", (f"{n.setting}: {n.message}" for n in notices), style="yellow")
