"""What every maker should make of a case of `check partition`, from the judge's own oracle.

Owns turning a case into a plan of one step, and the expectation into the fields that makers hand
out. All arithmetic is the oracle's (oracle.py, oracle_microbatch.py); which descriptor a step gets
is contract C10's own reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pcpbench.checks.candidates import wanted_shapes
from pcpbench.checks.contract_dispatch import smallest_covering
from pcpbench.checks.oracle import Oracle, RankExpectation, StepExpectation
from pcpbench.checks.oracle_microbatch import cut_bounds, cut_expectation
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.partition_cases import (
    BLOCK_SIZE,
    CAPTURE_SIZES,
    DISPATCHES,
    MAX_MODEL_LEN,
    MAX_NUM_TOKENS,
    NUM_SLOTS,
    VOCAB_SIZE,
    CaseRequest,
    DispatchSetup,
    PartitionCase,
    block_at,
    num_blocks_of,
    num_columns,
    token_at,
)
from pcpbench.partition_results import REFUSED, UNREAD, PartitionOutputs, Value
from pcpbench.plan import NewRequest, ScenarioPlan, ScheduledRequest, StepPlan
from pcpbench.records import IntArray
from pcpbench.world import World


def expected_outputs(case: PartitionCase) -> PartitionOutputs:
    """The oracle's answer: fields of all ranks, or that each rank has to refuse the batch."""
    whole = expectation_of(case)
    setup = _setup(case.pcp, case.dcp, case.tp, case.interleave)
    if is_refused(case, whole):
        ranks = tuple({"refusal": REFUSED} for _ in whole.ranks)
        return PartitionOutputs(ranks=ranks, step=_dispatch(whole))
    parts: list[StepExpectation] = []
    if case.is_cut and whole.ranks[0].num_tokens_after_padding > 1:
        parts = cut_expectation(whole, setup, 2, case.mode == CUDAGraphMode.FULL.name)
    found = []
    for rank in whole.ranks:
        fields = _rank_fields(case, rank, whole)
        for index, part in enumerate(parts):
            own = _part_fields(case, rank, part.ranks[rank.rank], index)
            fields |= {f"ubatch{index}.{name}": value for name, value in own.items()}
        found.append(fields)
    return PartitionOutputs(ranks=tuple(found), step=_dispatch(whole))


def expectation_of(case: PartitionCase) -> StepExpectation:
    """The oracle's expectation, as if the batch had to be taken."""
    oracle, step, feed = _oracle_of(case.requests, case.dcp)
    setup = _setup(case.pcp, case.dcp, case.tp, case.interleave)
    return oracle.expect(step, setup, case.descriptor, feed)


def is_refused(case: PartitionCase, expected: StepExpectation) -> bool:
    """Whether the batch may not be run so (SPEC 5): FULL with a prefill, or a rank without room."""
    descriptor = case.descriptor
    if case.pcp == 1 or descriptor.cg_mode is CUDAGraphMode.NONE:
        return False
    if descriptor.cg_mode is CUDAGraphMode.FULL and (
        expected.has_prefill or (descriptor.num_reqs or 0) < expected.dispatch_num_reqs
    ):
        return True
    return descriptor.num_tokens < expected.dispatch_num_tokens


@lru_cache(maxsize=1)
def _setup(pcp: int, dcp: int, tp: int, interleave: int) -> ArmSetup:
    world = World(pcp_size=pcp, dcp_size=dcp, tp_size=tp)
    return ArmSetup(name="partition", world=world, interleave=interleave)


@lru_cache(maxsize=1)
def _oracle_of(requests: tuple[CaseRequest, ...], dcp: int) -> tuple[Oracle, StepPlan, TokenFeed]:
    """The oracle of these requests, which all modes of one batch share."""
    plan, step, feed = plan_of(requests, dcp)
    oracle = Oracle(plan)
    oracle.advance(step)
    return oracle, step, feed


def plan_of(requests: Sequence[CaseRequest], dcp: int) -> tuple[ScenarioPlan, StepPlan, TokenFeed]:
    """A batch as the one step of a plan, with every request admitted in it."""
    span = BLOCK_SIZE * dcp
    feed = TokenFeed()
    scheduled, admitted = [], []
    blocks: dict[str, tuple[tuple[int, ...], ...]] = {}
    for request in requests:
        name = f"slot{request.slot}"
        prompt = tuple(token_at(request.slot, at) for at in range(request.prefill_len))
        num_drafts = 0 if request.is_prefilling else max(0, request.num_scheduled_tokens - 1)
        scheduled.append(
            ScheduledRequest(
                req_id=name,
                num_scheduled_tokens=request.num_scheduled_tokens,
                num_computed_tokens=request.num_computed_tokens,
                prefill_len=request.prefill_len,
                prompt_len=request.prefill_len,
                num_draft_tokens=num_drafts,
            )
        )
        admitted.append(NewRequest(req_id=name, prompt_token_ids=prompt, max_tokens=1))
        columns = range(num_blocks_of(request.slot, dcp))
        blocks[name] = (tuple(block_at(request.slot, column) for column in columns),)
        if not request.is_prefilling:
            after = range(request.num_computed_tokens, request.last_token)
            tokens = [token_at(request.slot, at) for at in after]
            feed.generated[name], feed.drafts[name] = tokens[:1], tokens[1:]
    step = StepPlan(
        index=0,
        scheduled=tuple(scheduled),
        new_requests=tuple(admitted),
        new_block_ids=blocks,
    )
    plan = ScenarioPlan(
        scenario="partition",
        steps=(step,),
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=1 + NUM_SLOTS * num_columns(dcp),
        block_sizes=(span,),
        vocab_size=VOCAB_SIZE,
    )
    return plan, step, feed


def _rank_fields(
    case: PartitionCase, rank: RankExpectation, whole: StepExpectation
) -> dict[str, Value]:
    count, total = rank.num_tokens, rank.num_tokens_after_padding
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
        "block_tables.0": _table(case, rank),
        **_row_fields(case, rank),
    }
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


def _row_fields(case: PartitionCase, rank: RankExpectation) -> dict[str, Value]:
    """What the host knows of each row; a rank with nothing to do has request 0 without tokens."""
    rows = [(row.req_index, row.start, row.num_tokens) for row in rank.rows] or [(0, 0, 0)]
    requests = [case.requests[at] for at, _, _ in rows]
    starts = [request.num_computed_tokens for request in requests]
    begins = [c + start for c, (_, start, _) in zip(starts, rows, strict=True)]
    bound = np.zeros(rank.num_reqs_after_padding, dtype=np.int64)
    bound[: len(rows)] = rank.seq_lens[: len(rows)]
    if not rank.rows:
        bound[0] = 0
    return {
        "row_req_index": np.array([at for at, _, _ in rows]),
        "row_start": np.array([start for _, start, _ in rows]),
        "num_scheduled_tokens": np.array([count for _, _, count in rows]),
        "num_computed_tokens_np": np.array(begins),
        "prefill_len_np": np.array([request.prefill_len for request in requests]),
        "is_prefilling_np": np.array([request.is_prefilling for request in requests]),
        "query_start_loc_np": rank.query_start_loc,
        "seq_lens_cpu_upper_bound": bound,
    }


def _table(case: PartitionCase, rank: RankExpectation) -> IntArray:
    """Padding rows 0; real ones the request's blocks, and UNREAD past them."""
    table = np.zeros((rank.num_reqs_after_padding, num_columns(case.dcp)), dtype=np.int64)
    table[: rank.num_reqs] = UNREAD
    for row, ids in enumerate(rank.block_ids[0]):
        table[row, : len(ids)] = ids
    return table


def _part_fields(
    case: PartitionCase,
    rank: RankExpectation,
    part: RankExpectation,
    index: int,
) -> dict[str, Value]:
    """One microbatch; a rank with nothing to do has its row of no tokens in both."""
    first = cut_bounds(rank.num_tokens_after_padding, 2)[index][0]
    count, total = part.num_tokens, part.num_tokens_after_padding
    rows = _rows_in(rank, part, first)
    table = np.full((part.num_reqs, num_columns(case.dcp)), UNREAD, dtype=np.int64)
    for at, ids in enumerate(part.block_ids[0]):
        table[at, : len(ids)] = ids
    fields: dict[str, Value] = {
        "first_token": first,
        "num_reqs": part.num_reqs,
        "num_reqs_after_padding": part.num_reqs_after_padding,
        "num_tokens": count,
        "num_tokens_after_padding": total,
        "row_index": np.array(rows),
        "input_ids": part.input_ids,
        "positions": part.positions,
        "is_padding": np.arange(total) >= count,
        "query_start_loc": part.query_start_loc[: part.num_reqs + 1],
        "seq_lens": part.seq_lens[: part.num_reqs],
        "slot_mappings": part.slot_mappings,
        "block_tables.0": table,
        "padding_rows": "neutral",
    }
    if part.dcp_local_seq_lens is not None:
        fields["dcp_local_seq_lens"] = part.dcp_local_seq_lens[: part.num_reqs]
    return fields


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


def _dispatch(whole: StepExpectation) -> dict[str, Value]:
    """Counts that ranks hand to dispatch, and the descriptor they should get, setup by setup."""
    fields: dict[str, Value] = {
        "dispatch_num_reqs": whole.dispatch_num_reqs,
        "dispatch_num_tokens": whole.dispatch_num_tokens,
    }
    for name, setup in DISPATCHES.items():
        fields[f"candidates[{name}]"] = candidates_text(candidates_of(setup))
        fields[f"dispatch[{name}]"] = choice_of(whole, setup)
        fields[f"runner_dispatch[{name}]"] = choice_of(whole, setup)
    return fields


def choice_of(whole: StepExpectation, setup: DispatchSetup) -> str:
    """The smallest covering descriptor, as text."""
    best = smallest_covering(candidates_of(setup), whole)
    return "NONE" if best is None else best.label


def candidates_text(candidates: Sequence[BatchExecutionDescriptor]) -> str:
    """All of them in one line, in an order of their own."""
    return " ".join(sorted(candidate.label for candidate in candidates))


@lru_cache(maxsize=len(DISPATCHES))
def candidates_of(setup: DispatchSetup) -> tuple[BatchExecutionDescriptor, ...]:
    """What SPEC 3 makes of the capture sizes, by contract C10's own list."""
    arm = ArmSetup(
        name="dispatch",
        world=World(),
        mode=setup.mode,
        capture_sizes=CAPTURE_SIZES,
        decode_query_len=setup.decode_query_len,
    )
    limits = ScenarioPlan(
        scenario="dispatch",
        steps=(),
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=2,
        block_sizes=(BLOCK_SIZE,),
        vocab_size=VOCAB_SIZE,
    )
    return tuple(
        BatchExecutionDescriptor(CUDAGraphMode[mode], tokens, reqs, length, longest)
        for mode, tokens, reqs, length, longest in wanted_shapes(arm, limits)
    )
