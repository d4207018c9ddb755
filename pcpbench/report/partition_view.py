"""`check partition` and `compare builtin vllm` on a console.

Owns the layout: counts, known differences with their reasons, and the first difference in full with
the command that shows it again.
"""

from __future__ import annotations

import shlex
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pcpbench.partition_results import PartitionDifference, PartitionResult
from pcpbench.report import units
from pcpbench.report.console import STYLES, Facts, add_notices, is_wide, new_table, verdict_line
from pcpbench.results import Outcome

SHOWN: Final = 3
"""Differences that are shown in full; partition.json has more."""

LEFTOVERS: Final = (
    "a batch that comes out right when it is given back met what an earlier one had left in the "
    "buffers: give the options of this run again."
)


def print_partition(result: PartitionResult, console: Console) -> None:
    """Print the whole report."""
    console.print(_groups(result, console))
    console.print()
    if result.explained:
        console.print(_explained(result))
        console.print()
    print_partition_verdict(result, console)


def print_partition_verdict(result: PartitionResult, console: Console) -> None:
    """The verdict in one sentence, the first differences, and where the files are."""
    verdict_line(console, result.outcome, _verdict(result))
    facts = Facts()
    for difference in result.differences[:SHOWN]:
        _add_difference(facts, difference, result)
    if result.differences and result.what == "batches":
        facts.add("Alone", LEFTOVERS, style="dim")
    missing = sorted({f.field for f in result.fields if not f.num_compared and f.num_missing})
    if missing:
        told = ", ".join(missing)
        facts.add("Not offered", f"by one of them: {told}", style="yellow")
    for kind, number in result.kernels.items():
        facts.add("Kernels", f"{number:,} {kind}", style="dim")
    add_notices(facts, result.notices)
    if result.stopped:
        facts.add("Stopped", result.stopped, style="yellow")
    facts.add("Files", result.run_dir)
    facts.print(console)


def _verdict(result: PartitionResult) -> str:
    makers = " and ".join(result.makers[1:])
    parts = ""
    if len(result.parts) < result.num_parts:
        parts = f" ({len(result.parts)} of {result.num_parts} parts)"
    known = f", {result.num_explained:,} for known reasons" if result.num_explained else ""
    return (
        f"{makers} against the {result.makers[0]}, {result.num_batches:,} {result.what}{parts}: "
        f"{result.num_compared:,} fields compared, {result.num_different:,} differ{known}; "
        f"{result.wall_s:.0f} s."
    )


def _add_difference(facts: Facts, difference: PartitionDifference, result: PartitionResult) -> None:
    style = STYLES[Outcome.FAIL]
    where = "" if difference.rank is None else f", rank {difference.rank}"
    facts.add("Differs", difference.message, style=style)
    facts.add("", f"{difference.left}{where}: {difference.left_value}")
    facts.add("", f"{difference.right}{where}: {difference.right_value}")
    if result.what == "batches":
        target = "" if "vllm" not in result.makers else " --target vllm"
        batch = shlex.quote(difference.case)
        facts.add("Again", f"pcpbench check partition{target} --batch {batch}")


def _groups(result: PartitionResult, console: Console) -> Table:
    wide = is_wide(console)
    first = ["Ranks, interleave, mode"] if result.what == "batches" else ["Scenario"]
    table = new_table(
        first,
        [
            result.what.capitalize(),
            *(["To be refused"] if wide and result.what == "batches" else []),
            "Fields compared" if wide else "Compared",
            "Differ",
            "Known",
        ],
    )
    for count in result.groups:
        style = STYLES[Outcome.FAIL if count.num_different else Outcome.PASS]
        table.add_row(
            count.group,
            f"{count.num_batches:,}",
            *([f"{count.num_refused:,}"] if wide and result.what == "batches" else []),
            f"{count.num_compared:,}",
            Text(f"{count.num_different:,}", style=style),
            f"{count.num_explained:,}" if count.num_explained else units.NOTHING,
        )
    return table


def _explained(result: PartitionResult) -> Table:
    """One row a reason, with its first case: known, told, and never counted as equal."""
    table = new_table(["Known difference", "Field", "First"], ["Times"])
    for reason, (number, first) in result.explained.items():
        table.add_row(reason, first.field, first.case, f"{number:,}")
    return table
