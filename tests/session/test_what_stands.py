"""What was seen to fail stays a failure, whatever goes wrong after it; a sound run is no pass."""

import io
import json
import shutil
import sys
from contextlib import contextmanager

import pytest

from pcpbench import cli
from pcpbench.errors import CannotMeasure, EngineError, NoMemory
from pcpbench.report.compare_files import CompareFiles
from pcpbench.results import Outcome
from pcpbench.session import compare
from pcpbench.targets import builtin
from pcpbench.targets.builtin import BuiltinArm

SCENARIO = """\
name: {name}
description: Two prompts that meet and part.
limits:
  {{max_num_seqs: 4, max_num_batched_tokens: 16, max_model_len: 32, num_blocks: 24, block_size: 4}}
requests:
  - {{name: five, prompt_len: 5, output_len: 3}}
  - {{name: three, prompt_len: 3, output_len: 4}}
"""
SCENARIO_BENCH = "s7-same-prompt-twice"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Called with more arguments, compares over two small scenarios: exit code, talk, place."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(SCENARIO.format(name=name))

    def compared(*arguments):
        command = "compare eager full --scenario one.yaml --scenario two.yaml --out run"
        code = cli.run([*command.split(), *(arguments or ("--repetitions", "0"))])
        printed = capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split()), tmp_path / "run"

    return compared


def summary_of(place):
    return json.loads((place / "summary.json").read_text())


def out_of_memory(*_, **__):
    raise MemoryError


LATER = ["dense_logits", "poison", "wipe", "churn_memory", "previous_outputs"]


@pytest.mark.parametrize("name", LATER)
def test_memory_that_runs_out_later_in_a_scenario_that_failed(
    bench, monkeypatch, sample_the_worst, name
):
    trial = bench(SCENARIO_BENCH)
    monkeypatch.setattr(BuiltinArm, name, out_of_memory)
    with pytest.raises(NoMemory):
        trial.run(checks="full")
    sample_the_worst()
    result = trial.run(checks="full")
    assert result.outcome is Outcome.FAIL
    (notice,) = result.notices
    assert notice.setting == "memory"
    assert "was not finished: there is not enough memory" in notice.message


def test_memory_that_runs_out_over_the_caches_of_a_scenario_that_failed(
    bench, monkeypatch, sample_the_worst
):
    trial, calls = bench(SCENARIO_BENCH), []
    caches = BuiltinArm.kv_caches

    def later(self):
        calls.append(self.label)
        return caches(self) if len(calls) < 30 else out_of_memory()

    monkeypatch.setattr(BuiltinArm, "kv_caches", later)
    with pytest.raises(NoMemory):
        trial.run()
    sample_the_worst()
    calls.clear()
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    assert result.notices[0].message.startswith("the judging of step ")


def test_what_is_no_error_of_memory_keeps_its_name(bench, monkeypatch, sample_the_worst):
    trial = bench(SCENARIO_BENCH)
    monkeypatch.setattr(builtin, "dense_logits", lambda *_: {}["no such layer"])
    with pytest.raises(KeyError):
        trial.run()
    sample_the_worst()
    result = trial.run()
    assert result.outcome is Outcome.FAIL
    why = "pcpbench itself failed with KeyError: 'no such layer'"
    told = f"the dense forward pass was not finished: {why}"
    assert [notice.message for notice in result.notices] == [told]


def test_copies_of_caches_that_do_not_fit_are_no_verdict(bench, monkeypatch):
    monkeypatch.setattr(BuiltinArm, "kv_caches", out_of_memory)
    with pytest.raises(NoMemory):
        bench(SCENARIO_BENCH)


def raises_at(name, step_index, label="full"):
    """A method of arms that raises for one arm in one step."""
    method = getattr(BuiltinArm, name)

    def faulty(self, step, *given):
        # Timed and watched steps alone keep no evidence, or are watched.
        in_pass = name == "execute_watched" or not self.engine.keeps_evidence
        if in_pass and self.label == label and step.index == step_index:
            raise EngineError("the engine raised IndexError: list index out of range (at a/b.py:1)")
        return method(self, step, *given)

    return faulty


@pytest.mark.parametrize("name", ["execute", "execute_watched"])
def test_an_engine_that_raises_in_a_timed_or_watched_step(run, monkeypatch, name):
    monkeypatch.setattr(BuiltinArm, name, raises_at(name, 2))
    code, said, place = run("--repetitions", "1")
    assert code == 1
    assert "Traceback" not in said
    for scenario in summary_of(place)["scenarios"]:
        (found,) = scenario["violations"]
        assert (found["contract"], found["arm"], found["step"]) == ("C0", "full", 2)
        assert "in a timed run: the engine raised IndexError" in found["message"]
        assert scenario["tpot_ratio"] is None
    rows = (place / "summary.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 4, "four arms of both scenarios"
    assert len((place / "samples.csv").read_text().splitlines()) == 1


def test_an_engine_that_cannot_begin_again_is_accused_where_it_was(bench, monkeypatch):
    trial = bench(SCENARIO_BENCH)
    starts, start = [], BuiltinArm.start

    def faulty(self, plan):
        starts.append(self.label)
        if len(starts) == number:
            raise EngineError("the engine raised KeyError: 'slot' (at a/b.py:1)")
        start(self, plan)

    monkeypatch.setattr(BuiltinArm, "start", faulty)
    # The reference, eager, its padded twin and full are judged; eager and full are timed.
    for number, label in ((2, "eager"), (4, "full"), (6, "full")):
        starts.clear()
        (found,) = trial.run(repetitions=1).violations
        assert (found.contract, found.arm, found.step) == ("C0", label, 0), number
        assert trial.trial.timings == []


def broken_bundle(monkeypatch):
    def full(*_):
        raise CannotMeasure("'run/divergence' cannot be written (No space left on device).")

    monkeypatch.setattr(compare.Locator, "locate", full)


def broken_second_scenario(monkeypatch):
    trial, calls = compare._trial, []

    def faulty(*arguments):
        calls.append(arguments)
        return trial(*arguments) if len(calls) == 1 else {}["no such arm"]

    monkeypatch.setattr(compare, "_trial", faulty)


def broken_injection(monkeypatch):
    planted = compare.planted_stand

    @contextmanager
    def faulty(*arguments):
        with planted(*arguments) as stand:
            yield stand
        raise CannotMeasure("the fault x raised KeyError when it was taken out.")

    monkeypatch.setattr(compare, "planted_stand", faulty)


def broken_rows(monkeypatch):
    def full(self, *_, **__):
        raise CannotMeasure("'run/steps.csv' cannot be written (No space left on device).")

    monkeypatch.setattr(CompareFiles, "add_scenario", full)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (broken_bundle, "divergence' cannot be written"),
        (broken_second_scenario, "pcpbench itself failed with KeyError: 'no such arm'"),
        (broken_injection, "raised KeyError when it was taken out"),
        (broken_rows, "steps.csv' cannot be written"),
    ],
)
def test_what_goes_wrong_behind_a_failed_scenario(run, monkeypatch, sample_the_worst, broken, told):
    sample_the_worst()
    broken(monkeypatch)
    code, said, place = run()
    assert code == 1
    assert told in said
    summary = summary_of(place)
    assert (summary["outcome"], summary["exit_code"]) == ("fail", 1)
    assert len(summary["scenarios"]) == 1
    (notice,) = [n["message"] for n in summary["notices"] if n["setting"] == "run"]
    assert notice.startswith("the run ended after 1 of 2 scenarios: ")
    assert told in notice


@pytest.mark.parametrize("broken", [broken_second_scenario, broken_injection, broken_rows])
def test_what_goes_wrong_behind_a_sound_scenario_is_no_verdict(run, monkeypatch, broken):
    broken(monkeypatch)
    assert run()[0] == 3


def broken_end(monkeypatch):
    def full(self, _):
        raise CannotMeasure("'run/summary.json' cannot be written (No space left on device).")

    monkeypatch.setattr(CompareFiles, "finish", full)


def broken_baselines(monkeypatch):
    def full(*_):
        raise CannotMeasure("'run/gate' cannot be written.")

    monkeypatch.setattr(compare, "after_compare", full)


def broken_view(monkeypatch):
    monkeypatch.setattr(compare, "print_compare", lambda *_: {}["no such column"])


@pytest.mark.parametrize("broken", [broken_end, broken_baselines, broken_view])
@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_report_that_cannot_be_given_takes_no_failure_back(
    run, monkeypatch, sample_the_worst, broken, is_wrong
):
    if is_wrong:
        sample_the_worst()
    broken(monkeypatch)
    code, said, place = run()
    assert code == (1 if is_wrong else 3)
    manifest = json.loads((place / "manifest.json").read_text())
    if broken is broken_end:
        assert "cannot be written" in said
        assert manifest["exit_code"] == code
    if is_wrong and broken is not broken_view:
        assert "FAIL one" in said


def test_a_failure_is_a_failure_where_stdout_is_full(run, monkeypatch, sample_the_worst):
    class Full(io.StringIO):
        def flush(self):
            raise CannotMeasure("stdout cannot be written (No space left on device).")

    monkeypatch.setattr(sys, "stdout", Full())
    assert run()[0] == 3
    shutil.rmtree("run")
    sample_the_worst()
    code, said, _ = run()
    assert code == 1
    assert "stdout cannot be written" in said


def test_an_arm_in_a_pass_is_otherwise_the_arm_itself(bench):
    """What timing asks of an arm besides running it reaches the arm."""
    from pcpbench.session.placed_arm import PlacedArm

    arm = bench(SCENARIO_BENCH).stand.arms["full"]
    placed = PlacedArm(arm, lambda *_: None)
    assert placed.label == "full"
    placed.keep_evidence(False)
    assert not arm.engine.keeps_evidence
