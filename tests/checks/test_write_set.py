"""C9, C15, the caches' half of C14: broken states that must be named, near misses that must not."""

import numpy as np
import pytest

from pcpbench.checks.findings import StepView
from pcpbench.checks.kv import KvArrays, written_slots
from pcpbench.checks.write_set import WriteSets, changed_by_capture, changed_tables, slot_bits
from pcpbench.plan import StepPlan

WIDTH = 3


class Stage:
    """One PCP 2 arm before and after the decode step of two requests; block size 4."""

    def __init__(self, kit, dtype=np.float32, idle=False):
        plan = kit.make_plan([3, 9], 2)
        bench = kit.Bench(plan, kit.setup(pcp=2))
        step, expected, record = bench.at(1)
        if idle:
            step, expected = StepPlan(index=1, scheduled=(), idle=True), None
        self.view = StepView(plan=step, record=record, setup=bench.setup, expected=expected)
        rng = np.random.default_rng(0)
        self.arrays = [
            [rng.integers(1, 99, (8, 4, WIDTH)).astype(dtype) for _ in range(2)] for _ in range(2)
        ]
        self.slots = [] if idle else written_slots(expected, 0, 0).tolist()
        self.tables = [[np.arange(12).reshape(3, 4)] for _ in range(2)]
        self.writes = WriteSets()
        self.writes.start("eager", KvArrays(self.arrays), 2, self.tables)

    def rows(self, rank, layer):
        return self.arrays[rank][layer].reshape(-1, WIDTH)

    def check(self):
        return list(self.writes.check(self.view, KvArrays(self.arrays), self.tables))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_c15_takes_the_slots_of_the_mapping_and_no_other(kit, dtype):
    stage = Stage(kit, dtype)
    assert stage.slots == [7, 17]  # r0 at position 3 of block 1; r1 at position 9 of block 4
    for rank in range(2):
        for layer in range(2):
            stage.rows(rank, layer)[stage.slots] += 1
    assert stage.check() == []
    stage.rows(1, 0)[8, WIDTH - 1] += 1
    (found,) = stage.check()
    assert (found.contract, found.rank, found.tensor) == ("C15", 1, "kv_cache")
    assert found.message == "layer 0, slot 8 (block 2) written that the slot mapping does not name"
    assert stage.check() == [], "told once"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_c9_takes_no_null_block_that_is_not_finite(kit, value):
    stage = Stage(kit, idle=True)
    stage.rows(1, 0)[3, WIDTH - 1] = value  # slot 3 is the last one of block 0
    (found,) = stage.check()
    assert (found.contract, found.rank, found.tensor) == ("C9", 1, "kv_cache")
    assert found.message.startswith("layer 0, block 0 (the null block) is not finite")
    assert stage.check() == [], "told once"


@pytest.mark.parametrize("pattern", [0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x7F81])
def test_c9_reads_bfloat16_from_its_bits(kit, pattern):
    """NaN and infinities of both signs; the largest finite number is one."""
    stage = Stage(kit, np.uint16, idle=True)
    stage.rows(0, 1)[2, 0] = 0x7F7F
    assert stage.check() == []
    stage.rows(1, 0)[3, WIDTH - 1] = pattern
    (found,) = stage.check()
    assert (found.contract, found.rank) == ("C9", 1)


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, np.nan), (np.uint16, 0x7FC0)])
def test_c9_takes_no_capture_that_leaves_nan_in_the_null_block(kit, dtype, value):
    stage = Stage(kit, dtype, idle=True)
    before = KvArrays([[layer.copy() for layer in rank] for rank in stage.arrays])
    stage.rows(1, 0)[1] = 3
    after = KvArrays(stage.arrays)
    assert list(changed_by_capture(before, after, stage.tables, stage.tables)) == []
    stage.rows(1, 0)[1, 0] = value
    (change,) = changed_by_capture(before, after, stage.tables, stage.tables)
    assert change[:2] == (1, "kv_cache")
    assert "null block) is not finite" in change[2]


def test_c9_takes_large_values_in_the_null_block_and_nan_that_is_not_there(kit):
    stage = Stage(kit, idle=True)
    stage.rows(0, 1)[:4] = 1e30
    assert stage.check() == []


def test_c15_takes_no_write_to_the_null_block(kit):
    stage = Stage(kit)
    stage.rows(0, 1)[0] = 5
    assert "slot 0 (block 0)" in stage.check()[0].message


def test_c15_compares_bits(kit):
    stage = Stage(kit)
    stage.rows(0, 0)[9] = np.nan
    stage.writes.start("eager", KvArrays(stage.arrays), 2)
    assert stage.check() == [], "the same NaN is no write"
    stage.rows(0, 0)[9] = 0.0
    stage.check()
    stage.rows(0, 0)[9] = -0.0
    assert len(stage.check()) == 1


def test_c15_misses_a_write_only_where_memory_was_used_before(kit):
    stage = Stage(kit)
    assert stage.check() == [], "the same values again are no missing write"
    stage.rows(1, 1)[7] = 0
    stage.writes.start("eager", KvArrays(stage.arrays), 2)
    (found,) = stage.check()
    assert found.message == "layer 1, slot 7 (block 1) of the mapping not written"
    assert found.rank == 1


def test_an_arm_that_was_not_started_is_not_judged(kit):
    stage = Stage(kit)
    stage.rows(0, 0)[:] += 1
    assert list(WriteSets().check(stage.view, KvArrays(stage.arrays))) == []


def test_c9_leaves_the_null_block_to_idle_steps_and_nothing_else(kit):
    stage = Stage(kit, idle=True)
    stage.rows(0, 0)[:4] = 7
    assert stage.check() == []
    stage.rows(0, 0)[4] = 7
    (found,) = stage.check()
    assert (found.contract, found.rank) == ("C9", 0)
    assert found.message == "an idle step wrote outside the null block: layer 0, slot 4 (block 1)"


def test_c9_holds_global_tables_in_idle_steps_only(kit):
    idle, busy = Stage(kit, idle=True), Stage(kit)
    for stage in (idle, busy):
        stage.tables[1][0][2, 1] = 77
    assert busy.check() == []
    (found,) = idle.check()
    assert (found.contract, found.rank, found.tensor) == ("C9", 1, "global.block_tables.0")
    assert found.message == "[2, 1] went from 9 to 77, 1 entries in an idle step"


def test_c9_over_a_capture():
    before, after = np.zeros((4, 2, WIDTH)), np.zeros((4, 2, WIDTH))
    tables = [[np.zeros((2, 2))]]
    after[0] = 5
    args = (KvArrays([[before]]), KvArrays([[after]]), tables, tables)
    assert list(changed_by_capture(*args)) == []
    after[3, 1] = 5
    assert list(changed_by_capture(*args)) == [
        (0, "kv_cache", "capture wrote layer 0, slot 7 (block 3)")
    ]


def test_tables_of_another_shape_have_changed():
    ((_, _, message),) = changed_tables([[np.zeros((2, 2))]], [[np.zeros((2, 3))]])
    assert message == "shape went from [2, 2] to [2, 3]"


def test_c9_leaves_the_null_block_to_dummy_replays_and_nothing_else(kit):
    stage = Stage(kit)
    stage.check()
    between = ("FULL[reqs=2,tokens=2]",)

    def replayed():
        kv = KvArrays(stage.arrays)
        return list(stage.writes.check_idle_replays(stage.view, kv, stage.tables, between))

    stage.rows(0, 0)[3] += 1
    assert replayed() == []
    assert list(stage.writes.check_again(stage.view, KvArrays(stage.arrays), between)) == []
    stage.rows(1, 1)[5] += 1
    (found,) = replayed()
    assert (found.contract, found.rank) == ("C9", 1)
    assert found.message == (
        "replaying FULL[reqs=2,tokens=2] on padding alone wrote layer 1, slot 5 (block 1)"
    )
    assert replayed() == [], "told once"
    stage.tables[0][0][1, 2] = 77
    (found,) = replayed()
    assert (found.contract, found.tensor) == ("C9", "global.block_tables.0")


def test_c14_any_slot_that_a_second_replay_moves(kit):
    stage = Stage(kit)
    assert list(stage.writes.check_again(stage.view, KvArrays(stage.arrays))) == []
    stage.rows(0, 0)[stage.slots[0]] += 1
    (found,) = stage.writes.check_again(stage.view, KvArrays(stage.arrays))
    assert found.contract == "C14"
    assert found.message == ("a second run on the same inputs changed layer 0, slot 7 (block 1)")


@pytest.mark.parametrize(
    ("dtype", "width", "words"),
    [(np.float32, 24, 12), (np.float16, 3, 3), (np.uint16, 6, 3), (np.float32, 3, 3)],
)
def test_bits_of_a_slot(dtype, width, words):
    assert slot_bits(np.zeros((5, 2, width), dtype)).shape == (10, words)
