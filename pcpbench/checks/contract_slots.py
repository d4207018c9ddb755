"""C4 and C5: where a step's tokens go in the KV cache (SPEC 9, 12).

Owns slot mappings and block tables. Knows no KV data; that writes follow the mapping is C15.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcpbench.checks.findings import StepView, mismatch, nonzero
from pcpbench.checks.oracle import RankExpectation
from pcpbench.checks.oracle_tables import NULL_BLOCK, PAD, with_given_back
from pcpbench.records import RankRecord, Violation


def check_slot_mappings(view: StepView) -> Iterator[Violation]:
    """C4: PAD for padding, for all but one writer and for other shards; else the token's slot.

    An idle step's mapping is PAD throughout: a dummy batch owns no block.
    """
    if view.expected is None:
        for record in view.record.ranks:
            written = np.argwhere(record.slot_mappings != PAD)
            if len(written):
                place = tuple(written[0].tolist())
                message = (
                    f"slot_mappings[{place[0]}, {place[1]}] is "
                    f"{record.slot_mappings[place]} in an idle step, expected {PAD} everywhere; "
                    f"{len(written)} slots are written"
                )
                yield view.violation("C4", record.rank, "slot_mappings", message)
        return
    for record, expected in view.ranks():
        message = _slots_message(record, expected)
        if message:
            yield view.violation("C4", record.rank, "slot_mappings", message)


def _slots_message(record: RankRecord, expected: RankExpectation) -> str:
    found, right = record.slot_mappings, expected.slot_mappings
    if found.shape != right.shape:
        return mismatch("slot_mappings", found, right, "KV groups x gathered tokens")
    padding = expected.gathered_token < 0
    message = mismatch(
        "slot_mappings", found, np.full_like(right, PAD), "padding token", ~padding[None, :]
    )
    if message:
        return message
    message = mismatch("slot_mappings", found, right, "slot of a real token", padding[None, :])
    if not message:
        return ""
    place = int(np.nonzero((found != right) & ~padding[None, :])[1][0])
    total = record.num_tokens_after_padding
    return f"{message}; the first is token {place % total} of PCP rank {place // total}"


def check_block_tables(view: StepView) -> Iterator[Violation]:
    """C5: padded rows are 0; a real row starts with its request's blocks (the rest is unread).

    Blocks wholly before a sliding window were given back: the null block stands in their place.
    """
    for record, expected in view.ranks():
        if len(record.block_tables) != len(expected.block_ids):
            message = (
                f"{len(record.block_tables)} block tables for {len(expected.block_ids)} KV groups"
            )
            yield view.violation("C5", record.rank, "block_tables", message)
            continue
        for group, table in enumerate(record.block_tables):
            name = f"block_tables[{group}]"
            what = f"padding row, {record.num_reqs} real of {record.num_reqs_after_padding}"
            message = nonzero(name, table, record.num_reqs, what)
            if not message and len(table) != record.num_reqs_after_padding:
                message = (
                    f"{name} has {len(table)} rows, expected num_reqs_after_padding = "
                    f"{record.num_reqs_after_padding}"
                )
            if not message and record.num_reqs == expected.num_reqs:
                message = _real_rows_message(view, group, record, expected)
            if message:
                yield view.violation("C5", record.rank, "block_tables", message)


def _real_rows_message(
    view: StepView, group: int, record: RankRecord, expected: RankExpectation
) -> str:
    """The row of a rank with nothing to do has no expected blocks: its table is unread."""
    for index, blocks in enumerate(expected.block_ids[group]):
        found = record.block_tables[group][index, : len(blocks)]
        request = view.plan.scheduled[expected.rows[index].req_index].req_id
        right, what = blocks, f"blocks of request {request}"
        if len(blocks) and blocks[0] == NULL_BLOCK:
            what += ", the null block for those before its window"
            if view.setup.traits.given_back_in_tables_under_dcp and view.setup.world.dcp_size > 1:
                right = with_given_back(blocks, expected.held_block_ids[group][index], found)
        message = mismatch(f"block_tables[{group}][{index}]", found, right, what)
        if message:
            return message
    return ""
