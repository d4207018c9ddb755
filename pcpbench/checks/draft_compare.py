"""Comparing what the draft models of two arms proposed behind one step (SPEC 10, 11).

Owns which of their logits compare: a draft is fed to the pass behind it, so that one that rounding
tipped makes all later ones of its request others. Those are left out, and the next step begins
from the target model's own result again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.drift import measure
from pcpbench.records import Drift, StepRecord

Allowed = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], bool]
"""Whether tokens that differ were near ties: the twin's logits [rows, vocab], tokens, its own."""


def compare_drafts(
    record: StepRecord,
    twin: StepRecord,
    kind: str,
    dtype: str,
    allowed: Allowed,
    alike: NDArray[np.bool_] | None = None,
) -> Iterator[Drift]:
    """One drift of the logits and one of the tokens; nothing where either arm has none.

    Under capture drift all of them compare; else, of each request, those up to the first draft that
    differs. alike [scheduled requests]: whether the passes began from the same tokens; the others
    are left out. None: all of them did.
    """
    ours, theirs = record.draft_logits, twin.draft_logits
    if ours is None or theirs is None or record.proposed is None or twin.proposed is None:
        return
    tokens, twin_tokens = record.proposed.T, twin.proposed.T
    comparable = ours.shape == theirs.shape and tokens.shape == twin_tokens.shape
    if not comparable or kind == "capture":
        yield measure(kind, "draft_logits", ours, theirs, dtype)
        yield _tokens(kind, tokens, twin_tokens, False)
        return
    same = tokens == twin_tokens
    before = np.ones_like(same)
    before[1:] = np.cumprod(same, axis=0)[:-1].astype(np.bool_)
    if alike is not None and len(alike) == same.shape[1]:
        before &= alike
        if not before.any():
            return
    logits = measure(kind, "draft_logits", ours[before], theirs[before], dtype)
    yield logits
    measured = logits.outcome not in ("non_finite", "shape_mismatch")
    mine, its = tokens[before], twin_tokens[before]
    yield _tokens(kind, mine, its, measured and allowed(theirs[before], mine, its))


def _tokens(kind: str, tokens: NDArray[Any], twin: NDArray[Any], allowed: bool) -> Drift:
    """Tokens have no distance: only their number of mismatches is measured."""
    if tokens.shape != twin.shape:
        return measure(kind, "proposed", tokens, twin, "float32")
    mismatched = int((tokens != twin).sum())
    outcome = "within_budget" if allowed else "exceeds_budget"
    return Drift(
        kind=kind,
        tensor="proposed",
        outcome=outcome if mismatched else "bitwise",
        num_elements=tokens.size,
        num_mismatched=mismatched,
        max_abs=None,
        max_rel=None,
        max_ulp=None,
        cosine=None,
    )
