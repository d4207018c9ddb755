"""Sections about time: TPOT by arm, gaps over steps, launch overhead, when captures pay back.

Times are those of scenarios that passed. Owns what is plotted and tabled; draws through plots.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from pcpbench.report.page import plots
from pcpbench.report.page.parts import Figure, Section, table_of
from pcpbench.report.page.svg import MARKERS
from pcpbench.report.stored import Row
from pcpbench.report.stored_compare import StoredCompare, StoredScenario
from pcpbench.report.units import NOTHING

NO_TIMES = "No scenario of this run has times: none passed, or none was timed."
OLD = "This run has no samples.csv: an older pcpbench made it."
_UNITS = ((1.0, "s"), (1e-3, "ms"), (0.0, "us"))


def unit_of(values: Sequence[float]) -> tuple[float, str]:
    """Factor and name of the unit that fits the median of some seconds."""
    middle = float(np.median(np.abs(values))) if len(values) else 0.0
    least, name = next(pair for pair in _UNITS if middle >= pair[0])
    return (1e6 if name == "us" else 1 / least), name


def speed_sections(run: StoredCompare) -> list[Section]:
    """All sections about time."""
    shared = "" if run.num_ranks == 1 else f"Sums over {run.num_ranks} ranks that share one device."
    if run.has("samples.csv") and not (run.passed and run.rows("samples.csv")):
        return [Section("Times", NO_TIMES)]
    numbers = _descriptor_numbers(run)
    return [
        Section(
            "TPOT by arm",
            "Time per output token of every request and repetition: (last - first token time) / "
            "(output tokens - 1). " + shared_core(run),
            [_boxes(run, "tpot", "TPOT")],
        ),
        Section(
            "ITL over steps",
            "The gap between a request's tokens that each step ended, median over requests and "
            "repetitions, by the descriptor that ran. " + shared,
            [_gaps(run, s, numbers) for s in run.passed] or [_nothing(run, "ITL")],
        ),
        Section(
            "Launch overhead",
            "Host time to issue a step. On a CPU: step time less the time of its kernels alone, "
            "so it can come out below zero where there is nothing to see. " + shared,
            [_boxes(run, "launch_overhead", "Launch overhead")],
        ),
        Section(
            "Break-even",
            "How many steps of a scenario it takes until the candidate's graphs have saved what "
            "their capture cost (warm-ups included; less what the base's own capture cost, where "
            "it has graphs, too). Saving per step: medians over repetitions, base less candidate, "
            "mean over the scenario's steps. " + shared,
            [_break_even(run)],
        ),
    ]


def shared_core(run: StoredCompare) -> str:
    """What must be known beside every time of the run."""
    if run.num_ranks == 1:
        return "Scope: worker; not to be set against a served system."
    return (
        f"{run.num_ranks} ranks share one device and run one after the other: times are sums over "
        "them, to compare the arms by. Scope: worker; not to be set against a served system."
    )


def _nothing(run: StoredCompare, title: str) -> Figure:
    return Figure(title, note=NO_TIMES if run.has("samples.csv") else OLD)


def _boxes(run: StoredCompare, measure: str, title: str) -> Figure:
    groups = []
    for scenario in run.passed:
        found = {arm: run.samples(scenario.name, arm, measure) for arm in run.asked}
        known = {arm: values for arm, values in found.items() if values}
        if known:
            groups.append((scenario, known))
    if not groups:
        return _nothing(run, title)
    scale, unit = unit_of([v for _, known in groups for values in known.values() for v in values])
    boxes = [
        plots.BoxGroup(s.name, {arm: [scale * v for v in values] for arm, values in known.items()})
        for s, known in groups
    ]
    arms = " and ".join(run.asked)
    desc = (
        f"{title} of {arms} in {len(groups)} scenarios, in {unit}. Boxes hold the middle half, the "
        "line in them is the median, whiskers reach from the 1st to the 99th percentile."
    )
    columns = ["scenario", "arm", "samples", *(f"{s} {unit}" for s in ("median", "mean", "std",
               "p99")), "ratio [95 %]"]  # fmt: skip
    rows = [
        [s.name, arm, str(len(values)), *_stats(values, scale), _ratio(s, measure, arm)]
        for s, known in groups
        for arm, values in known.items()
    ]
    svg = plots.box_plot(boxes, f"{title}, {unit}", title, desc)
    note = "Boxes: the middle half; line: median; whiskers: 1st to 99th percentile."
    return Figure(title, desc, svg, table_of(columns, rows, 2), note)


def _stats(values: Sequence[float], scale: float) -> list[str]:
    found = np.array(values) * scale
    numbers = (np.median(found), found.mean(), found.std(), np.percentile(found, 99))
    return [f"{number:.3f}" for number in numbers]


def _ratio(scenario: StoredScenario, measure: str, arm: str) -> str:
    row = scenario.row("candidate")
    if row is None or row.text("arm") != arm:
        return NOTHING
    parts = [row.number(f"{measure}_ratio{end}") for end in ("", "_low", "_high")]
    if any(part is None for part in parts):
        return NOTHING
    return f"{parts[0]:.3f} [{parts[1]:.3f}, {parts[2]:.3f}]"


def _descriptor_numbers(run: StoredCompare) -> dict[str, int]:
    """Colour and shape of each descriptor, the same in all plots of a run."""
    rows = run.rows("steps.csv", arm=run.candidate)
    names = {_ran_as(row) for row in rows if row.text("served_as") != "IDLE"}
    return {name: number for number, name in enumerate(sorted(names, key=_descriptor_order))}


def _gaps(run: StoredCompare, scenario: StoredScenario, numbers: dict[str, int]) -> Figure:
    title = scenario.name
    found = {arm: run.by_step(scenario.name, arm, "itl") for arm in run.asked}
    gaps = found.get(run.candidate, {})
    if not gaps:
        return Figure(title, note=NO_TIMES if run.has("samples.csv") else OLD)
    scale, unit = unit_of([value for one in found.values() for value in one.values()])
    ran = {row.whole("step"): row for row in run.rows("steps.csv", title, run.candidate)}
    by_name: dict[str, list[int]] = defaultdict(list)
    for step in gaps:
        by_name[_ran_as(ran.get(step))].append(step)
    series = [
        plots.Dots(
            f"{run.candidate}: {name}",
            steps,
            [scale * gaps[step] for step in steps],
            numbers.get(name, len(numbers)),
        )
        for name, steps in sorted(by_name.items(), key=lambda item: _descriptor_order(item[0]))
    ]
    series = _at_most(series, len(MARKERS))
    base = found[run.base]
    if run.base != run.candidate and base:
        line = plots.Dots(run.base, list(base), [scale * v for v in base.values()])
        series.insert(0, line)
    desc = (
        f"Median gap between tokens, in {unit}, that each step of {title} ended. "
        f"{run.candidate} by descriptor: " + ", ".join(f"{n} in {len(s)} steps" for n, s in
        by_name.items()) + f"; {run.base} as a dashed line."
    )  # fmt: skip
    columns = ["step", "ran as", *(f"{arm} {unit}" for arm in run.asked)]
    rows = [
        [str(step), _ran_as(ran.get(step)), *(_cell(found[arm].get(step), scale) for arm in
         run.asked)]
        for step in sorted(gaps)
    ]  # fmt: skip
    table = table_of(columns, rows, 2)
    return Figure(title, desc, plots.dots_over_steps(series, f"ITL, {unit}", title, desc), table)


def _at_most(series: list[plots.Dots], most: int) -> list[plots.Dots]:
    """The first series and one for all others, where there are more than marks to tell apart."""
    if len(series) <= most:
        return series
    rest = series[most - 1 :]
    pairs = sorted((s, v) for one in rest for s, v in zip(one.steps, one.values, strict=True))
    others = plots.Dots(
        f"{len(rest)} others", [p[0] for p in pairs], [p[1] for p in pairs], plots.OTHERS
    )
    return [*series[: most - 1], others]


def _cell(value: float | None, scale: float) -> str:
    return NOTHING if value is None else f"{value * scale:.3f}"


def _ran_as(row: Row | None) -> str:
    """Such as `FULL, 8 tokens`, `FULL, 8 tokens of 2 requests` (with drafts) or `eager`."""
    if row is None:
        return "unknown"
    served = row.text("served_as")
    if served in ("NONE", "IDLE", ""):
        return {"NONE": "eager", "IDLE": "idle"}.get(served, "unknown")
    size, requests = row.text("descriptor_num_tokens"), row.text("descriptor_num_reqs")
    text = f"{served}, {size} token{'' if size == '1' else 's'}"
    if requests in ("", size):
        return text
    return f"{text} of {requests} request{'' if requests == '1' else 's'}"


def _descriptor_order(name: str) -> tuple[str, list[int]]:
    mode, _, sizes = name.partition(", ")
    return mode, [int(word) for word in sizes.split() if word.isdigit()]


def _break_even(run: StoredCompare) -> Figure:
    title = "Steps to break even"
    bars, rows = [], []
    for scenario in run.passed:
        cost, saving, step_s = _costs(run, scenario)
        if cost is None or saving is None or step_s is None:
            continue
        steps = cost / saving if saving > 0 else None
        told = "never" if steps is None else f"{steps:,.0f}" if steps >= 10 else f"{steps:.1f}"
        text = "never: no saving" if steps is None else f"{told} steps"
        bars.append((scenario.name, steps or 0.0, text))
        spent = NOTHING if steps is None else f"{steps * step_s:.2f}"
        rows.append([scenario.name, f"{1e3 * cost:.1f}", f"{1e6 * saving:.1f}", told, spent])
    if not bars:
        reason = "The candidate captured no graphs in a scenario that passed and was timed."
        return Figure(title, note=reason if run.has("samples.csv") else OLD)
    desc = "Steps until captured graphs have saved what their capture cost: " + "; ".join(
        f"{name} {text}" for name, _, text in bars
    )
    columns = ["scenario", "capture ms", "saving per step us", "steps", "seconds of the candidate"]
    known = [value for _, value, _ in bars if value > 0]
    log = bool(known) and max(known) / min(known) > plots.WIDE_SPREAD
    svg = plots.level_bars(bars, "steps (log scale)" if log else "steps", title, desc, log)
    return Figure(title, desc, svg, table_of(columns, rows, 1))


def _costs(
    run: StoredCompare, scenario: StoredScenario
) -> tuple[float | None, float | None, float | None]:
    """Seconds: that the candidate's capture takes more, saved by a step, of a step of it."""
    rows = (scenario.row(role) for role in ("candidate", "base"))
    cost, base_cost = (None if row is None else row.number("capture_ms") for row in rows)
    base = run.by_step(scenario.name, run.base, "step")
    ours = run.by_step(scenario.name, run.candidate, "step")
    common = [step for step in ours if step in base]
    if cost is None or not common or run.base == run.candidate:
        return None, None, None
    saving = float(np.mean([base[step] - ours[step] for step in common]))
    return (
        max(cost - (base_cost or 0.0), 0.0) / 1e3,
        saving,
        float(np.mean([ours[step] for step in common])),
    )
