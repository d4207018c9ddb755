"""A recorded step as fields: good records are the oracle's, and what is broken in them is seen."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_plan

from pcpbench.checks.partition_compare import Tally
from pcpbench.checks.partition_known import GIVEN_BACK, GLOBAL_ROWS, may_lack
from pcpbench.checks.partition_steps import (
    LATE_HOST,
    WHOLE_COUNT,
    StepJudge,
    with_parts,
    with_rows,
)
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.partition_results import PartitionOutputs
from pcpbench.world import World

NONE_FOUND = np.zeros(0, dtype=np.int64)
FULL_2 = BatchExecutionDescriptor(CUDAGraphMode.FULL, 2, 2, uniform_token_count=1)
FULL_4 = BatchExecutionDescriptor(CUDAGraphMode.FULL, 4, 4, uniform_token_count=1)


class Steps:
    """Four decodes on two PCP ranks, after their prefills."""

    def __init__(self, kit):
        plan = kit.make_plan([3, 2, 5, 4], 1)
        setup = ArmSetup(
            name="builtin",
            world=World(pcp_size=2),
            mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            candidates=(FULL_2, FULL_4, kit.piecewise(2), kit.piecewise(4)),
        )
        self.judge = StepJudge(plan, setup, (8,))
        for step in plan.steps:
            self.judge.advance(step, NONE_FOUND)
        self.expected = self.judge.expect(FULL_2)
        self.record = kit.good_record(plan, plan.steps[-1], setup, self.judge._whole, FULL_2)

    def tally(self, **made):
        tally = Tally("test", self.judge.explain, may_lack)
        tally.compare("step 1", "made-up", {"oracle": self.expected, **made})
        return tally.result({}, 0.0)

    def with_step(self, **changes):
        return replace(self.expected, step={**self.expected.step, **changes})


@pytest.fixture
def steps(kit):
    return Steps(kit)


def test_an_equal_step_differs_in_nothing(steps):
    found = steps.tally(builtin=steps.expected, vllm=steps.expected)
    assert not found.differences
    assert not found.explained


def test_every_field_of_a_rank_is_seen_when_it_is_broken(steps):
    for name, value in steps.expected.ranks[1].items():
        wrong = value + 5 if not isinstance(value, str) else "odd"
        if isinstance(value, np.ndarray) and value.dtype == np.bool_:
            wrong = ~value
        if isinstance(value, np.ndarray) and not value.size:
            continue
        ranks = (steps.expected.ranks[0], {**steps.expected.ranks[1], name: wrong})
        found = steps.tally(vllm=PartitionOutputs(ranks=ranks, step=steps.expected.step))
        assert [(d.rank, d.field) for d in found.differences] == [(1, name)]


def test_the_dispatch_of_vllms_runner_is_known_and_every_other_is_not(steps):
    assert steps.expected.step["descriptor"] == FULL_2.label
    known = steps.with_step(dispatch_num_reqs=4, descriptor="PIECEWISE[tokens=2]")
    found = steps.tally(vllm=known)
    assert not found.differences
    assert {d.reason for d in found.explained} == {WHOLE_COUNT, GLOBAL_ROWS}
    odd = steps.with_step(dispatch_num_reqs=3, descriptor=FULL_4.label)
    assert {d.field for d in steps.tally(vllm=odd).differences} == {
        "dispatch_num_reqs",
        "descriptor",
    }
    assert len(steps.tally(builtin=known).differences) == 2


def test_counts_of_every_rank_are_looked_at(steps, kit):
    for name in ("dispatch_num_reqs", "dispatch_num_tokens"):
        assert steps.judge.outputs(steps.record, "").step[name] == 2
        odd = kit.change_rank(steps.record, 1, **{name: 4})
        made = steps.judge.outputs(odd, FULL_2.label).step
        assert made[name] == "not the same on all ranks"
        found = steps.tally(vllm=replace(steps.expected, step=made))
        assert [difference.field for difference in found.differences] == [name]


ROWS = ("num_scheduled_tokens", "num_computed_tokens_np", "prefill_len_np", "is_prefilling_np",
        "query_start_loc_np", "seq_lens_cpu_upper_bound", "padded_gather_idx")  # fmt: skip


def test_what_the_host_knows_of_each_row_is_put_beside_the_record(steps):
    assert set(ROWS) <= steps.expected.ranks[1].keys()
    rows = [{name: rank[name] for name in ROWS} for rank in steps.expected.ranks]
    made = with_rows(steps.judge.outputs(steps.record, FULL_2.label), rows)
    assert set(ROWS) <= made.ranks[1].keys()
    assert made.step["dispatch_num_tokens"] == 2


@pytest.fixture
def late(kit):
    """Decodes of two requests, of which the second had two drafts rejected in its last step."""
    found = Steps(kit)
    found.judge._late = {found.judge._step.scheduled[1].req_id: 2}
    return found


@pytest.mark.parametrize("name", ["num_computed_tokens_np", "seq_lens_cpu_upper_bound"])
def test_hosts_that_count_rejected_drafts_are_known_where_both_do(late, name):
    def made(more, rank):
        ranks = list(late.expected.ranks)
        ranks[rank] = {**ranks[rank], name: ranks[rank][name] + more}
        return replace(late.expected, ranks=tuple(ranks))

    at = next(n for n, rank in enumerate(late.expected.ranks) if 1 in rank["row_req_index"])
    row = (late.expected.ranks[at]["row_req_index"] == 1).astype(np.int64)
    found = late.tally(builtin=made(2 * row, at), vllm=made(2 * row, at))
    assert not found.differences
    assert found.reasons == {LATE_HOST: 2}
    for wrong in (row, 3 * row, 2 * np.roll(row, 1)):
        assert late.tally(builtin=made(wrong, at), vllm=made(wrong, at)).differences
    assert late.tally(builtin=late.expected, vllm=made(2 * row, at)).differences
    assert late.tally(builtin=made(2 * row, at), vllm=late.expected).differences


@pytest.mark.parametrize(("dcp", "first", "known"), [(2, 1, True), (2, 9, False), (1, 1, False)])
def test_an_id_that_was_given_back_is_known_in_a_table_under_dcp(kit, dcp, first, known):
    """Blocks of 4, window 3: at 9 computed the request's first block has gone back."""
    plan = replace_plan(kit.make_plan([9], 1), sliding_windows=(3,))
    world = World(tp_size=2, dcp_size=dcp)
    judge = StepJudge(plan, ArmSetup(name="builtin", world=world, sharded_groups=(False,)), (5,))
    for step in plan.steps:
        judge.advance(step, NONE_FOUND)
    expected = judge.expect(kit.NONE)
    (table,) = expected.ranks[1]["block_tables.0"].copy()[None]
    assert table[0, :3].tolist() == [0, 2, 3]
    table[0, 0] = first
    ranks = (expected.ranks[0], {**expected.ranks[1], "block_tables.0": table})
    tally = Tally("test", judge.explain, may_lack)
    made = PartitionOutputs(ranks=ranks, step=expected.step)
    tally.compare("step 1", "made-up", {"oracle": expected, "vllm": made})
    found = tally.result({}, 0.0)
    assert [d.reason for d in found.explained] == ([GIVEN_BACK] if known else [])
    assert len(found.differences) == (not known)


def test_parts_of_a_rank_are_put_beside_its_batch(steps):
    both = with_parts(steps.expected, [[{"seq_lens": NONE_FOUND}], []])
    assert "ubatch0.seq_lens" in both.ranks[0]
    assert both.ranks[1].keys() == steps.expected.ranks[1].keys()
