"""C16: what may be poisoned, and what may not change."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_plan

from pcpbench.checks.kv import KvArrays
from pcpbench.checks.poison import LiveSlots, broken_by_poison, compare_poisoned
from pcpbench.plan import StepPlan


def live_at(kit, index, **sizes):
    setup = kit.setup(**sizes)
    plan = kit.make_plan([3, 9], 3, block_size=4 * setup.world.dcp_size)
    live = LiveSlots(plan, setup)
    for step in plan.steps[: index + 1]:
        live.advance(step)
        if step.index < index:
            live.leave(step)
    return live, plan.steps[index]


def read(live, rank=0):
    return np.flatnonzero(~live.unread()[rank][0]).tolist()


def test_nothing_is_live_before_the_first_step(kit):
    live, _ = live_at(kit, 0)
    assert read(live) == []


def test_live_slots_by_hand(kit):
    """r0 holds block 1, r1 blocks 2 to 4: after the prefill 3 and 9 positions may be read."""
    live, step = live_at(kit, 1)
    assert read(live) == [4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    assert live.written(step, 0, 0).tolist() == [7, 17]
    live, _ = live_at(kit, 2)
    assert {7, 17} < set(read(live))


def test_live_slots_of_a_shard_by_hand(kit):
    """dcp 2, interleave 2: rank 1 holds positions 2; and 2, 3, 6, 7 of r1's 9."""
    live, step = live_at(kit, 1, tp=2, dcp=2, interleave=2)
    assert read(live, 1) == [4, 8, 9, 10, 11]
    assert read(live, 0) == [4, 5, 8, 9, 10, 11, 12]
    assert [live.written(step, rank, 0).tolist() for rank in range(2)] == [[13], [5]]


def test_a_request_that_waits_stays_live_and_one_that_ended_does_not(kit):
    steps = [
        StepPlan(
            index=0,
            scheduled=(kit.scheduled("r0", 2), kit.scheduled("r1", 3)),
            new_block_ids={"r0": ((1,),), "r1": ((2,),)},
        ),
        StepPlan(index=1, scheduled=(kit.scheduled("r1", 1, 3, 3),)),
        StepPlan(index=2, scheduled=(kit.scheduled("r1", 1, 4, 3),), finished_req_ids=("r0",),
                 new_block_ids={"r1": ((1,),)}),
    ]  # fmt: skip
    live = LiveSlots(kit.plan_of(steps, num_blocks=6), kit.setup())
    found = []
    for step in steps:
        live.advance(step)
        found.append(read(live))
        live.leave(step)
    assert found == [[], [4, 5, 8, 9, 10], [8, 9, 10, 11]]


def test_positions_before_a_window_are_not_read_though_their_block_is_held(kit):
    """Window 3: before the step at 5 positions 3 and 4 of r0's 5 may be read, of 6 it sees 4, 5."""
    plan = replace_plan(kit.make_plan([5], 2), sliding_windows=(3,))
    live = LiveSlots(plan, kit.setup())
    found = []
    for step in plan.steps:
        live.advance(step)
        found.append(read(live))
        live.leave(step)
    assert found == [[], [7, 8], [8, 9]]


VIEW = KvArrays([])


@pytest.fixture
def clean(kit):
    return kit.Bench(kit.make_plan([3, 9], 2), kit.setup("full", pcp=2)).at(1)[2]


def rows(value=1):
    return [[np.full((2, 3), value, np.uint32)] for _ in range(2)]


def test_equal_results_are_no_finding(clean):
    assert list(compare_poisoned(clean, clean, rows(), rows(), "nan", VIEW)) == []


@pytest.mark.parametrize("tensor", ["hidden", "logits", "sampled"])
def test_each_output_is_held_bit_for_bit(clean, tensor):
    values = getattr(clean, tensor).copy()
    values.reshape(-1)[1] += 1
    changed = replace(clean, **{tensor: values})
    (found,) = compare_poisoned(clean, changed, rows(), rows(), "nan", VIEW)
    assert (found.contract, found.arm, found.step, found.tensor) == ("C16", "full", 1, tensor)
    assert "poisoned (nan)" in found.message


def test_one_rank_is_enough(kit, clean):
    zeros = np.zeros((2, 3), np.float32)
    first = kit.change_rank(clean, 1, hidden=zeros)
    second = kit.change_rank(clean, 1, hidden=zeros + 1)
    (found,) = compare_poisoned(first, second, rows(), rows(), "large", VIEW)
    assert (found.rank, found.tensor) == (1, "hidden")


def test_written_slots_are_held_bit_for_bit(clean):
    poisoned = rows()
    poisoned[1][0][0, 0] = 2
    (found,) = compare_poisoned(clean, clean, rows(), poisoned, "nan", VIEW)
    assert (found.rank, found.tensor) == (1, "kv_cache")
    assert "layer 0, 1 of 6 values differ" in found.message


def test_rows_are_copies_of_what_was_written(kit):
    live, step = live_at(kit, 1)
    cache = np.arange(64 * 4 * 2, dtype=np.float32).reshape(64, 4, 2)
    ((row,),) = live.written_rows(step, KvArrays([[cache]]))
    expected = cache.reshape(-1, 2)[[7, 17]].copy()
    cache[:] = 0
    assert row.view(np.float32).tolist() == expected.tolist()


def test_a_step_that_fails_under_poison_breaks_c16(clean):
    found = broken_by_poison(clean, "nan", IndexError("index 9 is out of range"))
    assert found.contract == "C16"
    assert "the step failed: IndexError: index 9" in found.message
