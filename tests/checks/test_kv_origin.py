"""The first bad KV write: its phase, rank, layer, slot and whose token it is."""

import numpy as np
import pytest
from msgspec.structs import replace

from pcpbench.checks.kv import KvArrays
from pcpbench.checks.kv_origin import KvOrigins
from pcpbench.checks.oracle import Oracle
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.plan import StepPlan

WIDTH, LAYERS = 3, 2


class Run:
    """Two arms that write their KV soundly, until `spoil` says otherwise."""

    def __init__(self, kit, plan, arm, twin, kind, spoil):
        self.plan, self.oracle, self.spoil = plan, Oracle(plan), spoil
        self.setups = {setup.name: setup for setup in (arm, twin)}
        self.arrays = {
            name: [
                [
                    np.zeros((40, plan.block_sizes[0] // s.world.dcp_size, WIDTH), np.float32)
                    for _ in range(LAYERS)
                ]
                for _ in range(s.world.size)
            ]
            for name, s in self.setups.items()
        }
        self.views = {name: KvArrays(arrays) for name, arrays in self.arrays.items()}
        self.origins = KvOrigins(arm, twin, kind, "float32")
        self.origins.start(self.views[arm.name])
        for step in plan.steps:
            self.step(kit, step, arm)

    def step(self, kit, step, arm):
        self.oracle.advance(step)
        for name, setup in self.setups.items():
            for request in step.scheduled if not step.idle else ():
                first, count = request.num_computed_tokens, request.num_scheduled_tokens
                positions = np.arange(first, first + count)
                slots, owner = self.oracle.book.slots(
                    request.req_id, 0, positions, setup.world.dcp_size, setup.interleave
                )
                for rank, layers in enumerate(self.arrays[name]):
                    mine = owner == (setup.world.dcp_rank(rank) if setup.world.dcp_size > 1 else 0)
                    for layer, cache in enumerate(layers):
                        values = np.stack(
                            [
                                positions + 1,
                                positions * 0 + layer + 1,
                                positions * 0 + int(request.req_id[1:]) + 1,
                            ],
                            1,
                        )
                        cache.reshape(-1, WIDTH)[slots[mine]] = values[mine]
        self.spoil(step, self.arrays[arm.name])
        expected = None
        if step.scheduled and not step.idle:
            expected = self.oracle.expect(step, arm, kit.NONE, TokenFeed())
        self.origins.observe(step, self.oracle, expected, self.views)


def origin(kit, arm, twin, kind, spoil, plan=None):
    return Run(kit, plan or kit.make_plan([5, 3], 2), arm, twin, kind, spoil).origins


def pair(kit, **world):
    return kit.setup("full", **world), kit.setup("twin", **world)


@pytest.mark.parametrize("world", [{"pcp": 2}, {"tp": 2, "dcp": 2, "interleave": 2}], ids=str)
@pytest.mark.parametrize("kind", ["capture", "partition"])
def test_nothing_is_found_where_nothing_is_wrong(kit, world, kind):
    arm = kit.setup("full", **world)
    twin = kit.setup("twin", **(world if kind == "capture" else {}))
    assert origin(kit, arm, twin, kind, lambda *_: None).first is None


def test_a_wrong_value_is_placed(kit):
    def spoil(step, arrays):
        if step.index == 1:  # r1's fourth token, in the first block that it was given
            arrays[1][1].reshape(-1, WIDTH)[3 * 4 + 3][0] += 0.5

    found = origin(kit, *pair(kit, pcp=2), "capture", spoil)
    first = found.first
    assert (first.what, first.phase, first.step, first.rank, first.layer) == (
        "wrong", "decode", 1, 1, 1,
    )  # fmt: skip
    assert (first.slot, first.block, first.req_id, first.position) == (15, 3, "r1", 3)
    assert (first.found, first.expected) == (("4.5",), ("4.0",))
    assert found.found.tolist() == [4.5, 2.0, 2.0]


def test_under_dcp_a_slot_is_held_against_the_reference_position(kit):
    arm = kit.setup("eager", tp=2, dcp=2, interleave=2)

    def spoil(step, arrays):
        if step.index == 0:  # rank 1 holds positions 2 and 3 of r0's block in its slots 2 and 3
            arrays[1][0].reshape(-1, WIDTH)[2] = (30.0, 1.0, 1.0)

    first = origin(kit, arm, kit.setup("reference"), "partition", spoil).first
    assert (first.what, first.phase, first.rank, first.req_id, first.position) == (
        "wrong", "prefill", 1, "r0", 2,
    )  # fmt: skip


def test_a_block_that_changed_hands_before_a_window_is_its_new_owners(kit):
    """Blocks of 4, window 3: r0's block 1 is r1's from step 1 on."""
    steps = [
        StepPlan(index=0, scheduled=(kit.scheduled("r0", 7),), new_block_ids={"r0": ((1, 2),)},
                 new_requests=(kit.entering("r0", 7),)),
        StepPlan(index=1, scheduled=(kit.scheduled("r0", 1, 7, 7), kit.scheduled("r1", 3)),
                 new_block_ids={"r1": ((1,),)}, freed_block_ids={"r0": ((1,),)},
                 new_requests=(kit.entering("r1", 3),)),
    ]  # fmt: skip
    plan = replace(kit.plan_of(steps), sliding_windows=(3,))

    def spoil(step, arrays):
        if step.index == 1:
            arrays[0][0].reshape(-1, WIDTH)[5] = 9.0

    arm, twin = kit.setup("eager", pcp=2), kit.setup("reference")
    assert origin(kit, arm, twin, "partition", lambda *_: None, plan).first is None
    first = origin(kit, arm, twin, "partition", spoil, plan).first
    assert (first.what, first.slot, first.req_id, first.position) == ("wrong", 5, "r1", 1)

    def unplanned(step, arrays):
        if step.index == 1:  # the cache's last slot, which is what -1 would index
            arrays[0][0].reshape(-1, WIDTH)[159] = 9.0

    first = origin(kit, arm, twin, "partition", unplanned, plan).first
    assert (first.what, first.slot, first.req_id) == ("unplanned", 159, None)


def test_a_layer_before_a_rank_and_a_rank_before_a_slot(kit):
    def spoil(step, arrays):
        if step.index == 0:
            arrays[0][1].reshape(-1, WIDTH)[4] = 50.0
            arrays[1][0].reshape(-1, WIDTH)[5] = 50.0

    first = origin(kit, *pair(kit, pcp=2), "capture", spoil).first
    assert (first.layer, first.rank, first.slot) == (0, 1, 5)


def test_nan_is_named_before_it_is_called_wrong(kit):
    def spoil(step, arrays):
        arrays[0][0].reshape(-1, WIDTH)[4] = np.nan

    first = origin(kit, *pair(kit, pcp=2), "capture", spoil).first
    assert (first.what, first.phase, first.found) == ("non-finite", "prefill", ("nan",) * 3)


def test_a_slot_that_the_plan_does_not_name_is_unplanned(kit):
    def spoil(step, arrays):
        if step.index == 2:
            arrays[0][0].reshape(-1, WIDTH)[100] = 1.0

    first = origin(kit, *pair(kit, pcp=2), "padding", spoil).first
    assert (first.what, first.slot, first.req_id, first.phase) == ("unplanned", 100, None, "decode")


def test_an_idle_step_may_write_the_null_block_only(kit):
    steps = [*kit.make_plan([5, 3], 1).steps, StepPlan(index=2, scheduled=(), idle=True)]
    plan = kit.plan_of(steps)

    def null(step, arrays):
        if step.idle:
            arrays[0][0][0] = 1.0

    def live(step, arrays):
        if step.idle:
            arrays[0][0].reshape(-1, WIDTH)[4] = 7.0

    assert origin(kit, *pair(kit, pcp=2), "padding", null, plan).first is None

    def not_finite(step, arrays):
        if step.idle:
            arrays[1][1][0, 2] = np.nan

    first = origin(kit, *pair(kit, pcp=2), "padding", not_finite, plan).first
    assert (first.what, first.phase, first.layer, first.slot) == ("non-finite", "dummy", 1, 2)
    first = origin(kit, *pair(kit, pcp=2), "padding", live, plan).first
    assert (first.what, first.phase, first.req_id, first.position) == (
        "unplanned", "dummy", "r0", 0,
    )  # fmt: skip
