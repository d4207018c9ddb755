"""Where vLLM 0.33 has another answer by design, and the proof that it is that and nothing else.

Owns the reasons. A difference counts as known only where the judge can compute what the other
answer has to be; anything else about the same field stays unexplained. What is known is told in
every report, never dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from pcpbench.checks.contract_dispatch import Request, smallest_covering, taken_as_decodes
from pcpbench.checks.oracle import RankExpectation, StepExpectation
from pcpbench.checks.oracle_tables import with_given_back
from pcpbench.checks.partition_compare import Sides
from pcpbench.checks.partition_oracle import candidates_of, expectation_of
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.partition_cases import DISPATCHES, PartitionCase
from pcpbench.partition_results import Value

VLLM: Final = "vllm"

GLOBAL_ROWS: Final = (
    "vLLM's runner hands dispatch the number of requests of the global batch next to the tokens of "
    "the largest rank; with rank-local rows it chooses as expected"
)
ONE_TOKEN_PREFILL: Final = (
    "without PCP vLLM's runner dispatches a prefill of one token behind others like a decode; here "
    "a request prefills as long as tokens of its prompt are left"
)
OWN_ROWS: Final = (
    "vLLM refuses a request capacity on the ranks that it is too small for, and takes the batch on "
    "ranks with fewer rows; here every rank refuses"
)
UNCLEARED: Final = (
    "without PCP vLLM leaves in padding tokens whatever ids and positions the step before left "
    "there; they are flagged as padding, and their slots are PAD"
)
IDLE_BOUND: Final = (
    "the row of a rank without tokens has the first request's computed tokens as upper bound of "
    "its length; its seq_len is 0"
)
LAST_PART_PADS: Final = (
    "vLLM gives padding rows to the last microbatch, and one to a first that ends in padding; here "
    "a microbatch of a FULL graph has as many rows as tokens, or as the batch has where those are "
    "fewer"
)

GIVEN_BACK: Final = (
    "under DCP vLLM leaves in a table the ids of blocks that its request has given back, in "
    "columns wholly before the sliding window; no query of the step reads them"
)


NOT_OFFERED: Final = {
    VLLM: re.compile(r"dispatch_num_reqs|ubatch\d\.(slot_mappings|block_tables\.\d+)|pcp\..+"),
    "builtin": re.compile(r"pcp\..+"),
}
"""What a maker has nothing of. vLLM: rows of the largest rank, and slices of tables and slots of
microbatches under context parallelism; `pcp.` is what vLLM 0.33 carries of whole requests, 0.32 in
part."""

NOT_COMPOSED: Final = re.compile(r"ubatch\d\.dcp_local_seq_lens")
"""What comes from a kernel that a batch put together from rows is not run through."""


def may_lack(maker: str, name: str, is_composed: bool) -> bool:
    """Whether a maker has no such field to give; any other that is absent is a difference."""
    if maker == VLLM and is_composed and NOT_COMPOSED.fullmatch(name):
        return True
    return maker in NOT_OFFERED and NOT_OFFERED[maker].fullmatch(name) is not None


def explain(name: str, sides: Sides) -> str:
    """Why vLLM's value has to differ in a case, "" where nobody can say."""
    case = sides.case
    if sides.right != VLLM or case is None:
        return ""
    base, _, setup = name.partition("[")
    if base == "runner_dispatch":
        dispatch = DISPATCHES[setup.rstrip("]")]
        chosen = sides.fields(VLLM)[name]
        return dispatch_reason(
            chosen, expectation_of(case), candidates_of(dispatch), case.pcp, case.requests
        )
    if base == "refusal":
        return _refusal(sides, case)
    return field_reason(name, sides, case.pcp, case.requests[0].num_computed_tokens)


def field_reason(name: str, sides: Sides, pcp: int, first_computed: int) -> str:
    """The same for a field of a rank's batch. first_computed: of the step's first request."""
    base = name.rpartition(".")[2]
    if base in ("input_ids", "positions") and pcp == 1:
        return UNCLEARED if _is_padding_only(name, sides) else ""
    if name == "seq_lens_cpu_upper_bound" and pcp > 1:
        return IDLE_BOUND if _is_idle_bound(sides, first_computed) else ""
    if base == "num_reqs_after_padding" and base != name:
        return LAST_PART_PADS if _is_vllms_cut(name, sides) else ""
    return ""


def table_reason(name: str, sides: Sides, rank: RankExpectation, dcp: int) -> str:
    """The same for a rank's table in a step of a scenario, whose blocks may have gone back."""
    found, right = sides.fields(VLLM)[name], sides.fields(sides.left)[name]
    group = int(name.rpartition(".")[2])
    if dcp == 1 or not (isinstance(found, np.ndarray) and isinstance(right, np.ndarray)):
        return ""
    if found.shape != right.shape:
        return ""
    taken = right.copy()
    for row, held in enumerate(rank.held_block_ids[group]):
        count = len(held)
        taken[row, :count] = with_given_back(right[row, :count], held, found[row, :count])
    return GIVEN_BACK if np.array_equal(found, taken) else ""


def dispatch_reason(
    chosen: Value,
    whole: StepExpectation,
    candidates: Sequence[BatchExecutionDescriptor],
    pcp: int,
    requests: Sequence[Request],
) -> str:
    """Why vLLM's runner chose another descriptor, "" where nobody can say."""
    if pcp > 1:
        by_global_rows = _by_global_rows(whole, candidates, len(requests))
        return GLOBAL_ROWS if chosen == by_global_rows else ""
    return ONE_TOKEN_PREFILL if chosen == _as_decodes(whole, candidates, requests) else ""


def _by_global_rows(
    whole: StepExpectation, candidates: Sequence[BatchExecutionDescriptor], num_reqs: int
) -> str:
    """The choice by global rows and rank-local tokens.

    vLLM looks among the FULL shapes of the next captured token count alone: with 3 requests and 2
    local tokens it does not come to FULL[reqs=4,tokens=4], which would have the rows.
    """
    asked = replace(whole, dispatch_num_reqs=num_reqs)
    fitting = [d for d in candidates if d.num_tokens >= whole.dispatch_num_tokens]
    full = [d for d in fitting if d.cg_mode is CUDAGraphMode.FULL]
    next_count = min((d.num_tokens for d in full), default=0)
    looked_at = [d for d in fitting if d not in full or d.num_tokens == next_count]
    best = smallest_covering(looked_at, asked)
    return "NONE" if best is None else best.label


def _as_decodes(
    whole: StepExpectation,
    candidates: Sequence[BatchExecutionDescriptor],
    requests: Sequence[Request],
) -> str | None:
    """The choice if one-token prefills behind a context were decodes; None where there are none."""
    taken = taken_as_decodes(whole, requests)
    if taken is None:
        return None
    best = smallest_covering(candidates, taken)
    return "NONE" if best is None else best.label


def _refusal(sides: Sides, case: PartitionCase) -> str:
    """Taken by a rank that has the room, while another has not."""
    if sides.fields(VLLM).get("refusal", "taken") != "taken" or sides.rank is None:
        return ""
    if case.mode != CUDAGraphMode.FULL.name or case.has_prefill:
        return ""
    whole = expectation_of(case)
    capacity = case.num_reqs or 0
    has_room = whole.ranks[sides.rank].num_reqs <= capacity < whole.dispatch_num_reqs
    has_tokens = whole.dispatch_num_tokens <= (case.num_tokens or 0)
    return OWN_ROWS if has_room and has_tokens else ""


def _is_padding_only(name: str, sides: Sides) -> bool:
    """Real tokens agree, and every one that does not is flagged as padding by both."""
    prefix = name.rpartition(".")[0]
    flag_name = f"{prefix}.is_padding" if prefix else "is_padding"
    ours, theirs = sides.fields(sides.left), sides.fields(VLLM)
    left, right = ours[name], theirs[name]
    flags: Any = (ours[flag_name], theirs[flag_name])
    if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
        return False
    if left.shape != right.shape or not np.array_equal(*flags):
        return False
    return bool(np.all(flags[0][left != right]))


def _is_idle_bound(sides: Sides, first_computed: int) -> bool:
    fields: Any = sides.fields(VLLM)
    wanted = np.zeros_like(fields["seq_lens_cpu_upper_bound"])
    wanted[0] = first_computed
    return fields["num_tokens"] == 0 and np.array_equal(fields["seq_lens_cpu_upper_bound"], wanted)


def _is_vllms_cut(name: str, sides: Sides) -> bool:
    part = name.rpartition(".")[0]
    fields: Any = sides.fields(VLLM)
    rows, total = fields[f"{part}.row_index"], fields["num_reqs_after_padding"]
    if not len(rows):
        return False
    if part == "ubatch1":
        wanted = total - int(rows[0])
    else:  # a cut behind the last real token takes one row with it
        is_past = fields[f"{part}.num_tokens"] < fields[f"{part}.num_tokens_after_padding"]
        wanted = min(fields[f"{part}.num_reqs"] + is_past, total)
    return bool(fields[name] == wanted)
