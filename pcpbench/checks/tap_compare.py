"""Which tap point of an arm is the first that is not its twin's.

Owns the mapping of rows between two layouts (by token, as the plan has it), which points can be
compared at all, and how a difference is told. Padding rows are never compared. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pcpbench.checks.budgets import budget_of
from pcpbench.checks.drift import FloatArray, widen
from pcpbench.checks.oracle import StepExpectation
from pcpbench.checks.setup import ArmSetup
from pcpbench.divergence import TensorDifference
from pcpbench.plan import StepPlan
from pcpbench.records import IntArray, TapRecord

MAX_VALUES: Final = 8
"""Elements that a difference shows."""

Key = tuple[int, int, str, str]
"""Rank, layer, op, tensor."""


@dataclass(frozen=True)
class TapSide:
    """One arm's taps of a step, with what the plan says of its rows. taps: of all ranks."""

    setup: ArmSetup
    expected: StepExpectation
    taps: Sequence[TapRecord]

    def by_key(self) -> dict[Key, TapRecord]:
        """The taps by rank, layer, op and tensor."""
        return {(tap.rank, tap.layer, tap.op, tap.tensor): tap for tap in self.taps}

    def tokens(self, tap: TapRecord) -> IntArray:
        """The global batch's token in each row, -1 for padding."""
        rank = self.expected.ranks[tap.rank]
        if tap.is_gathered:
            return rank.gathered_token
        total = rank.num_tokens_after_padding
        first = self.setup.world.pcp_rank(tap.rank) * total
        return rank.gathered_token[first : first + total]


@dataclass(frozen=True)
class TapFinding:
    """A difference with both sides' values [rows without padding, ...]; none where not written."""

    difference: TensorDifference
    found: NDArray[Any] | None
    expected: NDArray[Any] | None


def first_tap(
    arm: TapSide, twin: TapSide, step: StepPlan, kind: str, dtype: str
) -> TapFinding | None:
    """The first point in the order of the forward pass, on the lowest rank, past what is allowed.

    kind: `capture` allows nothing; the others allow the relative error of the dtype's budget.
    """
    ours, theirs = arm.by_key(), twin.by_key()
    same_world = arm.setup.world == twin.setup.world
    everything = {**theirs, **ours} if same_world else ours
    for key, tap in sorted(everything.items(), key=lambda item: (item[1].order, item[0][0])):
        other = theirs.get(key) if same_world else _alike(theirs, key)
        if key not in ours or (other is None and same_world):
            name = (twin if key in ours else arm).setup.name
            return _untold(twin, step, tap, f"not written by {name}")
        if other is None or (tap.is_partial and not same_world):
            continue
        sides = _aligned(arm, twin, tap, other, dtype)
        if sides is None:
            return _untold(twin, step, tap, "the rows are not those that the plan gives")
        found, expected, tokens = sides
        allowed = "capture" if tap.tensor == "positions" else kind  # places have no rounding
        differs = beyond(found, expected, allowed, dtype, is_lse=tap.tensor == "lse")
        if differs.any():
            told = describe(found, expected, differs, twin.setup.name)
            place = token_place(step, int(tokens[np.argwhere(differs)[0][0]]))
            difference = _at(told, step, tap, place)
            return TapFinding(difference, found, expected)
    return None


def first_non_finite(arm: TapSide, step: StepPlan, dtype: str) -> TapFinding | None:
    """The first point with a NaN or inf in a row that is no padding; -inf in an LSE is sound."""
    for tap in sorted(arm.taps, key=lambda tap: (tap.order, tap.rank)):
        tokens = arm.tokens(tap)
        if len(tokens) != len(tap.values):
            continue
        rows = np.flatnonzero(tokens >= 0)
        found = widen(tap.values, dtype)[rows]
        bad = ~np.isfinite(found)
        if tap.tensor == "lse":
            bad &= found != -np.inf
        if bad.any():
            told = describe(found, found, bad, "finite values")
            place = token_place(step, int(tokens[rows][np.argwhere(bad)[0][0]]))
            told = replace(told, expected=())
            return TapFinding(_at(told, step, tap, place), found, None)
    return None


def beyond(
    found: FloatArray, expected: FloatArray, kind: str, dtype: str, is_lse: bool = False
) -> NDArray[np.bool_]:
    """Where two arrays differ by more than `kind` allows; all bits count without a budget.

    With one, an element may be off by the relative limit times the root mean square of its row
    (last axis). An LSE is a logarithm: its errors count as they are once it is smaller than 1.
    """
    budget = budget_of(kind, dtype)
    if budget is None:
        bits = f"u{found.dtype.itemsize}"
        left, right = (np.ascontiguousarray(side).view(bits) for side in (found, expected))
        differs: NDArray[np.bool_] = left != right
        return differs
    with np.errstate(invalid="ignore", over="ignore"):
        left, right = found.astype(np.float64), expected.astype(np.float64)
        finite = np.where(np.isfinite(right), right, 0.0)
        scale = np.sqrt(np.square(finite).mean(axis=-1, keepdims=True))
        scale = np.maximum(scale, 1.0) if is_lse else scale
        far = np.abs(left - right) > budget.relative * scale
    equal = (left == right) | (np.isnan(left) & np.isnan(right))
    past: NDArray[np.bool_] = ~equal & (far | ~np.isfinite(left) | ~np.isfinite(right))
    return past


def describe(
    found: NDArray[Any], expected: NDArray[Any], differs: NDArray[np.bool_], against: str
) -> TensorDifference:
    """Counts and first values of a difference between two arrays of one shape; its place is open.

    Example: found [1, 5], expected [1, 2] differ at (1,), max_abs 3, found ("5",).
    """
    places = np.argwhere(differs)
    left, right = (side[differs][:MAX_VALUES] for side in (found, expected))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(found[differs].astype(np.float64) - expected[differs].astype(np.float64))
    largest = float(gap.max(initial=0.0))
    non_finite = 0 if found.dtype.kind in "biu" else int((~np.isfinite(found[differs])).sum())
    return TensorDifference(
        step=-1,
        rank=None,
        layer=None,
        op="",
        tensor="",
        against=against,
        num_elements=int(differs.size),
        num_mismatched=len(places),
        first_index=tuple(int(axis) for axis in places[0]) if len(places) else (),
        max_abs=largest if np.isfinite(largest) else None,
        found=values_text(left),
        expected=values_text(right),
        num_non_finite=non_finite,
    )


def values_text(values: NDArray[Any]) -> tuple[str, ...]:
    """Up to MAX_VALUES elements, as short as they can be read back."""
    return tuple(str(value) for value in values.reshape(-1)[:MAX_VALUES])


def token_place(step: StepPlan, token: int) -> str:
    """Whose token of the global batch that is: `request r1, position 7`."""
    for request in step.scheduled:
        if token < request.num_scheduled_tokens:
            return f"request {request.req_id}, position {request.num_computed_tokens + token}"
        token -= request.num_scheduled_tokens
    return ""


def _alike(theirs: dict[Key, TapRecord], key: Key) -> TapRecord | None:
    """The one-rank twin's result of the same meaning: what DCP merges, it computes in one go."""
    _, layer, op, tensor = key
    return theirs.get((0, layer, "mla_attention" if op == "dcp_merge" else op, tensor))


def _aligned(
    arm: TapSide, twin: TapSide, tap: TapRecord, other: TapRecord, dtype: str
) -> tuple[FloatArray, FloatArray, IntArray] | None:
    """Values of both sides row by row with each row's token; None where the rows do not fit."""
    tokens, twin_tokens = arm.tokens(tap), twin.tokens(other)
    found, expected = widen(tap.values, dtype), widen(other.values, dtype)
    if len(tokens) != len(found) or len(twin_tokens) != len(expected):
        return None
    rows, twin_rows = np.flatnonzero(tokens >= 0), np.flatnonzero(twin_tokens >= 0)
    if not np.array_equal(tokens[rows], twin_tokens[twin_rows]):
        place = {int(twin_tokens[row]): int(row) for row in reversed(twin_rows)}
        rows = np.array([row for row in rows if int(tokens[row]) in place], dtype=np.int64)
        twin_rows = np.array([place[int(tokens[row])] for row in rows], dtype=np.int64)
    left, right = found[rows], expected[twin_rows]
    if tap.per_head and left.shape[1] != right.shape[1]:
        heads = left.shape[1]
        first = arm.setup.world.tp_rank(tap.rank) * heads
        right = right[:, first : first + heads]
    return (left, right, tokens[rows]) if left.shape == right.shape else None


def _untold(twin: TapSide, step: StepPlan, tap: TapRecord, message: str) -> TapFinding:
    """A point whose values cannot be set side by side."""
    told = TensorDifference(
        step=step.index,
        rank=tap.rank,
        layer=None,
        op="",
        tensor="",
        against=twin.setup.name,
        message=message,
    )
    return TapFinding(_at(told, step, tap, ""), None, None)


def _at(told: TensorDifference, step: StepPlan, tap: TapRecord, place: str) -> TensorDifference:
    where = {"step": step.index, "rank": tap.rank, "op": tap.op, "tensor": tap.tensor}
    outside = tap.op in ("embed", "norm")
    return replace(told, **where, layer=None if outside else tap.layer, place=place)
