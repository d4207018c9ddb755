"""C7: the PCP partition covers every token, restores it and writes it once (SPEC 5, 12).

Owns row identity, counts, the restore index and the write mask. Knows no lengths and no slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcpbench.checks.drift import same_bits
from pcpbench.checks.findings import StepView, mismatch, wrong_counts
from pcpbench.checks.oracle import RankExpectation
from pcpbench.records import RankRecord, StepRecord, Violation


def check_partition(view: StepView) -> Iterator[Violation]:
    """C7 on every rank: counts, rows, restore after gather, one KV writer; then the cover."""
    for record, expected in view.ranks():
        for tensor, message in (
            *wrong_counts(record, expected),
            ("rows", _rows_message(view, record, expected)),
            ("hidden_restore_idx", _restore_message(view, record, expected)),
            ("gathered_kv_write_mask", _writer_message(record, expected)),
        ):
            if message:
                yield view.violation("C7", record.rank, tensor, message)
    yield from _check_ranks(view)
    yield from _check_cover(view)
    yield from _check_outputs(view)
    yield from _check_sampling(view)


def _check_ranks(view: StepView) -> Iterator[Violation]:
    """Every rank of the world left a record, and left it once: a rank unseen is a rank unjudged."""
    found = sorted(record.rank for record in view.record.ranks)
    size = view.setup.world.size
    if found != list(range(size)):
        message = f"ranks {found} left a record of the step, expected all {size} of the world"
        yield view.violation("C7", None, "ranks", message)


def _check_sampling(view: StepView) -> Iterator[Violation]:
    """A request that is due samples the best token of its last scheduled position, on every rank.

    Queries of 3, 1 and 2 tokens of which the first and last are due sample from rows 2 and 5. With
    draft tokens it samples behind each of them, too: all rows of its query.
    """
    if view.expected is None:
        return
    due: list[int] = []
    end = 0
    for request in view.plan.scheduled:
        end += request.num_scheduled_tokens
        due += range(end - request.num_logits, end)
    rows = np.array(due, dtype=np.int64)
    for record in view.record.ranks:
        if record.sampled_rows is not None:
            message = mismatch("sampled_rows", record.sampled_rows, rows, "request due")
            if message:
                yield view.violation("C7", record.rank, "sampled_rows", message)
    for message in _sampled_messages(view.record):
        yield view.violation("C7", None, "sampled", message)


def _sampled_messages(record: StepRecord) -> Iterator[str]:
    """Tokens that no model could sample, and tokens that do not score best.

    The first may be -1, which the oracle takes for a token that nobody knows: no step after this
    one would be held to it.
    """
    logits, sampled = record.logits, record.sampled
    if not len(sampled) or len(logits) != len(sampled):
        return
    vocab_size = logits.shape[-1]
    is_known = (sampled >= 0) & (sampled < vocab_size)
    if not is_known.all():
        at = int(np.argmin(is_known))
        yield (
            f"token {int(sampled[at])} was sampled at {at}, outside the vocabulary of {vocab_size}"
        )
    rows = np.flatnonzero(is_known)
    worse = rows[logits[rows, sampled[rows]] < logits[rows].max(axis=-1, initial=-np.inf)]
    if len(worse):
        at = int(worse[0])
        yield f"token {int(sampled[at])} was sampled at {at}, and its logit is not the best"


def _check_outputs(view: StepView) -> Iterator[Violation]:
    """Every rank samples from the whole batch: what they restored and sampled must be one thing.

    Only rank 0's outputs are held against other arms; this makes them speak for all ranks.
    """
    for record in view.record.ranks[1:]:
        for tensor in ("hidden", "sampled"):
            own, first = getattr(record, tensor), getattr(view.record, tensor)
            if own is None or same_bits(own, first):
                continue
            if own.shape != first.shape:
                difference = f"has shape {list(own.shape)}, rank 0 has {list(first.shape)}"
            else:
                rows = np.flatnonzero((own != first).reshape(len(own), -1).any(axis=1))
                at = "" if not len(rows) else f", first in row {int(rows[0])}"
                difference = f"differs from that of rank 0 in {len(rows)} of {len(own)} rows{at}"
            yield view.violation("C7", record.rank, tensor, f"restored {tensor} {difference}")


def _recorded_rows(record: RankRecord) -> list[tuple[int, int, int]]:
    """(request, start, tokens) of each real row that holds tokens."""
    lengths = np.diff(record.query_start_loc[: record.num_reqs + 1])
    rows = zip(record.row_req_index, record.row_start, lengths, strict=False)
    return [(int(req), int(start), int(n)) for req, start, n in rows if n]


def _rows_message(view: StepView, record: RankRecord, expected: RankExpectation) -> str:
    if not len(record.row_req_index) == len(record.row_start) == record.num_reqs:
        return (
            f"row_req_index and row_start have {len(record.row_req_index)} and "
            f"{len(record.row_start)} rows, expected num_reqs = {record.num_reqs}"
        )
    found = _recorded_rows(record)
    right = [(row.req_index, row.start, row.num_tokens) for row in expected.rows]
    if found == right:
        return ""
    if len(found) != len(right):
        return f"the rank holds {len(found)} rows with tokens, expected {len(right)}"
    at = next(i for i in range(len(right)) if found[i] != right[i])
    return f"row {at} is {_span(view, found[at])}, expected {_span(view, right[at])}"


def _span(view: StepView, row: tuple[int, int, int]) -> str:
    req, start, length = row
    known = 0 <= req < len(view.plan.scheduled)
    name = view.plan.scheduled[req].req_id if known else f"#{req}"
    return f"tokens [{start}:{start + length}] of request {name}"


def _restore_message(view: StepView, record: RankRecord, expected: RankExpectation) -> str:
    """gathered[idx[t]] must be token t; any rank's copy of a replicated token will do."""
    index = record.hidden_restore_idx
    if view.expected is None or expected.write_mask is None:
        return "" if index is None else "hidden_restore_idx is present without PCP"
    if index is None:
        return "hidden_restore_idx is missing"
    if index.shape != (view.expected.num_tokens,):
        shape, num_tokens = list(index.shape), view.expected.num_tokens
        return f"hidden_restore_idx has shape {shape}, expected [{num_tokens}]"
    place = expected.gathered_token
    outside = (index < 0) | (index >= len(place))
    if outside.any():
        at = int(np.argmax(outside))
        return f"hidden_restore_idx[{at}] is {index[at]}, outside the {len(place)} gathered tokens"
    restored = place[index]
    wrong = restored != np.arange(len(index))
    if not wrong.any():
        return ""
    at = int(np.argmax(wrong))
    got = "padding" if restored[at] < 0 else f"token {restored[at]}"
    return (
        f"hidden_restore_idx[{at}] is {index[at]}, which holds {got} instead of token {at}; "
        f"{int(wrong.sum())} tokens are restored wrongly"
    )


def _writer_message(record: RankRecord, expected: RankExpectation) -> str:
    mask, right = record.gathered_kv_write_mask, expected.write_mask
    if right is None:
        return "" if mask is None else "gathered_kv_write_mask is present without PCP"
    if mask is None:
        return "gathered_kv_write_mask is missing"
    if mask.shape != right.shape:
        return mismatch("gathered_kv_write_mask", mask, right, "gathered tokens")
    padding = mask & (expected.gathered_token < 0)
    if padding.any():
        return f"gathered_kv_write_mask[{int(np.argmax(padding))}] lets padding write KV"
    num_tokens = int(right.sum())
    writers = np.bincount(expected.gathered_token[mask], minlength=num_tokens)
    if (writers != 1).any():
        at = int(np.argmax(writers != 1))
        return f"token {at} has {writers[at]} KV writers, expected 1"
    return mismatch("gathered_kv_write_mask", mask, right, "the writer of its token")


def _check_cover(view: StepView) -> Iterator[Violation]:
    """Over each PCP group every scheduled token is held by at least one rank."""
    if view.expected is None:
        return
    records = {record.rank: record for record in view.record.ranks}
    lengths = [request.num_scheduled_tokens for request in view.plan.scheduled]
    for group in view.setup.world.pcp_groups():
        if any(rank not in records for rank in group):
            continue
        held = [np.zeros(length, dtype=np.int64) for length in lengths]
        for rank in group:
            for req, start, length in _recorded_rows(records[rank]):
                if 0 <= req < len(held) and start >= 0:
                    held[req][start : start + length] += 1
        for req, counts in enumerate(held):
            if (counts == 0).any():
                name = view.plan.scheduled[req].req_id
                message = (
                    f"token {int(np.argmax(counts == 0))} of request {name} is on no rank of "
                    f"{group}; {int((counts == 0).sum())} of {len(counts)} are missing"
                )
                yield view.violation("C7", None, "rows", message)
