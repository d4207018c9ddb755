"""The report as one HTML file: runs on disk -> sections -> markup.

Owns the order of the page and what is said of each run before any plot. The file needs nothing
else: style and drawings are in it, and its content policy forbids the rest. Every text from a run
is escaped by the template.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pcpbench import __version__
from pcpbench.report.page.faults import FaultsFile, faults_section
from pcpbench.report.page.gate import UNENDED, gate_told, is_unfinished
from pcpbench.report.page.gate_trend import gate_trend_section
from pcpbench.report.page.parts import RunPart, Section, Table
from pcpbench.report.page.self_check import self_check_told
from pcpbench.report.page.speed import speed_sections
from pcpbench.report.page.trend import trend_section
from pcpbench.report.page.work import work_sections
from pcpbench.report.printable import printable
from pcpbench.report.stored import Row, StoredRun
from pcpbench.report.stored_compare import StoredCompare

MARK = "<!doctype html>\n<!-- pcpbench report -->"
"""How every page begins; a file that does not is none of ours and is never written over."""

HERE = Path(__file__).parent
MAX_WARNINGS = 12
SELF_CHECK = "gate --self-check"
MAIN_TABLES = {
    "modes": "modes.csv",
    "matrix": "matrix.csv",
    "capture": "capture.csv",
    "gate": "gate.csv",
    "compare --target engine": "summary.csv",
    "compare-targets": "partition.csv",
    "check-partition": "partition.csv",
}
"""The table that says most of a run that is no comparison."""


def render_page(runs: Sequence[StoredRun], faults: Sequence[FaultsFile] = ()) -> str:
    """The page over runs, oldest first, and results of the fault catalogue."""
    ordered = sorted(runs, key=lambda run: run.started_at)
    compares = [StoredCompare(run) for run in ordered if run.command == "compare"]
    gates = [run for run in ordered if run.command == "gate"]
    sections = [trend_section(compares)] if len(compares) > 1 else []
    sections += [gate_trend_section(gates)] if len(gates) > 1 else []
    sections += [faults_section(one) for one in faults]
    parts = [_part(run) for run in ordered]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = [part.name for part in parts] + [one.name for one in faults]
    return environment.get_template("page.html.j2").render(
        mark=Markup(MARK),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        title=f"pcpbench report: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""),
        version=__version__,
        sections=sections,
        parts=parts,
        svg=Markup,
    )


def _shown(value: Any) -> Any:
    """Text of a run cannot turn its neighbours round, or hide: control characters are escapes."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


def _part(run: StoredRun) -> RunPart:
    if run.command == "compare":
        return _compare_part(StoredCompare(run))
    if run.command == "gate":
        return _gate_part(run)
    if run.command == "gate-self-check":
        told = self_check_told(run)
        warnings = [*_warnings(run), *told.warnings]
        return RunPart(run.name, run.outcome, SELF_CHECK, _facts(run), warnings, told.sections)
    name = MAIN_TABLES.get(run.command)
    if name is None:
        lacking = f"A run of {run.command} has no table that a report shows: see its files."
        warnings = [*_warnings(run), lacking]
        return RunPart(run.name, run.outcome, run.command, _facts(run), warnings, [])
    sections = [_results(run, name)]
    return RunPart(run.name, run.outcome, run.command, _facts(run), _warnings(run), sections)


def _gate_part(run: StoredRun) -> RunPart:
    told = gate_told(run)
    results = _results(run, MAIN_TABLES["gate"])
    if is_unfinished(run) and results.table is None:
        results = Section("Results", "No verdict: the gate ended before it had one.")
    facts, warnings = [*_facts(run), *told.facts], [*_warnings(run), *told.warnings]
    sections = [results, *told.sections]
    return RunPart(run.name, run.outcome, run.command, facts, warnings, sections)


def _results(run: StoredRun, name: str) -> Section:
    rows = run.tables.get(name, [])
    lead = f"All of {name}; docs/csv.md has its columns." if rows else f"{name} has no row."
    return Section("Results", lead, table=_whole_table(rows) if rows else None)


def _whole_table(rows: Sequence[Row]) -> Table:
    columns = [c for c in (rows[0].cells if rows else ()) if any(row.text(c) for row in rows)]
    return Table(columns, [[row.text(column) for column in columns] for row in rows])


def _compare_part(run: StoredCompare) -> RunPart:
    warnings = _warnings(run.run)
    bad = [scenario for scenario in run.scenarios if not scenario.passed]
    if bad:
        told = ", ".join(f"{scenario.name} ({scenario.outcome})" for scenario in bad)
        warnings.append(f"No times are shown for what did not pass: {told}.")
    if not run.scenarios:
        warnings.append("No scenario had finished.")
    sections = [_scenarios(run)]
    if run.scenarios:
        sections += [*speed_sections(run), *work_sections(run)]
    headline = f"compare {run.candidate} against {run.base}" if run.asked else "compare"
    return RunPart(run.run.name, run.run.outcome, headline, _facts(run.run), warnings, sections)


def _scenarios(run: StoredCompare) -> Section:
    columns = ["scenario", "outcome", "steps", "FULL", "PIECEWISE", "eager", "TPOT ratio",
               "launch overhead ratio", "reasons"]  # fmt: skip
    counts = ("num_steps", "steps_full", "steps_piecewise", "steps_none")
    rows = []
    for scenario in run.scenarios:
        row = scenario.row("candidate") or scenario.arms[-1]
        ratios = (row.number(f"{name}_ratio") for name in ("tpot", "launch_overhead"))
        rows.append(
            [
                scenario.name,
                scenario.outcome,
                *(row.text(column) for column in counts),
                *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
                row.text("reasons"),
            ]
        )
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Section("Scenarios", table=Table(columns, rows, frozenset(range(2, 8))))


def _facts(run: StoredRun) -> list[tuple[str, str]]:
    manifest, environment = run.manifest, run.section("environment")
    arguments = manifest.get("arguments")
    words = [str(word) for word in arguments] if isinstance(arguments, list) else []
    versions = environment.get("versions")
    machine = [environment.get(key) for key in ("device", "device_name", "platform")]
    wall_s = manifest.get("wall_s")
    facts = [
        ("Command", "pcpbench " + shlex.join(words)),
        ("Started", run.started_at),
        ("Took", f"{wall_s:.1f} s" if isinstance(wall_s, int | float) else ""),
        ("Settings", _pairs(run.section("settings"))),
        ("Machine", ", ".join(str(value) for value in machine if value)),
        ("Threads", str(environment.get("num_threads", ""))),
        ("Versions", _pairs(versions if isinstance(versions, dict) else {})),
    ]
    return [(name, text) for name, text in facts if text]


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _warnings(run: StoredRun) -> list[str]:
    told = []
    planted = run.section("settings").get("inject")
    if planted:
        told.append(f"The fault {planted} was planted on purpose.")
    if run.outcome in UNENDED:
        told.append(
            f"The run did not end by itself (outcome: {run.outcome}): what had finished is here."
        )
    told += run.texts("reasons") + run.texts("notices")
    rest = len(told) - MAX_WARNINGS
    return told if rest <= 0 else [*told[:MAX_WARNINGS], f"{rest} more are in manifest.json."]
