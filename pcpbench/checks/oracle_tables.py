"""What each request owns as steps go by: its known tokens, its blocks, its KV slots (SPEC 7, 9).

Owns the bookkeeping that a worker does in its request states and block tables, done again from the
plan. Knows no rank-local row and no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import IntArray

PAD = -1
NULL_BLOCK = 0
UNKNOWN_TOKEN = -1


@dataclass
class TokenFeed:
    """The generated tokens that one arm reads as decode inputs.

    Under teacher forcing all arms share the feed of the teacher; in free running each has its own.
    drafts: draft tokens of the current step, for requests that have any.
    """

    generated: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)

    def advance(self, step: StepPlan) -> None:
        """Forget what left, and cut a re-admitted request back to what it re-enters with."""
        self.drafts = {}
        for req_id in step.finished_req_ids:
            self.generated.pop(req_id, None)
        for request in step.new_requests:
            self.generated[request.req_id] = self.of(request.req_id)[: request.num_generated]

    def draft(self, step: StepPlan, tokens: IntArray) -> None:
        """Take in the drafts of the current step, request after request."""
        self.drafts = drafts_by_request(step, tokens)

    def take(self, step: StepPlan, req_ids: Sequence[str], tokens: IntArray) -> None:
        """Append what a step sampled, as far as the plan keeps it.

        req_ids, tokens: one for each row of logits. Of a decode with three drafts, one of them
        right, and a last chunk rows 0, 1 and 4 of 5 are kept.
        """
        kept: list[bool] = []
        for request in step.scheduled:
            kept += [row < request.num_output_tokens for row in range(request.num_logits)]
        if len(kept) == len(req_ids) == len(tokens):
            req_ids = [req_id for req_id, keep in zip(req_ids, kept, strict=True) if keep]
            tokens = tokens[np.array(kept, dtype=np.bool_)]
        self.extend(req_ids, tokens)

    def extend(self, req_ids: Sequence[str], tokens: IntArray) -> None:
        """Append tokens, one name a token."""
        for req_id, token in zip(req_ids, tokens.tolist(), strict=False):
            self.generated.setdefault(req_id, []).append(int(token))

    def of(self, req_id: str) -> list[int]:
        """Tokens generated so far by one request."""
        return self.generated.get(req_id, [])


def drafts_by_request(step: StepPlan, tokens: IntArray) -> dict[str, list[int]]:
    """A step's draft tokens, which lie request after request, by request."""
    left, drafts = tokens.tolist(), {}
    for request in step.scheduled:
        count = request.num_draft_tokens
        drafts[request.req_id], left = left[:count], left[count:]
    return drafts


class RequestBook:
    """Prompts and block ids of the requests that the worker knows.

    num_unseen: for each request and KV group, how many of its first positions no query of the
    current step or a later one sees. Blocks that hold nothing else are somebody else's.
    """

    def __init__(self, plan: ScenarioPlan) -> None:
        self.block_sizes = plan.block_sizes
        self._windows = [plan.sliding_window(group) for group in range(len(plan.block_sizes))]
        self.num_unseen: dict[str, list[int]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.block_ids: dict[str, list[list[int]]] = {}

    def advance(self, step: StepPlan) -> None:
        """Apply one step: leavers first, then arrivals, then new blocks."""
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self.prompts.pop(req_id, None)
            self.block_ids.pop(req_id, None)
            self.num_unseen.pop(req_id, None)
        for request in step.new_requests:
            self.prompts[request.req_id] = request.prompt_token_ids
            self.block_ids[request.req_id] = [[] for _ in self.block_sizes]
        for req_id, groups in step.new_block_ids.items():
            tables = self.block_ids.setdefault(req_id, [[] for _ in self.block_sizes])
            for table, ids in zip(tables, groups, strict=False):
                table.extend(ids)
        for share in step.scheduled:
            self.num_unseen[share.req_id] = [
                unseen(share.num_computed_tokens, window) for window in self._windows
            ]

    def tokens(self, req_id: str, first: int, count: int, feed: TokenFeed) -> list[int]:
        """Input ids at positions first .. first + count - 1; UNKNOWN_TOKEN where nobody can know.

        Draft tokens follow the generated ones. Unknown are those that nobody recorded.
        """
        drafts = feed.drafts.get(req_id, ())
        known = [*self.prompts.get(req_id, ()), *feed.of(req_id), *drafts]
        return [known[p] if p < len(known) else UNKNOWN_TOKEN for p in range(first, first + count)]

    def table(self, req_id: str, group: int) -> list[int]:
        """Block ids of a request in one KV group, in order; the null block for those given back."""
        tables = self.block_ids.get(req_id)
        if not tables:
            return []
        num_freed = self._num_freed(req_id, group)
        return [NULL_BLOCK] * min(num_freed, len(tables[group])) + tables[group][num_freed:]

    def held(self, req_id: str, group: int) -> list[int]:
        """The same with the ids that the request had given back before the step."""
        tables = self.block_ids.get(req_id)
        return list(tables[group]) if tables else []

    def _num_freed(self, req_id: str, group: int) -> int:
        known = self.num_unseen.get(req_id)
        return known[group] // self.block_sizes[group] if known else 0

    def slots(
        self, req_id: str, group: int, positions: IntArray, dcp_size: int, interleave: int
    ) -> tuple[IntArray, IntArray]:
        """Slot on its owner, and the owning DCP rank, of each position.

        PAD past the last block and in blocks that were given back.

        Block size 4, dcp 2, interleave 2: one block id stands for 8 positions, dealt out in runs of
        2. Position 13 lies in the table's second block at offset 5, on rank (5 // 2) % 2 = 0, as
        that rank's offset 5 // 4 * 2 + 5 % 2 = 3; with block id 7 its slot is 7 * 4 + 3 = 31.
        """
        span = self.block_sizes[group]
        table = np.array(self.table(req_id, group), dtype=np.int64)
        number, offset = positions // span, positions % span
        owner = (offset // interleave) % dcp_size
        local = offset // (dcp_size * interleave) * interleave + offset % interleave
        slots = np.full(len(positions), PAD, dtype=np.int64)
        known = (number < len(table)) & (number >= self._num_freed(req_id, group))
        slots[known] = table[number[known]] * (span // dcp_size) + local[known]
        return slots, owner


def with_given_back(blocks: IntArray, held: IntArray, found: IntArray) -> IntArray:
    """A row's blocks, and where `found` has one that was given back, that one for the null block.

    blocks [0, 0, 7], held [5, 6, 7], found [5, 8, 7]: [5, 0, 7], so that the 8 is nobody's.
    """
    if not len(blocks) == len(held) == len(found):
        return blocks
    return np.where((blocks == NULL_BLOCK) & (found == held), found, blocks)


def unseen(num_computed: int, window: int) -> int:
    """How many positions lie before what queries from num_computed on see; window 0 sees all.

    unseen(40, 24) is 17: the query at 40 sees 24 positions, 17 .. 40.
    """
    return max(0, num_computed - window + 1) if window else 0


def dcp_share(length: int, dcp_size: int, dcp_rank: int, interleave: int) -> int:
    """How many of the first `length` positions one DCP rank holds, counted run by run (SPEC 7).

    dcp_share(11, 2, 0, 2) counts positions 0, 1, 4, 5, 8, 9: 6; rank 1 has the other 5.
    """
    lap = dcp_size * interleave
    whole, rest = divmod(length, lap)
    in_rest = min(max(rest - dcp_rank * interleave, 0), interleave)
    return whole * interleave + in_rest
