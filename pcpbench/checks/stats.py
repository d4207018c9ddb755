"""Summaries of samples: `Stat`, and `Ratio` with an interval (FACTS 1). Knows no metric.

Samples of one process are not independent: they share its memory layout, its neighbours and its
luck. The interval below resamples blocks, not single pairs, and is still an interval for this one
process; a gate on a few percent needs many fresh processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pcpbench.results import Ratio, Stat

NUM_RESAMPLES: Final = 500
MIN_BLOCKS: Final = 20
SEED: Final = 20_26
MAX_WEIGHTS: Final = 2**20
"""Pairs times resamples looked at at once."""


def stat_of(samples: Sequence[float]) -> Stat | None:
    """Mean, median, population std and linear p99; None of an empty sample, never 0 or nan."""
    if not len(samples):
        return None
    values = np.array(samples, dtype=np.float64)
    return Stat(
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        p99=float(np.percentile(values, 99)),
        num_samples=len(values),
    )


def ratio_of(ratios: NDArray[np.float64], repetitions: NDArray[np.int64]) -> Ratio | None:
    """Median of pairwise ratios with a 95 % percentile-bootstrap interval over blocks.

    A block is a repetition, cut into equal runs of consecutive pairs where there are fewer than
    MIN_BLOCKS repetitions. Resamples draw whole blocks with replacement and take the (lower)
    median of the pairs drawn. None where there is no pair; one block has no interval: 0 to inf.
    """
    if not len(ratios):
        return None
    order = np.argsort(ratios, kind="stable")
    blocks = _blocks(repetitions)[order]
    ordered = ratios[order]
    num_blocks, median = int(blocks.max()) + 1, float(np.median(ratios))
    if num_blocks < 2:  # nothing is known of its spread
        return Ratio(median=median, low=0.0, high=math.inf, num_pairs=len(ratios))
    draws = np.random.default_rng(SEED).integers(num_blocks, size=(NUM_RESAMPLES, num_blocks))
    times_drawn = np.stack([np.bincount(draw, minlength=num_blocks) for draw in draws])
    piece = max(1, MAX_WEIGHTS // len(ratios))
    middle = np.concatenate(
        [
            _middle(times_drawn[start : start + piece], blocks)
            for start in range(0, NUM_RESAMPLES, piece)
        ]
    )
    medians = ordered[middle]
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(
        median=median,
        low=min(float(low), median),
        high=max(float(high), median),
        num_pairs=len(ratios),
    )


def _middle(times_drawn: NDArray[np.int64], blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each resample, [resamples, blocks], where its lower median stands among ordered pairs."""
    weights = np.cumsum(times_drawn[:, blocks], axis=1)
    middle: NDArray[np.int64] = np.argmax(weights * 2 >= weights[:, -1:], axis=1)
    return middle


def _blocks(repetitions: NDArray[np.int64]) -> NDArray[np.int64]:
    """A block number for each pair: 3 repetitions of 14 pairs become 7 blocks of 2 pairs each."""
    names, of_pair = np.unique(repetitions, return_inverse=True)
    runs = -(-MIN_BLOCKS // len(names))
    blocks = np.zeros(len(repetitions), dtype=np.int64)
    for number in range(len(names)):
        mine = np.flatnonzero(of_pair == number)
        blocks[mine] = number * runs + np.arange(len(mine)) * runs // max(len(mine), 1)
    return np.unique(blocks, return_inverse=True)[1].astype(np.int64)
