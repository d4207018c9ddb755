"""What a gate can see with processes like these: false alarms, undecided gates, slowdowns called.

Owns the simulation of whole gates by drawing from processes that were measured. Every gate draws a
baseline and a run that share no process, looks as often as the real one, and decides by the same
intervals. Reads numbers only; fixed seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.gate import ALPHA
from pcpbench.checks.shift import MIN_PROCESSES, shift_of

NUM_GATES: Final = 400
SEED: Final = 20_27
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

    limits: of each column. slowed: whether a slowdown of the candidate moves the column.
    """

    values: Sequence[Sequence[float]]
    limits: Sequence[float]
    slowed: Sequence[bool]


def simulate(
    table: Table,
    slowdown: float,
    *,
    num_baseline: int,
    num_first: int,
    num_most: int,
    num_gates: int = NUM_GATES,
    seed: int = SEED,
) -> Rates:
    """Rates over `num_gates` gates; ValueError where the processes do not go round.

    num_baseline: processes of a baseline. num_first, num_most: of a run at its first look, and when
    its time is over.
    """
    values = np.asarray(table.values, dtype=np.float64)
    if num_baseline + num_first > len(values) or num_first < MIN_PROCESSES:
        raise ValueError(f"{len(values)} processes are too few for a baseline and a run")
    num_most = min(max(num_most, num_first), len(values) - num_baseline)
    moved = np.where(np.asarray(table.slowed), math.log1p(slowdown), 0.0)
    bounds = np.log1p(np.asarray(table.limits, dtype=np.float64))
    generator = np.random.default_rng(seed)
    ends, sizes = [], []
    for _ in range(num_gates):
        drawn = values[generator.permutation(len(values))[: num_baseline + num_most]]
        end, size = _gate(drawn[:num_baseline], drawn[num_baseline:] + moved, bounds, num_first)
        ends.append(end)
        sizes.append(size)
    return Rates(
        slowdown=slowdown,
        regression=ends.count(1) / num_gates,
        undecided=ends.count(0) / num_gates,
        passed=ends.count(-1) / num_gates,
        num_run=int(np.median(sizes)),
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
