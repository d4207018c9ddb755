"""Which tokens of a step each PCP rank should hold, from the plan alone (SPEC 5).

Owns the slow, plain version of DualChunkSwap: one loop over requests, one over pieces. Knows no
block table, no padding and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from pcpbench.plan import ScheduledRequest, StepPlan
from pcpbench.world import World


@dataclass(frozen=True)
class Row:
    """One row of a rank-local batch: a run of one request's scheduled tokens.

    req_index: index into the plan's `scheduled`. start: first token within the request's scheduled
    tokens. replicated: whether every PCP rank holds this same row.
    """

    req_index: int
    start: int
    num_tokens: int
    replicated: bool


def is_replicated(request: ScheduledRequest, world: World) -> bool:
    """Whether every PCP rank runs the whole query.

    Under DCP that is true of every decode, and of a prefill whose last chunk would be empty. With
    pcp=2 (4 chunks) a prefill of 5 has chunks of 2, 2, 1, 0: replicated; one of 7 has 2, 2, 2, 1:
    cut.
    """
    if world.pcp_size == 1:
        return True
    if world.dcp_size == 1:
        return False
    if not request.is_prefilling:
        return True
    return _chunks(request.num_scheduled_tokens, 2 * world.pcp_size)[-1][1] == 0


def rank_rows(step: StepPlan, world: World, pcp_rank: int) -> list[Row]:
    """The rows of one PCP rank: decodes before prefills, by request, then by start.

    A rank with nothing to do gets an empty list (its batch then holds one row of zero tokens).
    Example, pcp=2 and dcp=1: decodes d0, d1, d2 and a prefill of 7 give rank 0 the rows d0, d2,
    prefill[0:2], prefill[6:7] and rank 1 the rows d1, prefill[2:4], prefill[4:6].
    """
    decodes: list[Row] = []
    prefills: list[Row] = []
    num_decodes = 0
    for index, request in enumerate(step.scheduled):
        length = request.num_scheduled_tokens
        if length == 0:
            continue
        rows = prefills if request.is_prefilling else decodes
        if is_replicated(request, world):
            rows.append(Row(index, 0, length, True))
        elif request.is_prefilling:
            chunks = _chunks(length, 2 * world.pcp_size)
            for chunk in (pcp_rank, 2 * world.pcp_size - 1 - pcp_rank):
                start, size = chunks[chunk]
                if size:
                    rows.append(Row(index, start, size, False))
        elif num_decodes % world.pcp_size == pcp_rank:
            rows.append(Row(index, 0, length, False))
        if not request.is_prefilling:
            num_decodes += 1
    return decodes + prefills


def _chunks(length: int, num_chunks: int) -> list[tuple[int, int]]:
    """(start, size) of each chunk; the last ones may be short or empty.

    _chunks(7, 4) is [(0, 2), (2, 2), (4, 2), (6, 1)]; _chunks(2, 4) ends in two empty chunks.
    """
    size = -(-length // num_chunks)
    chunks = []
    for number in range(num_chunks):
        start = min(number * size, length)
        chunks.append((start, min(size, length - start)))
    return chunks
