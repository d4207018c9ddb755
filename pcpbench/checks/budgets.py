"""How much floating-point drift each comparison may show (SPEC 11). Numbers and their reasons only.

Partition drift (another split of the same sums) and padding drift (another batch size can pick
another GEMM) reorder roundings. One rounding is off by at most half of `eps`; a decoder of some
layers chains a few dozen of them, mostly of random sign, and the largest of many thousand values is
reported. So the typical ratio of largest error to a row's root mean square is a few `eps`, and the
budget is a few dozen: far above chance, far below what one wrong position, length or block does
(1e-2 and more in float32). The tolerances of torch.testing (float32 1.3e-6, float16 1e-3, bfloat16
1.6e-2) are for one operation and lie below ours for that reason.

Capture drift has no budget: replay and padded eager run the same kernels on the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pcpbench.errors import UsageError

EPS: Final = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1.0 to the next value."""


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
        "float32": Budget(relative=1e-4, cosine_gap=1e-8),
        "float16": Budget(relative=3e-2, cosine_gap=2e-5),
        "bfloat16": Budget(relative=2e-1, cosine_gap=1e-3),
    },
    "padding": {
        "float32": Budget(relative=5e-5, cosine_gap=1e-9),
        "float16": Budget(relative=2e-2, cosine_gap=1e-5),
        "bfloat16": Budget(relative=1.5e-1, cosine_gap=5e-4),
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
