"""All small batches for `check partition`, and samples of them. Pure words; same list every time.

Owns which batches there are (docs/vllm.md, "Partition: builtin against vLLM") and their order.
Modes of one batch of requests follow each other, so that whoever runs the cases in order prepares
its requests once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Final

import msgspec

from pcpbench.partition_cases import BLOCK_SIZE, NUM_SLOTS, CaseRequest, PartitionCase
from pcpbench.world import World

MAX_REQUESTS: Final = 4
PCP_SIZES: Final = (1, 2, 4)
SIZES: Final = {
    1: ((1, 1), (2, 2), (4, 4)),
    2: ((1, 1), (1, 2), (2, 4)),
    4: ((1, 1), (1, 4), (2, 8)),
}
"""For each PCP size the (TP, DCP) sizes next to it: every kind that SPEC 2 allows.

TP ranks that are in no DCP group together hold the same batch, so that TP comes with DCP only.
"""
INTERLEAVES: Final = (1, 2, 4)
SHUFFLED_UP_TO: Final = {1: 2, 2: 4, 4: 3}
"""Up to how many requests a batch is also met in another order, by PCP size."""
MOST_WITH_TP: Final = 3
"""With PCP 4 and TP above 1, most requests of a batch."""
CHUNK: Final = 64
"""Batches of requests (in all their modes) in one unit of work."""

Shape = tuple[tuple[bool, int], ...]
"""(is a prefill, tokens) of each request."""


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of the enumeration: shapes first .. last - 1 of one world and interleave."""

    pcp: int
    dcp: int
    tp: int
    interleave: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """Names it in files."""
        ranks = f"pcp{self.pcp}-dcp{self.dcp}-tp{self.tp}-i{self.interleave}"
        return f"{ranks}-{self.first:05d}"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What part of the enumeration is asked for; empty: all sizes."""

    pcp: tuple[int, ...] = ()
    dcp: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    interleave: tuple[int, ...] = ()
    max_requests: int = MAX_REQUESTS


def worlds(choice: Choice) -> Iterator[tuple[World, int]]:
    """Every world and interleave: PCP 1, 2, 4 and what is next to it in SIZES.

    Interleaves above 1 change nothing without DCP and are left out there.
    """
    for pcp in PCP_SIZES:
        for tp, dcp in SIZES[pcp]:
            for interleave in INTERLEAVES if dcp > 1 else (1,):
                sizes = (pcp, dcp, tp, interleave)
                asked = (choice.pcp, choice.dcp, choice.tp, choice.interleave)
                if all(not a or s in a for s, a in zip(sizes, asked, strict=True)):
                    yield World(pcp_size=pcp, dcp_size=dcp, tp_size=tp), interleave


def units(choice: Choice) -> list[Unit]:
    """The enumeration in pieces that can be run alone."""
    found = []
    for world, interleave in worlds(choice):
        count = len(shapes(world, choice.max_requests))
        for first in range(0, count, CHUNK):
            found.append(
                Unit(
                    pcp=world.pcp_size,
                    dcp=world.dcp_size,
                    tp=world.tp_size,
                    interleave=interleave,
                    first=first,
                    last=min(first + CHUNK, count),
                )
            )
    return found


@lru_cache(maxsize=32)
def shapes(world: World, max_requests: int = MAX_REQUESTS) -> list[Shape]:
    """Kinds and query lengths of all batches of up to four requests.

    Queries have 0 to 2 x pcp + 1 tokens (none without PCP: 1 to 3), so that a prefill fills all,
    some or none of the 2 x pcp chunks and leaves one over. Every multiset of requests comes with
    decodes first, and once more in another order (without PCP, which moves no row, decodes stay
    first). One request is met once for each context length
    that matters, two of them three times (see `requests_of`).
    """
    pcp = world.pcp_size
    first = 1 if pcp == 1 else 0
    kinds = [(kind, count) for kind in (False, True) for count in range(first, 2 * pcp + 2)]
    most = min(max_requests, MOST_WITH_TP) if pcp == 4 and world.tp_size > 1 else max_requests
    found: list[Shape] = []
    for number in range(1, most + 1):
        for canonical in combinations_with_replacement(kinds, number):
            if not sum(count for _, count in canonical):
                continue
            repeats = {1: 11, 2: 3}.get(number, 1)
            found += [canonical] * repeats
            other = _another_order(canonical, keep_first=pcp == 1)
            if other != canonical and number <= SHUFFLED_UP_TO[pcp]:
                found += [other] * min(repeats, 3)
    return found


def _another_order(shape: Shape, keep_first: bool) -> Shape:
    """The same requests in an order that follows from them alone.

    keep_first: decodes stay ahead of prefills.
    """
    mixed = list(shape)
    random.Random(repr(shape)).shuffle(mixed)
    if tuple(mixed) == shape:
        mixed.reverse()
    if keep_first:
        mixed.sort(key=lambda request: request[0])
    return tuple(mixed)


def contexts(dcp: int, interleave: int) -> list[int]:
    """Numbers of computed tokens at which something changes: runs, laps and blocks, and next to it.

    dcp 2, interleave 2, blocks of 4: 0 1 2 3 4 5 7 8 9.
    """
    found = {0, 1}
    for edge in (interleave, dcp * interleave, dcp * BLOCK_SIZE):
        found |= {edge - 1, edge, edge + 1}
    return sorted(found)


def requests_of(
    shape: Shape, number: int, world: World, interleave: int
) -> tuple[CaseRequest, ...]:
    """The requests of the number-th shape: contexts, slots and prompt tails dealt out in turn."""
    lengths = contexts(world.dcp_size, interleave)
    requests = []
    for place, (is_prefilling, count) in enumerate(shape):
        computed = lengths[(number * (place + 1) + 3 * place) % len(lengths)]
        left = (0, 2, 0, 5)[(number + place) % 4] if is_prefilling else 0
        if is_prefilling and not count + left:
            left = 1  # a prefill with nothing left to prefill would be a decode
        requests.append(
            CaseRequest(
                is_prefilling=is_prefilling,
                num_scheduled_tokens=count,
                num_computed_tokens=computed if is_prefilling else max(1, computed),
                num_left=left,
                slot=(number + 3 * place) % NUM_SLOTS,
            )
        )
    return tuple(requests)


def cases_of(unit: Unit, max_requests: int = MAX_REQUESTS) -> Iterator[PartitionCase]:
    """The cases of one piece."""
    world = World(pcp_size=unit.pcp, dcp_size=unit.dcp, tp_size=unit.tp)
    every = shapes(world, max_requests)
    for number in range(unit.first, unit.last):
        requests = requests_of(every[number], number, world, unit.interleave)
        yield from in_all_modes(requests, number, world, unit.interleave)


def in_all_modes(
    requests: tuple[CaseRequest, ...], number: int, world: World, interleave: int
) -> Iterator[PartitionCase]:
    """One batch unpadded, padded for PIECEWISE and FULL, and as what must be refused.

    Padding grows with `number`: none, one token, three; every third is cut in microbatches. FULL
    with exact and with spare rows and tokens. To be refused under PCP, for every fourth batch: FULL
    with a prefill, a token too few, a row too few.
    """
    rows, tokens = largest_rank(requests, world)
    bare = PartitionCase(
        pcp=world.pcp_size,
        dcp=world.dcp_size,
        tp=world.tp_size,
        interleave=interleave,
        requests=requests,
        is_cut=number % 3 == 0,
    )
    replace = msgspec.structs.replace
    yield bare
    yield replace(bare, mode="PIECEWISE", num_tokens=tokens + (0, 1, 3)[number % 3])
    if not bare.has_prefill:
        yield replace(bare, mode="FULL", num_tokens=tokens, num_reqs=rows)
        yield replace(bare, mode="FULL", num_tokens=tokens + 1 + number % 3, num_reqs=rows + 2)
    if world.pcp_size == 1 or number % 4:
        return
    if bare.has_prefill:
        yield replace(bare, mode="FULL", num_tokens=tokens, num_reqs=rows)
    elif rows > 1:
        yield replace(bare, mode="FULL", num_tokens=tokens, num_reqs=rows - 1)
    if tokens > 1:
        yield replace(bare, mode="PIECEWISE", num_tokens=tokens - 1)


def largest_rank(requests: Sequence[CaseRequest], world: World) -> tuple[int, int]:
    """Rows and tokens of the largest PCP rank (SPEC 3), of which descriptors are made.

    Counted chunk by chunk; a case needs a shape to be padded to, not a judgement on it.
    """
    pcp = world.pcp_size
    if pcp == 1:
        return len(requests), sum(request.num_scheduled_tokens for request in requests)
    rows, tokens, num_decodes = [0] * pcp, [0] * pcp, 0
    for request in requests:
        count = request.num_scheduled_tokens
        size = -(-count // (2 * pcp))
        is_whole = not request.is_prefilling or (
            world.dcp_size > 1 and (2 * pcp - 1) * size >= count
        )
        for rank in range(pcp) if count else ():
            if is_whole:
                if request.is_prefilling or world.dcp_size > 1 or num_decodes % pcp == rank:
                    rows[rank] += 1
                    tokens[rank] += count
                continue
            for chunk in (rank, 2 * pcp - 1 - rank):
                length = min(size, count - chunk * size)
                if length > 0:
                    rows[rank] += 1
                    tokens[rank] += length
        if count and not request.is_prefilling:
            num_decodes += 1
    return max(1, *rows), max(tokens)


def sample(num_batches: int, seed: int, choice: Choice) -> list[PartitionCase]:
    """`num_batches` of the enumeration's cases, chosen by the seed; those of one world together.

    Every world and interleave has its share, and each batch of requests is met in all its modes.
    """
    chooser = random.Random(seed)
    places = list(worlds(choice))
    found: list[PartitionCase] = []
    for index, (world, interleave) in enumerate(places):
        share = num_batches * (index + 1) // len(places) - num_batches * index // len(places)
        every = shapes(world, choice.max_requests)
        mine: list[PartitionCase] = []
        while len(mine) < share:
            number = chooser.randrange(len(every))
            requests = requests_of(every[number], number, world, interleave)
            mine += in_all_modes(requests, number, world, interleave)
        found += mine[:share]
    return found


def count_cases(parts: Sequence[Unit], max_requests: int = MAX_REQUESTS) -> int:
    """How many cases these pieces have."""
    return sum(1 for unit in parts for _ in cases_of(unit, max_requests))
