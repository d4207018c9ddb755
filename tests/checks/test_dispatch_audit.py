"""The dispatch audit: what served a step, what would have, and batches that nothing ever served."""

from dataclasses import replace

import pytest

from pcpbench.checks.dispatch_audit import DispatchAudit
from pcpbench.modes import CUDAGraphMode

LARGE = "more requests than the largest FULL graph"


def audit_of(
    kit,
    num_reqs,
    sizes=(),
    graphs=None,
    mode=CUDAGraphMode.FULL_DECODE_ONLY,
    choose=None,
    reason=LARGE,
    **world,
):
    """An arm that decodes `num_reqs` requests for two steps after their prefill."""
    graphs = tuple(kit.full(size) for size in sizes) if graphs is None else graphs
    setup = kit.setup("full", mode=mode, candidates=graphs, **world)
    bench = kit.Bench(kit.make_plan([3] * num_reqs, 2, block_size=8), setup)
    audit = DispatchAudit(setup)
    for index in range(3):
        descriptor = choose if choose is not None and index else kit.NONE
        missed = ("batch has a prefill" if index == 0 else reason) if descriptor is kit.NONE else ""
        bench.oracle.advance(step := bench.plan.steps[index])
        expected = bench.oracle.expect(step, setup, descriptor, bench.feed)
        record = kit.good_record(bench.plan, step, setup, expected, descriptor, missed)
        audit.observe(step, record, expected)
    return audit


def test_a_step_that_its_graph_fits_is_no_finding(kit):
    audit = audit_of(kit, 3, (2, 4), choose=kit.full(4))
    assert [step.smallest for step in audit.steps] == [None, *["FULL[reqs=4,tokens=4]"] * 2]
    summary = audit.summary()
    assert summary.modes == {"FULL": 2, "NONE": 1}
    assert summary.reasons == {"batch has a prefill": 1}
    assert summary.never_served == ()
    assert (summary.steps_larger_than_needed, summary.excess_tokens) == (0, 0)
    assert summary.steps_ranks_disagree == 0


def test_a_larger_graph_than_needed_costs_tokens_on_every_rank(kit):
    audit = audit_of(kit, 3, (2, 4, 8), choose=kit.full(8), pcp=2)
    assert audit.steps[1].smallest == "FULL[reqs=2,tokens=2]"
    assert audit.steps[1].excess_tokens == 2 * (8 - 2)
    summary = audit.summary()
    assert (summary.steps_larger_than_needed, summary.excess_tokens) == (2, 24)
    assert summary.steps_ranks_disagree == 0


@pytest.mark.parametrize("pcp", [1, 2])
def test_a_class_that_always_falls_back_is_named(kit, pcp):
    (batch,) = audit_of(kit, 9 * pcp, (2, 4, 8), pcp=pcp).summary().never_served
    assert batch.name == f"decode with {9 * pcp} requests"
    assert (batch.wanted, batch.ran_as, batch.num_steps) == ("FULL", ("eager",), 2)
    assert batch.why == "larger than the largest captured size 8 (up to 9 rows a rank)"


def test_a_class_that_fits_and_never_ran_gives_the_recorded_reason(kit):
    audit = audit_of(kit, 3, (4,), reason="queries are not uniform")
    (batch,) = audit.summary().never_served
    assert (batch.name, batch.why) == ("decode with 3 requests", "queries are not uniform")
    (silent,) = audit_of(kit, 3, (4,), reason="").summary().never_served
    assert silent.why == "no reason was given"
    (bare,) = audit_of(kit, 3).summary().never_served
    assert bare.why == "no FULL graph was captured"


def test_a_class_that_was_served_once_is_not_named(kit):
    audit = audit_of(kit, 3, (4,), choose=kit.full(4))
    more = audit_of(kit, 3, (4,))
    for step, seen in more._classes.items():
        audit._classes[step].num_steps += seen.num_steps
    assert audit.summary().never_served == ()


def test_neighbours_in_size_are_told_as_one_and_gaps_are_not(kit):
    audit = audit_of(kit, 5, (4,))
    for num_reqs in (6, 8):
        audit._classes.update(audit_of(kit, num_reqs, (4,))._classes)
    told = audit.summary().never_served
    assert [batch.name for batch in told] == ["decode with 5 to 6 requests",
                                              "decode with 8 requests"]  # fmt: skip
    assert told[0].num_steps == 4
    assert "up to 6 rows" in told[0].why


def test_a_prefill_is_a_class_only_where_a_graph_was_asked_for_it(kit):
    both = CUDAGraphMode.FULL_AND_PIECEWISE
    graphs = (kit.full(4), kit.piecewise(4))
    (batch,) = audit_of(kit, 3, graphs=graphs, mode=both, choose=kit.full(4)).summary().never_served
    assert batch.name == "large batches with a prefill"
    assert batch.why == "larger than the largest captured size 4 (up to 9 tokens a rank)"
    assert batch.wanted == "PIECEWISE"


def test_a_prefill_that_ran_as_full_was_served(kit):
    """Whether it may is C10's to say."""
    both, graphs = CUDAGraphMode.FULL_AND_PIECEWISE, (kit.full(4), kit.piecewise(4))
    setup = kit.setup("full", mode=both, candidates=graphs)
    for chosen, named in ((kit.full(4), 0), (kit.NONE, 1)):
        bench = kit.Bench(kit.make_plan([1, 2], 1), setup)
        audit = DispatchAudit(setup)
        step, expected, record = bench.at(0, chosen, "" if chosen.num_reqs else "why")
        audit.observe(step, record, expected)
        assert len(audit.summary().never_served) == named


def test_eager_arms_have_no_class(kit):
    summary = audit_of(kit, 3, mode=CUDAGraphMode.NONE, reason="").summary()
    assert summary.never_served == ()
    assert summary.modes == {"NONE": 3}


def test_ranks_that_disagree_are_counted(kit):
    setup = kit.setup("full", pcp=2, mode=CUDAGraphMode.FULL_DECODE_ONLY,
                      candidates=(kit.full(4),))  # fmt: skip
    step, expected, record = kit.Bench(kit.make_plan([3], 2), setup).at(1, kit.full(4))
    audit = DispatchAudit(setup)
    audit.observe(step, kit.change_rank(record, 1, descriptor=kit.NONE), expected)
    assert audit.steps[0].rank_choices == ("FULL[reqs=4,tokens=4]", "NONE")
    assert audit.summary().steps_ranks_disagree == 1


def test_an_idle_step_is_counted_as_such(kit):
    setup = kit.setup("full", mode=CUDAGraphMode.FULL_DECODE_ONLY, candidates=(kit.full(4),))
    step, _, record = kit.Bench(kit.make_plan([3], 2), setup).at(1, kit.full(4))
    audit = DispatchAudit(setup)
    audit.observe(step, replace(record, idle=True), None)
    assert audit.summary().modes == {"IDLE": 1}
    assert audit.steps[0].smallest is None
