"""A flipped token is explained by padding drift, or it is not: hand-made logits."""

import numpy as np
import pytest

from pcpbench.checks.token_trace import TokenAt, differences, num_equal, trace

NONE = np.zeros(8, dtype=np.float32)
NONE[2], NONE[5] = 3.0, 2.99999


def at(token, index=0, step=4, req_id="p0", row=0):
    return TokenAt(req_id, index, step, row, token)


def moved(by):
    """The same row with the two candidates moved towards each other."""
    row = NONE.copy()
    row[2] -= np.float32(by)
    row[5] += np.float32(by)
    return row


def traced(*, none=NONE, own=None, padded=None, dtype="float32", to=5):
    own = moved(6e-6) if own is None else own
    return trace("PIECEWISE", at(2), at(to), dtype, none=none, own=own, padded=padded)


def test_a_gap_that_drift_can_close_is_explained():
    found = traced(padded=moved(6e-6))
    assert found.explained
    assert found.gap == pytest.approx(1e-5, rel=0.1)
    assert found.gap <= 2 * found.drift <= 2 * found.limit


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"padded": moved(4e-6)}, "wider than twice the padding drift"),
        ({"padded": NONE.copy()}, "there is no drift"),
        ({"padded": None}, "could not be run"),
        ({"padded": moved(1e-3)}, "over its budget"),  # a broken padded arm explains nothing
        ({"padded": moved(6e-6), "own": moved(1e-3)}, "over the budget"),
        ({"padded": moved(6e-6), "to": 1}, "wider than twice"),  # not the runner-up
        ({"padded": moved(np.nan)}, "not finite"),
        ({"padded": moved(6e-6)[:4]}, "not of one shape"),
        ({"padded": moved(6e-6), "to": 8}, "outside the vocabulary of 8"),
        ({"padded": moved(6e-6), "none": NONE[::-1].copy()}, "wider|higher"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_everything_else_is_not(change, why):
    found = traced(**change)
    assert not found.explained
    assert any(part in found.why for part in why.split("|")), found.why


def test_a_token_that_none_held_lower_is_not_explained():
    row = NONE.copy()
    row[5] = 3.5
    found = trace("FULL", at(2), at(5), "float32", none=row, own=row, padded=moved(1e-6))
    assert "held the other token higher" in found.why


def test_half_precision_has_the_wider_budget():
    far = NONE.copy()
    far[2], far[5] = 3.0, 2.9
    own = far.copy()
    own[5] = 3.01
    told = [
        trace("FULL", at(2), at(5), dtype, none=far, own=own, padded=own)
        for dtype in ("bfloat16", "float32")
    ]
    assert [each.explained for each in told] == [True, False]


def test_only_the_first_difference_of_a_free_generation_counts():
    none = {
        "a": [at(1, 0, 4, "a"), at(2, 1, 5, "a"), at(3, 2, 6, "a")],
        "b": [at(7, req_id="b", step=2)],
    }
    found = {"a": [at(1), at(9, 1, 5), at(8, 2, 6)], "b": [at(6, req_id="b", step=2)]}
    pairs = differences(none, found, only_first=True)
    assert [(theirs.req_id, theirs.index) for theirs, _ in pairs] == [("b", 0), ("a", 1)]
    assert len(differences(none, found, only_first=False)) == 3
    assert num_equal(none, found) == 1
    assert num_equal(none, {}) == 0
