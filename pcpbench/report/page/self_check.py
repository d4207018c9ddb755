"""What a gate can see, as `pcpbench gate --self-check` found it: rates by true slowdown, spreads.

Owns the reading of `self-check.json` and its tables; the summary is the console's own. Judges
nothing.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

from pcpbench.gate_results import SelfCheckResult
from pcpbench.report import units
from pcpbench.report.manifest import SCHEMA_VERSION
from pcpbench.report.page import plots
from pcpbench.report.page.gate import SAMPLES, GateTold, processes_section
from pcpbench.report.page.gate_lines import read_lines
from pcpbench.report.page.parts import Figure, Section, Table, table_of
from pcpbench.report.self_check_view import summary
from pcpbench.report.stored import StoredRun, damaged

NAME: Final = "self-check.json"
PLANTED: Final = "planted.jsonl"
TITLE: Final = "What a gate can see"


class _Rate(msgspec.Struct, frozen=True):
    """Shares of gates of one true slowdown, by how they ended."""

    slowdown: float
    regression: float
    undecided: float
    passed: float
    num_run: int


def self_check_told(run: StoredRun) -> GateTold:
    """Rates, spreads and processes of a self-check, finished or not."""
    warnings: list[str] = []
    result = _read(run)
    if result is None:
        told = f"There is no {NAME}: the self-check ended before it had cut a gate. Run it again."
        sections = [Section(TITLE, told)]
    else:
        sections = [_rates_section(result), _spreads_section(result)]
    for file, title in (
        (SAMPLES, "Processes as they are"),
        (PLANTED, "Processes slowed on purpose"),
    ):
        lines = read_lines(run, file)
        warnings += [] if lines is None else lines.left_out()
        sections.append(processes_section(run, lines, file, title))
    return GateTold(warnings=warnings, sections=sections)


def _read(run: StoredRun) -> SelfCheckResult | None:
    """The result, None for a run that has none; raises UsageError for one that is damaged."""
    data = run.data(NAME)
    if data is None:
        return None
    file = run.path / NAME
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is no JSON ({error})") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise damaged(file, f"its schema version is {version!r}, not {SCHEMA_VERSION}")
    try:
        result = msgspec.convert(document, SelfCheckResult)
        rates = _rates(result)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is no result of a self-check ({error})") from error
    if not rates:
        raise damaged(file, "it has no rates")
    return result


def _rates(result: SelfCheckResult) -> list[_Rate]:
    return msgspec.convert(list(result.rates), list[_Rate])


def _rates_section(result: SelfCheckResult) -> Section:
    rates = _rates(result)
    lead = (
        f"{summary(result)} Measured: {result.num_processes} processes as they are and "
        f"{result.num_planted} slowed by {_share(result.planted)} on purpose, in "
        f"{result.wall_s:.0f} s. Cut from the first, in order of time: "
        f"{units.count(result.num_gates, 'gate')} of {result.gate_time_s:g} s, each with a "
        f"baseline of {result.num_baseline} processes and a later run of {result.num_first} to "
        f"{result.num_most}; they overlap. A machine that drifts meanwhile shows as false alarms; "
        "what changes from day to day, or between two machines, does not show."
    )
    places = ["none" if not rate.slowdown else f"{100 * rate.slowdown:g}" for rate in rates]
    rows = [
        [
            "none" if not rate.slowdown else _share(rate.slowdown),
            f"{result.num_gates:,}",
            *(units.percent(share) for share in (rate.regression, rate.undecided, rate.passed)),
            str(rate.num_run),
        ]
        for rate in rates
    ]
    columns = ["true slowdown", "gates", "regression", "undecided", "pass", "processes of a run"]
    table = table_of(columns, rows, 1)
    series: dict[str, list[float | None]] = {
        "regression": [100 * rate.regression for rate in rates],
        "undecided": [100 * rate.undecided for rate in rates],
        "pass": [100 * rate.passed for rate in rates],
    }
    title = "Verdicts by true slowdown"
    desc = (
        f"Percent of {units.count(result.num_gates, 'gate')} that end as regression, undecided and "
        f"pass, for {len(rates)} true slowdowns from none to {_share(rates[-1].slowdown)}."
    )
    names = ("true slowdown, %", "gates, %")
    svg = plots.grouped_bars(places, series, names, title, desc)
    return Section(TITLE, lead, [Figure(title, desc, svg, table, is_open=True)])


def _spreads_section(result: SelfCheckResult) -> Section:
    seen = {(rule, scenario): value for rule, scenario, value in result.seen}
    rows = []
    for rule, scenario, spread in result.spreads:
        value = seen.get((rule, scenario))
        planted = units.NOTHING if value is None else _share(result.planted)
        told = units.NOTHING if value is None else f"{100 * value:.1f} %"
        rows.append([rule, scenario, f"{100 * spread:.2f} %", planted, told])
    lead = (
        "Spread: the standard deviation of one process, from the middle half. Seen: what the "
        "medians make of the slowdown that was planted."
    )
    columns = ["rule", "scenario", "spread of a process", "planted", "seen"]
    return Section("Spread of a process", lead, table=Table(columns, rows, frozenset({2, 3, 4})))


def _share(value: float) -> str:
    return f"{100 * value:g} %"
