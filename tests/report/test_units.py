import math

import pytest

from pcpbench.report import units
from pcpbench.results import Ratio


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        ((1.234e-3, 0.08e-3), ("1.23 ms", "0.08 ms")),
        ((81.26e-6, None), ("81.3 us", "-")),
        ((2.0, 0.5), ("2.00 s", "0.50 s")),
        ((-3e-6,), ("-3.00 us",)),
        ((None,), ("-",)),
        ((0.0,), ("0.00 us",)),
        ((0.123,), ("123 ms",)),
    ],
)
def test_times_that_are_compared_have_one_unit(seconds, texts):
    assert units.times(*seconds) == texts


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (20 << 20, "20.0 MiB"), (-2048, "-2.0 KiB")],
)
def test_sizes(num_bytes, text):
    assert units.size(num_bytes) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "-"), (0.0, "0 %"), (1.0, "100 %"), (0.125, "12.5 %"), (0.99999, "99.9 %"),
     (0.00001, "0.1 %")],
)  # fmt: skip
def test_a_share_is_all_or_nothing_only_if_it_is(share, text):
    assert units.percent(share) == text


def ratio(median, low, high):
    return Ratio(median=median, low=low, high=high, num_pairs=9)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (ratio(0.66, 0.64, 0.68), "34 % less"),
        (ratio(1.052, 1.01, 1.1), "5.2 % more"),
        (ratio(0.9, 0.8, 1.0), "no clear difference"),
        (ratio(0.57, -0.48, 0.99), "lost in noise"),
        (None, ""),
    ],
)
def test_a_ratio_in_words(found, text):
    assert units.reading(found) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (81234.0, "81,234"), (0.125, "0.125"), (3.14e-7, "3.1e-07"),
     (math.inf, "inf"), (math.nan, "nan"), (1e12, "1.0e+12"), (14, "14")],
)  # fmt: skip
def test_drifts(value, text):
    assert units.small(value) == text


def test_a_drift_beside_its_limit():
    assert units.against(6.4e-6, 1e-4) == "6.4e-06 (0.0001)"
    assert units.against(math.inf, 0.04) == "inf (0.04)"
    assert units.against(0.0, None) == "0 (bitwise)"
    assert units.against(None, None) == "- (bitwise)"
