"""Where two arms' generations part, and whether padding drift alone can have parted them.

Owns the comparison of sampled tokens request by request, and the verdict on a flipped one. Reads
plans and records. Knows no engine.

A token may flip only where the twin holds the two candidates so close that the drift of padding
closes the gap. Each of two logits moves by at most `drift`, so a gap of up to 2 x drift can close:
with 3.00000 and 2.99999 and a drift of 6e-6 the second can come out on top, with 2.9 it cannot. A
drift explains nothing where it leaves the padding budget itself, or where the mode's own logits do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pcpbench.checks.budgets import budget_of
from pcpbench.modes_results import TokenTrace
from pcpbench.plan import ScenarioPlan
from pcpbench.records import StepRecord

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class TokenAt:
    """One output token of a request: which of its outputs, in which step, on which row."""

    req_id: str
    index: int
    step: int
    row: int
    token: int


def generations(plan: ScenarioPlan, records: Iterable[StepRecord]) -> dict[str, list[TokenAt]]:
    """Output tokens of every request, in order, from one arm's records.

    Of a verification's rows the accepted drafts and the token after them count, as the plan has it.
    A broken engine may have sampled fewer rows: the judge says so, and their tokens are left out.
    """
    by_step = {record.step: record for record in records}
    found: dict[str, list[TokenAt]] = {}
    for step in plan.steps:
        record = by_step.get(step.index)
        if record is None:
            continue
        rows: dict[str, list[int]] = {}
        for row, req_id in enumerate(record.sampled_req_ids[: len(record.sampled)]):
            rows.setdefault(req_id, []).append(row)
        for request in step.scheduled:
            mine = found.setdefault(request.req_id, [])
            for row in rows.get(request.req_id, [])[: request.num_output_tokens]:
                token = int(record.sampled[row])
                mine.append(TokenAt(request.req_id, len(mine), step.index, row, token))
    return found


def differences(
    twin: Mapping[str, list[TokenAt]], found: Mapping[str, list[TokenAt]], *, only_first: bool
) -> list[tuple[TokenAt, TokenAt]]:
    """(twin's, found) wherever tokens differ, by step; only_first: the first of each request.

    Behind a first difference two free generations stand on different tokens.
    """
    pairs: list[tuple[TokenAt, TokenAt]] = []
    for req_id, tokens in twin.items():
        apart = [
            pair
            for pair in zip(tokens, found.get(req_id, []), strict=False)
            if pair[0].token != pair[1].token
        ]
        pairs += apart[:1] if only_first else apart
    return sorted(pairs, key=lambda pair: (pair[0].step, pair[0].row))


def num_equal(twin: Mapping[str, list[TokenAt]], found: Mapping[str, list[TokenAt]]) -> int:
    """Tokens that are the same at the same place; a missing one is not."""
    return sum(
        ours.token == theirs.token
        for req_id, tokens in twin.items()
        for theirs, ours in zip(tokens, found.get(req_id, []), strict=False)
    )


def trace(
    mode: str,
    twin: TokenAt,
    found: TokenAt,
    dtype: str,
    *,
    none: Logits | None,
    own: Logits | None,
    padded: Logits | None,
) -> TokenTrace:
    """Say whether padding drift explains a flipped token.

    none, own, padded: that row's logits [vocab] of NONE, of the mode, and of the eager arm that is
    padded like it and was fed the same tokens; None where there are none: of the padded arm, where
    it could not be run so far.
    """
    told = TokenTrace(
        mode=mode,
        request=twin.req_id,
        token_index=twin.index,
        step=twin.step,
        none_token=twin.token,
        mode_token=found.token,
        why="the eager arm padded like the mode could not be run up to there",
    )
    if none is None or own is None:
        return replace(told, why="there are no logits of that row")
    if padded is None:
        return told
    parts = [row.astype(np.float64) for row in (none, own, padded)]
    if len({part.shape for part in parts}) > 1 or not all(np.isfinite(p).all() for p in parts):
        return replace(told, why="logits are not finite, or not of one shape")
    if not all(0 <= token < len(none) for token in (twin.token, found.token)):
        return replace(told, why=f"a token is outside the vocabulary of {len(none)}")
    return _judged(told, *parts, dtype=dtype)


def _judged(
    told: TokenTrace,
    none: NDArray[np.float64],
    own: NDArray[np.float64],
    padded: NDArray[np.float64],
    *,
    dtype: str,
) -> TokenTrace:
    budget = budget_of("padding", dtype)
    assert budget is not None  # only capture has none
    limit = budget.relative * float(np.sqrt(np.square(none).mean()))
    gap = float(none[told.none_token] - none[told.mode_token])
    drift, own_drift = (float(np.abs(part - none).max()) for part in (padded, own))
    why = ""
    if gap < 0:
        why = "NONE itself held the other token higher"
    elif drift == 0:
        why = "the padded eager arm has the same logits as NONE: there is no drift"
    elif drift > limit:
        why = f"the padding drift {drift:.3g} is over its budget {limit:.3g}"
    elif own_drift > limit:
        why = f"the mode's logits are {own_drift:.3g} away, over the budget {limit:.3g} of padding"
    elif gap > 2 * drift:
        why = f"the gap {gap:.3g} is wider than twice the padding drift {drift:.3g}"
    return replace(told, gap=gap, drift=drift, own_drift=own_drift, limit=limit, why=why)
