"""C10 over an arm's candidates, by hand and against what the engine builds."""

from dataclasses import replace

import pytest

from pcpbench.checks.candidates import candidate_violations, wanted_shapes
from pcpbench.checks.setup import ArmSetup
from pcpbench.engine.dispatcher import build_candidates
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.results import CapturedGraph
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
        ("FULL", 3, 1, 3, None),
        ("FULL", 6, 2, 3, None),
    }
    assert wanted_shapes(setup_of(MIXED, (2, 6, 80), 3), plan) == {
        ("PIECEWISE", 2, None, None, None),
        ("PIECEWISE", 6, None, None, None),
        ("FULL", 3, 1, 3, None),
        ("FULL", 6, 2, 3, None),
    }
    # 80 is no size of a step of 64 tokens, so 8 is the largest still.
    assert wanted_shapes(setup_of(FULL, (4, 8, 80), 3), plan) == {("FULL", 6, 2, 3, None)}
    # 17 requests are more than a step holds.
    assert wanted_shapes(setup_of(FULL, (16, 17), 1), plan) == {("FULL", 16, 16, 1, None)}
    assert wanted_shapes(setup_of(CUDAGraphMode.PIECEWISE, (4,), 3), plan) == {
        ("PIECEWISE", 4, None, None, None)
    }


def test_drafts_that_vary_add_every_length_and_a_varlen_graph_by_hand(plan):
    """Of at most 3 tokens: 4 becomes 6, 4 and 4, and a varlen graph of 4 tokens."""
    setup = replace(setup_of(FULL, (4, 6), 3), has_dynamic_drafts=True)
    assert wanted_shapes(setup, plan) == {
        ("FULL", 6, 2, 3, None),
        ("FULL", 4, 2, 2, None),
        ("FULL", 6, 3, 2, None),
        ("FULL", 4, 4, 1, None),
        ("FULL", 6, 6, 1, None),
        ("FULL", 4, 4, None, 3),
        ("FULL", 6, 6, None, 3),
    }
    # 64 tokens of 16 requests are 4 each: one of 3 at most has no such batch.
    setup = replace(setup_of(FULL, (64,), 3), has_dynamic_drafts=True)
    assert wanted_shapes(setup, plan) == set()


@pytest.mark.parametrize("mode", [FULL, MIXED, CUDAGraphMode.PIECEWISE])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 2, 4), (8, 8, 3, 16), (64, 65), (5, 70), (1, 2, 4, 8, 16, 32)]
)
def test_the_engine_builds_what_is_wanted(plan, mode, length, sizes, dynamic):
    limits = {"max_num_seqs": 16, "max_num_tokens": 64}
    built = build_candidates(mode, sizes, decode_query_len=length, dynamic_drafts=dynamic, **limits)
    setup = setup_of(mode, sizes, length, built.descriptors)
    setup = replace(setup, has_dynamic_drafts=dynamic)
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


def test_a_size_that_is_dropped_is_named_whichever_it_is(plan, kit):
    sizes = (1, 2, 4, 16)
    graphs = [kit.full(size) for size in sizes]
    for size, graph in zip(sizes, graphs, strict=True):
        setup = setup_of(FULL, sizes, 1, [each for each in graphs if each is not graph])
        (found,) = candidate_violations(setup, plan)
        assert found.message == (
            f"FULL with {size} tokens in {size} requests of 1 is missing among the candidates for "
            "capture sizes 1, 2, 4, 16, decodes of 1 tokens and at most 16 requests"
        )


def test_full_and_piecewise_needs_both_kinds(plan, kit):
    setup = setup_of(MIXED, (2, 4), 1, [kit.full(2), kit.full(4)])
    messages = [found.message.split(" the ")[0] for found in candidate_violations(setup, plan)]
    assert messages == [
        "PIECEWISE with 2 tokens is missing among",
        "PIECEWISE with 4 tokens is missing among",
    ]


def test_a_padded_twin_is_held_to_the_mode_that_it_is_padded_like(plan, kit):
    twin = replace(
        setup_of(CUDAGraphMode.NONE, (2,), 1, [kit.full(2)]),
        descriptor_mode=FULL,
        padded_like="full",
    )
    assert list(candidate_violations(twin, plan)) == []
    (missing,) = candidate_violations(replace(twin, candidates=()), plan)
    assert "is missing among" in missing.message
    # An eager arm has no shapes at all.
    (extra,) = candidate_violations(replace(twin, descriptor_mode=None), plan)
    assert "is no shape of" in extra.message


def graph(descriptor, breaks):
    return CapturedGraph(
        descriptor=descriptor.label,
        mode=descriptor.cg_mode.name,
        num_tokens=descriptor.num_tokens,
        num_reqs=descriptor.num_reqs,
        uniform_token_count=descriptor.uniform_token_count,
        capture_s=0.0,
        num_ops=1,
        num_segments=breaks + 1,
        eager_breaks=breaks,
        pool_bytes_after=0,
        num_reads=0,
        num_writes=0,
    )


def captured(kit, plan, *graphs, mode=MIXED, sizes=(2,)):
    candidates = [kit.full(2), kit.piecewise(2)]
    setup = replace(setup_of(mode, sizes, 1, candidates), captured=graphs)
    return [found.message for found in candidate_violations(setup, plan)]


def test_full_is_whole_and_piecewise_is_cut(plan, kit):
    full, mixed = kit.full(2), kit.piecewise(2)
    assert captured(kit, plan, graph(full, 0), graph(mixed, 2)) == []
    assert captured(kit, plan, graph(full, 2), graph(mixed, 0)) == [
        "FULL[reqs=2,tokens=2] has 2 eager breaks: a FULL graph holds the whole forward pass",
        "PIECEWISE[tokens=2] has no eager break: attention was captured with the rest",
    ]


def test_each_candidate_is_captured_and_nothing_else(plan, kit):
    assert captured(kit, plan, graph(kit.full(4), 0), graph(kit.piecewise(2), 1)) == [
        "FULL with 2 tokens in 2 requests of 1 is a candidate and was not captured",
        "FULL with 4 tokens in 4 requests of 1 was captured and is no candidate",
    ]


def test_each_shape_that_can_be_cut_has_a_twin_and_no_other_has(plan, kit):
    large, small = kit.full(4), kit.full(1)
    twin = replace(large, num_ubatches=2)
    good = replace(setup_of(FULL, (1, 4), 1, [large, twin, small]), ubatch_thresholds=(2, 4))
    graphs = [graph(each, 0) for each in (large, twin, small)]
    assert list(candidate_violations(replace(good, captured=graphs), plan)) == []
    (missing,) = candidate_violations(replace(good, candidates=(large, small)), plan)
    assert missing.message == f"{twin.label} is missing among the candidates"
    (left_out,) = candidate_violations(replace(good, captured=[graphs[0], graphs[2]]), plan)
    assert left_out.message == f"{twin.label} is a candidate and was not captured"
    (superfluous,) = candidate_violations(replace(good, ubatch_thresholds=None), plan)
    assert "no step of its size is cut" in superfluous.message
