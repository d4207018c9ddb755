"""Console view of `pcpbench faults clean`: sound runs by setting, and the false alarms."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from pcpbench.fault_results import CleanResult
from pcpbench.report import units
from pcpbench.report.console import Facts, new_table, verdict_line
from pcpbench.results import Outcome


def print_clean(result: CleanResult, console: Console) -> None:
    """Runs and false alarms by world, arms, dtype and scenario; each alarm with its command."""
    for title, field in (
        ("World", "world"),
        ("Arms", "arms"),
        ("Dtype", "dtype"),
        ("Scenario", "scenario"),
    ):
        runs = Counter(getattr(run, field) for run in result.runs)
        alarms = Counter(getattr(run, field) for run in result.runs if run.accused)
        table = new_table([title, "Runs", "False alarms"])
        for name in runs:
            table.add_row(name, str(runs[name]), str(alarms[name]))
        console.print(table)
        console.print()
    facts = Facts()
    for run in result.runs:
        if run.accused:
            facts.add("False alarm", f"{', '.join(run.accused)}: {run.detail} ({run.command})")
    if facts.grid.row_count:
        facts.print(console)
        console.print()
    outcome = Outcome.PASS if result.exit_code == 0 else Outcome.FAIL
    alarms_told = units.count(result.num_false_alarms, "false alarm")
    runs_told = units.count(len(result.runs), "clean run")
    verdict_line(console, outcome, f"{alarms_told} over {runs_told}; {result.wall_s:.0f} s.")
