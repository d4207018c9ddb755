"""By how much one group of processes lies above another: estimate, interval, and what it decides.

Owns the gate's statistics and nothing else: numbers in, `Shift` out. The estimate is the median of
all differences between a process of the run and one of the baseline (Hodges and Lehmann); the
interval inverts the exact rank-sum test of Mann and Whitney, so it needs no assumption on the shape
of the noise, and one process that met a busy machine cannot move it far. The chances are scipy's,
which is imported where the first one is asked for: it takes half a second that no fresh process
has to pay for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

MIN_PROCESSES: Final = 4
"""Fewest values of a side that are judged at all."""
MAX_NEEDED: Final = 200
"""More processes than this are not suggested to anyone."""
EXACT_PAIRS: Final = 10_000
"""Pairs of processes up to which chances are exact; beyond they are those of a normal curve."""


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """How much more the run has. low, high: -inf or inf where so few values bound nothing."""

    estimate: float
    low: float
    high: float

    def side_of(self, limit: float) -> int:
        """1: the whole interval is above the limit. -1: it is below. 0: it holds the limit."""
        return 1 if self.low > limit else -1 if self.high < limit else 0


Values = Sequence[float] | NDArray[np.float64]


def shift_of(baseline: Values, run: Values, alpha: float) -> Shift:
    """Hodges-Lehmann shift with an interval that errs on each side with chance `alpha` at most.

    Example: baseline 1, 2, 3, run 11, 12, 13: all differences lie from 8 to 12, the estimate is 10.
    """
    ours, theirs = np.asarray(run, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    differences = np.sort((ours[:, None] - theirs[None, :]).ravel())
    place = bound_place(len(ours), len(theirs), alpha)
    return Shift(
        estimate=float(np.median(differences)),
        low=float(differences[place - 1]) if place else -math.inf,
        high=float(differences[-place]) if place else math.inf,
    )


@lru_cache(maxsize=256)
def bound_place(num_run: int, num_baseline: int, alpha: float) -> int:
    """Which of the sorted differences bounds the shift, counted from 1 at either end; 0 for none.

    The largest k with P(U <= k - 1) <= alpha, where U counts, of two equal groups, the pairs in
    which the run is the larger. Example: 4 and 4 have 70 orders, so at alpha 0.02 it is the first
    (P(U = 0) = 1/70).
    """
    pairs = range(num_run * num_baseline)
    return bisect_right(pairs, alpha, key=lambda u: chance_of(u, num_run, num_baseline))


def chance_of(u: int, num_run: int, num_baseline: int) -> float:
    """P(U <= u) of two groups from one source, asked of scipy by two groups that have this U."""
    from scipy.stats import mannwhitneyu

    above_all, rest = divmod(u, num_baseline)
    below = np.zeros(num_run)  # how many of the baseline lie below each of the run
    below[:above_all], below[above_all] = num_baseline, rest
    # Counting every order of larger groups takes scipy minutes.
    method = "exact" if num_run * num_baseline <= EXACT_PAIRS else "asymptotic"
    test = mannwhitneyu(below - 0.5, np.arange(num_baseline), alternative="less", method=method)
    return float(test.pvalue)


def num_needed(
    baseline: Sequence[float], run: Sequence[float], limit: float, alpha: float
) -> int | None:
    """Processes of the run that would decide at the spread seen, None where no number would.

    The interval must become narrower than the way from the estimate to the limit. Its half width
    goes with sqrt(1/m + 1/n), so a baseline of few processes can be what stands in the way.
    """
    room = _room(baseline, run, limit, alpha) - 1 / len(baseline)
    if room <= 0:
        return None
    needed = max(math.ceil(1 / room), len(run) + 1)
    return needed if needed <= MAX_NEEDED else None


def num_needed_of_both(
    baseline: Sequence[float], run: Sequence[float], limit: float, alpha: float
) -> int | None:
    """Processes of each side that would decide at the spread seen, None where no number would.

    For a baseline of so few that a run of any size would stay undecided.
    """
    room = _room(baseline, run, limit, alpha)
    needed = math.ceil(2 / room) if room > 0 else MAX_NEEDED + 1
    return max(needed, len(baseline) + 1) if needed <= MAX_NEEDED else None


def _room(baseline: Sequence[float], run: Sequence[float], limit: float, alpha: float) -> float:
    """What 1/m + 1/n of two sides that are decided is below; 0 for nothing that could be."""
    distance = abs(shift_of(baseline, run, alpha).estimate - limit)
    spread = _spread(baseline, run)
    if distance == 0 or spread == 0:
        return 0.0
    return float(distance / (-NormalDist().inv_cdf(alpha) * spread)) ** 2


def _spread(baseline: Sequence[float], run: Sequence[float]) -> float:
    """Standard deviation of one process, from the middle half of each side."""
    quartiles = [np.percentile(side, [25, 75]) for side in (baseline, run)]
    return max(float(high - low) / 1.349 for low, high in quartiles)
