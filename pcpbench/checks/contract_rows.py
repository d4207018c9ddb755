"""C1, C2, C3 and C6: the rows and tokens of one rank's batch (SPEC 5, 7, 12).

Each contract first holds the padding to its neutral value, by the record's own counts, and then the
real part to the oracle. Knows no block table and no graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcpbench.checks.findings import StepView, mismatch, nonzero
from pcpbench.checks.oracle import RankExpectation
from pcpbench.checks.oracle_tables import UNKNOWN_TOKEN, dcp_share
from pcpbench.records import RankRecord, Violation


def check_seq_lens(view: StepView) -> Iterator[Violation]:
    """C1: rows past num_reqs are 0; a real row is where its last token ends."""
    for record, expected in view.ranks():
        found = record.seq_lens
        message = nonzero("seq_lens", found, record.num_reqs, _padding_rows(record))
        if not message and len(found) != record.num_reqs_after_padding:
            message = (
                f"seq_lens has {len(found)} rows, expected num_reqs_after_padding = "
                f"{record.num_reqs_after_padding}"
            )
        if not message and _same_rows(record, expected):
            real = slice(0, record.num_reqs)
            message = mismatch("seq_lens", found[real], expected.seq_lens[real], "real row")
        if message:
            yield view.violation("C1", record.rank, "seq_lens", message)


def check_query_start_loc(view: StepView) -> Iterator[Violation]:
    """C2: never decreases, equals num_tokens from num_reqs on, starts each row where planned."""
    for record, expected in view.ranks():
        message = _query_start_loc_message(record, expected)
        if message:
            yield view.violation("C2", record.rank, "query_start_loc", message)


def _query_start_loc_message(record: RankRecord, expected: RankExpectation) -> str:
    found = record.query_start_loc
    if len(found) != record.num_reqs_after_padding + 1:
        return (
            f"query_start_loc has {len(found)} entries, expected num_reqs_after_padding + 1 = "
            f"{record.num_reqs_after_padding + 1}"
        )
    steps = np.diff(found.astype(np.int64))
    if (steps < 0).any():
        at = int(np.argmax(steps < 0))
        return f"query_start_loc falls from {found[at]} at [{at}] to {found[at + 1]} at [{at + 1}]"
    tail = found[record.num_reqs :]
    full = np.full(len(tail), record.num_tokens)
    message = mismatch(f"query_start_loc[{record.num_reqs}:]", tail, full, "num_tokens")
    if not message and _same_rows(record, expected):
        real = slice(0, record.num_reqs + 1)
        message = mismatch(
            "query_start_loc", found[real], expected.query_start_loc[real], "start of a real row"
        )
    return message


def check_tokens(view: StepView) -> Iterator[Violation]:
    """C3: tokens past num_tokens are 0 and flagged; real ones are the plan's and are not."""
    is_stale = view.setup.traits.stale_padding_without_pcp and view.setup.world.pcp_size == 1
    for record, expected in view.ranks():
        total = record.num_tokens_after_padding
        flags = np.arange(total) >= record.num_tokens
        message = mismatch("is_padding", record.is_padding, flags, "padding from num_tokens on")
        if message:
            yield view.violation("C3", record.rank, "is_padding", message)
        name, gathered = "gathered_is_padding", record.gathered_is_padding
        if gathered is not None:
            what = "padding from each PCP rank's num_tokens on"
            message = mismatch(name, gathered, expected.gathered_token < 0, what)
            if message:
                yield view.violation("C3", record.rank, name, message)
        for name, found, right in (
            ("input_ids", record.input_ids, expected.input_ids),
            ("positions", record.positions, expected.positions),
        ):
            what = f"padding token, {record.num_tokens} real of {total}"
            message = "" if is_stale else nonzero(name, found, record.num_tokens, what)
            if not message and len(found) != total:
                message = f"{name} has {len(found)} tokens, expected {total}"
            if not message and record.num_tokens == expected.num_tokens:
                real = slice(0, record.num_tokens)
                unknown = (right[real] == UNKNOWN_TOKEN) if name == "input_ids" else None
                message = mismatch(name, found[real], right[real], "real token", unknown)
            if message:
                yield view.violation("C3", record.rank, name, message)


def check_dcp_lengths(view: StepView) -> Iterator[Violation]:
    """C6: padded rows 0; each row its rank's share of this batch's own seq_lens; shares sum up."""
    world, interleave = view.setup.world, view.setup.interleave
    sound = True
    for record, _ in view.ranks():
        message = ""
        found = record.dcp_local_seq_lens
        if (found is None) != (world.dcp_size == 1):
            state = "missing" if found is None else "present"
            message = f"dcp_local_seq_lens is {state} with a DCP size of {world.dcp_size}"
        elif found is not None:
            me = world.dcp_rank(record.rank)
            share = np.array(
                [dcp_share(int(n), world.dcp_size, me, interleave) for n in record.seq_lens],
                dtype=np.int64,
            )
            message = nonzero("dcp_local_seq_lens", found, record.num_reqs, _padding_rows(record))
            message = message or mismatch(
                "dcp_local_seq_lens", found, share, f"DCP rank {me}'s share of seq_lens"
            )
        if message:
            sound = False
            yield view.violation("C6", record.rank, "dcp_local_seq_lens", message)
    if sound and world.dcp_size > 1:
        yield from _check_sums(view)


def _check_sums(view: StepView) -> Iterator[Violation]:
    """Over a DCP group the shares of a row that every rank holds add up to its seq_len."""
    by_rank = {record.rank: (record, expected) for record, expected in view.ranks()}
    for group in view.setup.world.dcp_groups():
        if any(rank not in by_rank for rank in group):
            continue
        totals: dict[tuple[int, int], int] = {}
        lengths: dict[tuple[int, int], int] = {}
        for rank in group:
            record, expected = by_rank[rank]
            local = record.dcp_local_seq_lens
            if local is None or not _same_rows(record, expected):
                return
            for index, row in enumerate(expected.rows):
                if row.replicated:
                    key = (row.req_index, row.start)
                    totals[key] = totals.get(key, 0) + int(local[index])
                    lengths[key] = int(record.seq_lens[index])
        for key, total in totals.items():
            if total != lengths[key]:
                request = view.plan.scheduled[key[0]].req_id
                message = (
                    f"dcp_local_seq_lens of request {request} add up to {total} over ranks "
                    f"{group}, expected its seq_len {lengths[key]}"
                )
                yield view.violation("C6", None, "dcp_local_seq_lens", message)


def _same_rows(record: RankRecord, expected: RankExpectation) -> bool:
    """Whether rows can be compared one by one; C7 reports where they cannot."""
    return record.num_reqs == expected.num_reqs


def _padding_rows(record: RankRecord) -> str:
    return f"padding row, {record.num_reqs} real of {record.num_reqs_after_padding}"
