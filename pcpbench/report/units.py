"""Numbers as a person reads them: times, sizes, shares, ratios. Knows no result.

Owns units and digits. Two times that are to be compared get one unit:
`times(1.234e-3, 0.08e-3)` is `("1.23 ms", "0.08 ms")`.
"""

from __future__ import annotations

import math

from pcpbench.results import Ratio

NOTHING = "-"
"""What stands where there is no value."""

_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (0.0, "us"))
_SCALE = {"s": 1.0, "ms": 1e3, "us": 1e6}


def times(*seconds: float | None) -> tuple[str, ...]:
    """Times in the unit of the largest of them; NOTHING for None."""
    known = [abs(value) for value in seconds if value is not None and math.isfinite(value)]
    largest = max(known, default=0.0)
    unit = next(name for least, name in _TIME_UNITS if largest >= least)
    return tuple(NOTHING if s is None else f"{_digits(s * _SCALE[unit])} {unit}" for s in seconds)


def _digits(value: float) -> str:
    """Three significant digits, but never more than two decimals."""
    size = abs(value)
    return f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}"


def size(num_bytes: int) -> str:
    """`512 B`, `1.5 KiB`, `20.0 MiB`."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{num_bytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def percent(share: float | None) -> str:
    """`12.5 %`; whole shares without a decimal; never `100 %` for less than all."""
    if share is None:
        return NOTHING
    value = 100 * share
    if value in (0.0, 100.0):
        return f"{value:.0f} %"
    return f"{min(max(value, 0.1), 99.9):.1f} %" if 0 < value < 100 else f"{value:.1f} %"


def ratio(found: Ratio | None) -> str:
    """`0.66 [0.64, 0.68]`."""
    if found is None:
        return NOTHING
    return f"{found.median:.2f} {interval(found)}"


def interval(found: Ratio) -> str:
    """`[0.64, 0.68]`."""
    return f"[{found.low:.2f}, {found.high:.2f}]"


def is_clear(found: Ratio) -> bool:
    """Whether the interval lies on one side of 1, and not lost in noise."""
    return found.low > 0.0 and not found.low <= 1.0 <= found.high


def rough_ratio(found: Ratio | None) -> str:
    """`0.88`, or `~0.88` where the interval says that there may be no difference."""
    text = ratio(found).partition(" ")[0]
    return text if found is None or is_clear(found) else f"~{text}"


def reading(found: Ratio | None) -> str:
    """The ratio in words: `34 % less`, `12 % more`, or that the interval holds 1.

    An interval that reaches 0 belongs to a difference of times that is smaller than its error.
    """
    if found is None:
        return ""
    if math.isinf(found.high):
        return "one sample alone"
    if found.low <= 0.0:
        return "lost in noise"
    if found.low <= 1.0 <= found.high:
        return "no clear difference"
    change = 100 * abs(found.median - 1.0)
    return f"{change:.{0 if change >= 9.95 else 1}f} % {'less' if found.median < 1 else 'more'}"


def small(value: float | None) -> str:
    """A drift: `0`, `81,234`, `0.125`, `3.1e-07`, `inf`, NOTHING."""
    if value is None:
        return NOTHING
    if math.isfinite(value) and float(value).is_integer():
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.1e}"
    return f"{value:.3g}" if 0.01 <= abs(value) < 1000 else f"{value:.1e}"


def against(value: float | None, limit: float | None) -> str:
    """A drift with its limit: `6.4e-06 (0.0001)`; without one no bit may differ: `0 (bitwise)`."""
    return f"{small(value)} ({'bitwise' if limit is None else f'{limit:g}'})"


def count(number: int, noun: str) -> str:
    """`1 step`, `3 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
