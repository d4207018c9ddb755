"""Matplotlib figures as inline SVG that follows the page's colours. Owns sizes, fonts and themes.

A figure is drawn in stand-in colours, one for each role, which become CSS variables in the markup:
one drawing serves light and dark. Text stays text. Knows no run.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from itertools import count
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

WIDTH: Final = 5.2
"""Inches; shown between 350 and 600 pixels wide, so that text of 10 points stays readable."""

INK, MUTED, GRID, SURFACE, BAD = "#010101", "#010102", "#010103", "#010104", "#010105"
SERIES: Final = tuple(f"#0102{number:02x}" for number in range(1, 7))
HEAT: Final = tuple(f"#0103{number:02x}" for number in range(1, 7))
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
HATCHES: Final = ("", "////", "....", "xxxx")

VARIABLES: Final = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    SURFACE: "surface",
    BAD: "bad",
    **{colour: f"series-{number}" for number, colour in enumerate(SERIES, 1)},
    **{colour: f"heat-{number}" for number, colour in enumerate(HEAT, 1)},
}
"""The CSS variable of each stand-in colour."""

_SETTINGS: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pcpbench",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "patch.edgecolor": INK,
    "hatch.linewidth": 0.6,
    "hatch.color": SURFACE,
    "legend.frameon": False,
    "figure.facecolor": "none",
}

_numbers = count(1)


@contextmanager
def styled() -> Iterator[None]:
    """The house style of figures, for the `with` block; nothing of it stays."""
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # Text is laid out with matplotlib's font and drawn with the reader's, which may have more.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def canvas(height: float, shares: Sequence[float] = (1.0,)) -> tuple[Canvas, list[Axes]]:
    """A figure of the page's width with axes one above the other.

    height: of all, in inches. shares: how the axes divide it.
    """
    figure = Canvas(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(len(shares), 1, squeeze=False, height_ratios=list(shares))
    return figure, [row[0] for row in axes]


def legend_below(figure: Canvas, handles: list[Any], num_columns: int = 2) -> None:
    """A legend under all axes."""
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=num_columns)


def to_svg(figure: Canvas, title: str, desc: str) -> str:
    """Markup of a figure, to be put into a page as it is: all text in it is escaped.

    title, desc: read out in place of the drawing.
    """
    stream = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(figure).print_svg(stream, metadata=nothing)  # type: ignore[no-untyped-call]
    return _inline(stream.getvalue(), f"f{next(_numbers)}", title, desc)


def _inline(text: str, name: str, title: str, desc: str) -> str:
    body = text[text.index("<svg") :]
    head, _, rest = body.partition(">")
    view_box = re.search(r'viewBox="([^"]*)"', head)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    rest = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', rest)
    rest = re.sub(r'href="#([^"]*)"', rf'href="#{name}-\1"', rest)
    rest = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", rest)
    rest = re.sub(r"#010[1-3]0[0-9a-f]", _variable, rest)
    rest = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", rest)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{view_box.group(1) if view_box else "0 0 1 1"}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">'
    )
    told = f'<title id="{name}-title">{escape(title)}</title>'
    return f'{opening}{told}<desc id="{name}-desc">{escape(desc)}</desc>{rest}'


def _variable(found: re.Match[str]) -> str:
    name = VARIABLES.get(found.group(0))
    return found.group(0) if name is None else f"var(--{name})"
