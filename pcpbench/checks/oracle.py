"""All metadata of a step on every rank, rebuilt from the scheduler's plan (SPEC 5, 7, 9, 12).

Owns the expectation that contracts hold a record against. It shares no code with the engine: an
engine and its eager twin can read the same stale row and agree, and only a rebuild notices.
Call `advance` once for each step of the plan in order, then `expect` for each arm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pcpbench.checks.oracle_drafts import DraftExpectation, expect_drafts
from pcpbench.checks.oracle_partition import Row, rank_rows
from pcpbench.checks.oracle_tables import PAD, RequestBook, TokenFeed, dcp_share
from pcpbench.checks.selection import select
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import BoolArray, IndexTables, IntArray

PADDED_MODES = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


@dataclass(frozen=True, kw_only=True)
class RankExpectation:
    """What one rank should hold (R rows, T tokens after padding), shaped as in RankRecord.

    rows: the real rows; empty for a rank with nothing to do, whose num_reqs is 1.
    input_ids: -1 where the token cannot be known. block_ids[group][row]: real columns only.
    held_block_ids: the same with what the request had given back for the null block; () for the
    parts of a step in microbatches.
    gathered_token [T * pcp]: which global token lies at each place of the gathered batch, -1 for
    padding. write_mask [T * pcp]: None without PCP.
    """

    rank: int
    rows: tuple[Row, ...]
    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int
    input_ids: IntArray
    positions: IntArray
    query_start_loc: IntArray
    seq_lens: IntArray
    dcp_local_seq_lens: IntArray | None
    block_ids: tuple[tuple[IntArray, ...], ...]
    held_block_ids: tuple[tuple[IntArray, ...], ...] = ()
    slot_mappings: IntArray
    gathered_token: IntArray
    write_mask: BoolArray | None


@dataclass(frozen=True, kw_only=True)
class StepExpectation:
    """What one step should be on all ranks.

    dispatch_num_reqs, dispatch_num_tokens: largest rank-local counts over the PCP ranks.
    uniform_token_count: tokens of every request where all decode and agree, else None.
    selected [layers, num_tokens, topk]: positions that each token of the global batch attends to,
    rising, see `selection.select`; None for a model that attends to all.
    draft: of the passes of a draft model; None without one.
    """

    num_tokens: int
    ranks: tuple[RankExpectation, ...]
    dispatch_num_reqs: int
    dispatch_num_tokens: int
    has_prefill: bool
    uniform_token_count: int | None
    max_query_len: int
    selected: IntArray | None = None
    draft: DraftExpectation | None = None


@dataclass(frozen=True)
class _Layout:
    """What the PCP ranks share: rows of each, common token count, who holds what in the gather."""

    rows: list[list[Row]]
    offsets: list[int]
    padded_tokens: int
    gathered_token: IntArray
    write_mask: BoolArray


class Oracle:
    """Follows a plan and answers what each step should look like."""

    def __init__(self, plan: ScenarioPlan) -> None:
        self.plan = plan
        self.book = RequestBook(plan)
        self._cache: dict[object, StepExpectation] = {}
        self._slots_of: dict[tuple[int, int, int], tuple[IntArray, IntArray]] = {}
        self._selected: dict[tuple[int, int], IntArray] = {}

    def advance(self, step: StepPlan) -> None:
        """Enter the next step of the plan."""
        self.book.advance(step)
        self._cache.clear()
        self._slots_of.clear()
        self._selected.clear()

    def expect(
        self, step: StepPlan, setup: ArmSetup, descriptor: BatchExecutionDescriptor, feed: TokenFeed
    ) -> StepExpectation:
        """What every rank of an arm should hold when the step is padded to `descriptor`.

        NONE pads nothing (PCP ranks still share the largest local token count), PIECEWISE pads
        tokens, FULL pads tokens and rows. A descriptor too small for the batch pads nothing either;
        contract C10 names it.
        """
        padded = descriptor.cg_mode in PADDED_MODES
        num_tokens = descriptor.num_tokens if padded else 0
        num_reqs = (descriptor.num_reqs or 0) if padded else 0
        layout = (setup.world, setup.interleave, setup.sharded_groups)
        key = (*layout, num_tokens, num_reqs, id(feed), id(setup.index_tables))
        if key not in self._cache:
            self._cache[key] = self._build(step, setup, num_tokens, num_reqs, feed)
        return self._cache[key]

    def _build(
        self, step: StepPlan, setup: ArmSetup, num_tokens: int, num_reqs: int, feed: TokenFeed
    ) -> StepExpectation:
        layout = _lay_out(step, setup, num_tokens)
        ids, positions = self._global_tokens(step, feed)
        ranks = tuple(
            self._rank(step, setup, rank, layout, num_reqs, ids, positions)
            for rank in range(setup.world.size)
        )
        lengths = {request.num_scheduled_tokens for request in step.scheduled}
        uniform = lengths.pop() if len(lengths) == 1 and not step.has_prefill else None
        return StepExpectation(
            num_tokens=step.num_tokens,
            ranks=ranks,
            dispatch_num_reqs=max(max(1, len(rows)) for rows in layout.rows),
            dispatch_num_tokens=max(_count(rows) for rows in layout.rows),
            has_prefill=step.has_prefill,
            uniform_token_count=uniform,
            max_query_len=max((r.num_scheduled_tokens for r in step.scheduled), default=0),
            selected=self._select(step, setup.index_tables, feed),
            draft=expect_drafts(step, setup, self.plan, self.book, feed),
        )

    def _select(
        self, step: StepPlan, tables: IndexTables | None, feed: TokenFeed
    ) -> IntArray | None:
        """What each token of the global batch attends to, from the tokens ahead of it."""
        if tables is None:
            return None
        key = (id(tables), id(feed))
        if key not in self._selected:
            parts: list[IntArray] = [np.zeros((len(tables.layers), 0, tables.topk), dtype=np.int64)]
            for request in step.scheduled:
                first = request.num_computed_tokens
                last = first + request.num_scheduled_tokens
                tokens = self.book.tokens(request.req_id, 0, last, feed)
                parts.append(select(tables, np.array(tokens, dtype=np.int64), first))
            self._selected[key] = np.concatenate(parts, axis=1)
        return self._selected[key]

    def _global_tokens(self, step: StepPlan, feed: TokenFeed) -> tuple[IntArray, IntArray]:
        """Input id and position of every token of the global batch."""
        ids: list[int] = []
        positions: list[int] = []
        for request in step.scheduled:
            first, count = request.num_computed_tokens, request.num_scheduled_tokens
            ids += self.book.tokens(request.req_id, first, count, feed)
            positions += range(first, first + count)
        return np.array(ids, dtype=np.int64), np.array(positions, dtype=np.int64)

    def _rank(
        self,
        step: StepPlan,
        setup: ArmSetup,
        rank: int,
        layout: _Layout,
        num_reqs_padded: int,
        ids: IntArray,
        positions: IntArray,
    ) -> RankExpectation:
        pcp_rank = setup.world.pcp_rank(rank)
        rows, total = layout.rows[pcp_rank], layout.padded_tokens
        num_reqs = max(1, len(rows))
        num_rows = max(num_reqs, num_reqs_padded)
        count = _count(rows)
        tokens = layout.gathered_token[pcp_rank * total : pcp_rank * total + count]
        starts = np.full(num_rows + 1, count, dtype=np.int64)
        starts[0] = 0
        seq_lens = np.zeros(num_rows, dtype=np.int64)
        for index, row in enumerate(rows):
            starts[index + 1] = starts[index] + row.num_tokens
            computed = step.scheduled[row.req_index].num_computed_tokens
            seq_lens[index] = computed + row.start + row.num_tokens
        return RankExpectation(
            rank=rank,
            rows=tuple(rows),
            num_reqs=num_reqs,
            num_reqs_after_padding=num_rows,
            num_tokens=count,
            num_tokens_after_padding=total,
            input_ids=_padded(ids[tokens], total),
            positions=_padded(positions[tokens], total),
            query_start_loc=starts,
            seq_lens=seq_lens,
            dcp_local_seq_lens=dcp_lengths(seq_lens, setup, rank),
            block_ids=self._block_ids(step, rows, self.book.table),
            held_block_ids=self._block_ids(step, rows, self.book.held),
            slot_mappings=self._slots(step, setup, rank, layout),
            gathered_token=layout.gathered_token,
            write_mask=layout.write_mask if setup.world.pcp_size > 1 else None,
        )

    def _block_ids(
        self, step: StepPlan, rows: list[Row], table: Callable[[str, int], list[int]]
    ) -> tuple[tuple[IntArray, ...], ...]:
        names = [step.scheduled[row.req_index].req_id for row in rows]
        return tuple(
            tuple(np.array(table(name, group), dtype=np.int64) for name in names)
            for group in range(len(self.plan.block_sizes))
        )

    def _slots(self, step: StepPlan, setup: ArmSetup, rank: int, layout: _Layout) -> IntArray:
        """Gathered slots of one rank: PAD for padding, for all but one writer, for other shards."""
        gathered = np.full((len(self.plan.block_sizes), len(layout.gathered_token)), PAD)
        writes = layout.write_mask
        for group in range(len(self.plan.block_sizes)):
            slots, owner = self.token_slots(step, setup, group)
            dcp_rank = setup.world.dcp_rank(rank) if setup.dcp_size_of(group) > 1 else 0
            mine = np.where(owner == dcp_rank, slots, PAD)
            gathered[group, writes] = mine[layout.gathered_token[writes]]
        return gathered

    def token_slots(self, step: StepPlan, setup: ArmSetup, group: int) -> tuple[IntArray, IntArray]:
        """Slot and owning DCP rank of every token of the global batch, for the current step."""
        dcp_size, interleave = setup.dcp_size_of(group), setup.interleave
        key = (dcp_size, interleave, group)
        if key not in self._slots_of:
            slots: list[IntArray] = [np.zeros(0, dtype=np.int64)]
            owners: list[IntArray] = [np.zeros(0, dtype=np.int64)]
            for request in step.scheduled:
                first = request.num_computed_tokens
                where = np.arange(first, first + request.num_scheduled_tokens, dtype=np.int64)
                found = self.book.slots(request.req_id, group, where, dcp_size, interleave)
                slots.append(found[0])
                owners.append(found[1])
            self._slots_of[key] = (np.concatenate(slots), np.concatenate(owners))
        return self._slots_of[key]


def _lay_out(step: StepPlan, setup: ArmSetup, num_tokens_padded: int) -> _Layout:
    """Rows of every PCP rank and the gathered batch that they form.

    A replicated token is written by PCP rank 0 alone, any other by the rank that holds it.
    """
    world = setup.world
    rows = [rank_rows(step, world, rank) for rank in range(world.pcp_size)]
    offsets = [0]
    for request in step.scheduled:
        offsets.append(offsets[-1] + request.num_scheduled_tokens)
    total = max(num_tokens_padded, *(_count(one) for one in rows))
    token = np.full(total * world.pcp_size, -1, dtype=np.int64)
    writes = np.zeros(total * world.pcp_size, dtype=np.bool_)
    for pcp_rank, one in enumerate(rows):
        place = pcp_rank * total
        for row in one:
            first = offsets[row.req_index] + row.start
            token[place : place + row.num_tokens] = range(first, first + row.num_tokens)
            writes[place : place + row.num_tokens] = pcp_rank == 0 or not row.replicated
            place += row.num_tokens
    return _Layout(rows, offsets, total, token, writes)


def dcp_lengths(seq_lens: IntArray, setup: ArmSetup, rank: int) -> IntArray | None:
    """A rank's share of each length (SPEC 7); None where nothing is sharded."""
    world = setup.world
    if world.dcp_size == 1:
        return None
    me = world.dcp_rank(rank)
    shares = [dcp_share(int(n), world.dcp_size, me, setup.interleave) for n in seq_lens]
    return np.array(shares, dtype=np.int64)


def _padded(values: IntArray, total: int) -> IntArray:
    out = np.zeros(total, dtype=np.int64)
    out[: len(values)] = values
    return out


def _count(rows: list[Row]) -> int:
    return sum(row.num_tokens for row in rows)
