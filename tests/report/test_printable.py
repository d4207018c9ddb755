"""Nothing that a file says is taken for a command by a terminal, and NO_COLOR means no escape."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import pcpbench
from pcpbench.report.console import Facts, make_console, new_table, verdict_line
from pcpbench.report.plain import to_json
from pcpbench.report.printable import printable
from pcpbench.report.progress import make_progress
from pcpbench.results import Outcome

EVIL = "\x1b[31mred\x1b[0m \x9b2J\x07\r\x7f\u202e"
SHOWN = r"\x1b[31mred\x1b[0m \x9b2J\x07\r\x7f\u202e"


def test_control_characters_are_shown_as_escapes_and_nothing_else_is_touched():
    assert printable(EVIL) == SHOWN
    assert printable("two\nlines\tand \u00e9 \u2500 \U0001f600") == (
        "two\nlines\tand \u00e9 \u2500 \U0001f600"
    )


def in_a_table(console):
    table = new_table(["Name"], ["Right"])
    table.add_row(EVIL, Text(EVIL, "bold"))
    console.print(table)


def as_a_fact(console):
    facts = Facts()
    facts.add(EVIL, EVIL)
    facts.add_all("x", [EVIL])
    facts.print(console)


def nested(console):
    grid = Table.grid()
    grid.add_row(Padding(EVIL, 1))
    console.print(Group(grid, Text(EVIL)))


@pytest.mark.parametrize(
    "show",
    [
        in_a_table,
        as_a_fact,
        nested,
        lambda console: console.print(EVIL),
        lambda console: console.print(Text(EVIL), EVIL, sep="  "),
        lambda console: verdict_line(console, Outcome.FAIL, EVIL),
    ],
)
def test_wherever_a_text_stands_in_a_view(show):
    stream = io.StringIO()
    show(make_console(stream, width=200))
    shown = re.sub(r"\\x07|\\r|\s", "", SHOWN), "".join(stream.getvalue().split())
    assert shown[0] in re.sub(r"\\x07|\\r", "", shown[1])  # rich drops BEL and CR itself
    assert not set(stream.getvalue()) & set("\x1b\x9b\x07\r\x7f\u202e")


def test_progress_lines_and_json():
    stream = io.StringIO()
    make_progress(stream).say(EVIL)
    assert stream.getvalue() == SHOWN + "\n"
    text = to_json({"name": EVIL})
    assert not set(text) & set("\x1b\x9b\x07\r\x7f\u202e")
    assert json.loads(text) == {"name": EVIL}


ALLOWED = {
    "print(": {"__main__", "cli", "scenario_commands", "progress", "faults_view", "columns",
               "gate_commands", "baseline_runs", "github", "cli_report", "what_stands"},
    "Console(": {"console"},
}  # fmt: skip


@pytest.mark.parametrize(("call", "modules"), ALLOWED.items(), ids=ALLOWED)
def test_nobody_prints_past_it(call, modules):
    """A new `print` or console is a new way around: it must be looked at, and added here."""
    package = Path(pcpbench.__file__).parent
    found = {
        path.stem
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if f" {line.strip()}".replace("return ", " ").startswith(f" {call.strip()}")
    }
    assert found <= modules
