"""What is shown of one gate beside its verdict: its processes, those that broke, how to go on.

Times are those of scenarios that passed: a process that sampled other tokens has none. Owns what is
plotted and tabled; reads through gate_lines.py and draws through gate_plots.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from pcpbench.gate_results import GateVerdict
from pcpbench.gate_samples import ProcessFailure, ProcessSample, ScenarioSample
from pcpbench.report.page import gate_plots
from pcpbench.report.page.gate_lines import GateLines, read_lines, scenarios_of
from pcpbench.report.page.parts import Figure, Section, Table, table_of
from pcpbench.report.page.plots import Dots
from pcpbench.report.page.speed import shared_core, unit_of
from pcpbench.report.printable import printable
from pcpbench.report.stored import StoredRun
from pcpbench.report.stored_compare import PASS, StoredCompare
from pcpbench.report.units import NOTHING
from pcpbench.results import Stat

SAMPLES: Final = "samples.jsonl"
TABLE: Final = "gate.csv"
RATIOS: Final = {"tpot": "TPOT", "itl": "ITL"}
"""Metrics whose ratios are shown, and what they are called."""
WITH_SAMPLE: Final = "with a sample"
UNENDED: Final = ("running", "interrupted", "error")
"""Outcomes of runs that did not come to their own end."""
VALUED: Final = frozenset(
    {"--fail-on", "--accept", "--on-undecided", "--max-time", "--processes", "--config", "--out"}
)
"""Options of `pcpbench gate` that a value follows; a test holds them against the command line."""


@dataclass(frozen=True)
class GateTold:
    """What one gate's part of the page has more than any run's."""

    facts: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=list)


def gate_told(run: StoredRun) -> GateTold:
    """Processes of a gate, finished or not, and the command that goes on with one that is open."""
    lines = read_lines(run, SAMPLES)
    warnings = [] if lines is None else [*lines.left_out(), *_untold(lines)]
    facts: list[tuple[str, str]] = []
    if is_open(run):
        if lines is not None and lines.has_head and (lines.judged or lines.processes):
            facts.append(("To go on", command_on(run)))
            if not lines.is_readable:
                warnings.append(
                    f"A gate refuses {SAMPLES} while a damaged line is in it: take it out to go on."
                )
        else:
            facts.append(("To gate again", command_on(run, with_run=False)))
    return GateTold(facts, warnings, [processes_section(run, lines, SAMPLES, "Processes")])


def is_unfinished(run: StoredRun) -> bool:
    """Whether a gate ended before it had a verdict."""
    return run.outcome in UNENDED or TABLE not in run.tables


def is_open(run: StoredRun) -> bool:
    """Whether more processes could change what a gate says."""
    return is_unfinished(run) or run.outcome == GateVerdict.UNDECIDED.value


def command_on(run: StoredRun, with_run: bool = True) -> str:
    """The command that judges what is there and measures on, with the options of the first."""
    baseline, options = asked(run)
    words = ["pcpbench", "gate", baseline, *([str(run.path)] if with_run else []), *options]
    return shlex.join(words)


def asked(run: StoredRun) -> tuple[str, list[str]]:
    """The baseline as it was named, and the other options of the gate but for where it wrote.

    `BASELINE` where the command line does not tell. Of `compare --baseline FILE` it is FILE.
    """
    found = run.manifest.get("arguments")
    words = [str(word) for word in found] if isinstance(found, list) else []
    if words[:1] != ["gate"]:
        return _value_of("--baseline", words) or "BASELINE", []
    places: list[str] = []
    options: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        name, equals, _ = word.partition("=")
        if word == "--":
            places += rest
        elif name in VALUED:
            pair = [word] if equals else [word, next(rest, "")]
            options += pair if name != "--out" else []
        elif word.startswith("-"):
            options.append(word)
        else:
            places.append(word)
    return (places or ["BASELINE"])[0], options


def _value_of(option: str, words: Sequence[str]) -> str:
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return ""


def _untold(lines: GateLines) -> list[str]:
    """Which times are not shown, and why."""
    bad = [f"{j.scenario} ({j.outcome})" for j in lines.judged if j.outcome != PASS]
    told = [f"No times are shown for what did not pass: {', '.join(bad)}."] if bad else []
    wrong = [n for n, process in lines.samples if any(s.num_wrong for s in process.scenarios)]
    if wrong:
        which = "process" if len(wrong) == 1 else "processes"
        numbers = ", ".join(map(str, wrong))
        told.append(f"No times are shown where tokens were wrong: {which} {numbers}.")
    return told


def processes_section(run: StoredRun, lines: GateLines | None, file: str, title: str) -> Section:
    """Every process of a file of samples, and the ratios of each scenario."""
    if lines is None:
        return Section(title, f"There is no {file}: the run ended before it timed a process.")
    if not lines.processes:
        return Section(title, f"{file} holds no process: none had ended.")
    num, num_broken = len(lines.samples), len(lines.failures)
    counted = f"{num} that ended with a sample, {num_broken} without one"
    told = (
        f"Fresh processes in the order in which they ended: {counted}. A time is the median "
        f"of its arm in the process, a ratio the median over pairs of {lines.candidate} / "
        f"{lines.base} measured side by side. "
    )
    figures = [_ratios(lines, scenario) for scenario in scenarios_of(lines.samples)]
    return Section(title, told + shared_core(StoredCompare(run)), figures, _table(lines))


def _table(lines: GateLines) -> Table:
    rows = [(n, process, one) for n, process in lines.samples for one in process.scenarios]
    known = [
        stat.median
        for _, _, one in rows
        if _may_show(lines, one)
        for stat in _arms(one)
        if stat is not None
    ]
    scale, unit = unit_of(known)
    columns = [
        *("process", "started at", "scenario"),
        *(f"TPOT {arm}, {unit}" for arm in (lines.base, lines.candidate)),
        *("TPOT ratio", "ITL ratio", "capture, ms", "wrong tokens", "ended"),
    ]
    found = [(n, _cells(lines, n, process, one, scale)) for n, process, one in rows]
    found += [(n, _broken_cells(n, failure)) for n, failure in lines.failures]
    cells = [row for _, row in sorted(found, key=lambda pair: pair[0])]
    if not lines.failures:
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    return Table(columns, cells, frozenset({0, *range(3, 9)}))


def _may_show(lines: GateLines, one: ScenarioSample) -> bool:
    """Whether a scenario's times in a process may be shown: what computes something else has no
    speed."""
    outcomes = {judged.scenario: judged.outcome for judged in lines.judged}
    return not one.num_wrong and outcomes.get(one.scenario, PASS) == PASS


def _arms(one: ScenarioSample) -> tuple[Stat | None, Stat | None]:
    """TPOT of base and candidate."""
    metric = one.metrics.get("tpot")
    return (None, None) if metric is None else (metric.base, metric.candidate)


def _ratio_of(one: ScenarioSample, metric: str) -> float | None:
    found = one.metrics.get(metric)
    return None if found is None else found.ratio


def _cells(
    lines: GateLines, number: int, process: ProcessSample, one: ScenarioSample, scale: float
) -> list[str]:
    names = [str(number), process.started_at or NOTHING, one.scenario]
    if not _may_show(lines, one):
        return [*names, *[NOTHING] * 5, str(one.num_wrong), WITH_SAMPLE]
    return [
        *names,
        *(NOTHING if stat is None else f"{scale * stat.median:.3f}" for stat in _arms(one)),
        *(_shown(_ratio_of(one, metric)) for metric in RATIOS),
        NOTHING if one.capture_s is None else f"{1e3 * one.capture_s:.1f}",
        str(one.num_wrong),
        WITH_SAMPLE,
    ]


def _broken_cells(number: int, failure: ProcessFailure) -> list[str]:
    how = "crashed" if failure.is_crash else "broke a contract"
    return [str(number), *[NOTHING] * 8, f"{how}: {failure.why}"]


def _shown(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{ratio:.4f}"


def _ratios(lines: GateLines, scenario: str) -> Figure:
    """Ratios of one scenario by process; a cross where there are none to be shown."""
    title = f"Ratios of {printable(scenario)}"
    found = [(n, s) for n, process in lines.samples for s in process.scenarios
             if s.scenario == scenario]  # fmt: skip
    timed = [(n, one) for n, one in found if _may_show(lines, one)]
    without = [n for n, one in found if not _may_show(lines, one)]
    broken = sorted({*without, *(n for n, _ in lines.failures)})
    series, told = [], []
    for look, (metric, name) in enumerate(RATIOS.items()):
        known = [(n, ratio) for n, one in timed if (ratio := _ratio_of(one, metric)) is not None]
        if known:
            values = [ratio for _, ratio in known]
            middle = f"{name}, median {median(values):.4f}"
            series.append(Dots(middle, [n for n, _ in known], values, look))
            told.append(f"{middle}, from {min(values):.4f} to {max(values):.4f}")
    columns = ["process", *(f"{name} ratio" for name in RATIOS.values())]
    rows = [[str(n), *(_shown(_ratio_of(one, metric)) for metric in RATIOS)] for n, one in timed]
    table = table_of(columns, rows, 0)
    if not series:
        note = "No process has a ratio that may be shown."
        return Figure(title, table=table if rows else None, note=note)
    desc = f"{lines.candidate} / {lines.base} in {len(timed)} processes: {'; '.join(told)}." + (
        f" {len(broken)} without times." if broken else ""
    )
    axis = printable(f"{lines.candidate} / {lines.base}")
    num = max(process.number for process in lines.processes)
    svg = gate_plots.process_dots(series, broken, num, axis, title, printable(desc))
    return Figure(title, desc, svg, table)
