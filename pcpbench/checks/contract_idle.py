"""C1-C3, C5 and C6 in an idle step: its dummy batch is as documented (SPEC 4, 6).

Owns what a dummy batch looks like: padding throughout, tokens spread evenly over its rows, no
table entry but the null block, and no context but that of a FULL graph under DCP. That its slots
are PAD is C4, in contract_slots.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcpbench.checks.findings import StepView, mismatch, nonzero
from pcpbench.checks.oracle_tables import dcp_share
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import CUDAGraphMode
from pcpbench.records import IntArray, RankRecord, Violation

WHAT = "dummy token of an idle step"


def check_idle(view: StepView) -> Iterator[Violation]:
    """Each rank's dummy batch; nothing for a step that computes."""
    if view.expected is not None:
        return
    for record in view.record.ranks:
        query_lens = spread(record.num_tokens, record.num_reqs)
        for contract, tensor, message in (
            *_tokens(record, view.setup),
            *_rows(record, query_lens, view.setup),
            *_tables(record),
            *_dcp_lengths(record, view.setup),
        ):
            if message:
                yield view.violation(contract, record.rank, tensor, message)


def _tokens(record: RankRecord, setup: ArmSetup) -> Iterator[tuple[str, str, str]]:
    """C3: as many tokens as the descriptor has, all of them id 0 at position 0 and padding."""
    total, chosen = record.num_tokens_after_padding, record.descriptor
    if chosen.cg_mode is not CUDAGraphMode.NONE and chosen.num_tokens != total:
        yield "C3", "num_tokens", f"{total} dummy tokens are staged for {chosen.label}"
    flags = np.ones(total, dtype=np.bool_)
    yield "C3", "is_padding", mismatch("is_padding", record.is_padding, flags, WHAT)
    name, gathered = "gathered_is_padding", record.gathered_is_padding
    if gathered is not None:
        yield "C3", name, mismatch(name, gathered, np.tile(flags, setup.world.pcp_size), WHAT)
    for name in ("input_ids", "positions"):
        found = getattr(record, name)
        yield "C3", name, mismatch(name, found, np.zeros(total, dtype=found.dtype), WHAT)


def _rows(
    record: RankRecord, query_lens: IntArray, setup: ArmSetup
) -> Iterator[tuple[str, str, str]]:
    """C1 and C2: lengths are query and dummy context; queries are the tokens spread evenly."""
    chosen, num_rows = record.descriptor, record.num_reqs_after_padding
    is_full = chosen.cg_mode is CUDAGraphMode.FULL
    if is_full and chosen.num_reqs != num_rows:
        yield "C1", "num_reqs", f"{num_rows} dummy rows are staged for {chosen.label}"
    has_context = is_full and setup.world.dcp_size > 1 and setup.traits.idle_has_context
    context = setup.world.dcp_size * setup.interleave if has_context else 0
    room = query_lens * 0 + context
    if setup.max_model_len is not None:
        room = np.clip(setup.max_model_len - query_lens, 0, context)
    seq_lens = np.zeros(num_rows, dtype=np.int64)
    seq_lens[: len(query_lens)] = query_lens + room
    what = f"dummy row with {context} tokens of context"
    yield "C1", "seq_lens", mismatch("seq_lens", record.seq_lens, seq_lens, what)
    starts = np.full(num_rows + 1, record.num_tokens, dtype=np.int64)
    starts[0] = 0
    starts[1 : len(query_lens) + 1] = np.cumsum(query_lens)
    what = f"{record.num_tokens} dummy tokens spread over {record.num_reqs} rows"
    found = record.query_start_loc
    yield "C2", "query_start_loc", mismatch("query_start_loc", found, starts, what)


def _tables(record: RankRecord) -> Iterator[tuple[str, str, str]]:
    """C5: every entry of every row is the null block. FULL never goes without tables."""
    if record.descriptor.cg_mode is CUDAGraphMode.FULL and not record.block_tables:
        yield "C5", "block_tables", f"{record.descriptor.label} ran without attention inputs"
    for group, table in enumerate(record.block_tables):
        name = f"block_tables[{group}]"
        if len(table) != record.num_reqs_after_padding:
            rows = record.num_reqs_after_padding
            yield "C5", "block_tables", f"{name} has {len(table)} rows for {rows} dummy rows"
        yield "C5", "block_tables", nonzero(name, table, 0, "row of an idle step")


def _dcp_lengths(record: RankRecord, setup: ArmSetup) -> Iterator[tuple[str, str, str]]:
    """C6: this rank's share of the dummy lengths, wherever attention is run."""
    found, world = record.dcp_local_seq_lens, setup.world
    name = "dcp_local_seq_lens"
    if found is None:
        if world.dcp_size > 1 and record.descriptor.cg_mode is CUDAGraphMode.FULL:
            yield "C6", name, f"{name} is missing for {record.descriptor.label}"
        return
    me = world.dcp_rank(record.rank)
    shares = [dcp_share(int(n), world.dcp_size, me, setup.interleave) for n in record.seq_lens]
    what = f"DCP rank {me}'s share of a dummy row"
    yield "C6", name, mismatch(name, found, np.array(shares, dtype=np.int64), what)


def spread(num_tokens: int, num_reqs: int) -> IntArray:
    """Query lengths of a dummy batch: 7 tokens over 3 rows are 2, 2, 3."""
    whole, rest = divmod(num_tokens, max(1, num_reqs))
    return np.array([whole + (row >= num_reqs - rest) for row in range(num_reqs)], dtype=np.int64)
