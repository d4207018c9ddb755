"""The gate's statistics against known truth: exact chances, coverage, what more runs would do."""

import math

import numpy as np
import pytest
from scipy import stats

from pcpbench.checks.shift import bound_place, chance_of, num_needed, shift_of


def test_the_worked_examples_of_the_docstrings():
    shift = shift_of([1, 2, 3], [11, 12, 13], 0.06)
    assert shift.estimate == 10
    assert (shift.low, shift.high) == (8, 12)
    assert bound_place(4, 4, 0.02) == 1
    assert bound_place(4, 4, 0.0142) == 0  # P(U = 0) is 1/70 = 0.01429


@pytest.mark.parametrize(("n", "m"), [(4, 6), (6, 12), (9, 9), (14, 12)])
@pytest.mark.parametrize("alpha", [0.001, 0.01, 0.05])
def test_the_place_of_the_bound_is_that_of_the_exact_rank_sum_test(n, m, alpha):
    """Moving the run down to just past its bound makes scipy's exact test change its mind."""
    rng = np.random.default_rng(n * m)
    baseline, run = rng.normal(size=m), rng.normal(size=n)
    low = shift_of(baseline, run, alpha).low
    if math.isinf(low):
        least = stats.mannwhitneyu(run + 1e6, baseline, alternative="greater", method="exact")
        assert least.pvalue > alpha
        return
    for nudge, rejected in ((-1e-9, True), (1e-9, False)):
        test = stats.mannwhitneyu(
            run - (low + nudge), baseline, alternative="greater", method="exact"
        )
        assert bool(test.pvalue <= alpha) == rejected


def test_large_groups_are_near_the_exact_place():
    exact, normal = bound_place(100, 100, 0.01), bound_place(101, 100, 0.01)
    assert exact < normal < exact * 1.02


@pytest.mark.parametrize("size", [4, 12, 60])
def test_the_chance_of_no_pair_and_of_all_pairs(size):
    """Of C(2n, n) orders one has no pair in which the run is the larger, and one has all."""
    one_order = 1 / math.comb(2 * size, size)
    assert chance_of(0, size, size) == pytest.approx(one_order, abs=1e-12)
    assert chance_of(size * size - 1, size, size) == pytest.approx(1 - one_order, abs=1e-12)
    assert chance_of(size * size // 2, size, size) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("noise", ["normal", "outliers", "skewed"])
def test_the_interval_misses_the_truth_as_seldom_as_it_says(noise):
    rng, alpha, missed = np.random.default_rng(5), 0.05, 0
    draw = {
        "normal": lambda k: rng.normal(size=k),
        "outliers": lambda k: rng.standard_t(1.5, size=k),
        "skewed": lambda k: rng.exponential(size=k) ** 2,
    }[noise]
    for _ in range(2000):
        shift = shift_of(draw(12), draw(7) + 0.5, alpha)
        missed += shift.side_of(0.5) != 0
    assert missed / 2000 < 2 * alpha + 0.015


def test_too_few_values_bound_nothing():
    shift = shift_of([1.0, 1.1], [9.0, 9.1], 0.01)
    assert shift.side_of(0.5) == 0
    assert (shift.low, shift.high) == (-math.inf, math.inf)


def test_one_wild_process_does_not_move_the_estimate():
    baseline, run = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98], [1.0, 1.01, 0.99, 1.02, 0.98, 9.0]
    assert abs(shift_of(baseline, run, 0.01).estimate) < 0.02


def test_the_number_suggested_would_decide():
    rng = np.random.default_rng(3)
    baseline, decided = rng.normal(0, 0.015, 200), 0
    for _ in range(50):
        run = rng.normal(0, 0.015, 6)
        needed = num_needed(baseline, run, 0.025, 0.002)
        if needed is None:
            continue
        grown = rng.normal(0, 0.015, needed)
        decided += shift_of(baseline, grown, 0.002).side_of(0.025) == -1
    assert decided >= 40


def test_no_number_is_suggested_where_the_baseline_is_what_is_short():
    rng = np.random.default_rng(4)
    few, run = rng.normal(0, 0.02, 4), rng.normal(0.02, 0.02, 30)
    assert num_needed(few, run, 0.025, 0.002) is None
