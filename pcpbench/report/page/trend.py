"""The section over several runs: ratios, drift and FULL share in order of time.

Owns which runs are alike: those of one command with equal settings, arms, scenarios and machine are
a group; others are marked and never joined by a line. No absolute time is in it, so that runs of
several machines may share an axis.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pcpbench.report import units
from pcpbench.report.page import plots
from pcpbench.report.page.parts import Figure, Section, Table, table_of
from pcpbench.report.stored import StoredRun
from pcpbench.report.stored_compare import StoredCompare, StoredScenario

UNMEASURED = ("non_finite", "shape_mismatch")
MACHINE = ("device", "device_name", "platform", "num_threads")
Kind = Mapping[str, object]
"""What must be equal for two runs to be set against each other: a name and its value."""
Measure = Callable[[StoredScenario], float | None]
NOT_FINITE = math.inf
"""Of a drift that no number tells: it is larger than every other."""


@dataclass(frozen=True)
class _Measured:
    title: str
    axis: str
    what: str
    measure: Measure
    is_bad: Callable[[StoredScenario], bool] = lambda scenario: False
    level: float | None = None
    pick: Callable[[Sequence[float]], float] = lambda values: float(np.median(values))


def trend_section(runs: Sequence[StoredCompare]) -> Section:
    """The trend over runs that are in order of time."""
    kinds = [_kind_of(run) for run in runs]
    groups = group_names(kinds)
    num_groups = len(set(groups))
    lead = (
        "Each point is a run: the median over its scenarios (of drift: the largest), the bar "
        "behind it from the lowest to the highest one; a cross at the top: the drift of a scenario "
        "is not allowed. Runs are numbered in order of time. Only "
        "ratios, shares and errors are here: absolute times of different machines do not belong on "
        "one axis."
    )
    if num_groups > 1:
        lead += told_of_kinds(groups, "settings, arms, scenarios or machine")
    figures = [_figure(runs, groups, one) for one in MEASURES]
    return Section("Trend over runs", lead, figures, _runs_table(runs, kinds, groups))


def told_of_kinds(groups: Sequence[str], what: str) -> str:
    """A sentence on runs of several kinds; what: that they may differ in."""
    letters = sorted(set(groups))
    return (
        f" These runs are of {len(letters)} kinds, marked {', '.join(letters)}: {what} differ, so "
        "only points of one kind can be set against each other."
    )


def group_names(kinds: Sequence[Kind]) -> list[str]:
    """A letter for each run; runs of one letter are alike."""
    letters: dict[str, str] = {}
    names = []
    for kind in kinds:
        key = json.dumps(kind, sort_keys=True, default=str)
        letters.setdefault(key, _letter(len(letters)))
        names.append(letters[key])
    return names


def _letter(number: int) -> str:
    """A to Z, then A1, B1, ..."""
    turn, place = divmod(number, 26)
    return chr(ord("A") + place) + (str(turn) if turn else "")


def kind_of(run: StoredRun, **more: object) -> Kind:
    """Settings and machine of a run, and what else its command makes of it."""
    environment = run.section("environment")
    return {
        **{f"setting {key}": value for key, value in run.section("settings").items()},
        **more,
        **{f"machine {key}": environment.get(key) for key in MACHINE},
    }


def _kind_of(run: StoredCompare) -> Kind:
    scenarios = sorted(scenario.name for scenario in run.scenarios)
    return kind_of(run.run, arms=list(run.asked), scenarios=scenarios)


def differences(kinds: Sequence[Kind]) -> list[tuple[str, list[str]]]:
    """What the kinds differ in: a name, and its value in each run."""
    names = dict.fromkeys(name for kind in kinds for name in kind)
    told = []
    for name in names:
        values = [_text(kind.get(name)) for kind in kinds]
        if len(set(values)) > 1:
            told.append((name, values))
    return told


def _text(value: object) -> str:
    if value is None:
        return units.NOTHING
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(scenario: StoredScenario, column: str) -> float | None:
    row = scenario.row("candidate")
    value = None if row is None else row.number(column)
    return value if value is not None and math.isfinite(value) else None


def _ratio(column: str) -> Measure:
    return lambda scenario: _number(scenario, column) if scenario.passed else None


def _full_share(scenario: StoredScenario) -> float | None:
    served, coverable = (_number(scenario, name) for name in ("coverable_full", "coverable"))
    return 100 * served / coverable if coverable and served is not None else None


def _drift(kind: str) -> Measure:
    """The largest; NOT_FINITE where an outcome is that no share can be formed."""

    def measure(scenario: StoredScenario) -> float | None:
        found = []
        for row in scenario.arms:
            if row.text("drift_kind") == kind:
                value = row.number("drift_relative")
                is_nan = value is not None and math.isnan(value)
                is_hidden = row.text("drift_outcome") in UNMEASURED
                found.append(NOT_FINITE if is_nan or is_hidden else value)
        return max((value for value in found if value is not None), default=None)

    return measure


def _is_bad(kind: str) -> Callable[[StoredScenario], bool]:
    """Whether a drift of this kind is not allowed."""
    return lambda scenario: any(
        row.text("drift_kind") == kind and row.text("drift_ok") == "false" for row in scenario.arms
    )


MEASURES: tuple[_Measured, ...] = (
    _Measured("TPOT ratio", "candidate / base", "TPOT of the candidate over that of the base arm "
              "in the same run", _ratio("tpot_ratio"), level=1.0),
    _Measured("Launch overhead ratio", "candidate / base", "launch overhead of the candidate over "
              "that of the base arm in the same run", _ratio("launch_overhead_ratio"), level=1.0),
    _Measured("Partition drift", "largest relative", "largest relative difference between the base "
              "arm's ladder and one rank without context parallelism", _drift("partition"),
              _is_bad("partition"), pick=max),
    _Measured("Padding drift", "largest relative", "largest relative difference of an eager step "
              "padded as a graph would be from the same step unpadded", _drift("padding"),
              _is_bad("padding"), pick=max),
    _Measured("Capture drift", "largest relative", "largest relative difference of a replay from "
              "its padded eager twin; must be 0", _drift("capture"), _is_bad("capture"),
              pick=max),
    _Measured("FULL share", "% of coverable", "decode steps that FULL served, of those that a "
              "captured size covers", _full_share),
)  # fmt: skip


def _figure(runs: Sequence[StoredCompare], groups: Sequence[str], one: _Measured) -> Figure:
    points: dict[str, list[tuple[int, float, float, float]]] = {}
    rows, bad = [], dict[int, int]()
    for number, (run, group) in enumerate(zip(runs, groups, strict=True), 1):
        found = [one.measure(scenario) for scenario in run.scenarios]
        known = [value for value in found if value is not None]
        told = [units.NOTHING] * 3
        if known:
            middle, low, high = one.pick(known), min(known), max(known)
            points.setdefault(group, []).append((number, middle, low, high))
            told = [f"{value:.3g}" for value in (middle, low, high)]
        num_bad = sum(map(one.is_bad, run.scenarios))
        if num_bad and known:
            bad[number] = num_bad
        rows.append([str(number), run.run.name, group, *told, str(len(known)), str(num_bad)])
    columns = ["run", "directory", "kind", "value", "lowest", "highest", "scenarios", "not allowed"]
    if not bad:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    table = Table(columns, rows, frozenset({0, *range(3, len(columns))}))
    if not points:
        return Figure(one.title, table=table, note="No run has a value for this.")
    order = sorted(set(groups))
    trends = [
        plots.Trend(
            f"kind {group}",
            [p[0] for p in mine],
            [p[1] for p in mine],
            [(p[2], p[3]) for p in mine],
            order.index(group),
            [p[0] for p in mine if p[0] in bad],
        )
        for group, mine in sorted(points.items())
    ]
    desc = f"{one.what}, for {len(runs)} runs in order of time."
    svg = plots.trend_lines(trends, len(runs), one.axis, one.title, desc, one.level)
    return Figure(one.title, desc, svg, table)


def _runs_table(
    runs: Sequence[StoredCompare], kinds: Sequence[Kind], groups: Sequence[str]
) -> Table:
    told = differences(kinds)
    columns = ["run", "kind", "directory", "started", "outcome", "pcpbench", "arms",
               *(name.removeprefix("setting ") for name, _ in told if name != "arms")]  # fmt: skip
    rows = [
        [
            str(number),
            groups[number - 1],
            run.run.name,
            run.run.started_at,
            run.run.outcome,
            str(run.run.manifest.get("pcpbench_version", "")),
            " / ".join(reversed(run.asked)),
            *(values[number - 1] for name, values in told if name != "arms"),
        ]
        for number, run in enumerate(runs, 1)
    ]
    return table_of(columns, rows, len(columns))
