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
from pcpbench.checks.oracle_microbatch import cut_expectation
from pcpbench.checks.oracle_tables import TokenFeed, dcp_share
from pcpbench.checks.partition_fields import expected_fields, expected_part, expected_rows
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
from pcpbench.partition_results import REFUSED, PartitionOutputs, Value
from pcpbench.plan import NewRequest, ScenarioPlan, ScheduledRequest, StepPlan
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
        fields = expected_fields(rank, whole, (num_columns(case.dcp),))
        for index, part in enumerate(parts):
            own = expected_part(rank, part.ranks[rank.rank], index, (num_columns(case.dcp),))
            fields |= {f"ubatch{index}.{name}": value for name, value in own.items()}
        fields |= expected_rows(rank, case.requests)
        if case.pcp > 1:
            fields |= _request_fields(case, rank)
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


def _request_fields(case: PartitionCase, rank: RankExpectation) -> dict[str, Value]:
    """What a rank's batch carries of the whole requests behind its rows (vLLM's PCPBatchMetadata).

    A rank with nothing to do has request 0. Under DCP the bound of a row is DCP rank 0's share of
    the whole request, which no rank's exceeds; it is 0 in padding rows.
    """
    requests = [case.requests[row.req_index] for row in rank.rows] or [case.requests[0]]
    lengths = np.array([request.num_scheduled_tokens for request in requests])
    ends = np.array([request.last_token for request in requests])
    fields: dict[str, Value] = {
        "pcp.global_num_tokens": str(sum(r.num_scheduled_tokens for r in case.requests)),
        "pcp.global_query_lens_np": lengths,
        "pcp.global_seq_lens_cpu_upper_bound_np": ends,
        "pcp.is_padding": rank.gathered_token < 0,
    }
    if case.dcp > 1:
        bound = np.zeros(rank.num_reqs_after_padding, dtype=np.int64)
        bound[: len(ends)] = [dcp_share(int(n), case.dcp, 0, case.interleave) for n in ends]
        fields["pcp.dcp_local_seq_lens_cpu_upper_bound"] = bound
    return fields


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
