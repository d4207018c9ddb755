"""Comparing what two arms computed in one step: hidden states, logits, sampled tokens (SPEC 11).

Owns which outputs two records have in common and what each must satisfy. Knows no KV cache and no
plan beyond the order of requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.budgets import logit_gap_allowed
from pcpbench.checks.draft_compare import compare_drafts
from pcpbench.checks.drift import is_ok, measure, next_token_kl, same_bits
from pcpbench.checks.oracle_tables import drafts_by_request
from pcpbench.plan import StepPlan
from pcpbench.records import Difference, Drift, StepRecord, Violation


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """What two records of one step had in common and how it compared.

    drifts: one for each common tensor; empty means that nothing was compared.
    difference: the first tensor, in the order hidden, logits, sampled, draft_logits, proposed, that
    was not allowed.
    num_sampled, num_top1_equal, token_mismatches, max_kl: of the rows sampled by both.
    """

    drifts: tuple[Drift, ...]
    difference: Difference | None
    num_sampled: int = 0
    num_top1_equal: int = 0
    token_mismatches: int = 0
    max_kl: float | None = None


def compare_steps(
    record: StepRecord,
    twin: StepRecord,
    kind: str,
    dtype: str,
    step: StepPlan | None = None,
    exclude: Collection[str] = (),
    own_tokens: bool = False,
) -> StepComparison:
    """Compare the outputs that both records hold.

    own_tokens: each arm was fed what it sampled and the drafts that it found itself, and `step`
    says which rows are whose. Rows whose inputs differ are then left out: those of the requests in
    `exclude`, which parted in an earlier step, and those behind the first draft that differs.
    """
    drifts: list[Drift] = []
    rows = common_rows(record, twin, step, exclude) if own_tokens and step is not None else None
    ours, theirs = _hidden(record, step, rows), _hidden(twin, step, rows)
    if ours.size and theirs.size:
        drifts.append(measure(kind, "hidden", ours, theirs, dtype))
    common = [
        req_id for req_id in dict.fromkeys(record.sampled_req_ids) if req_id in twin.sampled_req_ids
    ]
    limits = None if step is None or rows is None else _logits_limits(step, rows)
    left, right = _rows_of(record, common, limits), _rows_of(twin, common, limits)
    outcome: dict[str, Any] = {}
    if any(len(r.sampled) != len(r.sampled_req_ids) for r in (record, twin)) or any(
        len(r.logits) != len(r.sampled_req_ids) for r in (record, twin)
    ):
        drifts.append(measure(kind, "logits", record.logits, twin.logits[:0], dtype))
    elif len(left) and len(left) == len(right):
        drifts += _compare_logits(record, twin, left, right, kind, dtype, outcome)
    elif len(left) != len(right):
        drifts.append(measure(kind, "sampled", np.array(left), np.array(right), dtype))

    def near_ties(logits: NDArray[Any], tokens: NDArray[Any], others: NDArray[Any]) -> bool:
        return _flips_allowed(logits, tokens, others, kind, dtype)

    alike: NDArray[np.bool_] | None = None
    if step is not None and rows is not None:
        apart = flipped(record, twin)
        alike = np.array(
            [
                r.req_id not in apart and rows[r.req_id] == r.num_scheduled_tokens
                for r in step.scheduled
            ]
        )
    drifts += compare_drafts(record, twin, kind, dtype, near_ties, alike)
    bad = next((drift for drift in drifts if not is_ok(drift)), None)
    difference = None if bad is None else difference_of(record, twin, bad)
    return StepComparison(drifts=tuple(drifts), difference=difference, **outcome)


def common_rows(
    record: StepRecord, twin: StepRecord, step: StepPlan, exclude: Collection[str]
) -> dict[str, int]:
    """How many first rows of each request's query had equal inputs in both records.

    Of drafts 5, 6, 7 against 5, 9, 7 these are two: the token before the drafts, and the 5.
    """
    none = np.zeros(0, dtype=np.int64)
    ours, theirs = (
        drafts_by_request(step, none if one.draft_tokens is None else one.draft_tokens)
        for one in (record, twin)
    )
    rows = {}
    for request in step.scheduled:
        name, num_rows = request.req_id, request.num_scheduled_tokens
        pairs = zip(ours[name], theirs[name], strict=False)
        parted = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        rows[name] = 0 if name in exclude else num_rows if parted is None else parted + 1
    return rows


def _logits_limits(step: StepPlan, rows: Mapping[str, int]) -> dict[str, int]:
    """Rows of logits are those of a query's last tokens."""
    return {
        r.req_id: max(rows[r.req_id] - (r.num_scheduled_tokens - r.num_logits), 0)
        for r in step.scheduled
    }


def flipped(record: StepRecord, twin: StepRecord) -> set[str]:
    """Requests for which both sampled, but not the same tokens."""
    ours, theirs = _tokens_of(record), _tokens_of(twin)
    return {req_id for req_id in ours.keys() & theirs.keys() if ours[req_id] != theirs[req_id]}


def stale_hint(record: StepRecord, twin_before: StepRecord | None) -> str:
    """Says so when an arm's outputs are those of its twin one step earlier: a stale input."""
    if twin_before is None:
        return ""
    for name in ("hidden", "logits"):
        ours, earlier = getattr(record, name), getattr(twin_before, name)
        if ours.size and same_bits(ours, earlier):
            return f"{name} equals that of {twin_before.arm} in step {twin_before.step}: stale"
    return ""


def difference_of(
    record: StepRecord,
    twin: StepRecord,
    drift: Drift,
    rank: int | None = None,
    layer: int | None = None,
) -> Difference:
    """Name the place of a drift."""
    return Difference(
        kind=drift.kind,
        arm=record.arm,
        twin=twin.arm,
        scenario=record.scenario,
        step=record.step,
        rank=rank,
        layer=layer,
        tensor=drift.tensor,
        drift=drift,
    )


def _compare_logits(
    record: StepRecord,
    twin: StepRecord,
    left: list[int],
    right: list[int],
    kind: str,
    dtype: str,
    outcome: dict[str, Any],
) -> list[Drift]:
    ours, theirs = record.logits[left], twin.logits[right]
    tokens, twin_tokens = record.sampled[left], twin.sampled[right]
    logits = measure(kind, "logits", ours, theirs, dtype)
    outcome["num_sampled"] = len(left)
    outcome["token_mismatches"] = int((tokens != twin_tokens).sum())
    measured = logits.outcome not in ("non_finite", "shape_mismatch")
    if measured and np.isfinite(theirs).all():
        outcome["num_top1_equal"] = int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
        outcome["max_kl"] = float(next_token_kl(ours, theirs).max())
    allowed = measured and _flips_allowed(theirs, tokens, twin_tokens, kind, dtype)
    return [logits, _sampled_drift(kind, tokens, twin_tokens, allowed)]


def _flips_allowed(
    twin_logits: NDArray[Any],
    tokens: NDArray[Any],
    twin_tokens: NDArray[Any],
    kind: str,
    dtype: str,
) -> bool:
    """Whether each flipped token was a near tie in the twin: closer than drift could close."""
    vocab = twin_logits.shape[1]
    for row in np.flatnonzero(tokens != twin_tokens):
        if not (0 <= tokens[row] < vocab and 0 <= twin_tokens[row] < vocab):
            return False
        logits = twin_logits[row].astype(np.float64)
        gap = abs(logits[twin_tokens[row]] - logits[tokens[row]])
        rms = float(np.sqrt(np.square(logits).mean()))
        if not gap <= logit_gap_allowed(kind, dtype, rms):
            return False
    return True


def _sampled_drift(
    kind: str, tokens: NDArray[Any], twin_tokens: NDArray[Any], allowed: bool
) -> Drift:
    """Tokens have no distance: only their number of mismatches is measured."""
    mismatched = int((tokens != twin_tokens).sum())
    outcome = "within_budget" if allowed and kind != "capture" else "exceeds_budget"
    return Drift(
        kind=kind,
        tensor="sampled",
        outcome=outcome if mismatched else "bitwise",
        num_elements=len(tokens),
        num_mismatched=mismatched,
        max_abs=None,
        max_rel=None,
        max_ulp=None,
        cosine=None,
    )


def _hidden(
    record: StepRecord, step: StepPlan | None, rows: Mapping[str, int] | None
) -> NDArray[np.float32]:
    """Restored hidden states [tokens, hidden]; of each request so many first rows."""
    if rows is None or step is None or len(record.hidden) != step.num_tokens:
        return record.hidden
    keep = np.concatenate(
        [np.arange(r.num_scheduled_tokens) < rows[r.req_id] for r in step.scheduled]
    )
    kept: NDArray[np.float32] = record.hidden[keep]
    return kept


def _rows_of(record: StepRecord, req_ids: list[str], limits: Mapping[str, int] | None) -> list[int]:
    """Rows of the sampled outputs that belong to some requests, request by request, the first so
    many of each."""
    rows: dict[str, list[int]] = {}
    for row, req_id in enumerate(record.sampled_req_ids):
        rows.setdefault(req_id, []).append(row)
    most = {} if limits is None else limits
    return [row for req_id in req_ids for row in rows[req_id][: most.get(req_id)]]


def _tokens_of(record: StepRecord) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for req_id, token in zip(record.sampled_req_ids, record.sampled.tolist(), strict=False):
        tokens.setdefault(req_id, []).append(token)
    return tokens


def capture_violation(
    record: StepRecord, twin: StepRecord, rank: int | None, drift: Drift, where: str
) -> Violation:
    """C13: what a capture pair computed is not the same, bit for bit."""
    size = "" if drift.max_abs is None else f", max abs {drift.max_abs:.3g}"
    return Violation(
        contract="C13",
        arm=record.arm,
        scenario=record.scenario,
        step=record.step,
        rank=rank,
        tensor=drift.tensor,
        message=(
            f"{drift.tensor} is not bitwise that of {twin.arm}: {drift.num_mismatched} of "
            f"{drift.num_elements} values differ{size} ({drift.outcome}, ran as "
            f"{record.descriptor.label})" + (f"; {where}" if where else "")
        ),
    )
