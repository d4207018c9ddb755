"""What the judge used to take for granted: the plan, the candidates, an idle step's batch."""

from contextlib import nullcontext

import pytest

from pcpbench.errors import DispatchMismatch
from pcpbench.faults import registry
from pcpbench.faults.fault import Site
from pcpbench.report.compare_rows import summary_rows
from pcpbench.results import Outcome

FAULTS = registry.all_faults()


def test_a_broken_plan_fails_the_scenario_and_every_arms_step(bench):
    fault = FAULTS["next-block-late"]
    with fault.inject(Site()):
        stand = bench("s11-long-kv", pcp=2)
    result = stand.run()
    assert result.outcome is Outcome.FAIL
    (reason,) = [r for r in result.reasons if r.startswith("C19 broken by plan")]
    words = "step 9, new_block_ids: request from-forty holds 3 blocks (2, 3, 4) for 49 positions"
    assert words in reason
    assert "C4" in {violation.contract for violation in result.violations}
    at_nine = [a.violated_contracts for a in stand.trial.step_audits if a.step == 9]
    assert len(at_nine) == 4
    assert all("C19" in contracts for contracts in at_nine)
    rows = summary_rows(result, base="eager", candidate="full", settings={})
    assert all("C19" in row["violated_contracts"] for row in rows)


def test_a_missing_size_is_named_although_every_batch_had_a_graph(bench):
    # No step has 16 decodes on a rank, so that nothing else tells.
    with FAULTS["largest-batch-not-captured"].inject(Site()):
        result = bench("s4-one-token-prompts", pcp=2).run()
    assert {(v.contract, v.arm, v.tensor) for v in result.violations} == {
        ("C10", "full", "candidates"),
        ("C10", "eager_padded[full]", "candidates"),
    }
    message = result.violations[0].message
    assert message.startswith("FULL with 16 tokens in 16 requests of 1 is missing")
    assert message.endswith("at most 16 requests")


@pytest.mark.parametrize("asked", ["16", "3,5", None])
def test_sizes_asked_for_and_default_ones_are_held_alike(bench, asked):
    result = bench("s3-idle-and-reuse", "full_and_piecewise", capture_sizes=asked).run()
    assert result.outcome is not Outcome.FAIL
    assert result.violations == ()


def test_ranks_that_disagree_are_told_with_their_counts(bench):
    stand = bench("s14-uneven-ranks", pcp=2)
    fault = FAULTS["rank-dispatches-on-own-counts"]
    with fault.inject(Site(stand.stand.arms)):
        result = stand.run()
    (violation,) = [v for v in result.violations if v.tensor == DispatchMismatch.tensor]
    assert violation.contract == "C10"
    first, second = violation.message.split(": ")[1].split(", ")
    assert first.startswith("rank 0 chose NONE for ")
    assert first.removeprefix("rank 0") != second.removeprefix("rank 1")


@pytest.mark.parametrize(
    ("name", "where", "contracts"),
    [
        ("dummy-keeps-tables", {"pcp": 2}, {"C5"}),
        ("dummy-keeps-lengths", {"pcp": 2}, {"C1", "C2"}),
        ("dummy-not-flagged", {"pcp": 2}, {"C3"}),
        ("dummy-context-too-short", {"tp": 4, "dcp": 4, "interleave": 2, "pcp": 1}, {"C1"}),
        (None, {"tp": 4, "dcp": 4, "interleave": 2, "pcp": 1}, set()),
    ],
)
def test_an_idle_step_is_judged(bench, name, where, contracts):
    stand = bench("s3-idle-and-reuse", **where)
    with FAULTS[name].inject(Site()) if name else nullcontext():
        result = stand.run()
    assert {violation.contract for violation in result.violations} == contracts
    idle = {step.index for step in stand.plan.steps if step.idle}
    assert {violation.step for violation in result.violations} <= idle
