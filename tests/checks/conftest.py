"""Small plans and good records for tests of the judge."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pcpbench.checks.oracle import Oracle
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.plan import NewRequest, ScenarioPlan, ScheduledRequest, StepPlan
from pcpbench.records import RankRecord, StepRecord
from pcpbench.world import World

HIDDEN, VOCAB = 6, 11
NONE = BatchExecutionDescriptor(CUDAGraphMode.NONE, 0, None)


def full(num_reqs, query_len=1):
    return BatchExecutionDescriptor(
        CUDAGraphMode.FULL, num_reqs * query_len, num_reqs, uniform_token_count=query_len
    )


def piecewise(num_tokens):
    return BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, num_tokens, None)


def scheduled(req_id, count, computed=0, prompt=None):
    """One request's share of a step; a prompt shorter than `computed` makes it a decode."""
    prompt = computed + count if prompt is None else prompt
    return ScheduledRequest(
        req_id=req_id,
        num_scheduled_tokens=count,
        num_computed_tokens=computed,
        prefill_len=prompt,
        prompt_len=prompt,
    )


def prompt_of(number, length):
    return tuple((7 * number + i) % VOCAB for i in range(length))


def make_plan(prompts, num_decodes, block_size=4, scenario="made-up"):
    """All prompts prefill whole in step 0, then `num_decodes` steps decode every request."""
    steps, names = [], [f"r{i}" for i in range(len(prompts))]
    next_block, held = 1, dict.fromkeys(names, 0)
    for index in range(num_decodes + 1):
        shares = [
            scheduled(name, length, 0, length)
            if index == 0
            else scheduled(name, 1, length + index - 1, length)
            for name, length in zip(names, prompts, strict=True)
        ]
        blocks = {}
        for share in shares:
            need = -(-(share.num_computed_tokens + share.num_scheduled_tokens) // block_size)
            extra = need - held[share.req_id]
            if extra:
                blocks[share.req_id] = (tuple(range(next_block, next_block + extra)),)
                next_block += extra
                held[share.req_id] = need
        new = tuple(
            NewRequest(req_id=n, prompt_token_ids=prompt_of(i, length), max_tokens=num_decodes + 1)
            for i, (n, length) in enumerate(zip(names, prompts, strict=True))
        )
        steps.append(
            StepPlan(
                index=index,
                scheduled=tuple(shares),
                new_requests=new if index == 0 else (),
                new_block_ids=blocks,
                time_s=float(index),
            )
        )
    return plan_of(steps, block_size, next_block, scenario)


def plan_of(steps, block_size=4, num_blocks=64, scenario="made-up", arrivals=None, **more):
    return ScenarioPlan(
        scenario=scenario,
        steps=tuple(steps),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=256,
        num_blocks=num_blocks,
        block_sizes=(block_size,),
        vocab_size=VOCAB,
        arrivals_s=arrivals or {},
        **more,
    )


def good_record(plan, step, setup, expected, descriptor=NONE, miss_reason="", seed=0):
    """The record of an engine that did everything right, with columns past a row's blocks dirty."""
    rng = np.random.default_rng([seed, step.index])
    sampled = [r.req_id for r in step.scheduled if r.samples]
    tokens = rng.integers(VOCAB, size=len(sampled))
    logits = rng.standard_normal((len(sampled), VOCAB)).astype(np.float32)
    logits[np.arange(len(tokens)), tokens] = 9.0  # what was sampled is the best, as it must be
    return StepRecord(
        arm=setup.name,
        scenario=plan.scenario,
        step=step.index,
        descriptor=descriptor,
        miss_reason=miss_reason,
        ranks=tuple(_rank_record(e, expected, descriptor) for e in expected.ranks),
        sampled_req_ids=tuple(sampled),
        sampled=tokens,
        logits=logits,
        hidden=rng.standard_normal((step.num_tokens, HIDDEN)).astype(np.float32),
    )


def _rank_record(e, expected, descriptor):
    real = e.num_reqs_after_padding
    tables = []
    for rows in e.block_ids:
        table = np.zeros((real, 24), dtype=np.int32)
        for index, blocks in enumerate(rows):
            table[index, : len(blocks)] = blocks
            table[index, len(blocks) :] = 999  # unread
        tables.append(table)
    rows = e.rows
    return RankRecord(
        rank=e.rank,
        num_reqs=e.num_reqs,
        num_reqs_after_padding=real,
        num_tokens=e.num_tokens,
        num_tokens_after_padding=e.num_tokens_after_padding,
        input_ids=np.maximum(e.input_ids, 0).astype(np.int32),
        positions=e.positions.copy(),
        is_padding=np.arange(e.num_tokens_after_padding) >= e.num_tokens,
        query_start_loc=e.query_start_loc.astype(np.int32),
        seq_lens=e.seq_lens.astype(np.int32),
        dcp_local_seq_lens=(
            None if e.dcp_local_seq_lens is None else e.dcp_local_seq_lens.astype(np.int32)
        ),
        block_tables=tuple(tables),
        slot_mappings=e.slot_mappings.copy(),
        row_req_index=np.array([r.req_index for r in rows] or [0]),
        row_start=np.array([r.start for r in rows] or [-1]),
        hidden_restore_idx=None if e.write_mask is None else _restore(e),
        gathered_kv_write_mask=None if e.write_mask is None else e.write_mask.copy(),
        descriptor=descriptor,
        dispatch_num_reqs=expected.dispatch_num_reqs,
        dispatch_num_tokens=expected.dispatch_num_tokens,
        collectives=(),
    )


def idle_record(setup, descriptor, num_tokens=1, num_reqs=1, num_columns=None):
    """A sound idle step of an arm: the dummy batch of the descriptor, or of the counts for NONE.

    num_columns: gathered slots; as many as the dummy batch has by default.
    """
    world, is_full = setup.world, descriptor.cg_mode is CUDAGraphMode.FULL
    num_tokens = descriptor.num_tokens or num_tokens
    num_reqs = descriptor.num_reqs or num_reqs
    query_lens = np.full(num_reqs, num_tokens // num_reqs)
    query_lens[num_reqs - num_tokens % num_reqs :] += 1
    lengths = query_lens + (
        world.dcp_size * setup.interleave if is_full and world.dcp_size > 1 else 0
    )
    columns = num_tokens * world.pcp_size if num_columns is None else num_columns
    tables = (np.zeros((num_reqs, 6), dtype=np.int32),) if is_full else ()
    ranks = tuple(
        RankRecord(
            rank=rank,
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            num_tokens=num_tokens,
            num_tokens_after_padding=num_tokens,
            input_ids=np.zeros(num_tokens, dtype=np.int32),
            positions=np.zeros(num_tokens, dtype=np.int64),
            is_padding=np.ones(num_tokens, dtype=np.bool_),
            query_start_loc=np.append(0, np.cumsum(query_lens)).astype(np.int32),
            seq_lens=lengths.astype(np.int32),
            dcp_local_seq_lens=_dummy_shares(lengths, setup, rank) if is_full else None,
            block_tables=tables,
            slot_mappings=np.full((1, columns), -1) if is_full else np.zeros((0, 0), dtype=int),
            row_req_index=np.arange(num_reqs),
            row_start=np.zeros(num_reqs, dtype=np.int64),
            hidden_restore_idx=None,
            gathered_kv_write_mask=None,
            descriptor=descriptor,
            dispatch_num_reqs=1,
            dispatch_num_tokens=1,
        )
        for rank in range(world.size)
    )
    nothing = np.zeros((0, 0), np.float32)
    return StepRecord(
        arm=setup.name,
        scenario="made-up",
        step=4,
        descriptor=descriptor,
        miss_reason="",
        ranks=ranks,
        sampled_req_ids=(),
        sampled=np.zeros(0, np.int64),
        logits=nothing,
        hidden=nothing,
        idle=True,
    )


def _dummy_shares(lengths, setup, rank):
    """Positions below each length that this rank holds, counted one by one."""
    size, run = setup.world.dcp_size, setup.interleave
    if size == 1:
        return None
    me = setup.world.dcp_rank(rank)
    return np.array([sum(p // run % size == me for p in range(n)) for n in lengths])


def _restore(e):
    """Position of each token's writer in the gathered batch."""
    order = np.flatnonzero(e.write_mask)
    return order[np.argsort(e.gathered_token[order])]


class Bench:
    """A plan, an arm and an oracle that walks along it."""

    def __init__(self, plan, setup, feed=None):
        self.plan, self.setup, self.oracle = plan, setup, Oracle(plan)
        self.feed = TokenFeed() if feed is None else feed

    def at(self, index, descriptor=NONE, miss_reason=""):
        """Walk to a step (once); the step, its expectation and a good record of it."""
        for step in self.plan.steps[: index + 1]:
            self.oracle.advance(step)
            self.feed.advance(step)
            if step.index < index:
                names = [r.req_id for r in step.scheduled if r.samples]
                self.feed.extend(names, np.arange(len(names)) + step.index)
        step = self.plan.steps[index]
        expected = self.oracle.expect(step, self.setup, descriptor, self.feed)
        record = good_record(self.plan, step, self.setup, expected, descriptor, miss_reason)
        return step, expected, record


def change_rank(record, rank, **changes):
    """The record with some fields of one rank replaced."""
    ranks = list(record.ranks)
    ranks[rank] = replace(ranks[rank], **changes)
    return replace(record, ranks=tuple(ranks))


@pytest.fixture(scope="session")
def kit():
    """Everything above, since test modules cannot import each other."""
    return SimpleNamespace(
        NONE=NONE,
        full=full,
        piecewise=piecewise,
        scheduled=scheduled,
        entering=lambda req_id, length: NewRequest(
            req_id=req_id, prompt_token_ids=prompt_of(0, length), max_tokens=4
        ),
        make_plan=make_plan,
        plan_of=plan_of,
        prompt_of=prompt_of,
        good_record=good_record,
        idle_record=idle_record,
        change_rank=change_rank,
        Bench=Bench,
        setup=lambda name="eager", pcp=1, tp=1, dcp=1, **more: ArmSetup(
            name=name, world=World(pcp_size=pcp, tp_size=tp, dcp_size=dcp), **more
        ),
    )
