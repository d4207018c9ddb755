"""A capture on a console: the verdict, the descriptors, and who reads and writes what.

Owns how an address book of thousands of uses becomes a page: buffers that differ only in a number
(rank, layer) share a line. Every use is in `address_book.csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from pcpbench.report import units
from pcpbench.report.console import Facts, add_notices, is_wide, new_table, verdict_line
from pcpbench.report.csv_files import access_of, shape_of
from pcpbench.results import AddressUse, CaptureResult, Outcome

UNOWNED_SHOWN = 10


def print_capture(result: CaptureResult, console: Console) -> None:
    """Print the whole report."""
    print_capture_verdict(result, console)
    console.print()
    if result.unowned:
        facts = Facts()
        facts.add_all("Unowned", _unowned_lines(result), style="bold red")
        facts.print(console)
        console.print()
    if result.graphs:
        console.print(_graph_table(result, console))
        console.print()
    if result.addresses:
        console.print(_buffer_table(result.addresses, console))
        console.print()
    facts = Facts()
    add_notices(facts, result.notices)
    if result.run_dir:
        facts.add("Files", result.run_dir)
    facts.print(console)


def print_capture_verdict(result: CaptureResult, console: Console) -> None:
    """The verdict in one sentence; also the talk beside `--json`."""
    verdict_line(console, result.outcome, verdict(result))


def verdict(result: CaptureResult) -> str:
    """One sentence."""
    if result.outcome is not Outcome.PASS:
        return f"{result.mode}: {'; '.join(result.reasons)}."
    seconds = sum(graph.capture_s for graph in result.graphs)
    return (
        f"{result.mode}: {units.count(len(result.graphs), 'descriptor')} captured in "
        f"{units.times(seconds)[0]}, {units.size(result.pool_bytes)} of pool; every buffer that "
        "they touch is owned."
    )


def _unowned_lines(result: CaptureResult) -> list[str]:
    seen: dict[tuple[int, str, str], list[AddressUse]] = {}
    for use in result.unowned:
        seen.setdefault((use.address, use.op, use.source), []).append(use)
    lines = [
        f"{access_of(uses[0])} of {shape_of(uses[0])} {uses[0].dtype} at 0x{address:x} by {op}, "
        f"{source}, in {units.count(len(uses), 'graph')}, {uses[0].graph} first"
        for (address, op, source), uses in seen.items()
    ]
    rest = len(lines) - UNOWNED_SHOWN
    return lines[:UNOWNED_SHOWN] + ([f"... and {rest} more"] if rest > 0 else [])


def _graph_table(result: CaptureResult, console: Console) -> Table:
    wide = is_wide(console)
    names = ["Time", "Ops", "Breaks", "Pool +", "Reads", "Writes"]
    if wide:
        names = ["Uniform", "Time", "Ops", "Segments", "Breaks", "Pool +", "Pool", "Reads",
                 "Writes"]  # fmt: skip
    table = new_table(["Descriptor"], names)
    times = units.times(*(graph.capture_s for graph in result.graphs))
    before = 0
    for graph, time in zip(result.graphs, times, strict=True):
        uniform = graph.uniform_token_count
        cells = {
            "Uniform": units.NOTHING if uniform is None else str(uniform),
            "Time": time,
            "Ops": str(graph.num_ops),
            "Segments": str(graph.num_segments),
            "Breaks": str(graph.eager_breaks),
            "Pool +": units.size(graph.pool_bytes_after - before),
            "Pool": units.size(graph.pool_bytes_after),
            "Reads": str(graph.num_reads),
            "Writes": str(graph.num_writes),
        }
        before = graph.pool_bytes_after
        table.add_row(graph.descriptor, *(cells[name] for name in names))
    return table


@dataclass
class _Line:
    """Buffers that share a line."""

    addresses: dict[int, int] = field(default_factory=dict)
    shapes: set[str] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)

    def add(self, use: AddressUse) -> None:
        self.addresses[use.address] = use.num_bytes
        self.shapes.add(shape_of(use))
        self.dtypes.add(use.dtype.removeprefix("torch."))
        if use.reads:
            self.readers.add(use.graph)
        if use.writes:
            self.writers.add(use.graph)


def pattern_of(name: str) -> str:
    """A buffer's name with its numbers left open: `rank*.kv_cache.*` of `rank0.kv_cache.1`."""
    return re.sub(r"(?<=\brank)\d+|(?<=\btp)\d+|(?<=\.)\d+(?=\.|$)", "*", name)


def _buffer_table(uses: Iterable[AddressUse], console: Console) -> Table:
    wide = is_wide(console)
    lines: dict[str, _Line] = {}
    for use in uses:
        name = "(unowned)" if use.name is None else pattern_of(use.name)
        lines.setdefault(name, _Line()).add(use)
    more = ["Shape", "Dtype"] if wide else []
    names = ["Buffers", "Bytes", *more, "Graphs\nreading", "Graphs\nwriting"]
    table = new_table(["Persistent buffer"], names)
    for name, line in lines.items():
        cells = [name, str(len(line.addresses)), units.size(sum(line.addresses.values()))]
        if wide:
            cells += [_some(line.shapes), _some(line.dtypes)]
        cells += [str(len(graphs) or units.NOTHING) for graphs in (line.readers, line.writers)]
        table.add_row(*cells, style="red" if name == "(unowned)" else "")
    return table


def _some(values: set[str]) -> str:
    ordered = sorted(values)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} ... ({len(ordered)})"
