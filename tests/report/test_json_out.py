import io
import json
import math

import pytest

from pcpbench.report.json_out import capture_json, compare_json, print_json


def load(text):
    """Strict: NaN and Infinity are no JSON."""
    return json.loads(text, parse_constant=pytest.fail)


def test_what_a_reader_needs_is_at_the_top(make):
    document = load(compare_json(make.compare(make.passed())))

    assert document["schema_version"] == 1
    assert document["outcome"] == "pass"
    assert document["exit_code"] == 0
    assert document["reasons"] == []
    assert document["settings"]["cudagraph_capture_sizes"] == [1, 2, 4, 8]
    assert document["environment"]["device"] == "cpu"
    assert document["base"] == "eager"
    assert document["candidate"] == "full"
    assert document["run_dir"].startswith("results/")


def test_times_are_milliseconds_with_the_size_of_their_sample(make):
    result = make.passed()
    full = load(compare_json(make.compare(result)))["scenarios"][0]["arms"][3]

    assert full["tpot_ms"]["median"] == pytest.approx(result.arms[3].tpot.median * 1e3)
    assert full["itl_ms"]["num_samples"] == 418
    assert full["launch_overhead_ms"]["p99"] > 0
    assert full["padding_waste"] == pytest.approx(0.125)


def test_what_was_not_measured_is_null(make):
    reference = load(compare_json(make.compare(make.passed())))["scenarios"][0]["arms"][0]

    assert reference["tpot_ms"] is None
    assert reference["launch_overhead_ms"] is None


def test_a_failure_brings_reasons_violations_and_the_first_difference(make):
    document = load(compare_json(make.compare(make.failed(), make.passed())))
    scenario = document["scenarios"][0]

    assert document["outcome"] == "fail"
    assert any("C1 broken by full" in reason for reason in document["reasons"])
    assert scenario["violations"][0] | {"message": ""} == {
        "contract": "C1", "arm": "full", "scenario": "s3-idle-and-reuse", "step": 7, "rank": 1,
        "tensor": "seq_lens", "message": "",
    }  # fmt: skip
    assert scenario["first_differences"][0]["drift"]["max_abs"] == 0.125
    assert scenario["tpot_ratio"] is None
    assert scenario["num_violations"] == {"C1": 31, "C13": 2}


def test_a_number_that_is_not_finite_is_null_and_flagged(make):
    worst = make.drift("capture", "non_finite", max_abs=math.nan, max_rel=math.inf)
    drifts = (make.drift_summary("capture", "full", "eager_padded[full]", worst, ok=False),)
    document = load(compare_json(make.compare(make.passed(drifts=drifts))))
    told = document["scenarios"][0]["drifts"][0]["worst"]

    assert (told["max_abs"], told["max_abs_non_finite"]) == (None, "nan")
    assert (told["max_rel"], told["max_rel_non_finite"]) == (None, "inf")


def test_dispatch_of_the_run_and_of_each_arm(make):
    found = json.loads(compare_json(make.compare(make.odd_dispatch(), make.passed())))

    total = found["dispatch"]["full"]
    assert total["modes"] == {"FULL": 72, "NONE": 28, "IDLE": 2}
    assert total["reasons"]["batch has a prefill"] == 16
    assert (total["steps_ranks_disagree"], total["excess_tokens"]) == (2, 24)
    (batch,) = total["never_served"]
    assert (batch["scenario"], batch["name"]) == ("s2-capture-edges", "decode with 9 requests")
    arm = found["scenarios"][0]["arms"][3]
    assert arm["dispatch"]["never_served"][0]["why"].startswith("larger than")


def test_a_capture(make):
    document = load(capture_json(make.capture(unowned=True)))

    assert document["command"] == "capture"
    assert document["outcome"] == "fail"
    assert len(document["graphs"]) == 4
    assert document["unowned"][0]["op"] == "aten.mul.Tensor"


def test_stdout_gets_one_document_and_nothing_else(make, capsys):
    print_json(make.compare(make.passed()))
    out, err = capsys.readouterr()

    assert load(out)["outcome"] == "pass"
    assert err == ""
    stream = io.StringIO()
    print_json(make.capture(), stream)
    assert load(stream.getvalue())["command"] == "capture"
