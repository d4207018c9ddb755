import numpy as np
import pytest
from msgspec.structs import replace

from pcpbench.checks.kv import (
    KvArrays,
    compare_kv,
    compare_kv_by_position,
    kv_by_position,
    written_slots,
)
from pcpbench.checks.oracle import Oracle
from pcpbench.checks.oracle_tables import PAD, TokenFeed
from pcpbench.plan import StepPlan

WIDTH, LAYERS = 3, 2


def latent(layer, req_id, position):
    return [layer, int(req_id[1:]), position]


def caches(plan, index, setup, num_blocks=40, fill=np.nan):
    """What a correct engine holds after a step: every owned position's latent, else `fill`."""
    oracle, feed = Oracle(plan), TokenFeed()
    block_size = plan.block_sizes[0] // setup.world.dcp_size
    arrays = [
        [np.full((num_blocks, block_size, WIDTH), fill, np.float32) for _ in range(LAYERS)]
        for _ in range(setup.world.size)
    ]
    for step in plan.steps[: index + 1]:
        oracle.advance(step)
        for rank in range(setup.world.size):
            me = setup.world.dcp_rank(rank)
            for request in step.scheduled:
                first, count = request.num_computed_tokens, request.num_scheduled_tokens
                positions = np.arange(first, first + count)
                slots, owner = oracle.book.slots(
                    request.req_id, 0, positions, setup.world.dcp_size, setup.interleave
                )
                for position, slot, its in zip(positions, slots, owner, strict=True):
                    if its == me:
                        for layer in range(LAYERS):
                            rows = arrays[rank][layer].reshape(-1, WIDTH)
                            rows[slot] = latent(layer, request.req_id, position)
    return KvArrays(arrays), oracle, feed


def test_blocks_before_a_window_are_nobodys(kit):
    """Blocks of 4, window 3: at 7 computed position 3 is out of sight, and block 5 with it."""
    plan = replace(
        kit.plan_of(
            [
                StepPlan(
                    index=0, scheduled=(kit.scheduled("r0", 7),), new_block_ids={"r0": ((5, 6),)}
                ),
                StepPlan(
                    index=1,
                    scheduled=(kit.scheduled("r0", 1, 7, 7), kit.scheduled("r1", 2)),
                    new_block_ids={"r1": ((5,),)},
                    freed_block_ids={"r0": ((5,),)},
                ),
            ]
        ),
        sliding_windows=(3,),
    )
    oracle, setup = Oracle(plan), kit.setup()
    for step in plan.steps:
        oracle.advance(step)
    assert oracle.book.table("r0", 0) == [0, 6]
    slots, _ = oracle.book.slots("r0", 0, np.arange(9), 1, 1)
    assert slots.tolist() == [PAD] * 4 + [24, 25, 26, 27, PAD]
    expected = oracle.expect(plan.steps[1], setup, kit.NONE, TokenFeed())
    assert [ids.tolist() for ids in expected.ranks[0].block_ids[0]] == [[0, 6], [5]]
    cache = np.arange(8 * 4, dtype=np.float32).reshape(8, 4, 1)
    held = kv_by_position(KvArrays([[cache]]), oracle, plan.steps[1], setup, 0, 0, "all")
    assert held["r0"][0].tolist() == [4, 5, 6, 7]
    assert held["r1"][1].ravel().tolist() == [20, 21]


def test_positions_of_a_shard_by_hand(kit):
    """Block size 4, dcp 2, interleave 2, block ids [7]: rank 1 holds 2, 3, 6, 7 of 0..7."""
    step = StepPlan(index=0, scheduled=(kit.scheduled("r0", 8),), new_block_ids={"r0": ((7,),)})
    plan = kit.plan_of([step], 8)
    oracle = Oracle(plan)
    oracle.advance(step)
    cache = np.zeros((9, 4, 1), np.float32)
    cache[7, :, 0] = [12, 13, 16, 17]
    view = KvArrays([[np.zeros_like(cache)], [cache]])
    setup = kit.setup(tp=2, dcp=2, interleave=2)
    positions, latents = kv_by_position(view, oracle, step, setup, 1, 0)["r0"]
    assert positions.tolist() == [2, 3, 6, 7]
    assert latents[:, 0].tolist() == [12, 13, 16, 17]


@pytest.mark.parametrize("scope", ["written", "all"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"pcp": 2},
        {"tp": 2, "dcp": 2, "interleave": 2},
        {"tp": 4, "dcp": 4},
        {"pcp": 2, "tp": 2, "dcp": 4, "interleave": 2},
    ],
)
def test_shards_hold_what_the_reference_holds(kit, sizes, scope):
    setups = {"eager": kit.setup(**sizes), "reference": kit.setup("reference")}
    plan = kit.make_plan([3, 9, 14], 4, block_size=8 * setups["eager"].world.dcp_size)
    view, oracle, _ = caches(plan, 3, setups["eager"])
    twin, _, _ = caches(plan, 3, setups["reference"])
    arms = ("eager", "reference")

    def compare():
        return list(
            compare_kv_by_position(
                view, twin, oracle, plan.steps[3], setups, arms, "partition", "float32", scope
            )
        )

    assert compare()
    assert {place.drift.outcome for place in compare()} == {"bitwise"}
    rank, row = damage(view, plan.steps[3], oracle, setups["eager"], scope)
    bad = [place for place in compare() if place.drift.outcome != "bitwise"]
    assert [(place.rank, place.layer) for place in bad] == [(rank, 1)]
    assert row in bad[0].where


def damage(view, step, oracle, setup, scope):
    """Change one latent of layer 1 on the last rank that holds something in scope."""
    for rank in reversed(range(setup.world.size)):
        held = kv_by_position(view, oracle, step, setup, rank, 1, scope)
        for req_id, (positions, latents) in held.items():
            if len(positions):
                rows = view.layer(rank, 1).reshape(-1, WIDTH)
                slot = int(np.flatnonzero((rows == latents[0]).all(axis=1))[0])
                rows[slot] += 1
                return rank, f"request {req_id}, position {positions[0]}"
    raise AssertionError("nothing in scope")


def test_excluded_requests_are_not_compared(kit):
    setups = {"eager": kit.setup(pcp=2), "reference": kit.setup("reference")}
    plan = kit.make_plan([3], 2, block_size=8)
    view, oracle, _ = caches(plan, 1, setups["eager"])
    args = (oracle, plan.steps[1], setups, ("eager", "reference"), "partition", "float32")
    twin, _, _ = caches(plan, 1, setups["reference"])
    assert list(compare_kv_by_position(view, twin, *args))
    assert list(compare_kv_by_position(view, twin, *args, exclude={"r0"})) == []


def test_written_slots_are_compared_and_others_are_not(kit):
    setup = kit.setup(pcp=2)
    plan = kit.make_plan([3, 9], 3, block_size=8)
    view, oracle, feed = caches(plan, 2, setup, fill=0)
    twin, _, _ = caches(plan, 2, setup, fill=0)
    expected = oracle.expect(plan.steps[2], setup, kit.NONE, feed)
    slots = written_slots(expected, 0, 0)
    # r0 at position 4: block 1, offset 4; r1 at position 10: its second block 3, offset 2.
    assert slots.tolist() == [12, 26]
    view.layer(0, 0).reshape(-1, WIDTH)[13] += 1
    assert all(p.drift.outcome == "bitwise" for p in compare_kv(view, twin, expected, 2, "float32"))
    (bad,) = [p for p in compare_kv(view, twin, None, 2, "float32") if p.where]
    assert (bad.rank, bad.layer, bad.drift.outcome) == (0, 0, "exceeds_budget")
    assert bad.where == "slot 13 (block 1); 1 slots differ"
    view.layer(1, 1).reshape(-1, WIDTH)[26] += 1
    (bad,) = [p for p in compare_kv(view, twin, expected, 2, "float32") if p.where]
    assert (bad.rank, bad.layer, bad.where) == (1, 1, "slot 26 (block 3); 1 slots differ")


def test_the_null_block_is_nobodys(kit):
    setup = kit.setup()
    plan = kit.make_plan([3], 1, block_size=8)
    view, _, _ = caches(plan, 1, setup)
    twin, _, _ = caches(plan, 1, setup)
    view.layer(0, 0)[0] = 5
    assert all(p.drift.outcome == "bitwise" for p in compare_kv(view, twin, None, 1, "float32"))
    assert PAD not in written_slots(Oracle(plan).expect(
        plan.steps[0], setup, kit.NONE, TokenFeed()), 0, 0)  # fmt: skip


def test_raw_bfloat16_caches_compare_bit_for_bit():
    one = np.zeros((3, 2, 4), np.uint16)
    two = one.copy()
    two[2, 1, 3] = 1
    views = KvArrays([[one]]), KvArrays([[two]])
    (place,) = compare_kv(*views, None, 1, "bfloat16")
    assert (place.drift.outcome, place.where) == (
        "exceeds_budget",
        "slot 5 (block 2); 1 slots differ",
    )


def test_caches_of_different_size_are_a_shape_mismatch():
    views = KvArrays([[np.zeros((3, 2, 4))]]), KvArrays([[np.zeros((4, 2, 4))]])
    (place,) = compare_kv(*views, None, 1, "float32")
    assert (place.drift.outcome, place.where) == (
        "shape_mismatch",
        "shapes [2, 2, 4] and [3, 2, 4]",
    )
