import json
import math
from pathlib import Path

import numpy as np
import pytest

from pcpbench.modes import CUDAGraphMode
from pcpbench.report.plain import to_json, to_plain
from pcpbench.results import Outcome, Stat


def test_non_finite_numbers_become_null_with_a_flag():
    assert to_plain({"x": math.inf, "y": -math.inf, "z": math.nan, "n": None, "f": 1.5}) == {
        "x": None, "x_non_finite": "inf",
        "y": None, "y_non_finite": "-inf",
        "z": None, "z_non_finite": "nan",
        "n": None, "f": 1.5,
    }  # fmt: skip


def test_a_list_tells_which_of_its_numbers_it_was():
    assert to_plain({"sizes": (1.0, math.nan)}) == {
        "sizes": [1.0, None],
        "sizes_non_finite": [None, "nan"],
    }
    assert to_plain({"sizes": (1.0, 2.0)}) == {"sizes": [1.0, 2.0]}


def test_records_inside_records_carry_their_own_flags(make):
    drift = make.drift("capture", "non_finite", max_abs=math.inf)
    plain = to_plain({"drifts": [drift]})

    assert plain["drifts"][0]["max_abs"] is None
    assert plain["drifts"][0]["max_abs_non_finite"] == "inf"
    assert list(plain) == ["drifts"]


def test_values_of_other_libraries_become_plain():
    stat = Stat(mean=np.float64(1.5), median=1.0, std=0.0, p99=2.0, num_samples=np.int64(3))
    text = to_json({"stat": stat, "flag": np.bool_(True), "path": Path("a/b"), "none": None})

    assert json.loads(text) == {
        "stat": {"mean": 1.5, "median": 1.0, "std": 0.0, "p99": 2.0, "num_samples": 3},
        "flag": True,
        "path": "a/b",
        "none": None,
    }


def test_enums_are_words():
    assert to_plain([Outcome.NOT_COMPARED, CUDAGraphMode.FULL_DECODE_ONLY]) == [
        "not compared",
        "full_decode_only",
    ]


@pytest.mark.parametrize("value", [object(), np.zeros(3), {1, 2}])
def test_what_is_no_value_is_an_error_not_a_repr(value):
    with pytest.raises(TypeError, match="no place in a report"):
        to_plain({"value": value})
