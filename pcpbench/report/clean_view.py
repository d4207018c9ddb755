"""Console view of `pcpbench faults clean`: sound runs by setting, false alarms, and what is open.

Also of the clean runs of `pcpbench faults run` that have no verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from pcpbench.fault_results import CleanResult, CleanRun
from pcpbench.report import units
from pcpbench.report.console import Facts, new_table, verdict_line
from pcpbench.results import Outcome


def print_clean(result: CleanResult, console: Console) -> None:
    """Runs and false alarms by world, arms, dtype and scenario; each alarm with its command."""
    left_out = len(result.runs) - result.num_judged
    for title, field in (
        ("World", "world"),
        ("Arms", "arms"),
        ("Dtype", "dtype"),
        ("Scenario", "scenario"),
    ):
        runs = Counter(getattr(run, field) for run in result.runs)
        alarms = Counter(getattr(run, field) for run in result.runs if run.accused)
        unknown = Counter(getattr(run, field) for run in result.runs if not run.has_verdict)
        table = new_table([title, "Runs", "False alarms", *(["No verdict"] if left_out else [])])
        for name in runs:
            counts = [runs[name], alarms[name], *([unknown[name]] if left_out else [])]
            table.add_row(name, *map(str, counts))
        console.print(table)
        console.print()
    facts = Facts()
    for run in result.runs:
        if run.accused:
            facts.add("False alarm", f"{', '.join(run.accused)}: {run.detail} ({run.command})")
    _add_without_verdict(facts, result.runs)
    if facts.grid.row_count:
        facts.print(console)
        console.print()
    outcome = {0: Outcome.PASS, 1: Outcome.FAIL, 3: Outcome.NOT_COMPARED}[result.exit_code]
    alarms_told = units.count(result.num_false_alarms, "false alarm")
    runs_told = units.count(result.num_judged, "clean run")
    told = f", {left_out} without a verdict" if left_out else ""
    verdict_line(console, outcome, f"{alarms_told} over {runs_told}{told}; {result.wall_s:.0f} s.")


def print_without_verdict(runs: Sequence[CleanRun], console: Console) -> None:
    """Clean runs that nothing is known of, and why; nothing where there is none."""
    facts = Facts()
    _add_without_verdict(facts, runs)
    facts.print(console)


def _add_without_verdict(facts: Facts, runs: Sequence[CleanRun]) -> None:
    for run in runs:
        if not run.has_verdict:
            where = run.command or f"{run.world}, {run.scenario}, no fault"
            facts.add(run.outcome.value.capitalize(), f"{run.detail} ({where})")
