from dataclasses import replace

import numpy as np

from pcpbench.checks.budgets import budget_of
from pcpbench.checks.compare import StepComparison
from pcpbench.checks.drift import cosine_gap, measure
from pcpbench.checks.setup import Pair
from pcpbench.checks.tally import ArmTally, PairTally


def row(scale, error, tensor="hidden"):
    twin = np.full((1, 8), scale, dtype=np.float32)
    found = twin.copy()
    found[0, 0] += np.float32(scale * error)
    return measure("partition", tensor, found, twin, "float32")


def test_what_stands_beside_a_limit_is_the_largest_of_all_tensors_and_steps():
    """The worst drift by absolute error is of a row whose scale is large, not the one judged."""
    wide, tight = row(1000.0, 1e-5), row(1.0, 3e-5, "logits")
    tokens = replace(wide, tensor="sampled", relative=None, cosine=None)
    tally = PairTally(Pair(kind="partition", arm="eager", twin="reference"))
    for step, drifts in enumerate([(wide,), (tight, tokens), (wide,)]):
        tally.observe(step, StepComparison(drifts=drifts, difference=None), replayed=False)
    summary, budget = tally.summary("float32"), budget_of("partition", "float32")

    assert summary.worst is wide
    assert summary.max_relative == tight.relative > wide.relative
    assert summary.max_cosine_gap == cosine_gap(tight) > cosine_gap(wide)
    assert (summary.limit_relative, summary.limit_cosine_gap) == (
        budget.relative,
        budget.cosine_gap,
    )


def test_under_capture_there_is_no_limit_to_show():
    drift = measure("capture", "hidden", np.ones((1, 4)), np.ones((1, 4)), "float32")
    tally = PairTally(Pair(kind="capture", arm="full", twin="eager_padded[full]"))
    tally.observe(0, StepComparison(drifts=(drift,), difference=None), replayed=True)
    summary = tally.summary("float32")
    assert (summary.max_relative, summary.limit_relative, summary.limit_cosine_gap) == (
        0,
        None,
        None,
    )


def test_steps_that_both_arms_ran_eagerly_say_nothing_of_a_capture():
    drift = measure("capture", "hidden", np.ones((1, 4)), np.ones((1, 4)), "float32")
    tally = PairTally(Pair(kind="capture", arm="full", twin="eager_padded[full]"))
    tally.observe(0, StepComparison(drifts=(drift,), difference=None), replayed=False)
    assert tally.summary("float32") is None
    tally.observe(1, StepComparison(drifts=(drift,), difference=None), replayed=True)
    assert tally.summary("float32").num_steps_compared == 1
    assert tally.num_steps == 2


def test_an_arm_that_was_to_cut_steps_and_cut_none_says_nothing_of_cuts(kit):
    bench = kit.Bench(kit.make_plan([2, 2], 2), kit.setup("eager"))
    step, expected, record = bench.at(1)
    cut = replace(record, ranks=(replace(record.ranks[0], microbatches=("one", "two")),))
    for thresholds, left, told in (((4, 8), record, 1), ((4, 8), cut, 0), (None, record, 0)):
        tally = ArmTally(kit.setup("eager", ubatch_thresholds=thresholds))
        tally.observe(step, left, expected)
        assert len(tally.not_as_asked()) == told
        assert tally.steps_cut == (left is cut)
