"""Cases as text, and which of them the enumeration has."""

from collections import Counter

import msgspec
import pytest

from pcpbench.checks.partition_oracle import expectation_of
from pcpbench.errors import UsageError
from pcpbench.partition_cases import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_SLOTS,
    block_at,
    check_case,
    num_blocks_of,
    parse_case,
)
from pcpbench.partition_enumeration import (
    CHUNK,
    Choice,
    cases_of,
    contexts,
    largest_rank,
    sample,
    shapes,
    units,
    worlds,
)
from pcpbench.world import World

SOME = [case for unit in units(Choice())[::60] for case in cases_of(unit)]


def test_every_case_comes_back_from_its_text():
    assert len(SOME) > 3000
    for case in SOME:
        assert parse_case(str(case)) == case


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing", "write ranks, mode and requests"),
        ("pcp=2 dcp=1 tp=1 interleave=1 NONE:", "write ranks, mode and requests"),
        ("pcp=2 dcp=1 tp=1 interleave=1 FULL: d1@5#0", "write ranks, mode and requests"),
        ("pcp=2 dcp=1 tp=1 interleave=1 NONE: d1@5#0 x", "write ranks, mode and requests"),
        ("pcp=2 dcp=3 tp=1 interleave=1 NONE: d1@5#0", "--dcp is 3"),
        ("pcp=2 dcp=1 tp=1 interleave=3 NONE: d1@5#0", "an interleave that no block has"),
        ("pcp=2 dcp=1 tp=1 interleave=1 NONE: d1@5#0 d1@3#0", "two requests in one slot"),
        ("pcp=2 dcp=1 tp=1 interleave=1 NONE: d1@5#7", "a slot past 6"),
        ("pcp=2 dcp=1 tp=1 interleave=1 NONE: d0@5#1", "no token at all"),
        ("pcp=2 dcp=1 tp=1 interleave=1 NONE: d1@0#1", "without a token computed before it"),
        ("pcp=1 dcp=1 tp=1 interleave=1 NONE: d1@2#1 p0@2+1#3", "which only PCP leaves out"),
        ("pcp=2 dcp=1 tp=1 interleave=1 NONE: p9@75#1", "over 80 tokens"),
        ("pcp=2 dcp=1 tp=1 interleave=1 PIECEWISE tokens=65: d1@5#0", "over 64 padded tokens"),
    ],
)
def test_what_no_engine_can_be_given_is_refused_by_name(text, told):
    with pytest.raises(UsageError, match=r"--batch is|--dcp is") as refusal:
        parse_case(text)
    assert told in str(refusal.value)


def test_no_two_places_of_a_table_hold_the_same_block_and_all_slots_hold_every_case():
    for dcp in (1, 2, 4, 8):
        blocks = [
            block_at(slot, column)
            for slot in range(NUM_SLOTS)
            for column in range(num_blocks_of(slot, dcp))
        ]
        assert len(set(blocks)) == len(blocks)
        assert min(blocks) > 0
        assert len({num_blocks_of(slot, dcp) for slot in range(NUM_SLOTS)}) > 1
        room = min(num_blocks_of(slot, dcp) for slot in range(NUM_SLOTS)) * BLOCK_SIZE * dcp
        assert room >= MAX_MODEL_LEN


def test_the_enumeration_has_every_kind_of_world():
    found = {(w.pcp_size, w.dcp_size, w.tp_size, i) for w, i in worlds(Choice())}
    assert {
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (2, 2, 1, 4),
        (2, 4, 2, 2),
        (4, 4, 1, 1),
        (4, 8, 2, 1),
    } <= found
    assert len(found) == 21  # a world without DCP has one interleave, the others three


@pytest.mark.parametrize("pcp", [1, 2, 4])
def test_up_to_four_requests_of_every_kind_and_query_length(pcp):
    every = shapes(World(pcp_size=pcp, tp_size=1, dcp_size=1))
    assert {len(shape) for shape in every} == {1, 2, 3, 4}
    first = 1 if pcp == 1 else 0
    kinds = {(kind, n) for kind in (False, True) for n in range(first, 2 * pcp + 2)}
    assert {request for shape in every for request in shape} == kinds
    multisets = {tuple(sorted(shape)) for shape in every}
    count = len(kinds)  # combinations with repetition of up to four, less those without a token
    total = sum(_choose(count + n - 1, n) for n in range(1, 5))
    empty = sum(n + 1 for n in range(1, 5)) if pcp > 1 else 0
    assert len(multisets) == total - empty


def _choose(n, k):
    return 1 if k == 0 else _choose(n - 1, k - 1) * n // k


@pytest.mark.parametrize(("dcp", "interleave"), [(1, 1), (2, 1), (2, 4), (8, 4)])
def test_contexts_lie_at_and_next_to_every_edge(dcp, interleave):
    lap = dcp * interleave
    assert {0, 1, interleave - 1, interleave, lap - 1, lap, lap + 1} <= set(
        contexts(dcp, interleave)
    )


def test_modes_padding_cuts_and_refusals_are_all_there():
    under_pcp = [case for case in SOME if case.pcp > 1]
    assert {case.mode for case in under_pcp} == {"NONE", "PIECEWISE", "FULL"}
    assert {case.is_cut for case in under_pcp} == {True, False}
    kinds = Counter()
    for case in under_pcp:
        rows, tokens = largest_rank(case.requests, case.world)
        if case.mode == "FULL" and case.has_prefill:
            kinds["FULL with a prefill"] += 1
        elif case.mode == "FULL" and case.num_reqs < rows:
            kinds["a row too few"] += 1
        elif case.mode != "NONE" and case.num_tokens < tokens:
            kinds["a token too few"] += 1
        elif case.mode != "NONE":
            kinds[f"{case.num_tokens - tokens} spare tokens"] += 1
    assert min(kinds.values()) > 10
    assert {"FULL with a prefill", "a row too few", "a token too few", "0 spare tokens"} <= set(
        kinds
    )
    assert len(kinds) >= 7


def test_counts_of_the_largest_rank_are_the_oracles():
    for case in SOME[::7]:
        whole = expectation_of(case)
        assert largest_rank(case.requests, case.world) == (
            whole.dispatch_num_reqs,
            whole.dispatch_num_tokens,
        )


def test_all_cases_can_be_given_to_an_engine():
    for case in SOME[::3]:
        check_case(case)


def test_units_hold_every_shape_once():
    choice = Choice(pcp=(2,), dcp=(1,))
    every = shapes(World(pcp_size=2), 4)
    found = units(choice)
    assert sum(unit.last - unit.first for unit in found) == len(every)
    assert max(unit.last - unit.first for unit in found) == CHUNK
    assert len({unit.name for unit in found}) == len(found)


def test_a_sample_is_the_same_for_the_same_seed_and_spread_over_all_worlds():
    first, again = sample(130, 5, Choice()), sample(130, 5, Choice())
    assert first == again
    assert len(first) == 130
    assert first != sample(130, 6, Choice())
    groups = {(case.pcp, case.dcp, case.tp, case.interleave) for case in first}
    assert len(groups) == 21


def test_a_case_is_a_frozen_word():
    with pytest.raises(AttributeError):
        SOME[0].pcp = 3
    assert msgspec.json.decode(msgspec.json.encode(SOME[0]), type=type(SOME[0])) == SOME[0]
