"""What a column of a CSV file is. The columns themselves: columns.py."""

from __future__ import annotations

from typing import Final, NamedTuple


class Column(NamedTuple):
    """One column. unit: "" for names, texts and plain numbers."""

    name: str
    unit: str
    meaning: str


STAT_NAMES: Final = ("mean", "median", "std", "p99")
