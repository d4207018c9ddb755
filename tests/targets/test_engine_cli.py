"""`pcpbench compare --target engine` from its arguments to its exit code, over a fake vLLM."""

import csv
import json

import pytest
from msgspec.structs import replace

from pcpbench import cli
from pcpbench.engine_request import EngineRequest
from pcpbench.session import engine_run
from pcpbench.targets.engine.process import EngineBroke


@pytest.fixture
def compare(fake_vllm, tmp_path, capfd):
    """(exit code, stdout, stderr, directory) of a run with something going wrong in the CP arm."""

    def run(words="", *flags, arms=("reference", "eager")):
        python = fake_vllm(words)
        out = tmp_path / "run"
        code = cli.run(
            ["compare", *arms, "--target", "engine", "--engine-python", str(python),
             "--repetitions", "1", "--out", str(out), *flags]
        )  # fmt: skip
        told = capfd.readouterr()
        return code, " ".join(told.out.split()), " ".join(told.err.split()), out

    return run


def test_a_sound_engine_passes_and_leaves_all_files(compare):
    code, out, _, path = compare()
    assert code == 0
    assert "PASS" in out
    assert "100 %" in out
    assert "eager against reference: 147 of 147 rows" in out
    rows = list(csv.DictReader((path / "summary.csv").open()))
    assert [row["arm"] for row in rows] == ["reference", "eager"]
    assert [row["role"] for row in rows] == ["base", "candidate"]
    assert float(rows[1]["max_dlogprob"]) == float(rows[1]["median_dlogprob"]) == 0.0
    assert rows[1]["num_rows_compared"] == rows[1]["num_output_tokens"]
    assert rows[1]["steps_partitioned"] == rows[1]["num_steps"] != "0"
    assert int(rows[1]["steps_uneven"]) > 0
    assert float(rows[1]["tpot_ratio"]) == 1.0
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["outcome"] == "pass"
    assert manifest["settings"]["checkpoint_sha256"]
    assert manifest["command"] == "compare --target engine"
    assert manifest["environment"]["device"] == "cpu"
    summary = json.loads((path / "summary.json").read_text())
    assert summary["exit_code"] == 0
    assert summary["arms"][1]["twin"] == "reference"
    assert {file.name for file in (path / "engine").iterdir()} == {
        "checkpoint", "reference.order.json", "reference.jsonl", "reference.log",
        "eager.order.json", "eager.jsonl", "eager.log",
    }  # fmt: skip
    assert "the engine talks on stdout" in (path / "engine" / "eager.log").read_text()


def test_a_drift_over_the_budget_fails_though_every_token_is_equal(compare):
    code, out, _, path = compare("drift=0.3")
    assert code == 1
    assert "FAIL" in out
    assert "a log-probability is 0.3" in out
    row = list(csv.DictReader((path / "summary.csv").open()))[1]
    assert row["num_tokens_equal"] == row["num_output_tokens"]
    assert row["tpot_ratio"] == ""


def test_a_token_that_flips_at_a_tie_is_explained(compare):
    code, out, _, _ = compare("tie=1e-4")
    assert code == 0
    assert "parted at a tie that the budget explains" in out
    assert ": explained" in out
    assert "eager against reference: 84 of 147 rows" in out


def test_a_run_in_which_nearly_all_lies_behind_a_flip_is_not_compared(compare):
    code, out, _, path = compare("tie=1e-4,at-once")
    assert code == 3
    assert "eager: only 12 of 147 output tokens were compared, less than 50%" in out
    assert json.loads((path / "manifest.json").read_text())["outcome"] == "not compared"


def test_log_probabilities_that_are_no_numbers_are_a_fault(compare):
    code, out, _, _ = compare("nan")
    assert code == 1
    assert "missing or not finite" in out


def test_an_arm_that_never_went_through_the_pcp_manager_is_not_compared(compare):
    code, out, _, path = compare("never-cut")
    assert code == 3
    assert "NOT COMPARED" in out
    assert "rank 0 cut 0 of" in out
    assert json.loads((path / "manifest.json").read_text())["exit_code"] == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("raise", "raised RuntimeError while it started: engine core initialization failed; the "
         "first error in its log: ValueError: no room for the KV cache"),
        ("die", "was ended by signal 9 while it started"),
        ("die-later", "was ended by signal 9 while it generated"),
    ],
)  # fmt: skip
def test_an_engine_that_dies_is_a_3_and_leaves_its_log(compare, words, told):
    code, _, err, path = compare(words)
    assert code == 3
    assert f"the engine of arm 'eager' {told}" in err
    assert (path / "engine" / "eager.log").read_text()
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["outcome"] == "not compared"
    assert "the engine of arm 'eager'" in manifest["reasons"][0]


def test_an_engine_that_hangs_is_ended_and_the_tail_of_its_log_told(compare):
    code, _, err, path = compare("hang", "--engine-timeout", "6")
    assert code == 3
    assert "told nothing for 6 s while it started" in err
    assert "eager | waiting for the other ranks" in err
    assert "waiting for the other ranks" in (path / "engine" / "eager.log").read_text()


def test_json_is_the_summary_on_stdout(compare):
    code, out, err, path = compare("", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((path / "summary.json").read_text())
    assert "PASS" in err


def test_arms_of_graphs_are_refused_on_a_cpu_before_anything_is_started(compare):
    code, _, err, path = compare("die", arms=("eager", "full"))
    assert code == 3
    assert "arm 'full' cannot run on vLLM's CPU platform" in err
    assert not path.exists()


def test_a_planted_fault_that_cannot_be_planted_is_a_3(compare):
    """The fake's PCP manager has no mask of writers: the fault raises inside its first step."""
    code, _, err, _ = compare("", "--inject", "kv-writer")
    assert code == 3
    assert "while it generated" in err


@pytest.mark.parametrize(("words", "code"), [("drift=0.3", 1), ("", 3)])
def test_a_failure_that_was_told_outweighs_an_engine_that_dies_later(
    compare, monkeypatch, words, code
):
    arms, run_arm = EngineRequest.arms.fget, engine_run._run_arm

    def with_one_more(request):
        known = arms(request)
        return (*known, replace(known[-1], label="later", twin=known[-1].label))

    def dies(request, arm, *arguments):
        if arm.label == "later":
            raise EngineBroke("the engine 'later' ended with code -9")
        return run_arm(request, arm, *arguments)

    monkeypatch.setattr(EngineRequest, "arms", property(with_one_more))
    monkeypatch.setattr(engine_run, "_run_arm", dies)
    found, out, err, path = compare(words)
    assert found == code
    assert "the engine 'later' ended with code -9" in out + err
    outcome = json.loads((path / "manifest.json").read_text())["outcome"]
    assert outcome == ("fail" if code == 1 else "not compared")
