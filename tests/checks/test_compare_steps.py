from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from pcpbench.checks.compare import compare_steps, flipped, stale_hint
from pcpbench.plan import StepPlan


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
    result = compare_steps(changed, twin, "partition", "float32", step, {"r1"}, own_tokens=True)
    assert result.difference is None
    assert result.drifts[0].num_elements == 5 * hidden.shape[1]
    assert result.num_sampled == 2


@pytest.fixture
def drafted(kit, twins):
    """Two requests that verify two drafts each, on arms that feed themselves; and a draft model."""
    step = StepPlan(
        index=3,
        scheduled=tuple(
            replace_struct(kit.scheduled(name, 3, 9, 4), num_draft_tokens=2) for name in ("a", "b")
        ),
    )
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((6, 11)).astype(np.float32)
    proposal = rng.standard_normal((2, 2, 11)).astype(np.float32)
    record = replace(
        twins[1],
        step=3,
        hidden=rng.standard_normal((6, 5)).astype(np.float32),
        logits=logits,
        sampled=logits.argmax(axis=1),
        sampled_req_ids=("a",) * 3 + ("b",) * 3,
        draft_tokens=np.array([5, 6, 7, 8]),
        draft_logits=proposal,
        proposed=proposal.argmax(axis=2).T,
    )
    return step, record, replace(record, arm="reference")


def test_rows_behind_a_draft_that_differs_had_other_inputs(drafted):
    """The first row of b flips in a near tie, so that its first draft is another one."""
    step, record, twin = drafted
    logits, other, hidden = record.logits.copy(), twin.logits.copy(), record.hidden.copy()
    best, second = np.argsort(other[3])[::-1][:2]
    other[3, second] = other[3, best] - 1e-7
    logits[3, second] = other[3, best] + 1e-7
    logits[4:] += 1
    hidden[4:] += 1
    sampled = logits.argmax(axis=1)
    proposal = record.draft_logits.copy()
    proposal[:, 1] += 1
    parted = replace(
        record,
        logits=logits,
        hidden=hidden,
        sampled=sampled,
        draft_tokens=np.array([5, 6, 9, 9]),
        draft_logits=proposal,
    )
    twin = replace(twin, logits=other, sampled=other.argmax(axis=1))
    result = compare_steps(parted, twin, "partition", "float32", step, own_tokens=True)
    assert result.difference is None
    assert (result.token_mismatches, result.num_sampled) == (1, 4)
    sizes = {drift.tensor: drift.num_elements for drift in result.drifts}
    assert sizes == {"hidden": 20, "logits": 44, "sampled": 4, "draft_logits": 22, "proposed": 2}
    # Rows in front of it are held as ever, and so is everything where all arms are fed the same.
    hidden[3] += 1
    wrong = compare_steps(replace(parted, hidden=hidden), twin, "partition", "float32", step, (),
                          own_tokens=True)  # fmt: skip
    assert wrong.difference.tensor == "hidden"
    assert compare_steps(parted, twin, "partition", "float32", step).difference is not None


def test_a_request_that_parted_earlier_is_left_out_of_its_proposals_too(drafted):
    step, record, twin = drafted
    changed = replace(record, draft_logits=record.draft_logits + np.array([[[0], [1]]], np.float32))
    for parted, is_bad in (((), True), (("b",), False), (("a", "b"), False)):
        result = compare_steps(changed, twin, "padding", "float32", step, parted, own_tokens=True)
        assert (result.difference is not None) is is_bad


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
