"""What the gate can see on this machine, on a console and as JSON. Owns the words."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from pcpbench.gate_results import SelfCheckResult
from pcpbench.report import units
from pcpbench.report.console import Facts, new_table, words_line
from pcpbench.report.manifest import SCHEMA_VERSION
from pcpbench.report.plain import to_json


def print_self_check(result: SelfCheckResult, console: Console) -> None:
    """The two answers first, then the rates they come from."""
    words_line(console, "SELF-CHECK", "bold", summary(result))
    console.print()
    table = new_table(["True slowdown"], ["Regression", "Undecided", "Pass", "Processes"])
    for rate in result.rates:
        table.add_row(
            "none" if not rate["slowdown"] else f"{100 * rate['slowdown']:g} %",
            *(units.percent(rate[name]) for name in ("regression", "undecided", "passed")),
            str(rate["num_run"]),
        )
    console.print(table)
    console.print()
    table = new_table(["Rule", "Scenario"], ["Spread of a process", "Planted", "Seen"])
    seen = {(rule, scenario): value for rule, scenario, value in result.seen}
    for rule, scenario, spread in result.spreads:
        value = seen.get((rule, scenario))
        planted = f"{100 * result.planted:g} %" if value is not None else units.NOTHING
        told = units.NOTHING if value is None else f"{100 * value:.1f} %"
        table.add_row(rule, scenario, f"{100 * spread:.2f} %", Text(planted), told)
    console.print(table)
    console.print()
    facts = Facts()
    facts.add(
        "Measured",
        f"{result.num_processes} processes as they are and {result.num_planted} slowed by "
        f"{100 * result.planted:g} %, {result.wall_s:.0f} s",
    )
    facts.add(
        "Simulated",
        f"gates of a baseline of {result.num_baseline} and a run of at most {result.num_most} "
        "processes, drawn from the first kind without drawing any twice for a gate",
    )
    facts.add("Files", result.run_dir)
    facts.print(console)


def summary(result: SelfCheckResult) -> str:
    """False alarms, and the smallest slowdown that is called."""
    clean = result.rates[0]
    alarms = f"{units.percent(clean['regression'])} false alarms"
    undecided = f"{units.percent(clean['undecided'])} undecided"
    least = result.smallest_called
    sees = (
        f"a slowdown of {100 * least:g} % is called in 95 % of gates"
        if least is not None
        else "no slowdown up to 100 % is called in 95 % of gates: give the gate more --max-time"
    )
    return f"{alarms} and {undecided} without any slowdown; {sees}."


def self_check_json(result: SelfCheckResult) -> str:
    """The text of `self-check.json`."""
    known = {name: getattr(result, name) for name in result.__struct_fields__}
    return to_json({"schema_version": SCHEMA_VERSION, "command": "gate --self-check", **known})


def print_self_check_json(result: SelfCheckResult) -> None:
    """Write the result's JSON to stdout."""
    sys.stdout.write(self_check_json(result))
    sys.stdout.flush()
