import tracemalloc

import numpy as np
import pytest

from pcpbench.checks import stats
from pcpbench.checks.stats import _blocks, ratio_of, stat_of
from pcpbench.report.units import is_clear, reading


def test_stat_by_hand():
    stat = stat_of([1.0, 2.0, 3.0, 6.0])
    assert (stat.mean, stat.median, stat.num_samples) == (3.0, 2.5, 4)
    assert stat.std == pytest.approx(np.sqrt(14 / 4))
    assert stat.p99 == pytest.approx(3.0 + 0.97 * 3)


def test_an_empty_sample_has_no_stat_and_no_ratio():
    assert stat_of([]) is None
    assert ratio_of(np.array([]), np.array([], dtype=np.int64)) is None


def test_one_pair_has_a_ratio_and_no_interval():
    found = ratio_of(np.array([0.93]), np.array([0]))
    assert (found.median, found.low, found.high, found.num_pairs) == (0.93, 0.0, np.inf, 1)
    assert not is_clear(found)
    assert reading(found) == "one sample alone"


def test_a_ratio_brackets_the_truth_and_narrows_with_more_repetitions():
    rng = np.random.default_rng(3)

    def ratio(num_repetitions):
        repetitions = np.repeat(np.arange(num_repetitions), 10)
        return ratio_of(0.8 * rng.lognormal(0, 0.1, len(repetitions)), repetitions)

    few, many = ratio(3), ratio(60)
    for found in (few, many):
        assert found.low <= found.median <= found.high
        assert found.low < 0.8 < found.high
    assert many.high - many.low < few.high - few.low
    assert (few.num_pairs, many.num_pairs) == (30, 600)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(11)
    hits = 0
    for _ in range(100):
        values = rng.lognormal(0, 0.2, 60)
        found = ratio_of(values, np.repeat(np.arange(30), 2))
        hits += found.low <= 1.0 <= found.high
    assert 85 <= hits <= 100


def test_an_outlier_repetition_widens_the_interval_and_leaves_the_median():
    repetitions = np.repeat(np.arange(25), 4)
    values = np.full(100, 0.5)
    values[:4] = 50.0
    found = ratio_of(values, repetitions)
    assert (found.median, found.low, found.high) == (0.5, 0.5, 0.5)
    half = np.where(repetitions % 2 == 0, 0.5, 1.0)
    wide = ratio_of(half, repetitions)
    assert (wide.low, wide.high) == (0.5, 1.0)


def test_correlated_pairs_of_a_repetition_count_once():
    """40 pairs that are 40 equal copies of 20 draws: blocks see 20 draws, not 800."""
    rng = np.random.default_rng(5)
    draws = rng.lognormal(0, 0.2, 20)
    together = ratio_of(np.repeat(draws, 40), np.repeat(np.arange(20), 40))
    apart = ratio_of(rng.lognormal(0, 0.2, 800), np.arange(800))
    assert together.high - together.low > 3 * (apart.high - apart.low)


def test_the_answer_is_the_same_every_time():
    values = np.random.default_rng(0).lognormal(0, 0.2, 50)
    repetitions = np.arange(50) // 5
    assert ratio_of(values, repetitions) == ratio_of(values, repetitions)


def test_blocks_are_repetitions_cut_where_there_are_few():
    assert _blocks(np.repeat([4, 9, 11], 14)).tolist() == [
        7 * repetition + pair // 2 for repetition in range(3) for pair in range(14)
    ]
    assert _blocks(np.repeat(np.arange(25), 2)).tolist() == np.repeat(np.arange(25), 2).tolist()
    assert _blocks(np.array([0])).tolist() == [0]


@pytest.mark.parametrize("piece", [1, 120, 121, 40 * 499])
def test_resamples_taken_in_pieces_are_the_same(monkeypatch, piece):
    ratios = np.random.default_rng(4).lognormal(0, 0.3, 40)
    repetitions = np.arange(40) // 4
    whole = ratio_of(ratios, repetitions)
    monkeypatch.setattr(stats, "MAX_WEIGHTS", piece)
    assert ratio_of(ratios, repetitions) == whole


def test_very_many_pairs_fit_into_memory():
    """All resamples of 100,000 pairs at once would be 400 MB, and that twice."""
    ratios = np.random.default_rng(6).lognormal(0, 0.3, 100_000)
    tracemalloc.start()
    try:
        ratio_of(ratios, np.arange(len(ratios)) % 3)
        assert tracemalloc.get_traced_memory()[1] < 60e6
    finally:
        tracemalloc.stop()
