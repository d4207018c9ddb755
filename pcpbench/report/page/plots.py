"""The kinds of plots: boxes, dots over steps, bars, a map of cells, lines over runs.

Owns how values become marks. Marks differ in shape, hatch or size as well as in colour. Knows no
run: callers hand over labels and numbers, in the unit that the axis names.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from pcpbench.report.page.svg import (
    BAD,
    GRID,
    HATCHES,
    HEAT,
    INK,
    MARKERS,
    MUTED,
    SERIES,
    SURFACE,
    canvas,
    legend_below,
    styled,
    to_svg,
)

WIDE_SPREAD = 12.0
"""An axis is logarithmic where its largest value is so many times the smallest."""


@dataclass(frozen=True)
class BoxGroup:
    """Boxes that are to be compared, one for each name, under one heading."""

    heading: str
    samples: Mapping[str, Sequence[float]]


def box_plot(groups: Sequence[BoxGroup], axis: str, title: str, desc: str) -> str:
    """Horizontal boxes: middle half, median, whiskers from the 1st to the 99th percentile."""
    names = list(dict.fromkeys(name for group in groups for name in group.samples))
    rows = sum(len(group.samples) + 1 for group in groups)
    with styled():
        figure, (axes,) = canvas(0.75 + 0.25 * rows)
        place, ticks, labels = 0.0, [], []
        for group in groups:
            axes.annotate(
                clip(group.heading, 44), (0, place), xycoords=("axes fraction", "data"),
                xytext=(3, 0), textcoords="offset points", va="center", weight="bold", fontsize=10,
            )  # fmt: skip
            for name, values in group.samples.items():
                place += 1
                _box(axes, values, place, names.index(name))
                ticks.append(place)
                labels.append(clip(name, 20))
            place += 1
        axes.set_yticks(ticks, labels)
        axes.set_ylim(place - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(axis)
        edges = [np.percentile(v, (1, 99)) for g in groups for v in g.samples.values()]
        _maybe_log(axes, edges)
        return to_svg(figure, title, desc)


def _box(axes: Any, values: Sequence[float], place: float, number: int) -> None:
    colour = SERIES[number % len(SERIES)]
    line = {"color": colour, "linewidth": 1.2}
    low, *box, high = (float(edge) for edge in np.percentile(values, (1, 25, 50, 75, 99)))
    known = dict(zip(("whislo", "q1", "med", "q3", "whishi"), (low, *box, high), strict=True))
    axes.bxp(
        [known], positions=[place], orientation="horizontal", widths=0.6,
        showfliers=False, patch_artist=True, manage_ticks=False,
        boxprops={"facecolor": colour if number else "none", "edgecolor": colour,
                  "linewidth": 1.2},
        whiskerprops=line, capprops=line,
        medianprops={"color": SURFACE if number else colour, "linewidth": 2.2},
    )  # fmt: skip


def _maybe_log(axes: Any, edges: Sequence[Any], which: str = "x") -> None:
    known = np.concatenate([np.ravel(edge) for edge in edges]) if len(edges) else np.ones(1)
    if known.min() > 0 and known.max() / known.min() > WIDE_SPREAD:
        _make_log(axes, which, known.max() / known.min())
        return
    if known.min() >= 0:
        getattr(axes, f"set_{which}lim")(0, None)


def _make_log(axes: Any, which: str, spread: float) -> None:
    """A logarithmic axis with plain numbers: 1, 2, 5, 10, or powers of ten where there are many."""
    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if spread < 300 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


OTHERS = -1


def mark(number: int) -> dict[str, Any]:
    """Colour, shape and filling of a series: no two of the first twenty differ in colour alone."""
    if number == OTHERS:
        return {"color": MUTED, "marker": "."}
    colour = SERIES[number % len(SERIES)]
    is_open = number // len(MARKERS) % 2
    return {
        "color": colour, "marker": MARKERS[number % len(MARKERS)],
        "markerfacecolor": "none" if is_open else colour,
    }  # fmt: skip


@dataclass(frozen=True)
class Dots:
    """A series over steps. number: its look (`mark`); None for a thin line behind the others.

    OTHERS: small dots, for all series that are too many to be told apart.
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    number: int | None = None


def dots_over_steps(series: Sequence[Dots], axis: str, title: str, desc: str) -> str:
    """One mark a step; each series has a colour and a shape of its own."""
    with styled():
        figure, (axes,) = canvas(2.7 + 0.17 * ((len(series) + 1) // 2))
        handles: list[Any] = []
        for one in series:
            number = one.number
            if number is None:
                style: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": (0, (3, 2))}
            else:
                style = {"linestyle": "none", "markersize": 5, **mark(number)}
            handles += axes.plot(one.steps, one.values, label=clip(one.name, 24), **style)
        axes.set_xlabel("step")
        axes.set_ylabel(axis)
        axes.xaxis.set_major_locator(whole_ticks())
        _maybe_log(axes, [one.values for one in series if len(one.values)], "y")
        legend_below(figure, handles)
        return to_svg(figure, title, desc)


def grouped_bars(
    places: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    axes_names: tuple[str, str],
    title: str,
    desc: str,
) -> str:
    """Upright bars: for each place one of every series, told apart by colour and hatch."""
    with styled():
        figure, (axes,) = canvas(2.9)
        width = 0.8 / max(len(series), 1)
        handles = []
        for number, (name, values) in enumerate(series.items()):
            known = [(x, value) for x, value in enumerate(values) if value is not None]
            xs = [x - 0.4 + width * (number + 0.5) for x, _ in known]
            style: Any = {"facecolor": SERIES[number], "hatch": HATCHES[number % len(HATCHES)]}
            axes.bar(xs, [value for _, value in known], width * 0.92, edgecolor=SURFACE, **style)
            handles.append(Patch(label=name, edgecolor=SURFACE, **style))
        every = -(-len(places) // 14)
        ticks = list(range(0, len(places), every))
        axes.set_xticks(ticks, [places[tick] for tick in ticks])
        axes.set_xlim(-0.6, len(places) - 0.4)
        axes.set_ylim(0, None)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(axes_names[0])
        axes.set_ylabel(axes_names[1])
        legend_below(figure, handles if len(series) > 1 else [])
        return to_svg(figure, title, desc)


def level_bars(
    bars: Sequence[tuple[str, float, str]], axis: str, title: str, desc: str, log: bool = False
) -> str:
    """Level bars (dots on a logarithmic axis), the heading above and what it comes to behind.

    bars: heading, value, text.
    """
    with styled():
        figure, (axes,) = canvas(0.7 + 0.48 * max(len(bars), 1))
        most = max((value for _, value, _ in bars), default=1.0) or 1.0
        least = min((value for _, value, _ in bars if value > 0), default=1.0)
        left = 10 ** np.floor(np.log10(least) - 0.3) if log else 0.0
        for place, (heading, value, text) in enumerate(bars):
            if log:  # a bar without a zero to stand on would lie
                axes.plot([value] if value else [], [place] if value else [], "o", color=SERIES[1])
            else:
                axes.barh(place, value, 0.36, color=SERIES[1])
            axes.annotate(clip(heading, 52), (0, place - 0.33), va="center", fontsize=10,
                          xycoords=("axes fraction", "data"), xytext=(2, 0),
                          textcoords="offset points")  # fmt: skip
            axes.annotate(text, (max(value, left), place), va="center", fontsize=10,
                          xytext=(6, 0), textcoords="offset points")  # fmt: skip
        axes.set_yticks([])
        axes.set_ylim(len(bars) - 0.5, -0.6)
        axes.grid(visible=False, axis="y")
        if log:
            _make_log(axes, "x", most / left)
            axes.set_xlim(left, most * (most / left) ** 0.5)
        else:
            axes.set_xlim(0, most * 1.3)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlabel(axis)
        return to_svg(figure, title, desc)


@dataclass(frozen=True)
class CellMap:
    """Drift by place and step, in decades. cells: (column, row) -> class from 0 up, -1 for equal.

    bad: cells outside what is allowed. absent: columns that were not compared.
    """

    heading: str
    rows: Sequence[str]
    num_columns: int
    cells: Mapping[tuple[int, int], int]
    bad: frozenset[tuple[int, int]]
    absent: Sequence[int]


def cell_maps(
    maps: Sequence[CellMap], classes: Sequence[str], axis: str, title: str, desc: str
) -> str:
    """Maps one above the other; a cell grows and gains colour with its class, equal ones are
    blank."""
    with styled():
        heights = [0.55 + 0.19 * len(one.rows) for one in maps]
        figure, panels = canvas(sum(heights) + 1.05, heights)
        figure.set_layout_engine("constrained", h_pad=0.06)
        for axes, one in zip(panels, maps, strict=True):
            _cell_map(axes, one, len(classes))
        panels[-1].set_xlabel(axis)
        handles: list[Any] = [
            Line2D([], [], marker="s", linestyle="none", color=_heat(number, len(classes)),
                   markersize=9 * _size(number, len(classes)), label=name)
            for number, name in enumerate(classes)
        ]  # fmt: skip
        handles.append(Patch(facecolor="none", edgecolor=GRID, label="equal, bit for bit"))
        if any(one.bad for one in maps):
            handles.append(Line2D([], [], marker="x", linestyle="none", color=BAD,
                                  markersize=7, label="not allowed"))  # fmt: skip
        if any(one.absent for one in maps):
            handles.append(Patch(facecolor=GRID, label="nothing to compare"))
        legend_below(figure, handles, 2)
        return to_svg(figure, title, desc)


def _heat(number: int, num_classes: int) -> str:
    """The classes spread over all shades: of two, the third and the last."""
    return HEAT[max((number + 1) * len(HEAT) // max(num_classes, 1), 1) - 1]


def _size(number: int, num_classes: int) -> float:
    return 0.45 + 0.5 * (number + 1) / max(num_classes, 1)


def _cell_map(axes: Any, one: CellMap, num_classes: int) -> None:
    axes.set_title(one.heading, loc="left")
    axes.grid(visible=False)
    for column in one.absent:
        axes.add_patch(
            Rectangle((column - 0.5, -0.5), 1, len(one.rows), facecolor=GRID, edgecolor="none")
        )
    for number in range(num_classes):
        half = _size(number, num_classes) / 2
        corners = [
            [(x - half, y - half), (x + half, y - half), (x + half, y + half), (x - half, y + half)]
            for (x, y), found in one.cells.items()
            if found == number
        ]
        colour = _heat(number, num_classes)
        axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="none"))
    if one.bad:
        xs, ys = zip(*sorted(one.bad), strict=True)
        axes.plot(xs, ys, linestyle="none", marker="x", color=BAD, markersize=6)
    axes.set_xlim(-0.5, one.num_columns - 0.5)
    axes.set_ylim(-0.5, len(one.rows) - 0.5)
    every = -(-len(one.rows) // 20)
    axes.set_yticks(range(0, len(one.rows), every), one.rows[::every])
    axes.xaxis.set_major_locator(whole_ticks())


def whole_ticks() -> MaxNLocator:
    """A few ticks at whole numbers."""
    return MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10])


@dataclass(frozen=True)
class Trend:
    """Points of runs of equal settings.

    number: their look (`mark`). spreads: lowest and highest scenario of each point. bad: runs in
    which a scenario has a value that is not allowed. A value that is not finite has no point, and
    its run must be among these.
    """

    name: str
    runs: Sequence[int]
    values: Sequence[float]
    spreads: Sequence[tuple[float, float]]
    number: int
    bad: Sequence[int] = ()


def trend_lines(
    trends: Sequence[Trend], num_runs: int, axis: str, title: str, desc: str,
    level: float | None = None,
) -> str:  # fmt: skip
    """Runs in order of time, numbered; a line joins runs of equal settings only."""
    with styled():
        figure, (axes,) = canvas(2.8)
        handles = []
        for trend in trends:
            look = mark(trend.number)
            for x, ends in zip(trend.runs, trend.spreads, strict=True):
                if all(map(np.isfinite, ends)):
                    axes.plot([x, x], ends, color=look["color"], linewidth=3, alpha=0.35)
            values = [value if np.isfinite(value) else np.nan for value in trend.values]
            handles += axes.plot(
                trend.runs, values, label=trend.name, markersize=6, linewidth=1.2, **look
            )
        if level is not None:
            axes.axhline(level, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        spread = [end for trend in trends for pair in trend.spreads for end in pair]
        known = [end for end in spread if np.isfinite(end)]
        top, low = max([*known, level or 0.0]), min([*known, 0.0])
        room = (top - low) or 1.0
        axes.set_ylim(low - 0.04 * room, top + 0.1 * room)
        handles += crosses(axes, [run for trend in trends for run in trend.bad], "not allowed")
        axes.set_xticks(range(1, num_runs + 1, -(-num_runs // 16)))
        axes.set_xlim(0.5, num_runs + 0.5)
        axes.set_xlabel("run, in order of time")
        axes.set_ylabel(axis)
        legend_below(figure, handles if len(handles) > 1 else [], 3)
        return to_svg(figure, title, desc)


def crosses(axes: Any, places: Sequence[int], label: str) -> list[Any]:
    """At the top of the plot: what the label says holds of these, whatever their points."""
    if not places:
        return []
    marks: list[Any] = axes.plot(
        places, [1.0] * len(places), transform=axes.get_xaxis_transform(), linestyle="none",
        marker="x", color=BAD, markersize=7, label=label, clip_on=False,
    )  # fmt: skip
    return marks


def clip(text: str, most: int) -> str:
    """Text of at most so many characters; what is cut ends in an ellipsis."""
    return (
        textwrap.shorten(text, most, placeholder="…")
        if len(text) > most and " " in text
        else (text if len(text) <= most else text[: most - 1] + "…")
    )
