"""A broken metadata contract as two arrays: what was recorded and what the plan demands.

Owns which field of a record a violation is about. A violation about something that is no array of
both (a descriptor, a collective, an address) is told by its message alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pcpbench.checks.oracle import RankExpectation, StepExpectation
from pcpbench.checks.oracle_tables import UNKNOWN_TOKEN
from pcpbench.checks.tap_compare import TapFinding, describe
from pcpbench.divergence import TensorDifference
from pcpbench.records import RankRecord, StepRecord, Violation

METADATA: Final = frozenset({"C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8", "C9", "C10", "C11"})
"""Contracts on what a step is given, and not on what it computes."""

_FIELDS: Final = (
    "input_ids",
    "positions",
    "query_start_loc",
    "seq_lens",
    "dcp_local_seq_lens",
    "slot_mappings",
)


def metadata_difference(
    violation: Violation, record: StepRecord | None, expected: StepExpectation | None
) -> TapFinding:
    """The place of a violation, with both sides where the record of its step has them."""
    bare = TensorDifference(
        step=violation.step,
        rank=violation.rank,
        layer=None,
        op="",
        tensor=violation.tensor,
        against="plan",
        message=violation.message,
    )
    if record is None or expected is None or violation.rank is None:
        return TapFinding(bare, None, None)
    rank = violation.rank
    sides = _sides(violation.tensor, record.ranks[rank], expected.ranks[rank])
    if sides is None:
        return TapFinding(bare, None, None)
    found, right = sides
    differs = found != right
    if violation.tensor == "input_ids":
        differs &= right != UNKNOWN_TOKEN
    if not differs.any():
        return TapFinding(bare, None, None)
    told = describe(found, right, differs, "plan")
    kept = {name: getattr(bare, name) for name in ("step", "rank", "tensor", "message")}
    return TapFinding(replace(told, **kept), found, right)


def _sides(
    tensor: str, record: RankRecord, expected: RankExpectation
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    if tensor == "is_padding":
        total = record.num_tokens_after_padding
        return record.is_padding, np.arange(total) >= expected.num_tokens
    found: NDArray[Any] | None
    right: NDArray[Any] | None
    if tensor == "block_tables":
        return _tables(record, expected)
    if tensor == "gathered_is_padding":
        found, right = record.gathered_is_padding, expected.gathered_token < 0
    elif tensor == "gathered_kv_write_mask":
        found, right = record.gathered_kv_write_mask, expected.write_mask
    elif tensor in _FIELDS:
        found, right = getattr(record, tensor), getattr(expected, tensor)
    else:
        return None
    if found is None or right is None or found.shape != right.shape:
        return None
    return found, right


def _tables(
    record: RankRecord, expected: RankExpectation
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The first group's table that is wrong; columns that nobody reads are taken as they are."""
    for found, rows in zip(record.block_tables, expected.block_ids, strict=False):
        if len(rows) > len(found) or max(map(len, rows), default=0) > found.shape[1]:
            return None  # the violation says so: there is no table of this shape to set beside it
        right = np.array(found)
        right[record.num_reqs :] = 0
        for row, ids in enumerate(rows):
            right[row, : len(ids)] = ids
        if (found != right).any():
            return found, right
    return None
