"""`pcpbench modes`: a small real run, faults, and flips that padding drift explains or does not."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from pcpbench import cli
from pcpbench.engine.worker import Worker
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import NoMemory, UsageError
from pcpbench.model.decoder import MLADecoder
from pcpbench.modes import CUDAGraphMode
from pcpbench.modes_request import ModesRequest
from pcpbench.session.modes import TaskRun, plan_task
from pcpbench.targets.builtin import BuiltinArm

SMALL = (
    "modes --prompts 6 --prompt-len 3-9 --output-len 4 --capture-sizes 1,2,4,24 --json --out run"
)
MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(capsys, arguments="", exit_code=0):
    assert cli.run(f"{SMALL} {arguments}".split()) == exit_code
    result = json.loads(capsys.readouterr().out)
    assert result["exit_code"] == exit_code
    return result


def request(**settings):
    return ModesRequest(options=EngineOptions(), **settings)


def ties(monkeypatch, drift):
    """Every token has a twin with the same logit; padded arms see the twins `drift` higher."""
    build, sample = MLADecoder.__init__, Worker.sample

    def twins(self, *arguments, **settings):
        build(self, *arguments, **settings)
        self.lm_head[:, 1::2] = self.lm_head[:, 0::2]

    async def tilted(self, hidden, plan):
        sampled = await sample(self, hidden, plan)
        even = sampled.logits.argmax(-1) // 2 * 2
        sampled.tokens = even
        if self.config.compilation_config.cudagraph_mode is not CUDAGraphMode.NONE:
            sampled.logits[:, 1::2] += drift
            sampled.tokens = even + 1
        return sampled

    monkeypatch.setattr(MLADecoder, "__init__", twins)
    monkeypatch.setattr(Worker, "sample", tilted)


def test_four_modes_agree_and_every_number_is_there(capsys):
    result = run(capsys, "--repetitions 1")
    rows = result["modes"]
    assert [row["mode"] for row in rows] == MODES
    assert all(row["agreement"] == 1.0 and row["first"] is None for row in rows)
    assert {row["num_tokens"] for row in rows} == {24}
    shares = [(row["steps"]["full"] > 0, row["steps"]["piecewise"] > 0) for row in rows]
    assert shares == [(False, False), (False, True), (True, False), (True, True)]
    assert rows[3]["tokens"]["full"] + rows[3]["tokens"]["piecewise"] == sum(
        step.num_tokens
        for step in plan_task(
            request(num_prompts=6, prompt_len="3-9", output_len="4")
        ).steps
    )  # fmt: skip
    for row in rows:
        speed = row["speed"]
        assert speed["tpot_ms"]["median"] > 0
        assert len(speed["tokens_per_s"]) == 1
        assert (speed["tpot_ratio"] is None) == (row["mode"] == "NONE")
    table = pd.read_csv("run/modes.csv")
    assert list(table["mode"]) == MODES
    assert (table["num_tokens_equal"] == table["num_output_tokens"]).all()
    assert table["throughput_ratio"].notna().tolist() == [False, True, True, True]
    assert json.loads(Path("run/manifest.json").read_text())["outcome"] == "pass"


@pytest.mark.parametrize("arguments", ["--feed teacher-forced", "--spec-tokens 2"])
def test_other_feeds_and_drafts_agree_too(capsys, arguments):
    repetitions = int("spec" in arguments)
    result = run(capsys, f"{arguments} --repetitions {repetitions}")
    assert all(row["agreement"] == 1.0 for row in result["modes"])
    assert all((row["speed"] is not None) == bool(repetitions) for row in result["modes"])


def test_full_checks_run_over_drafts_that_each_mode_found_for_itself(capsys):
    result = run(capsys, "--check full --spec-tokens 1 --repetitions 0")
    assert all(row["agreement"] == 1.0 for row in result["modes"])


def test_a_mode_whose_graphs_never_ran_is_no_pass(capsys):
    """One output a prompt leaves no decode: FULL_DECODE_ONLY runs eagerly throughout."""
    command = "modes --prompts 2 --prompt-len 3 --output-len 1 --repetitions 0 --json --out run"
    assert cli.run(command.split()) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["outcome"] == "not compared"
    assert any(reason.startswith("full: ") for reason in result["reasons"])


def test_a_planted_fault_is_exit_1_without_any_speed(capsys):
    result = run(capsys, "--inject stale-block-rows --repetitions 1", 1)
    assert result["outcome"] == "fail"
    assert "C5" in " ".join(result["reasons"])
    assert all(row["speed"] is None for row in result["modes"])


def test_flips_that_padding_drift_explains_are_told_and_pass(capsys, monkeypatch):
    ties(monkeypatch, drift=3e-6)
    result = run(capsys, "--repetitions 0")
    none, *others = result["modes"]
    assert none["agreement"] == 1.0
    for row in others:
        assert row["agreement"] < 1.0
        assert (row["num_traced"], row["num_unexplained"]) == (6, 0)
        assert row["first"]["gap"] <= 2 * row["first"]["drift"]
    assert all(each["explained"] for each in result["traces"])


def starved(monkeypatch, *, from_call):
    """No memory for the padded twin of a mode, from the n-th mode on that needs it."""
    padded, calls = TaskRun._padded, []

    def lacking(self, *arguments):
        calls.append(1)
        if len(calls) >= from_call:
            raise NoMemory("there is not enough memory: 1 TiB.")
        return padded(self, *arguments)

    monkeypatch.setattr(TaskRun, "_padded", lacking)


def test_what_the_judge_found_stands_where_no_memory_is_left_to_trace_a_token(capsys, monkeypatch):
    ties(monkeypatch, drift=3e-6)
    starved(monkeypatch, from_call=1)
    result = run(capsys, "--inject stale-block-rows --repetitions 0", 1)
    assert "C5" in " ".join(result["reasons"])
    assert result["modes"][1]["agreement"] < 1.0
    (notice,) = [each for each in result["notices"] if each["setting"] == "memory"]
    assert "not every differing token was traced: there is not enough" in notice["message"]


def test_a_token_that_was_traced_to_nothing_stands_too(capsys, monkeypatch):
    ties(monkeypatch, drift=0.0)
    starved(monkeypatch, from_call=3)
    result = run(capsys, "--repetitions 0", 1)
    assert [row["num_unexplained"] for row in result["modes"]] == [0, 6, 6, 0]


def test_tokens_that_cannot_be_traced_are_no_pass_of_a_run_that_has_no_fault(capsys, monkeypatch):
    ties(monkeypatch, drift=3e-6)
    starved(monkeypatch, from_call=3)
    assert cli.run([*SMALL.split(), "--repetitions", "0"]) == 3
    assert "there is not enough memory: 1 TiB." in capsys.readouterr().err


@pytest.mark.parametrize("arm", ["eager", "full"])
@pytest.mark.parametrize("what", [("sampled", "logits"), ("sampled",), ("logits",)], ids=str)
def test_rows_that_an_engine_left_out_are_the_judges_finding(capsys, monkeypatch, arm, what):
    record = BuiltinArm.record

    def short(self, step, scenario):
        found = record(self, step, scenario)
        if self.label != arm or step.index != 3:
            return found
        return replace(found, **{name: getattr(found, name)[:-1] for name in what})

    ties(monkeypatch, drift=3e-6)
    monkeypatch.setattr(BuiltinArm, "record", short)
    result = run(capsys, "--repetitions 0", 1)
    assert result["outcome"] == "fail"
    assert result["reasons"]


def test_a_flip_without_drift_is_a_regression(capsys, monkeypatch):
    """The judge alone would let it pass: a tie may go either way within the budget."""
    ties(monkeypatch, drift=0.0)
    result = run(capsys, "--repetitions 1", 1)
    assert "there is no drift" in result["reasons"][-1]
    assert result["modes"][1]["num_unexplained"] == 6
    assert all(row["speed"] is None for row in result["modes"])


def test_fed_the_same_tokens_in_float32_none_may_differ(capsys, monkeypatch):
    ties(monkeypatch, drift=3e-6)
    result = run(capsys, "--feed teacher-forced --repetitions 0", 1)
    assert "were fed the same tokens in float32" in result["reasons"][-1]


def test_the_prompts_are_those_of_the_seed_and_nothing_is_preempted():
    plan = plan_task(request(num_prompts=40))
    assert plan == plan_task(request(num_prompts=40))
    other = ModesRequest(options=EngineOptions(seed=1), num_prompts=40)
    assert plan != plan_task(other)
    lengths = [len(each.prompt_token_ids) for each in plan.requests]
    assert (min(lengths) >= 8, max(lengths) <= 32, len(set(lengths)) > 10) == (True,) * 3
    assert not any(step.preempted_req_ids for step in plan.steps)
    assert any(step.scheduled and not step.has_prefill for step in plan.steps)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "tiny-swa", "max_num_seqs": 1},
        {"model": "tiny-swa", "max_num_seqs": 2},
        {"model": "tiny-swa"},
        {"pcp": 1, "tp": 4, "dcp": 4},
        {"spec_tokens": 3, "draft_model": "mtp", "max_num_seqs": 3},
    ],
    ids=str,
)
def test_nothing_is_preempted_whatever_the_caches_are(options):
    asked = ModesRequest(options=EngineOptions(**options), num_prompts=40)
    asked.check()
    assert not any(step.preempted_req_ids for step in plan_task(asked).steps)


def test_a_fault_of_the_scheduler_is_in_the_plan(capsys):
    result = run(capsys, "--inject null-block-handed-out --repetitions 0", 1)
    assert "C19" in " ".join(result["reasons"])


@pytest.mark.parametrize("drafts", ["--draft-model planned", "--draft-model mtp"])
def test_drafts_that_each_mode_finds_for_itself_are_held_as_far_as_they_are_equal(
    capsys, monkeypatch, drafts
):
    """Near ties make the modes sample other tokens, and so find other drafts in the same step."""
    ties(monkeypatch, drift=3e-6)
    result = run(capsys, f"--repetitions 0 --spec-tokens 2 {drafts}")
    assert result["modes"][1]["agreement"] < 1.0


def plan_of(asked):
    asked.check()
    return plan_task(asked)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt_len": "9" * 5000}, "--prompt-len is '999"),
        ({"num_prompts": 10**4, "prompt_len": "65536"}, "tokens in all"),
        ({"num_prompts": 0}, "--prompts is 0: use 1 to 10000"),
        ({"num_prompts": 10**6}, "--prompts is 1000000"),
        ({"prompt_len": "9-3"}, "--prompt-len is '9-3'"),
        ({"prompt_len": "0"}, "--prompt-len is '0'"),
        ({"output_len": "4-"}, "--output-len is '4-'"),
        ({"output_len": "four"}, "--output-len is 'four'"),
        ({"output_len": "1e3"}, "--output-len is '1e3'"),
        ({"prompt_len": "65536", "output_len": "65536"}, None),
        ({"feed": "both"}, "--feed is 'both'"),
        ({"checks": "most"}, "--check is 'most'"),
        ({"repetitions": -1}, "--repetitions is -1"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_in_one_sentence(settings, words):
    asked = request(**settings)
    if words is None:
        asked.check()
        return
    with pytest.raises(UsageError, match=words):
        plan_of(asked)


def test_lengths_that_no_cache_holds_are_refused():
    asked = ModesRequest(options=EngineOptions(max_num_seqs=4096), prompt_len="65536")
    with pytest.raises(UsageError, match="--prompt-len and --output-len are too large"):
        asked.check()
