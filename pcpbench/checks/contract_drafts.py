"""C17: drafts are verified as planned, and cursors follow, the device's and the host's (SPEC 10).

Owns the judge's own verification: the longest prefix of drafts that the model would have chosen.
That rejected tokens are fed, written and overwritten as the plan says is seen by C1, C3 and C4 of
the step after. Knows no rank-local row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcpbench.checks.findings import StepView, mismatch
from pcpbench.plan import StepPlan
from pcpbench.records import IntArray, RankRecord, Violation


def check_drafts(view: StepView) -> Iterator[Violation]:
    """C17 over a step: drafts, accepted tokens of every rank, cursors of every rank."""
    if view.expected is None:
        return
    message = _drafts_message(view)
    if message:
        yield view.violation("C17", None, "draft_tokens", message)
    scheduled, is_due = view.plan.scheduled, _must_tell(view)
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
            if found is None:
                message = f"{tensor} is missing in a step with drafts" if is_due else ""
            else:
                message = mismatch(tensor, found, right, what)
            if message:
                yield view.violation("C17", record.rank, tensor, message)
        message = _bound_message(record, view.setup.decode_query_len - 1)
        if message:
            yield view.violation("C17", record.rank, "seq_lens_cpu_upper_bound", message)


def _bound_message(record: RankRecord, num_drafts: int) -> str:
    """Whether the host's bound holds, and is no further off than one step's drafts.

    The host takes all drafts of a request's last step for accepted and learns better one step
    later. A bound that is too small sizes work too small; one that runs away sizes it ever larger.
    """
    if record.seq_lens_cpu_upper_bound is None:
        return ""
    num = record.num_reqs
    has_tokens = np.diff(record.query_start_loc[: num + 1]) > 0
    lengths = record.seq_lens[:num][has_tokens].astype(np.int64)
    over = record.seq_lens_cpu_upper_bound[:num][has_tokens] - lengths
    wrong = np.flatnonzero((over < 0) | (over > num_drafts))
    if not wrong.size:
        return ""
    row, first = int(np.flatnonzero(has_tokens)[wrong[0]]), int(wrong[0])
    most = int(lengths[first]) + num_drafts
    return (
        f"row {row} has length {lengths[first]} and the host takes it for "
        f"{int(lengths[first] + over[first])}: at least the length and at most {most} is right"
    )


def _must_tell(view: StepView) -> bool:
    """Whether the step has drafts, and the record has to say what became of them."""
    return view.setup.tells_all and view.plan.num_draft_tokens > 0


def _drafts_message(view: StepView) -> str:
    """Whether the step's drafts, verified by hand, come to the planned acceptance."""
    drafts, num_drafts = view.record.draft_tokens, view.plan.num_draft_tokens
    if drafts is None and _must_tell(view):
        return f"the draft tokens are missing, {num_drafts} are planned"
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
