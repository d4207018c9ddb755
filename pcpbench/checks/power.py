"""What a gate can see with processes like these: false alarms, undecided gates, slowdowns called.

Owns the cutting of whole gates from processes that were measured one after the other. Every gate is
two stretches of them, in order of time: a baseline and a later run, so that a machine that drifts
between the two is wrong here as often as it would be there. (Drawn by chance, the two would always
be alike.) A gate looks as often as the real one and decides by the same intervals. Reads numbers
only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.gate import ALPHA
from pcpbench.checks.shift import shift_of

MAX_GATES: Final = 400
CALLED: Final = 0.95
SLOWDOWNS: Final = (
    *(0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1),
    *(0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0),
)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How gates of one true slowdown ended, as shares; num_run: median processes of a run."""

    slowdown: float
    regression: float
    undecided: float
    passed: float
    num_run: int


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the processes measured: one row a process, one column a finding (log ratios).

    The rows are in order of time. limits: of each column. slowed: whether a slowdown of the
    candidate moves the column.
    """

    values: Sequence[Sequence[float]]
    limits: Sequence[float]
    slowed: Sequence[bool]


class GateSize(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes a gate takes: of a baseline, of a run at its first look and at most."""

    num_baseline: int
    num_first: int
    num_most: int

    def num_apart(self, num_processes: int) -> int:
        """How many gates there are that share no process."""
        return num_processes // (self.num_baseline + self.num_most)

    def places(self, num_processes: int) -> list[tuple[int, int]]:
        """Where baseline and run of each gate begin, in order of time.

        Every baseline with every run behind it; of more than MAX_GATES so many, evenly chosen.
        Example: 5 processes have for 2 and 2 the places (0, 2), (0, 3) and (1, 3).
        """
        last = num_processes - self.num_most
        found = [
            (baseline, run)
            for baseline in range(last - self.num_baseline + 1)
            for run in range(baseline + self.num_baseline, last + 1)
        ]
        chosen = np.linspace(0, len(found) - 1, min(len(found), MAX_GATES)).round().astype(int)
        return [found[number] for number in chosen]


def simulate(table: Table, slowdown: float, size: GateSize) -> Rates:
    """Rates over all gates of a size, their runs slowed; ValueError where there is none."""
    values = np.asarray(table.values, dtype=np.float64)
    moved = np.where(np.asarray(table.slowed), math.log1p(slowdown), 0.0)
    bounds = np.log1p(np.asarray(table.limits, dtype=np.float64))
    gates = [
        _gate(
            values[baseline : baseline + size.num_baseline],
            values[run : run + size.num_most] + moved,
            bounds,
            size.num_first,
        )
        for baseline, run in size.places(len(values))
    ]
    if not gates:
        raise ValueError(f"{len(values)} processes are too few for a baseline and a run")
    ends = [end for end, _ in gates]
    return Rates(
        slowdown=slowdown,
        regression=ends.count(1) / len(ends),
        undecided=ends.count(0) / len(ends),
        passed=ends.count(-1) / len(ends),
        num_run=int(np.median([num for _, num in gates])),
    )


def _gate(
    baseline: NDArray[np.float64],
    run: NDArray[np.float64],
    bounds: NDArray[np.float64],
    num_first: int,
) -> tuple[int, int]:
    """1 regression, -1 pass, 0 undecided, and how many processes it took."""
    alpha = ALPHA / len(bounds)
    sides = [0]
    for num in range(num_first, len(run) + 1):
        sides = [
            shift_of(baseline[:, column], run[:num, column], alpha).side_of(bound)
            for column, bound in enumerate(bounds)
        ]
        if 1 in sides or 0 not in sides:
            break
    return (1 if 1 in sides else 0 if 0 in sides else -1), num


def smallest_called(rates: Sequence[Rates]) -> Rates | None:
    """The smallest slowdown from which on every one is called in 95 % of gates; None: none is."""
    found = None
    for rate in sorted(rates, key=lambda r: -r.slowdown):
        if rate.regression < CALLED:
            break
        found = rate
    return found
