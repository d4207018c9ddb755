"""The oracle's expectation of a step as the fields that makers hand out.

Owns the shape of a field, no arithmetic: all of that is the oracle's (oracle.py,
oracle_microbatch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pcpbench.checks.oracle import RankExpectation, StepExpectation
from pcpbench.checks.oracle_microbatch import cut_bounds
from pcpbench.partition_results import UNREAD, Value
from pcpbench.records import IntArray


def expected_fields(
    rank: RankExpectation, whole: StepExpectation, num_columns: Sequence[int]
) -> dict[str, Value]:
    """The fields of one rank; a rank with nothing to do has request 0 without tokens.

    num_columns: of each KV group's table.
    """
    count, total = rank.num_tokens, rank.num_tokens_after_padding
    rows = [(row.req_index, row.start) for row in rank.rows] or [(0, 0)]
    fields: dict[str, Value] = {
        "num_reqs": rank.num_reqs,
        "num_reqs_after_padding": rank.num_reqs_after_padding,
        "num_tokens": count,
        "num_tokens_after_padding": total,
        "input_ids": rank.input_ids,
        "positions": rank.positions,
        "is_padding": np.arange(total) >= count,
        "query_start_loc": rank.query_start_loc,
        "seq_lens": rank.seq_lens,
        "slot_mappings": rank.slot_mappings,
        "row_req_index": np.array([at for at, _ in rows]),
        "row_start": np.array([start for _, start in rows]),
    }
    for group, columns in enumerate(num_columns):
        table = _table(rank, group, columns)
        table[rank.num_reqs :] = 0
        fields[f"block_tables.{group}"] = table
    if rank.dcp_local_seq_lens is not None:
        fields["dcp_local_seq_lens"] = rank.dcp_local_seq_lens
    if rank.write_mask is not None:
        fields["gathered_kv_write_mask"] = rank.write_mask
        fields["padded_gather_idx"] = np.maximum(rank.gathered_token, 0)
        restore = np.zeros(whole.num_tokens, dtype=np.int64)
        writers = np.flatnonzero(rank.write_mask)
        restore[rank.gathered_token[writers]] = writers
        fields["hidden_restore_idx"] = restore
    return fields


class Request(Protocol):
    """What the host knows of a request."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens before this step."""

    @property
    def prefill_len(self) -> int:
        """Tokens known when it was admitted."""

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens of its prompt are left."""


def expected_rows(rank: RankExpectation, requests: Sequence[Request]) -> dict[str, Value]:
    """What the host knows of each row; a rank with nothing to do has request 0 without tokens."""
    rows = [(row.req_index, row.start, row.num_tokens) for row in rank.rows] or [(0, 0, 0)]
    behind = [requests[at] for at, _, _ in rows]
    starts = [request.num_computed_tokens for request in behind]
    begins = [c + start for c, (_, start, _) in zip(starts, rows, strict=True)]
    bound = np.zeros(rank.num_reqs_after_padding, dtype=np.int64)
    bound[: len(rows)] = rank.seq_lens[: len(rows)]
    if not rank.rows:
        bound[0] = 0
    return {
        "num_scheduled_tokens": np.array([count for _, _, count in rows]),
        "num_computed_tokens_np": np.array(begins),
        "prefill_len_np": np.array([request.prefill_len for request in behind]),
        "is_prefilling_np": np.array([request.is_prefilling for request in behind]),
        "query_start_loc_np": rank.query_start_loc,
        "seq_lens_cpu_upper_bound": bound,
    }


def expected_part(
    rank: RankExpectation, part: RankExpectation, index: int, num_columns: Sequence[int]
) -> dict[str, Value]:
    """One of two microbatches; a rank with nothing to do has its row of no tokens in both."""
    first = cut_bounds(rank.num_tokens_after_padding, 2)[index][0]
    count, total = part.num_tokens, part.num_tokens_after_padding
    fields: dict[str, Value] = {
        "first_token": first,
        "num_reqs": part.num_reqs,
        "num_reqs_after_padding": part.num_reqs_after_padding,
        "num_tokens": count,
        "num_tokens_after_padding": total,
        "row_index": np.array(_rows_in(rank, part, first)),
        "input_ids": part.input_ids,
        "positions": part.positions,
        "is_padding": np.arange(total) >= count,
        "query_start_loc": part.query_start_loc[: part.num_reqs + 1],
        "seq_lens": part.seq_lens[: part.num_reqs],
        "slot_mappings": part.slot_mappings,
        "padding_rows": "neutral",
    }
    for group, columns in enumerate(num_columns):
        fields[f"block_tables.{group}"] = _table(part, group, columns)[: part.num_reqs]
    if part.dcp_local_seq_lens is not None:
        fields["dcp_local_seq_lens"] = part.dcp_local_seq_lens[: part.num_reqs]
    return fields


def _table(rank: RankExpectation, group: int, columns: int) -> IntArray:
    """The request's blocks in each real row, and UNREAD past them."""
    table = np.full((rank.num_reqs_after_padding, columns), UNREAD, dtype=np.int64)
    for row, ids in enumerate(rank.block_ids[group]):
        table[row, : len(ids)] = ids
    return table


def _rows_in(rank: RankExpectation, part: RankExpectation, first: int) -> list[int]:
    """The batch's row of each of a microbatch's rows, found by the token that it begins with."""
    if not rank.rows:
        return [0]
    if not part.num_tokens:
        return [len(rank.rows) - 1]
    starts = rank.query_start_loc
    found, place = [], first
    for row in part.rows:
        at = max(n for n in range(len(rank.rows)) if starts[n] <= place < starts[n + 1])
        found.append(at)
        place += row.num_tokens
    return found
