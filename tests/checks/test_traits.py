"""Targets that are known to differ: what is no longer said of them, and what still is."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pcpbench.checks.contracts import check_step
from pcpbench.checks.findings import StepView
from pcpbench.traits import Traits


def said(bench, step, expected, record, **traits):
    """(contract, tensor) of everything that is found of a target with these traits."""
    setup = replace(bench.setup, traits=Traits(**traits))
    view = StepView(plan=step, record=record, setup=setup, expected=expected)
    return {(v.contract, v.tensor) for v in check_step(view)}


def at(kit, index, chosen, candidates, **sizes):
    bench = kit.Bench(
        kit.make_plan([3, 9, 5, 2, 7], 3, block_size=16),
        kit.setup("full", candidates=candidates, **sizes),
    )
    return bench, *bench.at(index, chosen, "" if chosen.num_reqs else "batch has a prefill")


def whole_batch_counts(kit, record):
    for rank in range(2):
        record = kit.change_rank(record, rank, dispatch_num_reqs=5)
    return record


def test_a_count_of_the_whole_batch_is_a_finding_where_a_full_graph_depends_on_it(kit):
    bench, step, expected, record = at(kit, 1, kit.full(4), (kit.full(4),), pcp=2)
    found = said(bench, step, expected, whole_batch_counts(kit, record), counts_whole_batch=True)
    assert found == {("C10", "dispatch_num_reqs")}


@pytest.mark.parametrize(
    ("index", "full"), [(0, True), (1, False)], ids=["a prefill", "no FULL graph"]
)
def test_it_is_none_where_nothing_depends_on_it(kit, index, full):
    chosen = kit.NONE if full else kit.piecewise(8)
    candidates = (kit.full(4),) if full else (kit.piecewise(8),)
    bench, step, expected, record = at(kit, index, chosen, candidates, pcp=2)
    record = whole_batch_counts(kit, record)
    assert said(bench, step, expected, record, counts_whole_batch=True) == set()
    assert said(bench, step, expected, record) == {("C10", "dispatch_num_reqs")}


def test_its_reasons_are_its_own_and_what_can_be_told_of_them_is_true(kit):
    """5 decodes on two ranks, 3 rows and tokens on the first; graphs are for queries of two."""
    graphs = (kit.full(4, 2), kit.full(2, 2))
    bench, step, expected, record = at(kit, 1, kit.NONE, graphs, pcp=2)

    def is_said(reason, **traits):
        missed = replace(record, miss_reason=reason)
        return ("C10", "descriptor") in said(bench, step, expected, missed, **traits)

    for reason, of_ours, of_theirs in (
        ("no FULL graph with this query length", False, False),
        ("the count is that of the whole batch", True, False),
        ("queries are not uniform", True, False),
        ("more requests than the largest FULL graph", True, False),  # 5 of them all, 4 in a graph
        ("more tokens than the largest FULL graph", True, True),
        ("batch has a prefill", True, True),
    ):
        assert is_said(reason) is of_ours, reason
        assert is_said(reason, counts_whole_batch=True) is of_theirs, reason


def test_token_counts_are_compared_all_the_same(kit):
    bench, step, expected, record = at(kit, 0, kit.NONE, (), pcp=2)
    record = kit.change_rank(record, 1, dispatch_num_tokens=1)
    found = said(bench, step, expected, record, counts_whole_batch=True)
    assert found == {("C10", "dispatch_num_tokens")}


@pytest.mark.parametrize("name", ["input_ids", "positions"])
def test_stale_padding_is_accepted_without_pcp_only(kit, name):
    for sizes, right in (({}, set()), ({"pcp": 2}, {("C3", name)})):
        chosen = kit.full(8) if not sizes else kit.full(4)
        bench, step, expected, record = at(kit, 1, chosen, (chosen,), **sizes)
        values = np.array(getattr(record.ranks[-1], name))
        values[-1] = 5
        stale = kit.change_rank(record, len(record.ranks) - 1, **{name: values})
        assert said(bench, step, expected, stale, stale_padding_without_pcp=True) == right
        assert said(bench, step, expected, stale) == {("C3", name)}


def test_flags_and_real_tokens_are_compared_all_the_same(kit):
    bench, step, expected, record = at(kit, 1, kit.full(8), (kit.full(8),))
    for name, place, value in (("is_padding", -1, False), ("positions", 0, 99)):
        values = np.array(getattr(record.ranks[0], name))
        values[place] = value
        broken = kit.change_rank(record, 0, **{name: values})
        found = said(bench, step, expected, broken, stale_padding_without_pcp=True)
        assert found == {("C3", name)}


@pytest.fixture
def last_token(kit):
    """Called with what the step ran as: two decodes and the 9th token of a prompt of 9."""

    def walk(chosen, *candidates, computed=8, why="", **sizes):
        first = kit.scheduled("late", computed, 0, 9) if computed else None
        more = {"block_size": 16}
        plan = kit.make_plan([3, 5], 2, **more)
        late = kit.scheduled("late", 9 - computed, computed, 9)
        enters = {
            "new_requests": (kit.entering("late", 9),),
            "new_block_ids": {"late": ((9,),)},
        }
        steps = list(plan.steps)
        at = 1 if first else 2
        steps[at] = msgspec.structs.replace(steps[at], **enters)
        if first:
            steps[1] = msgspec.structs.replace(steps[1], scheduled=(*steps[1].scheduled, first))
        steps[2] = msgspec.structs.replace(steps[2], scheduled=(*steps[2].scheduled, late))
        setup = kit.setup("full", candidates=candidates, **sizes)
        bench = kit.Bench(kit.plan_of(steps, 16), setup)
        return bench, *bench.at(2, chosen, why)

    return walk


def said_of_dispatch(walked, **traits):
    return [place for place in sorted(said(*walked, **traits)) if place[0] == "C10"]


SHORT = {"short_prefill_is_decode_without_pcp": True}


def test_the_last_token_of_a_prompt_may_run_as_a_decode_without_pcp(kit, last_token):
    walked = last_token(kit.full(4), kit.full(4), kit.full(8))
    assert said_of_dispatch(walked, **SHORT) == []
    assert said_of_dispatch(walked) == [("C10", "descriptor")]
    # As a prefill it may run as well: a newer vLLM may not do that any more.
    walked = last_token(kit.NONE, kit.full(4), why="batch has a prefill")
    assert said_of_dispatch(walked, **SHORT) == []


def test_nothing_else_may(kit, last_token):
    larger = last_token(kit.full(8), kit.full(4), kit.full(8))
    two_tokens = last_token(kit.full(4), kit.full(4), computed=7)
    under_pcp = last_token(kit.full(4), kit.full(4), pcp=2)
    without_context = at(kit, 0, kit.full(5), (kit.full(5),))
    for walked in (larger, two_tokens, under_pcp, without_context):
        assert said_of_dispatch(walked, **SHORT) == [("C10", "descriptor")]


def test_a_prompt_of_one_token_is_a_prefill_all_the_same(kit):
    plan = kit.make_plan([1, 1], 1)
    bench = kit.Bench(plan, kit.setup("full", candidates=(kit.full(2),)))
    walked = bench, *bench.at(0, kit.full(2))
    assert said_of_dispatch(walked, **SHORT) == [("C10", "descriptor")]


GIVEN_BACK = {"given_back_in_tables_under_dcp": True}


@pytest.mark.parametrize(
    ("table", "traits", "sizes", "right"),
    [
        ([0, 2, 3], {}, {}, []),
        ([1, 2, 3], {}, {"tp": 2, "dcp": 2}, ["block_tables"]),
        ([1, 2, 3], GIVEN_BACK, {"tp": 2, "dcp": 2}, []),
        ([9, 2, 3], GIVEN_BACK, {"tp": 2, "dcp": 2}, ["block_tables"]),
        ([1, 0, 3], GIVEN_BACK, {"tp": 2, "dcp": 2}, ["block_tables"]),
        ([1, 2, 3], GIVEN_BACK, {"pcp": 2}, ["block_tables"]),
    ],
)  # fmt: skip
def test_blocks_given_back_may_stay_in_a_table_under_dcp_only(kit, table, traits, sizes, right):
    """Blocks of 4, window 3: at 9 computed block 1 with positions 0 to 3 has gone back."""
    plan = msgspec.structs.replace(kit.make_plan([9], 2), sliding_windows=(3,))
    bench = kit.Bench(plan, kit.setup("eager", sharded_groups=(False,), **sizes))
    step, expected, record = bench.at(1)
    tables = (np.array([table], dtype=np.int32),)
    record = kit.change_rank(record, 0, block_tables=tables)
    found = said(bench, step, expected, record, **traits)
    assert [name for contract, name in found if contract == "C5"] == right
