"""Rows as CSV text, and the rows of `capture.csv` and `address_book.csv`.

Owns how a value becomes a cell. Which columns there are is in columns.py; the rows of a comparison
are in compare_rows.py.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from pcpbench.report.columns import Column
from pcpbench.results import AddressUse, CapturedGraph

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]


def header(columns: Sequence[Column]) -> str:
    """The header line."""
    return ",".join(column.name for column in columns) + "\n"


def lines(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """One line for each row, in the columns' order.

    Raises ValueError for a row with a key that is no column, or without one that is: a column that
    nobody fills would read as missing.
    """
    names = [column.name for column in columns]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in rows:
        if row.keys() != set(names):
            odd = sorted(row.keys() ^ set(names))
            raise ValueError(f"row and columns differ in {', '.join(odd)}")
        writer.writerow([cell(row[name]) for name in names])
    return stream.getvalue()


def cell(value: Cell) -> str:
    """Text of one cell: "" for None, numbers exactly, and no line break inside a text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return " ".join(value.split("\n")).replace("\r", " ")
    return repr(float(value)) if isinstance(value, float) else str(value)


def ms(seconds: float | None) -> float | None:
    """Milliseconds, None kept."""
    return None if seconds is None else seconds * 1e3


def capture_row(graph: CapturedGraph, pool_bytes_before: int) -> Row:
    """Row of `capture.csv`."""
    return {
        "descriptor": graph.descriptor,
        "mode": graph.mode,
        "num_tokens": graph.num_tokens,
        "num_reqs": graph.num_reqs,
        "uniform_token_count": graph.uniform_token_count,
        "max_query_len": graph.max_query_len,
        "capture_ms": ms(graph.capture_s),
        "num_ops": graph.num_ops,
        "num_segments": graph.num_segments,
        "eager_breaks": graph.eager_breaks,
        "pool_bytes_delta": graph.pool_bytes_after - pool_bytes_before,
        "pool_bytes_after": graph.pool_bytes_after,
        "num_reads": graph.num_reads,
        "num_writes": graph.num_writes,
    }


def address_row(use: AddressUse) -> Row:
    """Row of `address_book.csv`."""
    return {
        "graph": use.graph,
        "buffer": use.name,
        "access": access_of(use),
        "address": f"0x{use.address:x}",
        "shape": shape_of(use),
        "dtype": use.dtype,
        "num_bytes": use.num_bytes,
        "op": use.op,
        "source": use.source,
    }


def access_of(use: AddressUse) -> str:
    """`read`, `write` or `read+write`."""
    return "+".join(name for name, does in (("read", use.reads), ("write", use.writes)) if does)


def shape_of(use: AddressUse) -> str:
    """`4x64`; `scalar` for a tensor without dimensions."""
    return "x".join(str(size) for size in use.shape) or "scalar"
