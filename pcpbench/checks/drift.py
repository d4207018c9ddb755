"""How far two arrays are apart, and whether that is allowed (SPEC 11, 13).

Owns the measures and their outcomes. Arrays are host copies: float32 (half precisions widened), or
raw 16-bit patterns of bfloat16 as int16 or uint16. Knows no step and no arm.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.budgets import Budget, budget_of
from pcpbench.records import Drift

OUTCOMES: Final = (
    "bitwise",
    "within_budget",
    "exceeds_budget",
    "non_finite",
    "shape_mismatch",
)
"""From equality to what cannot be measured."""

FloatArray = NDArray[np.floating[Any]]


def same_bits(found: NDArray[Any], twin: NDArray[Any]) -> bool:
    """Whether two arrays hold the same bytes: -0.0 is not 0.0, a NaN equals the same NaN."""
    if found.shape != twin.shape or found.dtype != twin.dtype:
        return False
    return bool(np.array_equal(_bits(found), _bits(twin)))


def widen(array: NDArray[Any], dtype: str) -> FloatArray:
    """float32 values of an engine array; 16-bit integers are taken as bfloat16 bit patterns."""
    if dtype == "bfloat16" and array.dtype in (np.int16, np.uint16):
        high = array.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return high.view(np.float32)
    return array.astype(np.float32, copy=False)


def ulp_distance(found: FloatArray, twin: FloatArray, dtype: str) -> NDArray[np.int64]:
    """Representable values of `dtype` between each pair; finite float32 input of equal shape.

    1.0 and 1.0 + 2**-23 are 1 apart in float32; 1.0 and 1.0078125 are 1 apart in bfloat16. 0.0 and
    -0.0 are 0 apart. Values that bfloat16 cannot hold (logits computed in float32) count by the
    bfloat16 steps between them, rounded up.
    """
    if dtype == "float16":
        with np.errstate(over="ignore"):
            first, second = found.astype(np.float16), twin.astype(np.float16)
        return _apart(first.view(np.int16), second.view(np.int16))
    wide_found = np.ascontiguousarray(found, dtype=np.float32)
    wide_twin = np.ascontiguousarray(twin, dtype=np.float32)
    distance = _apart(wide_found.view(np.int32), wide_twin.view(np.int32))
    return -(-distance // 65536) if dtype == "bfloat16" else distance


def measure(kind: str, tensor: str, found: NDArray[Any], twin: NDArray[Any], dtype: str) -> Drift:
    """The drift of `found` from `twin`, judged by the budget of `kind` and the engine's `dtype`.

    max_rel is relative to the larger of the two values, so that it stays finite. Where both hold
    the same non-finite value nothing is measured there; where one does not, the outcome is
    `non_finite`. Bitwise equality is judged before any of that.
    """
    budget = budget_of(kind, dtype)
    if found.shape != twin.shape:
        return _unmeasured(kind, tensor, "shape_mismatch", found.size, found.size)
    if same_bits(found, twin):
        return Drift(
            kind=kind,
            tensor=tensor,
            outcome="bitwise",
            num_elements=found.size,
            num_mismatched=0,
            max_abs=0.0,
            max_rel=0.0,
            max_ulp=0.0,
            cosine=1.0,
            relative=0.0,
        )
    left, right = widen(found, dtype), widen(twin, dtype)
    num_mismatched = int((_bits(left) != _bits(right)).sum())
    if not _same_non_finite(left, right):
        return _unmeasured(kind, tensor, "non_finite", found.size, num_mismatched)
    finite = np.isfinite(right)
    if not finite.all():
        left_finite, right_finite = left[finite], right[finite]
    else:
        left_finite, right_finite = left.ravel(), right.ravel()
    a, b = left_finite.astype(np.float64), right_finite.astype(np.float64)
    gap = np.abs(a - b)
    larger = np.maximum(np.abs(a), np.abs(b))
    relative = np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0)
    cosine, row_error = _cosine(a, b), relative_error(left, right)
    within = budget is not None and _within(row_error, cosine, budget)
    return Drift(
        kind=kind,
        tensor=tensor,
        outcome="within_budget" if within else "exceeds_budget",
        num_elements=found.size,
        num_mismatched=num_mismatched,
        max_abs=float(gap.max(initial=0.0)),
        max_rel=float(relative.max(initial=0.0)),
        max_ulp=float(ulp_distance(left_finite, right_finite, dtype).max(initial=0)),
        cosine=cosine,
        relative=row_error,
    )


def relative_error(found: FloatArray, twin: FloatArray) -> float:
    """Largest over the rows (last axis) of max |found - twin| over the twin row's root mean square.

    Infinite where a row of zeros drifted. Non-finite places count as equal.
    """
    return float(relative_errors(found, twin).max(initial=0.0))


def relative_errors(found: FloatArray, twin: FloatArray) -> NDArray[np.float64]:
    """The same of each row: [rows]."""
    if not found.size:
        return np.zeros(0)
    shape = (-1, found.shape[-1]) if found.ndim else (1, 1)
    left, right = (_without_non_finite(side).reshape(shape) for side in (found, twin))
    worst = np.abs(left - right).max(axis=1)
    rms = np.sqrt(np.square(right).mean(axis=1))
    errors = np.where(worst > 0, np.inf, 0.0)
    np.divide(worst, rms, out=errors, where=(worst > 0) & (rms > 0))
    return errors


def next_token_kl(found: FloatArray, twin: FloatArray) -> NDArray[np.float64]:
    """KL(twin || found) of each row's softmax: [rows, vocab] to [rows], in nats and float64."""
    log_found, log_twin = _log_softmax(found), _log_softmax(twin)
    gap = np.exp(log_twin) * (log_twin - log_found)
    divergence: NDArray[np.float64] = np.maximum(gap.sum(axis=-1), 0.0)
    return divergence


def is_ok(drift: Drift) -> bool:
    """Whether a drift is allowed."""
    return drift.outcome in OUTCOMES[:2]


def worse(first: Drift | None, second: Drift) -> Drift:
    """The one that is further from equality: by outcome, then by largest absolute error."""
    if first is None:
        return second
    return second if _badness(second) > _badness(first) else first


def _badness(drift: Drift) -> tuple[int, float]:
    return OUTCOMES.index(drift.outcome), drift.max_abs or 0.0


def cosine_gap(drift: Drift) -> float | None:
    """1 - cosine of a drift, None where there is no cosine; never negative by rounding."""
    return None if drift.cosine is None else max(1.0 - drift.cosine, 0.0)


def _within(relative: float, cosine: float | None, budget: Budget) -> bool:
    if cosine is None or 1.0 - cosine > budget.cosine_gap:
        return False
    return relative <= budget.relative


def _same_non_finite(left: FloatArray, right: FloatArray) -> bool:
    """Whether NaN, inf and -inf stand at the same places on both sides."""
    ours, theirs = np.isfinite(left), np.isfinite(right)
    if not np.array_equal(ours, theirs):
        return False
    return bool(np.array_equal(left[~ours], right[~theirs], equal_nan=True))


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """None where one side is all zeros; elements that differ only in the sign of zero give 1."""
    if np.array_equal(a, b):
        return 1.0
    norms = float(np.sqrt(np.square(a).sum() * np.square(b).sum()))
    return float(np.dot(a, b) / norms) if norms > 0 else None


def _without_non_finite(values: FloatArray) -> NDArray[np.float64]:
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    if not finite.all():
        wide[~finite] = 0.0
    return wide


def _unmeasured(kind: str, tensor: str, outcome: str, size: int, mismatched: int) -> Drift:
    return Drift(
        kind=kind,
        tensor=tensor,
        outcome=outcome,
        num_elements=size,
        num_mismatched=mismatched,
        max_abs=None,
        max_rel=None,
        max_ulp=None,
        cosine=None,
    )


def _log_softmax(logits: FloatArray) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _apart(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.int64]:
    distance: NDArray[np.int64] = np.abs(_ordered(first) - _ordered(second))
    return distance


def _ordered(bits: NDArray[Any]) -> NDArray[np.int64]:
    """Sign-magnitude patterns as integers that grow with the value; both zeros become 0."""
    wide = bits.astype(np.int64)
    magnitude = wide & (2 ** (8 * bits.dtype.itemsize - 1) - 1)
    ordered: NDArray[np.int64] = np.where(wide < 0, -magnitude, magnitude)
    return ordered


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory as unsigned integers."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
