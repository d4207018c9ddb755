"""How much floating-point drift each comparison may show (SPEC 11). Numbers and their reasons only.

Partition drift (another split of the same sums) and padding drift (another batch size can pick
another GEMM) reorder roundings. One rounding is off by at most half of `eps`; a decoder of some
layers chains a few dozen of them, mostly of random sign, and the largest of many thousand values is
reported. So the largest error of a row, over the row's root mean square, comes to some `eps`. On a
CPU, over presets and scenarios, at most 1.1e-5 was seen in float32 (95 eps), 7.8e-3 in float16 (8)
and 8.7e-2 in bfloat16 (11, tensor parallel, whose partial sums are rounded before they are added);
1 - cosine at most 2.6e-12, 8.2e-7 and 1.7e-4. The budgets are 3 to 10 times that, more for the
cosine, which grows with the square. torch.testing's tolerances (float32 1.3e-6, float16 1e-3,
bfloat16 1.6e-2) are for one operation and lie below. A wrong position, length or block moves a row
by 1e-2 of its scale and more: far past the budget in float32, not always in half precision, which
is why metadata is checked without any tolerance.

Contract C18 uses the partition budget, too. Its other side is float32 throughout, so it sees the
whole error of an arm: at most 1.0e-5, 9.8e-3 and 7.6e-2 (1 - cosine 2.1e-12, 1.6e-6 and 9.6e-5)
over all shipped scenarios, a tenth of the limit in float32 and a quarter in 16 bits.

These are limits of the worst row, and wide in 16 bits: a row may meet another expert. The middle
row of many has a limit of its own there, TYPICAL_EPS. A rounding to 16 bits is off by 0.21 eps
(root mean square, mantissas spread over their octave), one of some 30 on the way to the logits of
two layers, in both arms: 0.21 x sqrt(2 x 30) = 1.6 eps of the rms on a logit, three times that on
the worst of some hundred, 4.9. With tensor parallelism, which rounds most, the middle row was seen
at 3.4 to 6.0. In float32 sums differ by their own roundings, as many as they are long, and the
worst row's limit is strict already: it holds for all rows.

Capture drift has no budget: replay and padded eager run the same kernels on the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pcpbench.errors import UsageError

EPS: Final = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1.0 to the next value."""


TYPICAL_EPS: Final = 8.0
"""Largest error of the middle one of many rows, in 16 bits: eps of the row's root mean square."""


@dataclass(frozen=True)
class Budget:
    """Limits on one tensor's drift; all must hold.

    relative: largest |found - twin| of a row over the root mean square of the twin's row.
    cosine_gap: largest 1 - cosine over the whole tensor (about half the squared relative error).
    """

    relative: float
    cosine_gap: float


BUDGETS: Final[dict[str, dict[str, Budget]]] = {
    "partition": {
        "float32": Budget(relative=1e-4, cosine_gap=1e-10),
        "float16": Budget(relative=4e-2, cosine_gap=3e-5),
        "bfloat16": Budget(relative=3e-1, cosine_gap=2e-3),
    },
    "padding": {
        "float32": Budget(relative=1e-4, cosine_gap=1e-10),
        "float16": Budget(relative=2e-2, cosine_gap=1e-5),
        "bfloat16": Budget(relative=2e-1, cosine_gap=1e-3),
    },
}
"""Budget by drift kind and engine dtype; `capture` is absent because its budget is zero."""


def budget_of(kind: str, dtype: str) -> Budget | None:
    """The budget of a drift kind in an engine dtype, None for capture drift (bitwise or fail)."""
    if dtype not in EPS:
        raise UsageError(f"dtype {dtype!r} has no drift budget: use one of {', '.join(EPS)}.")
    if kind == "capture":
        return None
    if kind not in BUDGETS:
        known = ", ".join([*BUDGETS, "capture"])
        raise UsageError(f"drift kind {kind!r} is unknown: use one of {known}.")
    return BUDGETS[kind][dtype]


def logit_gap_allowed(kind: str, dtype: str, rms: np.floating | float) -> float:
    """Largest gap between two logits that drift within budget may close.

    Both may move by `relative * rms` towards each other, so a next token may flip only where the
    twin holds the two candidates closer than twice that.
    """
    budget = budget_of(kind, dtype)
    return 0.0 if budget is None else 2.0 * budget.relative * float(rms)


def typical_gap_allowed(kind: str, dtype: str, rms: np.floating | float) -> float:
    """The same for the middle one of many rows."""
    allowed = logit_gap_allowed(kind, dtype, rms)
    if dtype == "float32":
        return allowed
    return min(allowed, 2.0 * TYPICAL_EPS * EPS[dtype] * float(rms))
