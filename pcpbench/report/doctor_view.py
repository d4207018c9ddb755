"""What this machine can run, on a console. Owns its layout; finds out nothing."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from pcpbench.report.console import Facts, new_table
from pcpbench.results import Ability, DoctorReport

STYLES = {Ability.OK: "green", Ability.LIMITED: "yellow", Ability.NO: "red"}


def print_doctor(report: DoctorReport, console: Console) -> None:
    """Print the whole report."""
    environment = report.environment
    facts = Facts()
    facts.add("Platform", environment.platform)
    facts.add_all("Devices", report.devices)
    facts.add("Threads", str(environment.num_threads))
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    facts.add("Versions", versions)
    facts.print(console)
    console.print()
    table = new_table(["What", "Here", "Why"])
    for row in report.rows:
        table.add_row(row.what, Text(row.status.value, style=STYLES[row.status]), row.why)
    console.print(table)
    if report.changes:
        console.print()
        console.print("Set or changed around vllm, as there is no accelerator:")
        table = new_table(["What", "How", "Change", "Why"])
        for change in report.changes:
            table.add_row(change.name, change.how, change.what, change.why)
        console.print(table)
