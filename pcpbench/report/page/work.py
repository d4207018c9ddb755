"""Sections about what ran and what it computed: padding waste, dispatch misses, drift (drift.py).

They hold counts and errors, no times, so that scenarios that failed are in them. Owns what is
plotted and tabled; draws through plots.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from pcpbench.modes import ARM_MODES, CUDAGraphMode
from pcpbench.report import units
from pcpbench.report.arms import base_arm
from pcpbench.report.page import plots
from pcpbench.report.page.drift import drift_section
from pcpbench.report.page.parts import Figure, Section, Table, table_of
from pcpbench.report.stored_compare import StoredCompare

SERVED = "served by FULL"


def work_sections(run: StoredCompare) -> list[Section]:
    """All sections about counts and errors."""
    return [
        Section(
            "Padding waste by batch size",
            "Share of executed tokens that were padding, over all ranks, in steps of the candidate "
            "arm, by the number of requests in the step. All scenarios together.",
            [_padding(run)],
        ),
        Section(
            "Dispatch misses",
            "Steps that no FULL graph served, by the reason that dispatch gave. All scenarios "
            "together; idle steps are not counted.",
            [_misses(run, arm) for arm in run.asked if _replays(arm)]
            or [Figure("Misses", note="No arm of this run replays graphs.")],
        ),
        drift_section(run),
    ]


def _replays(arm: str) -> bool:
    """Whether an arm is there to be served by graphs, whether or not one ever was."""
    return ARM_MODES.get(base_arm(arm)) not in (None, CUDAGraphMode.NONE)


def _padding(run: StoredCompare) -> Figure:
    title = f"Padding waste of {run.candidate}"
    counts: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in run.rows("steps.csv", arm=run.candidate):
        real, padded, size = (row.whole(c) for c in ("real_tokens", "padded_tokens", "num_reqs"))
        if row.text("idle") == "true" or not padded or size is None or real is None:
            continue
        kind = "with a prefill" if row.text("has_prefill") == "true" else "decode only"
        total = counts[size, kind]
        total[0], total[1], total[2] = total[0] + real, total[1] + padded, total[2] + 1
    if not counts:
        return Figure(title, note="No step of this run computed anything.")
    sizes = sorted({size for size, _ in counts})
    kinds = [kind for kind in ("decode only", "with a prefill") if any(k == kind for _, k in
             counts)]  # fmt: skip
    series = {
        kind: [100 * _waste(counts[size, kind]) if (size, kind) in counts else None for size in
               sizes]
        for kind in kinds
    }  # fmt: skip
    rows = [
        [str(size), kind, str(n), f"{real:,}", f"{padded:,}",
         units.percent(_waste([real, padded, n]))]
        for (size, kind), (real, padded, n) in sorted(counts.items())
    ]  # fmt: skip
    desc = f"Percent of executed tokens that were padding, for {len(sizes)} batch sizes."
    names = ("requests in the step", "padding, %")
    svg = plots.grouped_bars([str(size) for size in sizes], series, names, title, desc)
    columns = ["requests", "steps with", "steps", "real tokens", "executed tokens", "padding"]
    return Figure(title, desc, svg, Table(columns, rows, frozenset({0, 2, 3, 4, 5})))


def _waste(total: Sequence[int]) -> float:
    return 1.0 - total[0] / total[1]


def _misses(run: StoredCompare, arm: str) -> Figure:
    title = f"Steps of {arm}"
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for row in run.rows("steps.csv", arm=arm):
        if row.text("served_as") == "IDLE":
            continue
        reason = SERVED
        if row.text("served_as") != "FULL":
            reason = f"missed: {row.text('miss_reason') or 'no reason was given'}"
        reasons[reason][row.text("scenario")] += 1
    total = sum(sum(found.values()) for found in reasons.values())
    order = sorted(reasons, key=lambda r: (r != SERVED, -sum(reasons[r].values()), r))
    bars = []
    for reason in order:
        steps = sum(reasons[reason].values())
        bars.append((reason, float(steps), f"{steps:,} ({units.percent(steps / total)})"))
    desc = f"{total} steps of {arm}: " + "; ".join(f"{name}, {text}" for name, _, text in bars)
    rows = [
        [scenario.name, *(f"{reasons[reason][scenario.name]:,}" for reason in order)]
        for scenario in run.scenarios
    ]
    svg = plots.level_bars(bars, "steps", title, desc)
    return Figure(title, desc, svg, table_of(["scenario", *order], rows, 1))
