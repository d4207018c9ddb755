"""Sections about what ran and what it computed: padding waste, dispatch misses, drift.

They hold counts and errors, no times, so that scenarios that failed are in them. Owns what is
plotted and tabled; draws through plots.py.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from pcpbench.report import units
from pcpbench.report.page import plots
from pcpbench.report.page.parts import Figure, Section, Table, table_of
from pcpbench.report.stored import Row
from pcpbench.report.stored_compare import StoredCompare

MAX_COLUMNS = 120
"""Columns of a drift map; longer scenarios have several steps in one."""
MAX_CLASSES = 6
KINDS = ("partition", "padding", "capture")
ALLOWED = ("bitwise", "within_budget")
GRAPH_MODES = ("FULL", "PIECEWISE")


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
            [_misses(run, arm) for arm in run.asked if _replays(run, arm)]
            or [Figure("Misses", note="No arm of this run replays graphs.")],
        ),
        Section(
            "Drift by step and layer",
            "Largest difference relative to its row's scale, worst over the ranks. A layer's row "
            "is its KV cache. Capture drift must be zero everywhere; partition and padding drift "
            "have a budget (docs/measures.md).",
            [_drift(run, scenario.name) for scenario in run.scenarios],
        ),
    ]


def _replays(run: StoredCompare, arm: str) -> bool:
    return any(
        row.text("served_as") in GRAPH_MODES or row.text("miss_reason")
        for row in run.rows("steps.csv", arm=arm)
    )


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
        reason = row.text("miss_reason")
        reasons[f"missed: {reason}" if reason else "served by FULL"][row.text("scenario")] += 1
    total = sum(sum(found.values()) for found in reasons.values())
    order = sorted(reasons, key=lambda r: (r != "served by FULL", -sum(reasons[r].values()), r))
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


def _drift(run: StoredCompare, scenario: str) -> Figure:
    rows = run.rows("drift.csv", scenario)
    if not rows:
        old = not run.has("drift.csv")
        why = "This run has no drift.csv: an older pcpbench made it."
        return Figure(scenario, note=why if old else "Nothing was compared.")
    num_steps = 1 + max(row.whole("step") or 0 for row in run.rows("steps.csv", scenario) or rows)
    bin_size = -(-num_steps // MAX_COLUMNS)
    decades = [_decade(row) for row in rows]
    known = [decade for decade in decades if decade is not None]
    top = max(known, default=0)
    low = max(min(known, default=0), top - MAX_CLASSES + 1)
    maps, quiet, pairs = [], [], _pairs(rows)
    for kind, arm, twin in pairs:
        mine = [row for row in rows if (row.text("kind"), row.text("arm")) == (kind, arm)]
        heading = f"{kind}: {plots.clip(arm, 20)} against {plots.clip(twin, 22)}"
        if all(row.text("outcome") == "bitwise" for row in mine):
            quiet.append(f"{kind} drift of {arm} from {twin}: none, {len(mine)} tensors equal bit "
                         "for bit")  # fmt: skip
            continue
        maps.append(_map(mine, heading, num_steps, bin_size, low))
    classes = [_class_name(low + n, n == 0 and low > min(known, default=0)) for n in
               range(top - low + 1)] if known else []  # fmt: skip
    desc = f"Drift of {scenario} over {num_steps} steps. " + " ".join(
        f"{row[0]} of {row[1]}: largest relative {row[4]} in step {row[5]}."
        for row in _worst(rows, pairs)
    )
    axis = "step" if bin_size == 1 else f"step / {bin_size}"
    svg = plots.cell_maps(maps, classes, axis, f"Drift of {scenario}", desc) if maps else ""
    columns = ["kind", "arm", "twin", "tensor", "largest relative", "in step", "values that differ",
               "outcome"]  # fmt: skip
    table = Table(columns, _worst(rows, pairs), frozenset({4, 5, 6}))
    return Figure(scenario, desc, svg, table, "; ".join(quiet) + "." if quiet else "")


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    found = dict.fromkeys((r.text("kind"), r.text("arm"), r.text("twin")) for r in rows)
    return sorted(found, key=lambda pair: KINDS.index(pair[0]) if pair[0] in KINDS else 9)


def _place(row: Row) -> str:
    layer = row.text("layer")
    return f"layer {layer}" if layer else row.text("tensor")


def _places(rows: Sequence[Row]) -> list[str]:
    """Layers from the first one up, then what lies behind them."""
    layers = sorted({row.whole("layer") or 0 for row in rows if row.text("layer")})
    behind = [name for name in ("hidden", "logits", "sampled") if any(r.text("tensor") == name for
              r in rows)]  # fmt: skip
    return [f"layer {layer}" for layer in layers] + behind


def _decade(row: Row) -> int | None:
    """Of the relative error: -6 for 3e-6. None where nothing differs or nothing can be formed."""
    relative = row.number("relative")
    if row.text("outcome") == "bitwise" or not relative or not math.isfinite(relative):
        return None
    return math.floor(math.log10(relative))


def _class_name(decade: int, is_open: bool) -> str:
    return f"below 1e{decade + 1}" if is_open else f"1e{decade} to 1e{decade + 1}"


def _map(
    rows: Sequence[Row], heading: str, num_steps: int, bin_size: int, low: int
) -> plots.CellMap:
    places = _places(rows)
    cells: dict[tuple[int, int], int] = {}
    bad, seen = set(), set()
    for row in rows:
        column = (row.whole("step") or 0) // bin_size
        place = (column, places.index(_place(row)))
        seen.add(column)
        decade = _decade(row)
        if decade is not None:
            cells[place] = max(cells.get(place, -1), max(decade - low, 0))
        if row.text("outcome") not in ALLOWED:
            bad.add(place)
    num_columns = -(-num_steps // bin_size)
    absent = [column for column in range(num_columns) if column not in seen]
    return plots.CellMap(heading, places, num_columns, cells, frozenset(bad), absent)


def _worst(rows: Sequence[Row], pairs: Sequence[tuple[str, str, str]]) -> list[list[str]]:
    """A row for each pair and place: its largest error, where, and the worst outcome."""
    told = []
    for kind, arm, twin in pairs:
        mine = [row for row in rows if (row.text("kind"), row.text("arm")) == (kind, arm)]
        for place in _places(mine):
            here = [row for row in mine if _place(row) == place]
            worst = max(here, key=_badness)
            differs = sum(row.whole("num_mismatched") or 0 for row in here)
            told.append(
                [kind, arm, twin, place, units.small(worst.number("relative")), worst.text("step"),
                 f"{differs:,}", worst.text("outcome").replace("_", " ")]
            )  # fmt: skip
    return told


def _badness(row: Row) -> tuple[bool, float]:
    return row.text("outcome") not in ALLOWED, row.number("relative") or 0.0
