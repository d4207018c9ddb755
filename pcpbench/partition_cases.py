"""One small batch to partition: its ranks, its requests and what it is padded to. Pure words.

Owns the case and its text form, which `check partition --batch` takes back. Every request sits in
one of NUM_SLOTS request slots whose tokens and KV blocks are the same in all cases, so that a case
is no more than a line of text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from pcpbench.errors import UsageError
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.world import World

NUM_SLOTS: Final = 7
BLOCK_SIZE: Final = 4
"""Slots in one block on one rank; a block of a DCP group stands for BLOCK_SIZE x dcp positions."""
MAX_MODEL_LEN: Final = 96
MAX_NUM_TOKENS: Final = 64
"""Most tokens of a case, with padding."""
MAX_QUERY_LEN: Final = 32
VOCAB_SIZE: Final = 128

CAPTURE_SIZES: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32)


class DispatchSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What dispatch is asked of every case under: a configured mode and tokens of a decode."""

    mode: CUDAGraphMode
    decode_query_len: int


DISPATCHES: Final = {
    "full_and_piecewise": DispatchSetup(mode=CUDAGraphMode.FULL_AND_PIECEWISE, decode_query_len=1),
    "full_decode_only,k=2": DispatchSetup(mode=CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=3),
}

_REQUEST = re.compile(r"([dp])(\d+)@(\d+)(?:\+(\d+))?#(\d+)")
_HEAD = re.compile(r"pcp=(\d+) dcp=(\d+) tp=(\d+) interleave=(\d+)")
_SHAPE = re.compile(r"(NONE|PIECEWISE tokens=(\d+)|FULL reqs=(\d+) tokens=(\d+))( ubatches=2)?")


class CaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request's share of the batch.

    num_left: tokens of the prompt that are left after this step; decodes have none. slot: which of
    the NUM_SLOTS request slots it sits in. A decode of several tokens verifies drafts.
    """

    is_prefilling: bool
    num_scheduled_tokens: int
    num_computed_tokens: int
    slot: int
    num_left: int = 0

    @property
    def prefill_len(self) -> int:
        """Tokens known when the request was admitted."""
        if not self.is_prefilling:
            return self.num_computed_tokens
        return self.num_computed_tokens + self.num_scheduled_tokens + self.num_left

    @property
    def last_token(self) -> int:
        """The position after the last scheduled token: its length through this step."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    def __str__(self) -> str:
        """`p7@4+2#0`: a prefill of 7 behind 4, with 2 left, in slot 0; `d1@5#3`: a decode."""
        left = f"+{self.num_left}" if self.num_left else ""
        kind = "p" if self.is_prefilling else "d"
        return f"{kind}{self.num_scheduled_tokens}@{self.num_computed_tokens}{left}#{self.slot}"


class PartitionCase(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, on all ranks.

    mode: `NONE`, `PIECEWISE` or `FULL`. num_tokens, num_reqs: capacities of the descriptor, counted
    on one rank; None where the mode has none. is_cut: in two microbatches, where a rank has two
    tokens after padding.
    """

    pcp: int
    dcp: int
    tp: int
    interleave: int
    requests: tuple[CaseRequest, ...]
    mode: str = "NONE"
    num_tokens: int | None = None
    num_reqs: int | None = None
    is_cut: bool = False

    @property
    def world(self) -> World:
        """Its ranks; raises UsageError for sizes that cannot form groups."""
        return World(pcp_size=self.pcp, tp_size=self.tp, dcp_size=self.dcp)

    @property
    def descriptor(self) -> BatchExecutionDescriptor:
        """What the batch is padded to."""
        mode = CUDAGraphMode[self.mode]
        if mode is CUDAGraphMode.NONE:
            return BatchExecutionDescriptor(mode, self.total_tokens, len(self.requests))
        return BatchExecutionDescriptor(mode, self.num_tokens or 0, self.num_reqs)

    @property
    def total_tokens(self) -> int:
        """Tokens of the global batch."""
        return sum(request.num_scheduled_tokens for request in self.requests)

    @property
    def has_prefill(self) -> bool:
        """Whether any request prefills."""
        return any(request.is_prefilling for request in self.requests)

    @property
    def group(self) -> str:
        """The ranks and the mode, which reports count by."""
        return (
            f"pcp={self.pcp} dcp={self.dcp} tp={self.tp} interleave={self.interleave} {self.mode}"
        )

    def __str__(self) -> str:
        """`pcp=2 dcp=1 tp=1 interleave=1 FULL reqs=4 tokens=4: d1@5#0 d1@3#1`."""
        shape = "".join(
            f" {name}={size}"
            for name, size in (("reqs", self.num_reqs), ("tokens", self.num_tokens))
            if size is not None
        )
        cut = " ubatches=2" if self.is_cut else ""
        return f"{self.group}{shape}{cut}: {' '.join(map(str, self.requests))}"


def parse_case(text: str) -> PartitionCase:
    """The case that a line of text names; raises UsageError for one that cannot be."""
    head, colon, body = text.partition(":")
    ranks = _HEAD.match(head)
    shape = None if ranks is None else _SHAPE.fullmatch(head[ranks.end() :].strip())
    requests = [_REQUEST.fullmatch(word) for word in body.split()]
    if not colon or ranks is None or shape is None or not requests or None in requests:
        raise UsageError(
            f"--batch is {text!r}: write ranks, mode and requests such as 'pcp=2 dcp=1 tp=1 "
            "interleave=1 FULL reqs=4 tokens=4: d1@5#0 p7@4+2#1' (a decode of 1 token behind 5 in "
            "slot 0; a prefill of 7 behind 4 with 2 left in slot 1)."
        )
    pcp, dcp, tp, interleave = map(int, ranks.groups())
    _, piecewise, num_reqs, full, cut = shape.groups()
    tokens = piecewise or full
    case = PartitionCase(
        pcp=pcp,
        dcp=dcp,
        tp=tp,
        interleave=interleave,
        requests=tuple(_request(match) for match in requests if match is not None),
        mode=shape.group(0).split()[0],
        num_tokens=None if tokens is None else int(tokens),
        num_reqs=None if num_reqs is None else int(num_reqs),
        is_cut=cut is not None,
    )
    check_case(case)
    return case


def _request(match: re.Match[str]) -> CaseRequest:
    kind, query, computed, left, slot = match.groups()
    return CaseRequest(
        is_prefilling=kind == "p",
        num_scheduled_tokens=int(query),
        num_computed_tokens=int(computed),
        num_left=int(left or 0),
        slot=int(slot),
    )


def check_case(case: PartitionCase) -> None:
    """Raise UsageError for a batch that no engine can be given."""
    world = case.world  # raises for sizes that cannot form groups
    slots = [request.slot for request in case.requests]
    longest = max((request.last_token + request.num_left for request in case.requests), default=0)
    rules: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: world.size > 16, "more than 16 ranks"),
        (lambda: case.interleave < 1, "an interleave below 1"),
        (lambda: BLOCK_SIZE % case.interleave > 0, "an interleave that no block has"),
        (lambda: len(set(slots)) < len(slots), "two requests in one slot"),
        (lambda: max(slots) >= NUM_SLOTS, f"a slot past {NUM_SLOTS - 1}"),
        (lambda: case.total_tokens == 0, "no token at all"),
        (lambda: case.total_tokens > MAX_NUM_TOKENS, f"more than {MAX_NUM_TOKENS} tokens"),
        (lambda: (case.num_tokens or 0) > MAX_NUM_TOKENS, f"over {MAX_NUM_TOKENS} padded tokens"),
        (lambda: (case.num_reqs or 0) > NUM_SLOTS * 2, f"more than {NUM_SLOTS * 2} padded rows"),
        (lambda: longest > MAX_MODEL_LEN - 16, f"a request over {MAX_MODEL_LEN - 16} tokens"),
        (
            lambda: any(r.num_scheduled_tokens > MAX_QUERY_LEN for r in case.requests),
            f"a query longer than {MAX_QUERY_LEN}",
        ),
        (
            lambda: any(not r.is_prefilling and r.num_computed_tokens < 1 for r in case.requests),
            "a decode without a token computed before it",
        ),
        (
            lambda: case.pcp == 1 and any(not r.num_scheduled_tokens for r in case.requests),
            "a request without tokens, which only PCP leaves out",
        ),
    )  # fmt: skip
    for is_broken, what in rules:
        if is_broken():
            raise UsageError(f"--batch is {str(case)!r}, which has {what}.")


def token_at(slot: int, position: int) -> int:
    """The token of a request slot at a position: the same in all cases, different in all slots."""
    return 1 + (slot * 37 + position * 11) % (VOCAB_SIZE - 1)


def num_blocks_of(slot: int, dcp: int) -> int:
    """Blocks that a slot holds: enough for any case, and not equally many in all slots."""
    return max(1, num_columns(dcp) - slot % 3)


def num_columns(dcp: int) -> int:
    """Columns of a block table: blocks of the longest request, and two more."""
    return -(-MAX_MODEL_LEN // (BLOCK_SIZE * dcp)) + 2


def block_at(slot: int, column: int) -> int:
    """The block in a column of a slot's table: no two places have the same, none the null block."""
    return 1 + column * NUM_SLOTS + (slot * 3 + column) % NUM_SLOTS
