from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks.compare import compare_steps, flipped, stale_hint


@pytest.fixture
def twins(kit):
    """Two equal records of a step in which three requests prefill 3, 4 and 2 tokens and sample."""
    bench = kit.Bench(kit.make_plan([3, 4, 2], 2), kit.setup("eager"))
    step, _, record = bench.at(0)
    logits = record.logits
    sampled = logits.argmax(axis=1)
    record = replace(record, sampled=sampled)
    return step, record, replace(record, arm="reference")


def test_equal_records_are_bitwise_in_everything(twins):
    _, record, twin = twins
    result = compare_steps(record, twin, "capture", "float32")
    assert [(d.tensor, d.outcome) for d in result.drifts] == [
        ("hidden", "bitwise"),
        ("logits", "bitwise"),
        ("sampled", "bitwise"),
    ]
    assert result.difference is None
    assert (result.num_sampled, result.num_top1_equal, result.token_mismatches) == (3, 3, 0)
    assert result.max_kl == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("tensor", ["hidden", "logits"])
def test_the_first_tensor_that_left_is_named(twins, tensor):
    _, record, twin = twins
    values = getattr(record, tensor).copy()
    values[1, 2] += 1
    result = compare_steps(replace(record, **{tensor: values}), twin, "partition", "float32")
    assert result.difference is not None
    assert (result.difference.tensor, result.difference.kind) == (tensor, "partition")
    assert (result.difference.arm, result.difference.twin) == ("eager", "reference")


def test_nothing_in_common_is_not_compared(twins):
    _, record, twin = twins
    nothing = np.zeros((0, 0), np.float32)
    bare = replace(
        twin, hidden=nothing, logits=nothing, sampled=np.zeros(0, int), sampled_req_ids=()
    )
    assert compare_steps(record, bare, "partition", "float32").drifts == ()
    other = replace(bare, sampled_req_ids=("x",), sampled=np.zeros(1, int), logits=twin.logits[:1])
    assert compare_steps(record, other, "partition", "float32").drifts == ()


def test_rows_are_matched_by_request_not_by_place(twins):
    _, record, twin = twins
    order = [2, 0, 1]
    turned = replace(
        twin,
        sampled_req_ids=tuple(twin.sampled_req_ids[i] for i in order),
        logits=twin.logits[order],
        sampled=twin.sampled[order],
    )
    drifts = compare_steps(record, turned, "capture", "float32").drifts
    assert {drift.outcome for drift in drifts} == {"bitwise"}


def test_excluded_requests_do_not_count(twins):
    step, record, twin = twins
    hidden, logits = record.hidden.copy(), record.logits.copy()
    hidden[3:7] += 1  # r1's tokens
    logits[1] += 1
    changed = replace(record, hidden=hidden, logits=logits)
    assert compare_steps(changed, twin, "partition", "float32", step).difference is not None
    result = compare_steps(changed, twin, "partition", "float32", step, {"r1"})
    assert result.difference is None
    assert result.drifts[0].num_elements == 5 * hidden.shape[1]
    assert result.num_sampled == 2


def flip(record, twin, gap):
    """The first request samples the runner-up, which the twin holds `gap` below its best."""
    logits = twin.logits.copy()
    best, second = np.argsort(logits[0])[::-1][:2]
    logits[0, second] = logits[0, best] - gap
    ours = logits.copy()
    ours[0, second] = logits[0, best] + gap / 10
    tokens = twin.sampled.copy()
    tokens[0] = second
    return replace(record, logits=ours, sampled=tokens), replace(twin, logits=logits)


def test_a_flip_between_near_ties_is_allowed_where_drift_is(twins):
    _, record, twin = twins
    record, twin = flip(record, twin, 1e-5)
    result = compare_steps(record, twin, "partition", "float32")
    assert (result.token_mismatches, result.num_top1_equal) == (1, 2)
    assert result.difference is None
    assert result.drifts[2].outcome == "within_budget"
    capture = compare_steps(record, twin, "capture", "float32")
    assert capture.drifts[2].outcome == "exceeds_budget"


def test_a_flip_across_a_gap_exceeds_even_if_the_logits_agree(twins):
    _, record, twin = twins
    tokens = twin.sampled.copy()
    tokens[0] = (tokens[0] + 1) % 11
    result = compare_steps(replace(record, sampled=tokens), twin, "partition", "float32")
    assert [d.outcome for d in result.drifts] == ["bitwise", "bitwise", "exceeds_budget"]
    assert result.difference.tensor == "sampled"
    tokens[0] = 10_000
    result = compare_steps(replace(record, sampled=tokens), twin, "partition", "float32")
    assert result.difference.tensor == "sampled"


def test_non_finite_logits_have_no_kl_and_fail(twins):
    _, record, twin = twins
    logits = record.logits.copy()
    logits[0, 0] = np.nan
    result = compare_steps(replace(record, logits=logits), twin, "partition", "float32")
    assert result.max_kl is None
    assert result.difference.drift.outcome == "non_finite"


def test_a_record_whose_rows_do_not_fit_its_requests_fails(twins):
    _, record, twin = twins
    result = compare_steps(replace(record, sampled=record.sampled[:2]), twin, "padding", "float32")
    assert result.difference.drift.outcome == "shape_mismatch"
    more = replace(
        record,
        sampled_req_ids=(*record.sampled_req_ids, "r0"),
        sampled=np.append(record.sampled, 1),
        logits=np.vstack([record.logits, record.logits[:1]]),
    )
    result = compare_steps(more, twin, "padding", "float32")
    assert (result.difference.tensor, result.difference.drift.outcome) == (
        "sampled",
        "shape_mismatch",
    )


def test_flipped_names_the_requests(twins):
    _, record, twin = twins
    tokens = twin.sampled.copy()
    tokens[1] += 1
    assert flipped(replace(record, sampled=tokens), twin) == {"r1"}
    assert flipped(record, twin) == set()


def test_outputs_of_the_step_before_are_recognised(twins):
    _, record, twin = twins
    assert "hidden equals that of reference in step 0: stale" in stale_hint(record, twin)
    assert stale_hint(record, replace(twin, hidden=twin.hidden + 1, logits=twin.logits + 1)) == ""
    assert stale_hint(record, None) == ""
