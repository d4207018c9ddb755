"""C17: draft tokens are verified as planned, and cursors advance by what was accepted (SPEC 10).

Owns the judge's own verification: the longest prefix of drafts that the model would have chosen.
That rejected tokens are fed, written and overwritten as the plan says is seen by C1, C3 and C4 of
the step after. Knows no rank-local row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcpbench.checks.findings import StepView, mismatch
from pcpbench.plan import StepPlan
from pcpbench.records import IntArray, Violation


def check_drafts(view: StepView) -> Iterator[Violation]:
    """C17 over a step: drafts, accepted tokens of every rank, cursors of every rank."""
    if view.expected is None:
        return
    message = _drafts_message(view)
    if message:
        yield view.violation("C17", None, "draft_tokens", message)
    scheduled = view.plan.scheduled
    accepted = np.array([r.num_accepted_tokens for r in scheduled if r.samples], dtype=np.int64)
    after = np.array(
        [r.num_computed_tokens + r.num_scheduled_tokens - r.num_rejected_tokens for r in scheduled],
        dtype=np.int64,
    )
    for record in view.record.ranks:
        for tensor, right, what in (
            ("num_accepted", accepted, "drafts that the plan accepts"),
            ("num_computed_after", after, "computed tokens less rejected ones"),
        ):
            found = getattr(record, tensor)
            message = "" if found is None else mismatch(tensor, found, right, what)
            if message:
                yield view.violation("C17", record.rank, tensor, message)


def _drafts_message(view: StepView) -> str:
    """Whether the step's drafts, verified by hand, come to the planned acceptance."""
    drafts, num_drafts = view.record.draft_tokens, view.plan.num_draft_tokens
    if drafts is None or view.fed is None:
        return ""
    if len(drafts) != num_drafts:
        return f"{len(drafts)} draft tokens, {num_drafts} are planned"
    if len(view.fed) != sum(request.num_logits for request in view.plan.scheduled):
        return ""  # C7 and the comparison of outputs name it
    found = accepted_by_hand(view.plan, drafts, view.fed)
    for request in view.plan.scheduled:
        if found[request.req_id] != request.num_accepted_tokens:
            return (
                f"of the {request.num_draft_tokens} drafts of request {request.req_id} "
                f"{found[request.req_id]} are right, {request.num_accepted_tokens} are planned"
            )
    return ""


def accepted_by_hand(step: StepPlan, drafts: IntArray, targets: IntArray) -> dict[str, int]:
    """Accepted drafts of each request; targets: the best token behind each row of logits.

    Drafts 5, 6, 7 with targets 5, 9, 7, 1: the second is the first miss, so one is accepted.
    """
    accepted: dict[str, int] = {}
    draft = row = 0
    for request in step.scheduled:
        count = 0
        while count < request.num_draft_tokens and drafts[draft + count] == targets[row + count]:
            count += 1
        accepted[request.req_id] = count
        draft += request.num_draft_tokens
        row += request.num_logits
    return accepted
