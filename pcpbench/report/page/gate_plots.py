"""The plots of a gate: a ratio of each process, and the change of each run with interval and limit.

Both show a part of the axis only: what is looked for is small beside the value. Knows no run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from pcpbench.report.page.plots import Dots, Trend, clip, crosses, mark, whole_ticks
from pcpbench.report.page.svg import INK, canvas, legend_below, styled, to_svg

HALF_LIMIT = 0.32
"""Half the width of a limit's mark, in runs."""


def process_dots(
    series: Sequence[Dots], broken: Sequence[int], num: int, axis: str, title: str, desc: str
) -> str:
    """A mark for each process and measure, with a line at the median of each.

    broken: processes that have no mark; they have a cross at the top. num: of all processes.
    """
    with styled():
        figure, (axes,) = canvas(2.9)
        handles: list[Any] = []
        for one in series:
            look = mark(one.number or 0)
            axes.axhline(
                float(np.median(one.values)), color=look["color"], linewidth=0.8, alpha=0.7,
                linestyle=(0, (4, 3)),
            )  # fmt: skip
            handles += axes.plot(
                one.steps, one.values, label=clip(one.name, 36), linestyle="none", markersize=5,
                **look,
            )  # fmt: skip
        axes.margins(y=0.12)
        axes.set_xlim(0.5, max(num, 1) + 0.5)
        axes.xaxis.set_major_locator(whole_ticks())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        axes.set_xlabel("process, in the order in which they ended")
        axes.set_ylabel(axis)
        handles += crosses(axes, broken, "no times")
        legend_below(figure, handles, 2)
        return to_svg(figure, title, desc)


def changes_by_run(
    trends: Sequence[Trend], limits: Mapping[int, float], num_runs: int, axis: str, title: str,
    desc: str, has_zero: bool = True,
) -> str:  # fmt: skip
    """A mark for each run with its interval as a bar, and a dash at its limit; no line joins them.

    The spread of a trend is the interval; an end that is not finite runs to the edge of the plot.
    limits: by run. bad: runs that broke the limit, with a cross at the top. has_zero: whether 0,
    no change, is on the axis.
    """
    with styled():
        figure, (axes,) = canvas(2.9)
        ends = [end for trend in trends for pair in trend.spreads for end in pair]
        values = [value for trend in trends for value in trend.values]
        zero = [0.0] if has_zero else []
        known = [v for v in (*values, *ends, *limits.values(), *zero) if np.isfinite(v)]
        low, top = min(known), max(known)
        room = (top - low) or 1.0
        low, top = low - 0.06 * room, top + 0.1 * room
        for level in zero:
            axes.axhline(level, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        handles: list[Any] = []
        for trend in trends:
            look = mark(trend.number)
            for x, pair in zip(trend.runs, trend.spreads, strict=True):
                axes.plot([x, x], np.clip(pair, low, top), color=look["color"], linewidth=3,
                          alpha=0.4)  # fmt: skip
            handles += axes.plot(trend.runs, trend.values, label=trend.name, linestyle="none",
                                 markersize=6, **look)  # fmt: skip
        for run, limit in limits.items():
            axes.plot([run - HALF_LIMIT, run + HALF_LIMIT], [limit, limit], color=INK,
                      linewidth=1.6)  # fmt: skip
        if limits:
            handles.append(Line2D([], [], color=INK, linewidth=1.6, label="limit"))
        handles += crosses(axes, [run for trend in trends for run in trend.bad], "regression")
        axes.set_ylim(low, top)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axes.set_xticks(range(1, num_runs + 1, -(-num_runs // 16)))
        axes.set_xlim(0.5, num_runs + 0.5)
        axes.set_xlabel("run, in order of time")
        axes.set_ylabel(axis)
        legend_below(figure, handles, 3)
        return to_svg(figure, title, desc)
