"""Taps of two arms side by side: rows by token, budgets, order, what cannot be compared."""

from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks.oracle import Oracle
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.checks.setup import ArmSetup
from pcpbench.checks.tap_compare import (
    TapSide,
    beyond,
    describe,
    first_non_finite,
    first_tap,
    token_place,
)
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.records import TapRecord
from pcpbench.world import World

NONE = BatchExecutionDescriptor(CUDAGraphMode.NONE, 0, None)
REFERENCE = ArmSetup(name="reference", world=World())


@pytest.fixture
def plan(kit):
    return kit.make_plan([5, 3], 2)


def side(plan, setup, step, make, descriptor=NONE):
    """An arm whose taps are made from each row's token by `make(op, token)`."""
    oracle, feed = Oracle(plan), TokenFeed()
    for earlier in plan.steps[: step.index + 1]:
        oracle.advance(earlier)
    expected = oracle.expect(step, setup, descriptor, feed)
    bare = TapSide(setup, expected, ())
    taps = []
    for rank in range(setup.world.size):
        for order, (layer, op, tensor, gathered) in enumerate(
            [(-1, "embed", "hidden", False), (0, "kv_cache_write", "kv_cache", True)]
        ):
            tap = TapRecord(
                rank=rank, layer=layer, op=op, tensor=tensor, values=np.zeros((0, 2), np.float32),
                order=order, is_gathered=gathered,
            )  # fmt: skip
            values = np.array([make(op, token) for token in bare.tokens(tap)], dtype=np.float32)
            taps.append(replace(tap, values=values))
    return TapSide(setup, expected, tuple(taps))


def value(op, token):
    return (0.0, 9.0) if token < 0 else (1.0 + token, 2.0)


WORLDS = [World(pcp_size=2), World(pcp_size=3), World(tp_size=2, dcp_size=2)]


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("number", [0, 1])
def test_equal_values_are_equal_whatever_the_layout(plan, world, number):
    arm = ArmSetup(name="eager", world=world)
    step = plan.steps[number]
    padding = {True: (-1.0, 5.0)}

    def other_padding(op, token):
        return padding.get(token < 0, value(op, token))

    ours, theirs = side(plan, arm, step, other_padding), side(plan, REFERENCE, step, value)
    assert first_tap(ours, theirs, step, "partition", "float32") is None


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_the_token_that_differs_is_found_and_named(plan, world):
    arm, step = ArmSetup(name="eager", world=world), plan.steps[0]

    def wrong(op, token):
        return (100.0, 2.0) if (op, token) == ("kv_cache_write", 6) else value(op, token)

    ours, theirs = side(plan, arm, step, wrong), side(plan, REFERENCE, step, value)
    found = first_tap(ours, theirs, step, "partition", "float32").difference
    assert (found.op, found.layer, found.num_mismatched) == ("kv_cache_write", 0, 1)
    assert found.place == "request r1, position 1"
    assert (found.found, found.expected, found.max_abs) == (("100.0",), ("7.0",), 93.0)
    assert found.against == "reference"


def test_the_first_point_in_the_forward_pass_wins(plan):
    arm, step = ArmSetup(name="full", world=World(pcp_size=2)), plan.steps[0]
    twin = side(plan, replace(arm, name="eager"), step, value)
    ours = side(plan, arm, step, lambda op, token: (0.5, 0.5))
    found = first_tap(ours, twin, step, "capture", "float32").difference
    assert (found.rank, found.layer, found.op) == (0, None, "embed")


def test_one_bit_counts_without_a_budget_and_not_with_one(plan):
    arm, step = ArmSetup(name="full", world=World(pcp_size=2)), plan.steps[0]
    twin = side(plan, replace(arm, name="eager"), step, value)

    def nudged(op, token):
        first, second = value(op, token)
        return np.nextafter(np.float32(first), np.float32(9e9)), second

    ours = side(plan, arm, step, nudged)
    assert first_tap(ours, twin, step, "padding", "float32") is None
    assert first_tap(ours, twin, step, "capture", "float32") is not None


def test_a_point_that_only_one_arm_wrote_is_a_difference(plan):
    arm, step = ArmSetup(name="full", world=World(pcp_size=2)), plan.steps[0]
    twin = side(plan, replace(arm, name="eager"), step, value)
    ours = side(plan, arm, step, value)
    cut = TapSide(arm, ours.expected, ours.taps[:1] + ours.taps[2:])
    found = first_tap(cut, twin, step, "capture", "float32").difference
    assert (found.rank, found.op, found.message) == (0, "kv_cache_write", "not written by full")


def test_heads_of_a_tp_rank_are_those_of_the_reference(plan):
    world, step = World(tp_size=2), plan.steps[1]
    whole = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3) + 1
    oracle = Oracle(plan)
    for each in plan.steps[:2]:
        oracle.advance(each)

    def one(setup, heads):
        expected = oracle.expect(step, setup, NONE, TokenFeed())
        taps = tuple(
            TapRecord(rank=r, layer=0, op="qkv_proj", tensor="q", values=v, per_head=True)
            for r, v in enumerate(heads)
        )
        return TapSide(setup, expected, taps)

    twin = one(REFERENCE, [whole])
    arm = ArmSetup(name="eager", world=world)
    right = one(arm, [whole[:, :2], whole[:, 2:]])
    swapped = one(arm, [whole[:, 2:], whole[:, :2]])
    assert first_tap(right, twin, step, "partition", "float32") is None
    assert first_tap(swapped, twin, step, "partition", "float32").difference.rank == 0


def test_partial_results_are_compared_within_one_layout_only(plan):
    step = plan.steps[0]
    arm = ArmSetup(name="eager", world=World(tp_size=2, dcp_size=2))

    def partial(one):
        taps = tuple(replace(tap, is_partial=True) for tap in one.taps)
        return TapSide(one.setup, one.expected, taps)

    wrong = partial(side(plan, arm, step, lambda *_: (5.0, 5.0)))
    assert (
        first_tap(wrong, side(plan, REFERENCE, step, value), step, "partition", "float32") is None
    )
    assert first_tap(wrong, side(plan, arm, step, value), step, "padding", "float32") is not None


def test_an_lse_near_zero_is_not_held_to_its_own_size():
    found, expected = np.float32([[2e-5]]), np.float32([[1e-5]])
    assert beyond(found, expected, "partition", "float32").all()
    assert not beyond(found, expected, "partition", "float32", is_lse=True).any()
    far = np.float32([[1e-2]])
    assert beyond(far, expected, "partition", "float32", is_lse=True).all()


@pytest.mark.parametrize("kind", ["partition", "capture"])
def test_non_finite_places_differ_unless_both_have_them(kind):
    found = np.float32([[np.nan, 1.0], [-np.inf, 1.0], [np.nan, 1.0]])
    expected = np.float32([[1.0, 1.0], [-np.inf, 1.0], [np.nan, 1.0]])
    assert beyond(found, expected, kind, "float32").tolist() == [[True, False]] + [[False] * 2] * 2


def test_nan_in_padding_or_minus_inf_in_an_lse_is_no_finding(plan):
    arm, step = ArmSetup(name="eager", world=World(pcp_size=3)), plan.steps[0]

    def padded(op, token):
        return (np.nan, np.nan) if token < 0 else value(op, token)

    ours = side(plan, arm, step, padded)
    assert first_non_finite(ours, step, "float32") is None
    (lse,) = (replace(ours.taps[0], tensor="lse", values=ours.taps[0].values - np.inf),)
    assert first_non_finite(TapSide(arm, ours.expected, (lse,)), step, "float32") is None
    bad = side(plan, arm, step, lambda *_: (np.inf, 1.0))
    found = first_non_finite(bad, step, "float32").difference
    assert (found.op, found.num_non_finite, found.found[0]) == (
        "embed",
        found.num_mismatched,
        "inf",
    )


def test_describe_counts_and_shows_the_first_few():
    found, expected = np.arange(20), np.arange(20) * 2
    told = describe(found, expected, found != expected, "plan")
    assert (told.num_elements, told.num_mismatched, told.first_index) == (20, 19, (1,))
    assert told.max_abs == 19.0
    assert (told.found[0], told.expected[0], len(told.found)) == ("1", "2", 8)


def test_the_place_of_a_token_is_its_request_and_position(plan):
    assert token_place(plan.steps[0], 0) == "request r0, position 0"
    assert token_place(plan.steps[0], 7) == "request r1, position 2"
    assert token_place(plan.steps[1], 1) == "request r1, position 3"
