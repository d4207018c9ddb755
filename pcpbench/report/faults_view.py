"""The fault catalogue and what came of it, on a console and as the table of `docs/faults.md`.

Owns the layout of both. Knows no engine and no injection.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from pcpbench import __version__
from pcpbench.fault_results import GOOD, NO_VERDICT, FaultInfo, FaultRun, FaultsResult, Verdict
from pcpbench.report import units
from pcpbench.report.console import Facts, new_table, verdict_line
from pcpbench.report.manifest import SCHEMA_VERSION
from pcpbench.report.plain import to_json
from pcpbench.report.printable import printable
from pcpbench.results import Outcome

NOTHING_EXPECTED: Final = "nothing"
NARROW: Final = 60
"""Columns below which a table would break the names of faults."""

NO_VERDICT_WORDS: Final[dict[Verdict, Callable[[int], str]]] = {
    Verdict.NOT_TRIGGERED: lambda number: f"{number} never acted where it was run",
    Verdict.NOT_RUN: lambda number: f"{number} cannot be where it was to be run",
    Verdict.UNUSABLE: lambda number: f"{number} cannot be used",
    Verdict.NO_MEMORY: lambda number: f"{number} ran out of memory",
}

_INTRODUCTION: Final = """\
# The fault catalogue, and what caught it

Printed by `pcpbench faults run --markdown > docs/faults.md`; edit the catalogue, not this file.

Each fault is injected into the built-in engine in the smallest world that can have it, and judged
like any comparison of `eager` and `full`. It is *caught* when one of the findings expected of its
class is there: a contract of [contracts.md](contracts.md), or a drift that leaves its budget. It is
*misnamed* when only others are, *escaped* when the run passes, *crashed* when the engine raised
what is no finding. An injection also counts how often it acted: one that never did is *not
triggered* and proves nothing. `quiet` is what an entry should be whose description begins with
"Not a fault": an alarm would be a false one. A fault whose world says `--check full` shows only in
second looks at a step, not in one run of the scenario. Clean runs are those of the same worlds and
scenarios without a fault, before the first one (on engines just captured) and after the last (on
engines that were used again).

Mutations of the engine that nobody had written a contract for, by an author who had read neither
the checks nor this catalogue; which they were, and which holes were closed, is told in
[blind-test.md](blind-test.md):

| outcome of 98 mutations | at first | after the holes were closed |
|---|---:|---:|
| caught: exit 1, a contract or a drift named | 70 | 93 |
| no verdict: the engine raised, exit 3 | 7 | 0 |
| passed: exit 0 | 21 | 5 |

An installed package adds faults under the entry-point group `pcpbench.faults`: a `Fault` of
`pcpbench.faults.fault`, or an iterable of them. A fault is a name, a class, an injection (a context
manager that is given the engines of all arms and puts back what it changed), the findings expected,
and the world and scenario that trigger it.
An entry that cannot be used (it is no `Fault`, names a contract or scenario that there is not, or a
world that the engine refuses) is *unusable*, with its package and the reason; the others run.
"""


def print_catalogue(faults: Sequence[FaultInfo], console: Console) -> None:
    """Name, class, findings expected, and what each fault does."""
    if console.width < NARROW:
        for fault in faults:
            console.print(Text(fault.name, "bold"), soft_wrap=True)
            told = f"{fault.class_id}, {_expected(fault)}: {fault.description}"
            console.print(Padding(told, (0, 0, 0, 2)))
        return
    table = new_table(["Fault", "Class", "Expected", "What goes wrong"])
    table.columns[0].no_wrap = True
    for fault in faults:
        table.add_row(fault.name, fault.class_id, _expected(fault), fault.description)
    console.print(table)


def print_faults(result: FaultsResult, console: Console) -> None:
    """The table of a run, what went wrong in it, and the verdict in one line."""
    table = new_table(["Fault", "Class", "Where", "Expected", "Fired", "Verdict"])
    table.columns[0].no_wrap = console.width >= NARROW
    for run in result.runs:
        where = f"{run.world}, {run.scenario}" if run.scenario else "-"
        verdict = Text(run.verdict.value, style=_style(run))
        table.add_row(
            run.fault.name, run.fault.class_id, where, _expected(run.fault), _fired(run), verdict
        )
    console.print(table)
    facts = Facts()
    for run in result.runs:
        if run.verdict not in GOOD:
            facts.add(run.verdict.value.capitalize(), f"{run.fault.name}: {_said(run)}")
    for clean in result.clean:
        if clean.accused:
            facts.add("False alarm", f"{clean.world}, {clean.scenario}: {clean.detail}")
    if facts.grid.row_count:
        console.print()
        facts.print(console)
    console.print()
    outcome = {0: Outcome.PASS, 1: Outcome.FAIL, 3: Outcome.NOT_COMPARED}[result.exit_code]
    verdict_line(console, outcome, summary(result))


def summary(result: FaultsResult) -> str:
    """Catch rate, false alarms, time."""
    if not result.judged:
        counts = Counter(run.verdict for run in result.runs)
        why = [NO_VERDICT_WORDS[verdict](number) for verdict, number in counts.items()]
        return f"no fault was judged: {', '.join(why) or 'none was named'}."
    rate = f" ({100 * result.num_caught / result.num_faults:.0f} %)" if result.num_faults else ""
    left_out = sum(run.verdict in NO_VERDICT for run in result.runs)
    told = f", {left_out} without a verdict" if left_out else ""
    return (
        f"{result.num_caught} of {units.count(result.num_faults, 'fault')} caught{rate}{told}; "
        f"{units.count(result.num_false_alarms, 'false alarm')} over "
        f"{units.count(result.num_clean, 'clean run')}; {result.wall_s:.0f} s."
    )


def faults_json(result: FaultsResult) -> str:
    """One JSON object: counts, and every run. missed: neither caught nor quiet, and what else."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "pcpbench_version": __version__,
        "command": "faults run",
        "target": result.target,
        "exit_code": result.exit_code,
        "num_faults": result.num_faults,
        "num_caught": result.num_caught,
        "num_judged": len(result.judged),
        "num_false_alarms": result.num_false_alarms,
        "missed": [
            f"{run.fault.name} {run.verdict.value}"
            for run in result.judged
            if run.verdict not in GOOD
        ],
        "runs": result.runs,
        "clean": result.clean,
        "wall_s": result.wall_s,
    }
    return to_json(document)


def print_markdown(result: FaultsResult) -> None:
    """The whole of `docs/faults.md` on stdout: the same as a Markdown table.

    Of another target than the built-in engine the table alone, which its own page takes up.
    """
    if result.target == "builtin":
        print(_INTRODUCTION)
    print("| fault | class | what goes wrong | where | expected | fired | verdict |")
    print("|---|---|---|---|---|---|---|")
    for run in result.runs:
        fault = run.fault
        cells = (
            f"`{fault.name}`",
            fault.class_id,
            fault.description,
            f"{run.world}, `{run.scenario}`" if run.scenario else "-",
            _expected(fault),
            _fired(run),
            run.verdict.value,
        )
        print(printable(f"| {' | '.join(cells)} |"))
    told = [run for run in result.runs if run.verdict not in GOOD]
    print(f"\n{summary(result)}")
    for run in told:
        print(printable(f"\n- `{run.fault.name}` {run.verdict.value}: {_said(run)}."))
    sys.stdout.flush()


def _expected(fault: FaultInfo) -> str:
    if not fault.is_usable:
        return "-"
    return ", ".join(fault.contracts) or NOTHING_EXPECTED


def _said(run: FaultRun) -> str:
    """The first finding of a run, or why there is none; without a full stop."""
    if run.verdict is Verdict.NOT_TRIGGERED and not run.detail:
        return "it never acted in this world and scenario"
    return run.detail.rstrip(".") or "every contract held and every drift stayed in its budget"


def _fired(run: FaultRun) -> str:
    return ", ".join(run.fired) or "-"


def _style(run: FaultRun) -> str:
    if run.verdict in GOOD:
        return "green"
    return "yellow" if run.verdict in NO_VERDICT else "bold red"
