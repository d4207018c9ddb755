"""The section over several gates: the change of each rule and scenario, by run in order of time.

Owns which findings are one series: those of one rule (whatever its limit) on one scenario. A change
is against the baseline of its own gate, so no line joins two of them, and the tables say what each
was held against. Draws through gate_plots.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pcpbench.errors import UsageError
from pcpbench.gate_results import GateVerdict
from pcpbench.gate_rules import PROCESS_RULE, Form, Rule, parse_rule
from pcpbench.report.page import gate_plots
from pcpbench.report.page.gate import SAMPLES, TABLE, asked, is_unfinished
from pcpbench.report.page.gate_lines import read_lines
from pcpbench.report.page.parts import Figure, Section, Table, table_of
from pcpbench.report.page.plots import Trend
from pcpbench.report.page.trend import Kind, differences, group_names, kind_of, told_of_kinds
from pcpbench.report.stored import Row, StoredRun, damaged
from pcpbench.report.units import NOTHING

BROKEN: Final = GateVerdict.REGRESSION.value
UNBOUNDED: Final = "unbounded"
GATE_SETTINGS: Final = "gate"
"""The setting that holds those of the gate itself: another limit is no other kind of run."""


@dataclass(frozen=True)
class _Numbers:
    """One finding in the unit of its plot. None: there is no such number."""

    value: float | None
    limit: float | None
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    run: float | None = None


@dataclass(frozen=True)
class _Measured:
    """How findings of one form are shown.

    of: their numbers. has_interval: whether a change comes with one. signed: whether a value is a
    change, with its sign. baseline, run: what the numbers behind it are called, "" where the value
    is the run's own.
    """

    axis: str
    of: Callable[[Row], _Numbers]
    has_interval: bool = False
    signed: bool = True
    baseline: str = ""
    run: str = ""


@dataclass(frozen=True)
class _Series:
    """Findings that belong in one plot."""

    name: str
    form: Form
    scenario: str

    @property
    def title(self) -> str:
        """Such as `tpot of s2-capture-edges, change in %`."""
        where = f" of {self.scenario}" if self.scenario else ""
        return f"{self.name}{where}, {MEASURED[self.form].axis}"


def gate_trend_section(runs: Sequence[StoredRun]) -> Section:
    """The trend over gates that are in order of time."""
    kinds = [_kind_of(run) for run in runs]
    groups = group_names(kinds)
    lead = (
        "Each point is a gate: by how much its run lies above its own baseline. The bar is the "
        "interval of the change, the dash the limit that applied; a bar above its dash with all of "
        "it is a regression (a cross at the top), one below a pass, one that holds it undecided. "
        "No line joins two points, because two gates may have had two baselines. Gates are "
        "numbered in order of time, apart from other runs."
    )
    if len(set(groups)) > 1:
        lead += told_of_kinds(groups, "settings, arms, the baseline's name or machine")
    tables = [_findings(run) for run in runs]
    figures = [_figure(runs, groups, tables, one) for one in _series(tables)]
    return Section("Trend over gates", lead, figures, _runs_table(runs, kinds, groups))


def _kind_of(run: StoredRun) -> Kind:
    kind = dict(kind_of(run, baseline=asked(run)[0]))
    kind.pop(f"setting {GATE_SETTINGS}", None)
    return kind


def _findings(run: StoredRun) -> list[tuple[_Series, Row]]:
    """Rows of a gate that are about a rule, each with its series."""
    return [
        (_series_of(run, row), row)
        for row in run.tables.get(TABLE, ())
        if row.text("metric") != PROCESS_RULE.metric
    ]


def _series_of(run: StoredRun, row: Row) -> _Series:
    try:
        rule = parse_rule(row.text("rule"), "rule")
    except UsageError as error:
        raise damaged(run.path / TABLE, str(error).rstrip(".")) from error
    if not isinstance(rule, Rule):
        raise damaged(run.path / TABLE, f"{row.text('rule')!r} judges nothing")
    # Of counts and shares the scenario is only where the worst one was.
    scenario = row.text("scenario") if rule.form in (Form.MORE, Form.MORE_SECONDS) else ""
    return _Series(rule.name, rule.form, scenario)


def _series(tables: Sequence[list[tuple[_Series, Row]]]) -> list[_Series]:
    """All, in the order in which they are met; one without a scenario only where no run has one."""
    found = list(dict.fromkeys(one for table in tables for one, _ in table))
    placed = {(one.name, one.form) for one in found if one.scenario}
    return [one for one in found if one.scenario or (one.name, one.form) not in placed]


def _row_of(table: Sequence[tuple[_Series, Row]], one: _Series) -> Row | None:
    """What a gate found of a series; where it could say nothing of any scenario, that."""
    known = dict(table)
    return known.get(one) or known.get(_Series(one.name, one.form, ""))


def _change(unit: str, scale: float = 1.0) -> Callable[[Row], _Numbers]:
    def of(row: Row) -> _Numbers:
        ends = (row.number(f"{name}_{unit}") for name in ("change", "limit", "change_low",
                "change_high"))  # fmt: skip
        value, limit, low, high = (None if end is None else scale * end for end in ends)
        names = ("baseline_ratio", "run_ratio") if unit == "percent" else ("baseline_ms", "run_ms")
        was, now = (row.number(name) for name in names)
        if value is None:
            return _Numbers(None, limit)
        return _Numbers(
            value,
            limit,
            -math.inf if low is None else low,
            math.inf if high is None else high,
            None if was is None else scale * was,
            None if now is None else scale * now,
        )

    return of


def _fall(row: Row) -> _Numbers:
    was, now, limit = (row.number(f"{name}_percent") for name in ("baseline", "run", "limit"))
    value = None if was is None or now is None else now - was
    return _Numbers(value, None if limit is None else -limit, baseline=was, run=now)


def _share(row: Row) -> _Numbers:
    return _Numbers(row.number("run_percent"), row.number("limit_percent"))


def _count(row: Row) -> _Numbers:
    return _Numbers(row.number("run_count"), row.number("limit_count"))


MEASURED: Final = {
    Form.MORE: _Measured("change in %", _change("percent"), True, baseline="baseline, ratio",
                         run="run, ratio"),
    Form.MORE_SECONDS: _Measured("change in us", _change("ms", 1e3), True, baseline="baseline, us",
                                 run="run, us"),
    Form.LESS: _Measured("change in points", _fall, baseline="baseline, %", run="run, %"),
    Form.AT_LEAST: _Measured("in %", _share, signed=False),
    Form.AT_MOST: _Measured("count", _count, signed=False),
}  # fmt: skip
"""By the form of a rule. (A ratio of capture_time is in steps of the base arm.)"""


def _figure(
    runs: Sequence[StoredRun],
    groups: Sequence[str],
    tables: Sequence[list[tuple[_Series, Row]]],
    one: _Series,
) -> Figure:
    how = MEASURED[one.form]
    found = [_row_of(table, one) for table in tables]
    numbers = [_Numbers(None, None) if row is None else how.of(row) for row in found]
    verdicts = [_verdict(run, row) for run, row in zip(runs, found, strict=True)]
    bad = {number for number, verdict in enumerate(verdicts, 1) if verdict == BROKEN}
    rows = [
        [str(place), run.name, group, verdict, *_cells(how, known), _processes(row)]
        for place, (run, group, verdict, known, row) in enumerate(
            zip(runs, groups, verdicts, numbers, found, strict=True), 1
        )
    ]
    table = _table_of(how, rows)
    points = [n.value for n in numbers if n.value is not None]
    if not points:
        return Figure(one.title, table=table, note="No gate has a value for this.")
    if one.form is Form.AT_MOST and not any(points):
        told = "It is 0 in every gate that has a value."
        return Figure(one.title, table=table, note=told)
    order = sorted(set(groups))
    trends = [_trend(group, groups, numbers, bad, order.index(group)) for group in order]
    limits = {place: n.limit for place, n in enumerate(numbers, 1)
              if n.limit is not None and n.value is not None}  # fmt: skip
    desc = (
        f"{one.title}, for {len(runs)} gates in order of time, {len(points)} with a value"
        + (" and an interval" if how.has_interval else "")
        + f"; {len(bad)} called a regression."
    )
    known = [trend for trend in trends if trend.runs]
    names = (how.axis, one.title, desc)
    svg = gate_plots.changes_by_run(known, limits, len(runs), *names, has_zero=how.signed)
    return Figure(one.title, desc, svg, table)


def _trend(
    group: str, groups: Sequence[str], numbers: Sequence[_Numbers], bad: set[int], look: int
) -> Trend:
    """The points of one kind; a value without an interval is its own."""
    mine = [
        (place, n, n.value)
        for place, (n, other) in enumerate(zip(numbers, groups, strict=True), 1)
        if other == group and n.value is not None
    ]
    spreads = [
        (value if n.low is None else n.low, value if n.high is None else n.high)
        for _, n, value in mine
    ]
    places = [place for place, _, _ in mine]
    crossed = [place for place in places if place in bad]
    return Trend(f"kind {group}", places, [value for _, _, value in mine], spreads, look, crossed)


def _verdict(run: StoredRun, row: Row | None) -> str:
    if row is not None:
        return row.text("verdict")
    return "no verdict" if is_unfinished(run) else "not judged"


def _cells(how: _Measured, known: _Numbers) -> list[str]:
    """Value, interval, limit, and the two numbers behind it."""
    sign = "+" if how.signed else ""

    def shown(value: float | None, form: str) -> str:
        if value is None:
            return NOTHING
        return format(value, form) if math.isfinite(value) else UNBOUNDED

    interval = [known.low, known.high] if how.has_interval else []
    behind = [known.baseline, known.run] if how.baseline else []
    return [
        shown(known.value, f"{sign}.2f" if how.signed else "g"),
        *(shown(end, f"{sign}.2f") for end in interval),
        shown(known.limit, f"{sign}g"),
        *(shown(value, ".4g") for value in behind),
    ]


def _processes(row: Row | None) -> str:
    """Of the run and of the baseline."""
    told = [row.text(f"num_{side}_processes") for side in ("run", "baseline")] if row else []
    return " / ".join(told) if told and all(told) and told[0] != "0" else NOTHING


def _table_of(how: _Measured, rows: Sequence[Sequence[str]]) -> Table:
    columns = [
        *("run", "directory", "kind", "verdict", how.axis),
        *(("lowest", "highest") if how.has_interval else ()),
        "limit",
        *((how.baseline, how.run) if how.baseline else ()),
        "processes",
    ]
    if all(row[-1] == NOTHING for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(columns, rows, frozenset({0, *range(4, len(columns))}))


def _runs_table(runs: Sequence[StoredRun], kinds: Sequence[Kind], groups: Sequence[str]) -> Table:
    told = [(name, values) for name, values in differences(kinds) if name != "baseline"]
    columns = [
        *("run", "kind", "directory", "started", "outcome", "baseline", "processes"),
        *("without a sample", *(name.removeprefix("setting ") for name, _ in told)),
    ]
    rows = []
    for number, (run, group) in enumerate(zip(runs, groups, strict=True)):
        lines = read_lines(run, SAMPLES)
        counts = (0, 0) if lines is None else (len(lines.samples), len(lines.failures))
        rows.append(
            [
                *(str(number + 1), group, run.name, run.started_at, run.outcome, asked(run)[0]),
                *map(str, counts),
                *(values[number] for _, values in told),
            ]
        )
    return table_of(columns, rows, len(columns))
