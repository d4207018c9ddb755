from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pcpbench.checks.budgets import BUDGETS, EPS, budget_of
from pcpbench.checks.drift import (
    cosine_gap,
    is_ok,
    measure,
    next_token_kl,
    relative_error,
    same_bits,
    ulp_distance,
    widen,
    worse,
)
from pcpbench.errors import UsageError

finite = st.floats(-1e6, 1e6, width=32)
rows = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=finite)


def f32(*values):
    return np.array(values, dtype=np.float32)


def bf16_bits(array):
    """The upper halves of float32 patterns: bfloat16 by truncation."""
    return (array.view(np.uint32) >> 16).astype(np.uint16)


@given(rows)
def test_an_array_is_bitwise_itself_and_a_copy(array):
    for dtype in EPS:
        drift = measure("capture", "hidden", array.copy(), array, dtype)
        assert (drift.outcome, drift.num_mismatched, drift.max_ulp) == ("bitwise", 0, 0)


@given(rows, st.data())
def test_one_changed_bit_is_never_bitwise_and_capture_has_no_budget(array, data):
    place = tuple(data.draw(st.integers(0, side - 1)) for side in array.shape)
    changed = array.copy()
    changed.view(np.uint32)[place] ^= 1
    drift = measure("capture", "hidden", changed, array, "float32")
    assert (drift.outcome, drift.num_mismatched) == ("exceeds_budget", 1)
    assert drift.max_ulp in (1, 2)  # two where the last bit of zero flips its neighbour


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 1000))
def test_ulp_counts_steps_of_nextafter(start, steps):
    value = np.float32(start)
    other = value
    for _ in range(min(steps, 50)):
        with np.errstate(over="ignore"):
            other = np.nextafter(other, np.float32(np.inf), dtype=np.float32)
    if np.isfinite(other):
        assert ulp_distance(f32(other), f32(value), "float32").item() == min(steps, 50)
        assert ulp_distance(f32(value), f32(other), "float32").item() == min(steps, 50)


@given(st.integers(0, 0x7F7F), st.integers(0, 0x7F7F), st.booleans(), st.booleans())
def test_ulp_of_bfloat16_is_the_distance_of_its_patterns(one, two, minus_one, minus_two):
    patterns = np.array([one + 0x8000 * minus_one, two + 0x8000 * minus_two], dtype=np.uint16)
    first, second = widen(patterns, "bfloat16")
    signed = [(-n if minus else n) for n, minus in ((one, minus_one), (two, minus_two))]
    found = ulp_distance(f32(first), f32(second), "bfloat16").item()
    assert found == abs(signed[0] - signed[1])


@pytest.mark.parametrize(
    ("found", "twin", "dtype", "ulp"),
    [
        (1.0 + 2.0**-23, 1.0, "float32", 1),
        (1.0078125, 1.0, "bfloat16", 1),
        (1.0 + 2.0**-10, 1.0, "float16", 1),
        (0.0, -0.0, "float32", 0),
        (0.0, -0.0, "float16", 0),
        (2.0**-24, -(2.0**-24), "float16", 2),
        (1.0 + 2.0**-20, 1.0, "bfloat16", 1),
    ],
)
def test_ulp_by_hand(found, twin, dtype, ulp):
    assert ulp_distance(f32(found), f32(twin), dtype).item() == ulp


def test_widen_reads_bfloat16_patterns_whatever_their_sign():
    bits = bf16_bits(f32(1.0, -2.5, 0.0))
    for patterns in (bits, bits.view(np.int16)):
        assert widen(patterns, "bfloat16").tolist() == [1.0, -2.5, 0.0]
    assert widen(np.array([1.5], np.float16), "float16").dtype == np.float32


def test_bits_tell_zeros_apart_and_know_a_nan():
    assert not same_bits(f32(0.0), f32(-0.0))
    assert same_bits(f32(np.nan), f32(np.nan))
    assert not same_bits(f32(1.0), np.array([1.0]))
    drift = measure("capture", "hidden", f32(-0.0), f32(0.0), "float32")
    assert (drift.outcome, drift.max_ulp, drift.cosine) == ("exceeds_budget", 0, 1.0)
    assert measure("padding", "hidden", f32(-0.0), f32(0.0), "float32").outcome == "within_budget"


def test_non_finite_on_one_side_is_an_outcome_of_its_own():
    twin = f32(1, 2, 3)
    for found in (f32(1, np.nan, 3), f32(1, np.inf, 3)):
        drift = measure("partition", "logits", found, twin, "float32")
        assert (drift.outcome, drift.max_abs, is_ok(drift)) == ("non_finite", None, False)
    both = measure("partition", "logits", f32(1, np.inf, 3), f32(1, -np.inf, 3), "float32")
    assert both.outcome == "non_finite"


def test_the_same_non_finite_value_on_both_sides_is_not_measured():
    found, twin = f32(1.0000001, -np.inf, np.nan), f32(1, -np.inf, np.nan)
    drift = measure("partition", "logits", found, twin, "float32")
    assert (drift.outcome, drift.num_mismatched) == ("within_budget", 1)
    assert drift.max_abs == pytest.approx(1e-7, rel=0.3)


def test_another_shape_is_an_outcome_of_its_own():
    drift = measure("partition", "logits", f32(1, 2), f32(1, 2, 3), "float32")
    assert (drift.outcome, is_ok(drift)) == ("shape_mismatch", False)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("kind", BUDGETS)
def test_a_few_roundings_fit_the_budget_and_a_hundredth_does_not(kind, dtype):
    rng = np.random.default_rng(0)
    twin = rng.standard_normal((32, 64)).astype(np.float32)
    noise = rng.standard_normal(twin.shape)
    rounded = (twin + 2 * EPS[dtype] * noise).astype(np.float32)
    assert measure(kind, "hidden", rounded, twin, dtype).outcome == "within_budget"
    far = twin + np.float32(10 * budget_of(kind, dtype).relative)
    assert measure(kind, "hidden", far, twin, dtype).outcome == "exceeds_budget"


def test_one_wrong_row_of_small_numbers_does_not_hide_behind_large_ones():
    twin = np.vstack([np.full((1, 8), 1e3), np.full((1, 8), 1e-2)]).astype(np.float32)
    found = twin.copy()
    found[1, 0] *= 1.01
    assert relative_error(found, twin) == pytest.approx(0.01, rel=1e-3)
    assert measure("partition", "hidden", found, twin, "float32").outcome == "exceeds_budget"


def test_a_row_of_zeros_must_stay_zero():
    assert relative_error(f32(0, 1e-30), f32(0, 0)) == float("inf")
    drift = measure("partition", "hidden", f32(0, 1e-30), f32(0, 0), "float32")
    assert (drift.outcome, drift.cosine) == ("exceeds_budget", None)


def test_a_wrong_direction_exceeds_though_every_element_is_close():
    """A row error just below the limit everywhere: the cosine notices what no element shows."""
    rng = np.random.default_rng(1)
    twin = rng.standard_normal((64, 512)).astype(np.float32)
    step = 0.9 * BUDGETS["partition"]["float16"].relative
    found = twin + (step * rng.choice([-1, 1], twin.shape)).astype(np.float32)
    drift = measure("partition", "hidden", found, twin, "float16")
    assert relative_error(found, twin) < BUDGETS["partition"]["float16"].relative
    assert drift.outcome == "exceeds_budget"


def test_measures_by_hand():
    drift = measure("partition", "hidden", f32(1, 2, 5), f32(1, 2, 4), "float32")
    assert (drift.num_elements, drift.num_mismatched) == (3, 1)
    assert (drift.max_abs, drift.max_rel) == (1.0, pytest.approx(0.2))
    assert drift.cosine == pytest.approx(25 / np.sqrt(30 * 21))


def test_raw_bfloat16_patterns_are_measured_as_their_values():
    twin = f32(1.0, 2.0, 3.0)
    found = bf16_bits(f32(1.0078125, 2.0, 3.0))
    drift = measure("partition", "kv_cache", found, bf16_bits(twin), "bfloat16")
    assert (drift.max_ulp, drift.max_abs) == (1, pytest.approx(0.0078125))
    assert drift.outcome == "within_budget"


def test_kl_by_hand_and_against_itself():
    logits = np.log(np.array([[0.5, 0.5], [0.9, 0.1]])).astype(np.float32)
    other = np.log(np.array([[0.25, 0.75], [0.9, 0.1]])).astype(np.float32) + 3
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert next_token_kl(other, logits) == pytest.approx([expected, 0], abs=1e-6)


def test_the_worse_of_two_drifts():
    fine = measure("partition", "hidden", f32(1, 1), f32(1, 1), "float32")
    near = measure("partition", "logits", f32(1, 1.000001), f32(1, 1), "float32")
    far = measure("partition", "logits", f32(1, 2), f32(1, 1), "float32")
    broken = measure("partition", "logits", f32(1, np.nan), f32(1, 1), "float32")
    assert worse(None, fine) is fine
    assert worse(worse(worse(fine, far), broken), near) is broken
    assert worse(near, far) is far


def test_unknown_words_are_refused():
    with pytest.raises(UsageError, match=r"float64.*float32, float16, bfloat16"):
        budget_of("partition", "float64")
    with pytest.raises(UsageError, match=r"drift kind 'sideways'"):
        budget_of("sideways", "float32")


@pytest.mark.parametrize("error", [0.0, 1e-7, 1e-5, 9e-5, 2e-4, 1e-2])
def test_the_two_measures_told_are_the_ones_judged(error):
    twin = np.linspace(1, 2, 64, dtype=np.float32).reshape(4, 16)
    found = twin.copy()
    found[2, 3] += np.float32(error) * np.sqrt(np.square(twin[2]).mean())
    drift, budget = (
        measure("padding", "hidden", found, twin, "float32"),
        BUDGETS["padding"]["float32"],
    )
    held = drift.relative <= budget.relative and cosine_gap(drift) <= budget.cosine_gap
    assert drift.relative == pytest.approx(error, rel=0.1, abs=1e-7)
    assert is_ok(drift) == held == (error < 1e-4)


def test_a_cosine_that_rounds_past_one_leaves_no_gap():
    drift = replace(measure("padding", "x", f32(1.0), f32(1.0), "float32"), cosine=1.0 + 2**-52)
    assert cosine_gap(drift) == 0.0
