"""C10 over an arm's candidates, by hand and against what the engine builds."""

from dataclasses import replace

import pytest

from pcpbench.checks.candidates import candidate_violations, wanted_shapes
from pcpbench.checks.setup import ArmSetup
from pcpbench.engine.dispatcher import build_candidates
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.world import World

FULL, MIXED = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE


def setup_of(mode, sizes, length, candidates=()):
    return ArmSetup(
        name="full",
        world=World(),
        mode=mode,
        candidates=tuple(candidates),
        capture_sizes=sizes,
        decode_query_len=length,
    )


@pytest.fixture
def plan(kit):
    return kit.make_plan([3, 3], 2)  # at most 16 requests and 64 tokens a step


def test_sizes_that_are_no_multiple_by_hand(plan):
    # 1, 2 become 3; 4 becomes 6; 8 would be 9, past the largest.
    assert wanted_shapes(setup_of(FULL, (1, 2, 4, 8), 3), plan) == {
        ("FULL", 3, 1, 3),
        ("FULL", 6, 2, 3),
    }
    assert wanted_shapes(setup_of(MIXED, (2, 6, 80), 3), plan) == {
        ("PIECEWISE", 2, None, None),
        ("PIECEWISE", 6, None, None),
        ("FULL", 3, 1, 3),
        ("FULL", 6, 2, 3),
    }
    # 17 requests are more than a step holds.
    assert wanted_shapes(setup_of(FULL, (16, 17), 1), plan) == {("FULL", 16, 16, 1)}
    assert wanted_shapes(setup_of(CUDAGraphMode.PIECEWISE, (4,), 3), plan) == {
        ("PIECEWISE", 4, None, None)
    }


@pytest.mark.parametrize("mode", [FULL, MIXED, CUDAGraphMode.PIECEWISE])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("sizes", [(1, 2, 4), (8, 8, 3, 16), (64, 65), (5,), (1, 2, 4, 8, 16, 32)])
def test_the_engine_builds_what_is_wanted(plan, mode, length, sizes):
    built = build_candidates(
        mode, sizes, decode_query_len=length, max_num_seqs=16, max_num_tokens=64
    )
    setup = setup_of(mode, sizes, length, built.descriptors)
    assert list(candidate_violations(setup, plan)) == []


def test_a_missing_shape_and_a_wrong_one_are_named(plan):
    wrong = BatchExecutionDescriptor(CUDAGraphMode.FULL, 4, 1, 3)
    right = BatchExecutionDescriptor(CUDAGraphMode.FULL, 3, 1, 3)
    setup = setup_of(FULL, (1, 2, 4, 6), 3, (right, wrong))
    found = list(candidate_violations(setup, plan))
    assert [(v.contract, v.arm, v.tensor) for v in found] == [("C10", "full", "candidates")] * 2
    assert found[0].message.startswith("FULL with 6 tokens in 2 requests of 3 is missing among")
    assert found[1].message.startswith("FULL with 4 tokens in 1 requests of 3 is no shape of")


def test_nothing_is_said_of_sizes_that_nobody_told(plan):
    setup = replace(setup_of(FULL, (4,), 1), capture_sizes=None)
    assert list(candidate_violations(setup, plan)) == []
