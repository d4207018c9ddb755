"""What a page is made of: tables and sections. Knows no run and no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Cells as text. numbers: indices of the columns that hold numbers, set flush right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Figure:
    """One plot with its table. title and desc also tell a screen reader what the plot shows.

    svg: markup made by plots.py, "" where there is nothing to draw; `note` then says why. is_open:
    whether the table is unfolded at once, where it is what one came for.
    """

    title: str
    desc: str = ""
    svg: str = ""
    table: Table | None = None
    note: str = ""
    is_open: bool = False


@dataclass(frozen=True)
class Section:
    """Plots that answer one question. lead: a sentence or two on how to read them."""

    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    table: Table | None = None


@dataclass(frozen=True)
class RunPart:
    """One run. facts: name and text. warnings: sentences to be seen before any number."""

    name: str
    outcome: str
    headline: str
    facts: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=list)


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]], first_number: int) -> Table:
    """A table whose columns from `first_number` on hold numbers."""
    return Table(columns, rows, frozenset(range(first_number, len(columns))))
