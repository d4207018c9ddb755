"""A step of a scenario as the fields that targets are compared by, and what is known to differ.

Owns the expectation of one step at a time. All arithmetic is the oracle's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pcpbench.checks.contract_dispatch import smallest_covering
from pcpbench.checks.oracle import Oracle, StepExpectation
from pcpbench.checks.oracle_microbatch import cut_expectation
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.checks.partition_compare import Sides
from pcpbench.checks.partition_fields import expected_fields, expected_part, expected_rows
from pcpbench.checks.partition_known import VLLM, dispatch_reason, field_reason, table_reason
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.partition_results import ORACLE, PartitionOutputs, Value, alike, rank_fields
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import IntArray, StepRecord

BELIEFS = ("num_computed_tokens_np", "seq_lens_cpu_upper_bound")
"""Fields in which the host may take rejected drafts for computed."""

LATE_HOST = (
    "the host takes all drafts of a request's last step for accepted, and learns better one step "
    "later (C17)"
)
WHOLE_COUNT = (
    "vLLM's runner hands dispatch the number of requests of the global batch, not the rows of the "
    "largest rank"
)


class StepJudge:
    """Follows a plan and says what each step should be; call `advance` once for each step.

    num_columns: of each KV group's table.
    """

    def __init__(self, plan: ScenarioPlan, setup: ArmSetup, num_columns: Sequence[int]) -> None:
        self._oracle, self._setup, self._feed = Oracle(plan), setup, TokenFeed()
        self._num_columns = num_columns
        self._step: StepPlan | None = None
        self._late: dict[str, int] = {}
        self._whole: StepExpectation | None = None

    def advance(self, step: StepPlan, drafts: IntArray) -> None:
        """Enter the next step. drafts: its draft tokens, request after request."""
        self._oracle.advance(step)
        last = () if self._step is None else self._step.scheduled
        self._late |= {request.req_id: request.num_rejected_tokens for request in last}
        self._late |= {request.req_id: 0 for request in step.new_requests}
        self._feed.advance(step)
        self._feed.draft(step, drafts)
        self._step = step

    def expect(self, descriptor: BatchExecutionDescriptor) -> PartitionOutputs:
        """All ranks of the step, padded to the descriptor that it ran as."""
        assert self._step is not None
        whole = self._oracle.expect(self._step, self._setup, descriptor, self._feed)
        self._whole = whole
        parts: list[StepExpectation] = []
        if whole.ranks[0].num_tokens_after_padding > 1:
            is_full = descriptor.cg_mode is CUDAGraphMode.FULL
            parts = cut_expectation(whole, self._setup, 2, is_full)
        ranks = []
        for rank in whole.ranks:
            fields = expected_fields(rank, whole, self._num_columns)
            fields |= expected_rows(rank, self._step.scheduled)
            for index, part in enumerate(parts):
                own = expected_part(rank, part.ranks[rank.rank], index, self._num_columns)
                fields |= {f"ubatch{index}.{name}": value for name, value in own.items()}
            ranks.append(fields)
        best = smallest_covering(self._setup.candidates, whole)
        step: dict[str, Value] = {
            "dispatch_num_reqs": whole.dispatch_num_reqs,
            "dispatch_num_tokens": whole.dispatch_num_tokens,
            "descriptor": "NONE" if best is None else best.label,
        }
        return PartitionOutputs(ranks=tuple(ranks), step=step)

    def take(self, record: StepRecord) -> None:
        """What the step sampled in the arm whose tokens feed all."""
        assert self._step is not None
        self._feed.take(self._step, record.sampled_req_ids, record.sampled)

    def outputs(self, record: StepRecord, descriptor: str) -> PartitionOutputs:
        """A target's record as fields. descriptor: what its own dispatcher chose."""
        assert self._whole is not None
        ranks = []
        for rank, expected in zip(record.ranks, self._whole.ranks, strict=True):
            read = [_lengths(group, rank.num_reqs) for group in expected.block_ids]
            ranks.append(rank_fields(rank, read))
        step: dict[str, Value] = {
            "dispatch_num_reqs": alike(rank.dispatch_num_reqs for rank in record.ranks),
            "dispatch_num_tokens": alike(rank.dispatch_num_tokens for rank in record.ranks),
            "descriptor": descriptor,
        }
        return PartitionOutputs(ranks=tuple(ranks), step=step)

    def explain(self, name: str, sides: Sides) -> str:
        """Why vLLM's value has to differ in the step at hand, "" where nobody can say."""
        whole, step = self._whole, self._step
        if whole is None or step is None:
            return ""
        if name in BELIEFS and self._is_late_host(name, sides):
            return LATE_HOST
        if sides.right != VLLM:
            return ""
        pcp, found = self._setup.world.pcp_size, sides.fields(VLLM)
        if name == "dispatch_num_reqs":
            return WHOLE_COUNT if pcp > 1 and found[name] == len(step.scheduled) else ""
        if name == "descriptor":
            candidates = self._setup.candidates
            return dispatch_reason(found[name], whole, candidates, pcp, step.scheduled)
        if name.startswith("block_tables.") and sides.rank is not None:
            dcp = self._setup.world.dcp_size
            return table_reason(name, sides, whole.ranks[sides.rank], dcp)
        return field_reason(name, sides, pcp, step.scheduled[0].num_computed_tokens)

    def _is_late_host(self, name: str, sides: Sides) -> bool:
        """Rows of an engine are further than the oracle's by what was rejected.

        Both engines believe the same, so that nothing is to be explained between them.
        """
        assert self._whole is not None
        assert self._step is not None
        if ORACLE not in (sides.left, sides.right) or sides.rank is None:
            return False
        rank, scheduled = self._whole.ranks[sides.rank], self._step.scheduled
        right = np.asarray(sides.fields(ORACLE)[name])
        late = np.zeros_like(right)
        for row, at in enumerate([row.req_index for row in rank.rows]):
            late[row] = self._late.get(scheduled[at].req_id, 0)
        if not rank.rows and name == BELIEFS[0]:  # its row of no tokens is of request 0
            late[0] = self._late.get(scheduled[0].req_id, 0)
        wanted = {side: right if side == ORACLE else right + late
                  for side in (sides.left, sides.right)}  # fmt: skip
        return all(np.array_equal(sides.fields(side)[name], wanted[side]) for side in wanted)


def with_rows(outputs: PartitionOutputs, rows: Sequence[Mapping[str, Value]]) -> PartitionOutputs:
    """The same with what the host knows of each rank's rows."""
    ranks = [{**fields, **own} for fields, own in zip(outputs.ranks, rows, strict=True)]
    return PartitionOutputs(ranks=tuple(ranks), step=outputs.step)


def with_parts(
    outputs: PartitionOutputs, parts: Sequence[Sequence[Mapping[str, Value]]]
) -> PartitionOutputs:
    """The same with the fields of each rank's microbatches. parts: [rank][microbatch]."""
    ranks = [
        {
            **fields,
            **{f"ubatch{i}.{n}": value for i, part in enumerate(own) for n, value in part.items()},
        }
        for fields, own in zip(outputs.ranks, parts, strict=True)
    ]
    return PartitionOutputs(ranks=tuple(ranks), step=outputs.step)


def _lengths(block_ids: Sequence[IntArray], num_reqs: int) -> list[int]:
    """Columns that are read of each row; none of the row of a rank with nothing to do."""
    known = [len(ids) for ids in block_ids]
    return known + [0] * (num_reqs - len(known))
