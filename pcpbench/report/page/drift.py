"""The section about drift: a map of steps and places for each pair of arms, and the worst of each.

Owns what is plotted and tabled; draws through plots.py. Errors, no times: scenarios that failed are
in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pcpbench.report import units
from pcpbench.report.page import plots
from pcpbench.report.page.parts import Figure, Section, Table
from pcpbench.report.stored import Row
from pcpbench.report.stored_compare import StoredCompare

MAX_COLUMNS = 120
"""Columns of a drift map; longer scenarios have several steps in one."""
MAX_CLASSES = 6
KINDS = ("partition", "padding", "capture")
ALLOWED = ("bitwise", "within_budget")
"""Outcomes that no drift fails for, the better first."""
TENSORS = {
    "kv_cache": "layer",
    "index_cache": "index layer",
    "hidden": "hidden",
    "logits": "logits",
    "sampled": "sampled",
    "draft_kv_cache": "draft layer",
    "draft_index_cache": "draft index layer",
    "draft_logits": "draft_logits",
    "proposed": "proposed",
}
"""What a tensor's row is called, in the order of the rows; tensors not known here come behind."""
NO_SHARE = "differs, by no share"

Place = tuple[int, str, int]
"""Of a tensor: its place in the order, its name, its layer or -1."""


def drift_section(run: StoredCompare) -> Section:
    """A figure for each scenario."""
    return Section(
        "Drift by step and layer",
        "Largest difference relative to its row's scale, worst over the ranks. A layer's row is "
        "its KV cache, an index layer's its cache of index keys. Capture drift must be zero "
        "everywhere; partition and padding drift have a budget (docs/measures.md). Values that "
        "differ are counted on the worst rank of each step.",
        [_figure(run, scenario.name) for scenario in run.scenarios],
    )


def is_allowed(outcome: str) -> bool:
    """Whether a drift may be so."""
    return outcome in ALLOWED


def _figure(run: StoredCompare, scenario: str) -> Figure:
    rows = run.rows("drift.csv", scenario)
    if not rows:
        old = not run.has("drift.csv")
        why = "This run has no drift.csv: an older pcpbench made it."
        return Figure(scenario, note=why if old else "Nothing was compared.")
    num_steps = 1 + max(row.whole("step") or 0 for row in run.rows("steps.csv", scenario) or rows)
    bin_size = -(-num_steps // MAX_COLUMNS)
    scale = _Scale(rows)
    maps, quiet, pairs = [], [], _pairs(rows)
    for kind, arm, twin in pairs:
        mine = [row for row in rows if (row.text("kind"), row.text("arm")) == (kind, arm)]
        heading = f"{kind}: {plots.clip(arm, 20)} against {plots.clip(twin, 22)}"
        if all(row.text("outcome") == "bitwise" for row in mine):
            quiet.append(
                f"{kind} drift of {arm} from {twin}: none, {len(mine)} tensors equal bit for bit"
            )
            continue
        maps.append(_map(mine, heading, num_steps, bin_size, scale))
    worst = _worst(rows, pairs)
    desc = f"Drift of {scenario} over {num_steps} steps. " + " ".join(
        f"{row[0]} of {row[1]}, {row[3]}: largest relative {row[4]} in step {row[5]}."
        for row in worst
    )
    axis = "step" if bin_size == 1 else f"step / {bin_size}"
    title = f"Drift of {scenario}"
    svg = plots.cell_maps(maps, scale.names, axis, title, desc) if maps else ""
    columns = ["kind", "arm", "twin", "tensor", "largest relative", "in step", "values that differ",
               "outcome"]  # fmt: skip
    table = Table(columns, worst, frozenset({4, 5, 6}))
    return Figure(scenario, desc, svg, table, "; ".join(quiet) + "." if quiet else "")


class _Scale:
    """The classes of a figure's cells, from the least to the largest difference.

    The first one is of what differs though no share of it can be formed (tokens, -0.0 against 0.0),
    if there is such; then a class for each decade of the relative error.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        differ = [row for row in rows if row.text("outcome") != "bitwise"]
        decades = [decade for row in differ if (decade := _decade(row)) is not None]
        top, least = max(decades, default=0), min(decades, default=0)
        self._low = max(least, top - MAX_CLASSES + 1)
        self._first = any(_decade(row) is None and not _is_infinite(row) for row in differ)
        self.names = [NO_SHARE] if self._first else []
        if decades:
            self.names += [
                _class_name(decade, decade == self._low > least)
                for decade in range(self._low, top + 1)
            ]

    def class_of(self, row: Row) -> int | None:
        """None for what is equal, and for an error that is not finite: that one has a cross."""
        if row.text("outcome") == "bitwise" or _is_infinite(row):
            return None
        decade = _decade(row)
        return 0 if decade is None else max(decade - self._low, 0) + self._first


def _decade(row: Row) -> int | None:
    """Of the relative error: -6 for 3e-6. None where no share can be formed, or it is 0."""
    relative = row.number("relative")
    if not relative or not math.isfinite(relative):
        return None
    return math.floor(math.log10(relative))


def _is_infinite(row: Row) -> bool:
    relative = row.number("relative")
    return relative is not None and not math.isfinite(relative)


def _class_name(decade: int, is_open: bool) -> str:
    return f"below 1e{decade + 1}" if is_open else f"1e{decade} to 1e{decade + 1}"


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    found = dict.fromkeys((r.text("kind"), r.text("arm"), r.text("twin")) for r in rows)
    return sorted(found, key=lambda pair: KINDS.index(pair[0]) if pair[0] in KINDS else 9)


def _place(row: Row) -> Place:
    tensor, layer = row.text("tensor"), row.whole("layer")
    order = list(TENSORS).index(tensor) if tensor in TENSORS else len(TENSORS)
    return order, tensor, -1 if layer is None else layer


def _name(place: Place) -> str:
    _, tensor, layer = place
    name = TENSORS.get(tensor, tensor)
    return name if layer < 0 else f"{name} {layer}"


def _map(
    rows: Sequence[Row], heading: str, num_steps: int, bin_size: int, scale: _Scale
) -> plots.CellMap:
    places = sorted({_place(row) for row in rows})
    cells: dict[tuple[int, int], int] = {}
    bad, seen = set(), set()
    for row in rows:
        column = (row.whole("step") or 0) // bin_size
        place = (column, places.index(_place(row)))
        seen.add(column)
        number = scale.class_of(row)
        if number is not None:
            cells[place] = max(cells.get(place, -1), number)
        if not is_allowed(row.text("outcome")):
            bad.add(place)
    num_columns = -(-num_steps // bin_size)
    absent = [column for column in range(num_columns) if column not in seen]
    names = [_name(place) for place in places]
    return plots.CellMap(heading, names, num_columns, cells, frozenset(bad), absent)


def _worst(rows: Sequence[Row], pairs: Sequence[tuple[str, str, str]]) -> list[list[str]]:
    """A row for each pair and place: its largest error, where, and the worst outcome."""
    told = []
    for kind, arm, twin in pairs:
        mine = [row for row in rows if (row.text("kind"), row.text("arm")) == (kind, arm)]
        for place in sorted({_place(row) for row in mine}):
            here = [row for row in mine if _place(row) == place]
            worst = max(here, key=_badness)
            differs = sum(row.whole("num_mismatched") or 0 for row in here)
            told.append(
                [kind, arm, twin, _name(place), units.small(worst.number("relative")),
                 worst.text("step"), f"{differs:,}", worst.text("outcome").replace("_", " ")]
            )  # fmt: skip
    return told


def _badness(row: Row) -> tuple[int, float, int]:
    """Rows sort by it: outcome first, then the error, then how much of the tensor differs."""
    outcome, relative = row.text("outcome"), row.number("relative") or 0.0
    order = ALLOWED.index(outcome) if outcome in ALLOWED else len(ALLOWED)
    return order, math.inf if math.isnan(relative) else relative, row.whole("num_mismatched") or 0
