"""A step of a scenario as the fields that targets are compared by, and what is known to differ.

Owns the expectation of one step at a time. All arithmetic is the oracle's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pcpbench.checks.contract_dispatch import smallest_covering
from pcpbench.checks.oracle import Oracle, StepExpectation
from pcpbench.checks.oracle_microbatch import cut_expectation
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.checks.partition_compare import Sides
from pcpbench.checks.partition_fields import expected_fields, expected_part
from pcpbench.checks.partition_known import VLLM, dispatch_reason, field_reason
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.partition_results import PartitionOutputs, Value, alike, rank_fields
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import IntArray, StepRecord

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
        self._whole: StepExpectation | None = None

    def advance(self, step: StepPlan, drafts: IntArray) -> None:
        """Enter the next step. drafts: its draft tokens, request after request."""
        self._oracle.advance(step)
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
            del_not_recorded(fields)
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
        if sides.right != VLLM or whole is None or step is None:
            return ""
        pcp, found = self._setup.world.pcp_size, sides.fields(VLLM)
        if name == "dispatch_num_reqs":
            return WHOLE_COUNT if pcp > 1 and found[name] == len(step.scheduled) else ""
        if name == "descriptor":
            candidates = self._setup.candidates
            return dispatch_reason(found[name], whole, candidates, pcp, step.scheduled)
        return field_reason(name, sides, pcp, step.scheduled[0].num_computed_tokens)


def del_not_recorded(fields: dict[str, Value]) -> None:
    """Leave out what records do not hold: it follows from the write mask and the restore index."""
    fields.pop("padded_gather_idx", None)


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
