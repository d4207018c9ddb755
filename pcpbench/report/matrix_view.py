"""A matrix on a console: the verdict, one row a cell, and why cells are no pass.

Owns the layout; a narrow console leaves counts of steps and times to the files.
"""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pcpbench.matrix_results import CellOutcome, CellRecord, MatrixResult
from pcpbench.report import units
from pcpbench.report.console import (
    STYLES,
    Facts,
    add_notices,
    add_planted,
    is_wide,
    new_table,
    verdict_line,
)
from pcpbench.results import Outcome

SHOWN: Final = 4
"""Cells of one reason that are named; matrix.csv has all of them."""

_NARROW: Final = {"could not measure": "could not\nmeasure", "not compared": "not\ncompared"}


def print_matrix(result: MatrixResult, console: Console) -> None:
    """Print the whole report."""
    console.print(_table(result, console))
    console.print()
    print_matrix_verdict(result, console)


def print_matrix_verdict(result: MatrixResult, console: Console) -> None:
    """The verdict in one sentence, the reasons, and where the files are; also beside `--json`."""
    verdict_line(console, result.outcome, _verdict(result))
    facts = Facts()
    add_planted(facts, result.settings)
    for (outcome, reason), names in _by_reason(result).items():
        style = STYLES[_as_verdict(outcome)]
        shown = ", ".join(names[:SHOWN]) + (", ..." if names[SHOWN:] else "")
        label = outcome.value.capitalize()
        facts.add(label, f"{units.count(len(names), 'cell')} ({shown}): {reason}", style=style)
    left_out = sorted({record.faults_reason for record in result.cells} - {""})
    facts.add_all("Faults", left_out)
    add_notices(facts, result.notices)
    settings = result.settings
    scenarios = units.count(len(settings.get("scenarios", ())), "scenario")
    facts.add(
        "Each cell",
        f"compare full full_and_piecewise, {scenarios}, "
        f"--check {settings.get('checks')}, {settings.get('dtype')}, {result.environment.device}, "
        "untimed",
        style="dim",
    )
    facts.add("Cut", "whether steps are cut into microbatches; scenarios: passed/run", style="dim")
    facts.add("Files", result.run_dir)
    facts.print(console)


def _verdict(result: MatrixResult) -> str:
    counts = [
        f"{result.count(outcome)} {outcome.value}"
        for outcome in CellOutcome
        if result.count(outcome)
    ]
    kept = f", {result.num_kept} from an earlier run" if result.num_kept else ""
    cells = units.count(len(result.cells), "cell")
    return f"{cells}: {', '.join(counts)}{kept}; {result.wall_s:.0f} s."


def _by_reason(result: MatrixResult) -> dict[tuple[CellOutcome, str], list[str]]:
    """Names of the cells that are no pass, worst outcome first."""
    found: dict[tuple[CellOutcome, str], list[str]] = {}
    for outcome in CellOutcome:
        for record in result.cells:
            if record.outcome is outcome is not CellOutcome.PASS:
                found.setdefault((outcome, record.reason), []).append(record.cell.name)
    return found


def _table(result: MatrixResult, console: Console) -> Table:
    wide = is_wide(console)
    has_faults = bool(result.settings.get("faults"))
    names = ["Ranks", "k", "Cut", "Model", "Verdict"]
    table = new_table(
        [*names, *(["Capture\ndrift", "Contracts"] if wide else ["Drift", "Con-\ntracts"])],
        [
            "Scen-\narios",
            *(["Steps", "FULL", "PIECE-\nWISE"] if wide else []),
            *(["Faults\ncaught" if wide else "Faults"] if has_faults else []),
            *(["Took"] if wide or not has_faults else []),
        ],
    )
    for column in table.columns:
        column.no_wrap = column is not table.columns[len(names) + 1]  # contracts can be many
    for record in result.cells:
        table.add_row(*_cells(record, wide=wide, has_faults=has_faults))
    return table


def _cells(record: CellRecord, *, wide: bool, has_faults: bool) -> list[str | Text]:
    cell, faults = record.cell, record.faults
    style = STYLES[_as_verdict(record.outcome)]
    counts = (record.num_steps, record.steps_full, record.steps_piecewise)
    scenarios = f"{record.num_passed}/{record.num_scenarios}"
    caught = units.NOTHING if faults is None else f"{faults.num_caught}/{faults.num_faults}"
    took = f"{record.wall_s:.0f} s" if record.wall_s else units.NOTHING
    verdict = record.outcome.value
    drifted = "NOT zero" if wide else "NOT\nzero"
    return [
        cell.parallel.name,
        str(cell.spec_tokens),
        "on" if cell.microbatch else "off",
        cell.preset if wide else cell.model,
        Text(verdict if wide else _NARROW.get(verdict, verdict), style=style),
        {True: "zero", False: drifted, None: units.NOTHING}[record.capture_is_zero],
        _contracts(record),
        scenarios if record.num_scenarios else units.NOTHING,
        *([f"{n:,}" if n else units.NOTHING for n in counts] if wide else []),
        *([caught] if has_faults else []),
        *([took] if wide or not has_faults else []),
    ]


def _contracts(record: CellRecord) -> str:
    if record.violated:
        return " ".join(record.violated)
    return "clean" if record.num_scenarios else units.NOTHING


def _as_verdict(outcome: CellOutcome) -> Outcome:
    if outcome is CellOutcome.PASS:
        return Outcome.PASS
    return Outcome.FAIL if outcome is CellOutcome.FAIL else Outcome.NOT_COMPARED
