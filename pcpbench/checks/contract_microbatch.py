"""C12: microbatches make up the batch, own their buffers and recompute their lengths (SPEC 8, 12).

Owns what ties microbatches to the batch that was cut, and holds each of them to C1-C6 as the batch
itself is held. What each should be is in oracle_microbatch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Final

import numpy as np

from pcpbench.checks import contract_rows, contract_slots
from pcpbench.checks.findings import StepView, mismatch, wrong_counts
from pcpbench.checks.oracle_microbatch import cut_bounds, cut_expectation
from pcpbench.checks.oracle_tables import dcp_share
from pcpbench.modes import CUDAGraphMode
from pcpbench.records import BufferSpan, MicrobatchRecord, RankRecord, Violation

TOKENS: Final = ("input_ids", "positions", "is_padding")

ON_EACH: Final[tuple[Callable[[StepView], Iterator[Violation]], ...]] = (
    contract_rows.check_seq_lens,
    contract_rows.check_query_start_loc,
    contract_rows.check_tokens,
    contract_slots.check_slot_mappings,
    contract_slots.check_block_tables,
    contract_rows.check_dcp_lengths,
)
"""C1-C6, which hold for a microbatch as for a batch."""


def check_microbatches(view: StepView) -> Iterator[Violation]:
    """C12 on every rank, and C1-C6 on each microbatch. Idle steps are never cut."""
    expected = view.expected
    num_tokens = 0 if expected is None else expected.dispatch_num_tokens
    wanted = view.setup.num_ubatches(num_tokens, expected is not None and expected.has_prefill)
    is_cut = True
    for record in view.record.ranks:
        message = _count_message(record, wanted)
        if message:
            is_cut = False
            yield view.violation("C12", record.rank, "num_ubatches", message)
    if wanted == 1 or not is_cut:
        return
    for record in view.record.ranks:
        for tensor, message in (
            *_union(record),
            *_lengths(record, view),
            *_shared(record),
        ):
            yield view.violation("C12", record.rank, tensor, message)
    yield from _check_each(view, wanted)


def _count_message(record: RankRecord, wanted: int) -> str:
    chosen, found = record.descriptor.num_ubatches, len(record.microbatches)
    if chosen != wanted:
        tokens = record.dispatch_num_tokens
        return f"{record.descriptor.label} cuts {tokens} tokens in {chosen}, expected {wanted}"
    if found != (wanted if wanted > 1 else 0):
        return f"{record.descriptor.label} ran with {found} microbatches, expected {wanted}"
    return ""


def _union(record: RankRecord) -> Iterator[tuple[str, str]]:
    """Tokens and slots of the parts, put together, are those of the batch; cut at its middle."""
    parts = record.microbatches
    total = record.num_tokens_after_padding
    found = [(p.first_token, p.first_token + p.num_tokens_after_padding) for p in parts]
    if found != cut_bounds(total, len(parts)):
        yield "first_token", f"{total} tokens are cut at {found}, not in the middle"
        return
    real = sum(part.num_tokens for part in parts)
    if real != record.num_tokens:
        yield "num_tokens", f"microbatches hold {real} real tokens, the batch {record.num_tokens}"
    for name in TOKENS:
        whole = np.concatenate([getattr(part, name) for part in parts])
        message = mismatch(f"ubatches.{name}", whole, getattr(record, name), "of the batch")
        if message:
            yield name, message
    slots = record.slot_mappings
    num_ranks = slots.shape[1] // total
    for index, part in enumerate(parts):
        found_slots, right = part.slot_mappings.shape, part.num_tokens_after_padding * num_ranks
        if found_slots != (len(slots), right):
            message = f"has shape {list(found_slots)}, expected [{len(slots)}, {right}]"
            yield "slot_mappings", f"ubatch{index}.slot_mappings {message}"
            return
    by_rank = [p.slot_mappings.reshape(len(slots), num_ranks, -1) for p in parts]
    joined = np.concatenate(by_rank, axis=2).reshape(len(slots), -1)
    message = mismatch("ubatches.slot_mappings", joined, slots, "of the batch, each token once")
    if message:
        yield "slot_mappings", message


def _lengths(record: RankRecord, view: StepView) -> Iterator[tuple[str, str]]:
    """Rows, queries and lengths of each part follow from the recorded batch and the cut alone."""
    setup = view.setup
    me = setup.world.dcp_rank(record.rank)
    for index, part in enumerate(record.microbatches):
        last = part.first_token + part.num_tokens_after_padding
        rows, lengths, seq_lens = _cut_rows(record, part.first_token, last)
        for name, found, right, what in (
            ("row_index", part.row_index, np.array(rows), "rows of the batch"),
            ("query_lens", np.diff(part.query_start_loc[: part.num_reqs + 1]), np.array(lengths),
             "query truncated at the cut"),
            ("seq_lens", part.seq_lens[: part.num_reqs], np.array(seq_lens),
             "the batch's, less what lies past the microbatch"),
        ):  # fmt: skip
            message = mismatch(f"ubatch{index}.{name}", found, right, what)
            if message:
                yield f"ubatch{index}.{name}", message
        local = part.dcp_local_seq_lens
        if local is not None:
            size, step = setup.world.dcp_size, setup.interleave
            own = [dcp_share(int(n), size, me, step) for n in part.seq_lens]
            what = "share of this microbatch's own seq_lens"
            message = mismatch(f"ubatch{index}.dcp_local_seq_lens", local, np.array(own), what)
            if message:
                yield f"ubatch{index}.dcp_local_seq_lens", message


def _cut_rows(record: RankRecord, first: int, last: int) -> tuple[list[int], list[int], list[int]]:
    """Row, query length and seq_len of each row with tokens in [first, last), else the last row."""
    rows, lengths, seq_lens = [], [], []
    starts = record.query_start_loc
    for row in range(record.num_reqs):
        begin, end = max(first, int(starts[row])), min(last, int(starts[row + 1]))
        if begin < end:
            rows.append(row)
            lengths.append(end - begin)
            seq_lens.append(int(record.seq_lens[row]) - (int(starts[row + 1]) - end))
    if rows:
        return rows, lengths, seq_lens
    row = record.num_reqs - 1
    return [row], [0], [int(record.seq_lens[row])]


def _shared(record: RankRecord) -> Iterator[tuple[str, str]]:
    """No byte is in buffers of two microbatches, or in one of theirs and one of the batch's.

    Ids, positions and flags are slices of the batch's own: each byte is one microbatch's.
    """
    parts = record.microbatches
    for one, other in combinations(range(len(parts)), 2):
        for mine, theirs in _overlaps(parts[one].spans, parts[other].spans):
            name = f"ubatch{other}.{theirs.name}"
            yield name, f"{name} shares memory with ubatch{one}.{mine.name}"
    for index, part in enumerate(parts):
        own = tuple(span for span in part.spans if span.name not in TOKENS)
        for mine, theirs in _overlaps(own, record.spans):
            name = f"ubatch{index}.{mine.name}"
            yield name, f"{name} shares memory with {theirs.name} of the batch that was cut"


def _overlaps(
    ours: tuple[BufferSpan, ...], theirs: tuple[BufferSpan, ...]
) -> Iterator[tuple[BufferSpan, BufferSpan]]:
    for mine in ours:
        for other in theirs:
            begin = max(mine.address, other.address)
            if begin < min(mine.address + mine.num_bytes, other.address + other.num_bytes):
                yield mine, other


def _check_each(view: StepView, num_ubatches: int) -> Iterator[Violation]:
    """C12 on the counts of each microbatch; C1-C6 on it as if it were a step's batch.

    C1-C6 go by a batch's own counts: rows that were never padded are none of theirs.
    """
    assert view.expected is not None
    pads_rows = view.record.descriptor.cg_mode is CUDAGraphMode.FULL
    steps = cut_expectation(view.expected, view.setup, num_ubatches, pads_rows)
    for index, expected in enumerate(steps):
        ranks = tuple(_as_rank(record, record.microbatches[index]) for record in view.record.ranks)
        part = replace(view, record=replace(view.record, ranks=ranks), expected=expected)
        for record, right in part.ranks():
            for name, message in wrong_counts(record, right):
                yield view.violation(
                    "C12", record.rank, f"ubatch{index}.{name}", f"ubatch{index}.{message}"
                )
        for check in ON_EACH:
            for violation in check(part):
                yield replace(
                    violation,
                    tensor=f"ubatch{index}.{violation.tensor}",
                    message=f"in microbatch {index}, {violation.message}",
                )


def _as_rank(record: RankRecord, part: MicrobatchRecord) -> RankRecord:
    return replace(
        record,
        num_reqs=part.num_reqs,
        num_reqs_after_padding=part.num_reqs_after_padding,
        num_tokens=part.num_tokens,
        num_tokens_after_padding=part.num_tokens_after_padding,
        input_ids=part.input_ids,
        positions=part.positions,
        is_padding=part.is_padding,
        query_start_loc=part.query_start_loc,
        seq_lens=part.seq_lens,
        dcp_local_seq_lens=part.dcp_local_seq_lens,
        block_tables=part.block_tables,
        slot_mappings=part.slot_mappings,
        microbatches=(),
    )
