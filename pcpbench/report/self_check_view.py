"""What the gate can see on this machine, on a console and as JSON. Owns the words."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from pcpbench.gate_results import SelfCheckResult
from pcpbench.report import units
from pcpbench.report.console import Facts, new_table, words_line
from pcpbench.report.json_out import print_text
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
        f"{units.count(result.num_gates, 'gate')} of {result.gate_time_s:g} s, cut from the first "
        f"kind in order of time: a baseline of {result.num_baseline} and a later run of "
        f"{result.num_first} to {result.num_most} processes; they overlap, at most "
        f"{result.num_apart} of them share none",
    )
    facts.add(
        "Reading",
        "a machine that drifts while this measures shows as false alarms; what changes from day to "
        "day, or between two machines, does not show",
    )
    facts.add("Files", result.run_dir)
    facts.print(console)


def summary(result: SelfCheckResult) -> str:
    """False alarms, of how many gates, and the smallest slowdown that is called."""
    clean = result.rates[0]
    alarms = f"{units.percent(clean['regression'])} false alarms"
    undecided = f"{units.percent(clean['undecided'])} undecided"
    gates = f"{units.count(result.num_gates, 'gate')}, at most {result.num_apart} without overlap"
    least = result.smallest_called
    sees = (
        f"a slowdown of {100 * least:g} % is called in 95 % of gates"
        if least is not None
        else "no slowdown up to 100 % is called in 95 % of gates: give a gate more time"
    )
    return f"{alarms} and {undecided} without any slowdown ({gates}); {sees}."


def self_check_json(result: SelfCheckResult) -> str:
    """The text of `self-check.json`."""
    known = {name: getattr(result, name) for name in result.__struct_fields__}
    return to_json({"schema_version": SCHEMA_VERSION, "command": "gate --self-check", **known})


def print_self_check_json(result: SelfCheckResult) -> None:
    """Write the result's JSON to stdout."""
    print_text(self_check_json(result))
