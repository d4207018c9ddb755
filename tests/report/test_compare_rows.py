import io
from dataclasses import replace

import msgspec
import numpy as np
import pandas as pd
import pytest

from pcpbench.checks.metrics import arm_times
from pcpbench.report import columns
from pcpbench.report.compare_rows import step_rows, summary_rows
from pcpbench.report.csv_files import header, lines


def read(table, rows) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(header(table) + lines(table, rows)))


@pytest.fixture
def summary(make):
    def read_summary(result, candidate="full"):
        rows = summary_rows(result, "eager", candidate, make.settings)
        return read(columns.SUMMARY, rows).set_index("arm")

    return read_summary


@pytest.fixture
def steps(make):
    def read_steps(result=None, **options):
        found = make.steps()
        rows = step_rows(
            result or make.passed(),
            found.plan,
            found.records,
            found.timings,
            found.step_drifts,
            found.step_audits,
            **options,
        )
        return read(columns.STEPS, rows)

    return read_steps


def test_one_row_for_each_arm_in_their_order(make, summary):
    frame = summary(make.passed())

    assert list(frame.index) == ["reference", "eager", "eager_padded[full]", "full"]
    assert list(frame.role) == ["rung", "base", "rung", "candidate"]
    assert set(frame.outcome) == {"pass"}


def test_times_are_milliseconds_and_exact(make, summary):
    result = make.passed()
    frame, full = summary(result), result.arms[3]

    assert frame.median_tpot_ms["full"] == full.tpot.median * 1e3
    assert frame.p99_itl_ms["full"] == full.itl.p99 * 1e3
    assert frame.std_launch_overhead_ms["full"] == full.launch.std * 1e3
    assert frame.num_itl_samples["full"] == 418


def test_what_was_not_measured_is_missing_and_never_zero(make, summary):
    frame = summary(make.passed())

    assert frame.loc["reference"].filter(regex="_ms$").isna().all()
    assert pd.isna(frame.drift_kind["reference"])
    assert frame.drift_max_abs["full"] == 0.0
    assert pd.isna(frame.drift_relative_limit["full"])
    assert pd.isna(frame.drift_cosine_gap["reference"])
    assert (frame.drift_relative["eager"], frame.drift_relative_limit["eager"]) == (3.1e-6, 1e-4)
    assert frame.drift_cosine_gap["eager"] == 2.5e-13
    assert frame.drift_cosine_gap_limit["eager"] == 1e-10
    assert frame.padding_waste_percent["eager"] == 0.0
    assert frame.padding_waste_percent["full"] == pytest.approx(12.5)


def test_column_types(make, summary):
    frame = summary(make.passed())

    assert frame.median_tpot_ms.dtype == "float64"
    assert frame.steps_full.dtype == "int64"
    assert frame.prefill_context_parallel_size.dtype == "int64"


def test_the_reference_arm_is_told_to_run_on_one_rank(make, summary):
    frame = summary(make.passed())

    assert frame.prefill_context_parallel_size.to_dict() == {
        "reference": 1, "eager": 2, "eager_padded[full]": 2, "full": 2,
    }  # fmt: skip
    assert frame.cudagraph_mode["full"] == "full_decode_only"
    assert frame.cudagraph_mode["eager"] == "none"


def test_a_ratio_stands_in_the_candidates_row_of_a_pass(make, summary):
    frame = summary(make.passed())

    assert frame.tpot_ratio["full"] == 0.658
    assert frame.launch_overhead_ratio_high["full"] == 0.415
    assert frame.tpot_ratio.notna().sum() == 1


@pytest.mark.parametrize("outcome", ["failed", "not_compared"])
def test_no_ratio_without_a_pass(make, summary, outcome):
    filled_in = {"tpot_ratio": make.passed().tpot_ratio}
    result = msgspec.structs.replace(getattr(make, outcome)(), **filled_in)

    assert summary(result).filter(regex="ratio").isna().all(axis=None)


def test_drift_and_contracts_are_told_of_the_arm_they_are_of(make, summary):
    frame = summary(make.failed())

    assert frame.drift_kind.dropna().to_dict() == {
        "eager": "partition", "eager_padded[full]": "padding", "full": "capture",
    }  # fmt: skip
    assert frame.drift_ok["full"] in (False, "false", "False")
    assert frame.drift_tensor["full"] == "logits"
    assert frame.violated_contracts.dropna().to_dict() == {"full": "C1;C13"}
    assert "C1 broken by full 5 times" in frame.reasons["full"]


def test_an_arm_asked_for_by_kind_is_found(make, summary):
    assert summary(make.passed(), "eager_padded").role["eager_padded[full]"] == "candidate"


def test_steps_are_in_the_order_of_arms_and_steps(steps):
    frame = steps()

    assert list(zip(frame.arm, frame.step, strict=True)) == [
        (arm, step) for arm in ("eager", "eager_padded[full]", "full") for step in (0, 1, 2)
    ]


def test_how_a_step_was_served(steps):
    frame = steps().set_index(["arm", "step"])

    assert frame.served_as.to_dict() == {
        ("eager", 0): "NONE", ("eager", 1): "NONE", ("eager", 2): "IDLE",
        ("eager_padded[full]", 0): "NONE", ("eager_padded[full]", 1): "NONE",
        ("eager_padded[full]", 2): "IDLE",
        ("full", 0): "NONE", ("full", 1): "FULL", ("full", 2): "IDLE",
    }  # fmt: skip
    assert frame.descriptor_mode["eager_padded[full]", 1] == "FULL"
    assert frame.miss_reason["full", 0] == "batch has a prefill"
    assert pd.isna(frame.miss_reason["full", 1])


def test_counts_of_a_step(steps):
    frame = steps().set_index(["arm", "step"])
    row = frame.loc[("full", 1)]

    assert (row.num_reqs, row.num_decodes, row.num_tokens) == (2, 2, 2)
    assert (row.descriptor_num_reqs, row.descriptor_num_tokens) == (4, 4)
    assert (row.local_num_reqs, row.local_num_tokens) == (3, 3)
    assert (row.real_tokens, row.padded_tokens) == (6, 8)
    assert frame.has_prefill["full", 0]
    assert not frame.has_prefill["full", 1]


def test_counts_of_a_verification(make):
    made = make.steps()
    plan, record = made.plan, made.records[0]
    share = msgspec.structs.replace(
        plan.steps[0].scheduled[0], num_scheduled_tokens=4, num_draft_tokens=3
    )
    step = msgspec.structs.replace(plan.steps[0], scheduled=(share, plan.steps[0].scheduled[1]))
    rank = replace(record.ranks[0], num_accepted=np.array([2, 0]))
    record = replace(
        record, sampled=np.arange(5), draft_tokens=np.array([7, 8, 9]), ranks=(rank, rank)
    )
    plan = msgspec.structs.replace(plan, steps=(step, *plan.steps[1:]))
    row = step_rows(make.passed(), plan, [record])[0]
    # Five rows of logits, three drafts, two of them right: 1 + 2 tokens for a, one for b.
    assert (row["num_draft_tokens"], row["num_accepted_tokens"]) == (3, 2)
    assert (row["num_sampled"], row["max_query_len"]) == (4, 8)


def test_an_arm_that_was_not_timed_has_no_times(steps):
    frame = steps().set_index(["arm", "step"])
    times = frame.loc["eager_padded[full]"].filter(regex="_ms$")

    assert times.isna().all(axis=None)
    assert frame.num_repetitions["eager_padded[full]", 1] == 0
    assert frame.num_repetitions["full", 1] == 3


@pytest.mark.parametrize("async_device", [False, True])
def test_launch_overhead_is_what_the_judge_reports(make, steps, async_device):
    found = make.steps()
    judged = arm_times(found.plan, found.timings, "full", async_device)
    frame = steps(async_device=async_device).set_index(["arm", "step"])

    for step in (0, 1):
        expected = 1e3 * np.median([judged.launch[(str(step), i)] for i in range(3)])
        assert frame.launch_overhead_ms["full", step] == pytest.approx(expected)
        assert frame.kernel_ms["full", step] == pytest.approx(0.25)
    assert frame.median_step_ms["full", 1] == pytest.approx(3.0)


def test_drift_and_contracts_of_a_step(steps):
    """Contracts come from the audit: the result keeps the first few violations only."""
    frame = steps().set_index(["arm", "step"])

    assert frame.drift_outcome.dropna().to_dict() == {("full", 1): "bitwise"}
    assert frame.violated_contracts.dropna().to_dict() == {
        ("eager_padded[full]", 1): "C2;C10", ("full", 1): "C2;C10",
    }  # fmt: skip


def test_dispatch_of_a_step(steps):
    frame = steps().set_index(["arm", "step"])

    assert frame.smallest_descriptor.dropna().to_dict() == {
        ("eager_padded[full]", 1): "FULL[reqs=2,tokens=2]", ("full", 1): "FULL[reqs=2,tokens=2]",
    }  # fmt: skip
    assert frame.rank_descriptors["full", 1] == "rank0=FULL[reqs=4,tokens=4];rank1=NONE"
    assert frame.rank_descriptors["full", 0] == "NONE"
    assert frame.excess_tokens["full", 1] == 4
    assert pd.isna(frame.excess_tokens["eager", 1])


def test_dispatch_of_a_scenario(make, summary):
    frame = summary(make.odd_dispatch())

    row = frame.loc["full"]
    counts = (row.steps_ranks_disagree, row.steps_larger_than_needed, row.excess_tokens)
    assert counts == (2, 3, 24)
    assert row.never_served.startswith("decode with 9 requests: never FULL, larger than the")
    assert pd.isna(frame.never_served["eager"])


def test_the_pairs_behind_a_ratio_are_told_beside_it(make, summary):
    frame = summary(make.passed())
    names = ["num_tpot_pairs", "num_itl_pairs", "num_launch_overhead_pairs"]
    assert list(frame.loc["full", names]) == [36, 418, 50]
    assert frame.loc["eager", names].isna().all()
    assert summary(make.failed())[names].isna().all().all()
