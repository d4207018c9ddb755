"""What a worker measures: both arms' times, a planted slowdown, and how it says that it failed."""

import subprocess
import sys

import msgspec
import pytest

from pcpbench.engine_options import EngineOptions
from pcpbench.errors import MeasuredFailure, UsageError
from pcpbench.gate_jobs import SampleJob
from pcpbench.gate_samples import TIME_METRICS
from pcpbench.session import processes, sampling
from pcpbench.session.judging import judge_job
from pcpbench.session.sampling import time_job

SCENARIO = """\
name: short
description: Two prompts and a few decodes.
requests:
  - {prompt_len: 3, output_len: 6, count: 2}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "short.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    options = EngineOptions(capture_sizes="1,2")
    return SampleJob(
        base="eager", candidate="full", options=options, scenarios=(str(path),), repetitions=3
    )


def test_a_worker_times_both_arms(job):
    sample = time_job(job)
    (scenario,) = sample.scenarios
    assert scenario.metrics.keys() == set(TIME_METRICS)
    tpot = scenario.metrics["tpot"]
    assert tpot.num_pairs == 2 * 3
    assert tpot.base.num_samples == tpot.candidate.num_samples == 2 * 3
    assert 0.2 < tpot.ratio < 2.0
    assert scenario.capture_s > 0
    assert scenario.num_wrong == 0
    assert scenario.plan_hash == judge_job(job)[0].plan_hash


def test_floors_are_measured_in_the_first_repetitions_only(job):
    none, one, two = (
        time_job(msgspec.structs.replace(job, floor_repetitions=number)).scenarios[0].metrics
        for number in (0, 1, 2)
    )
    assert (none["launch"].num_pairs, none["launch"].ratio) == (0, None)
    assert none["tpot"].num_pairs == one["tpot"].num_pairs
    assert two["launch"].num_pairs == 2 * one["launch"].num_pairs > 0
    assert one["step"].num_pairs == two["step"].num_pairs


def test_the_capture_that_is_timed_is_the_candidates(job, monkeypatch):
    timed = []
    capture = sampling._TimedTarget._capture

    def note(self, own):
        timed.append(own.__self__.label)
        capture(self, own)

    monkeypatch.setattr(sampling._TimedTarget, "_capture", note)
    arms = {"base": "full", "candidate": "full_and_piecewise", "repetitions": 1}
    (scenario,) = time_job(msgspec.structs.replace(job, **arms)).scenarios
    assert timed == ["full_and_piecewise"]
    assert scenario.capture_s > 0


def test_without_a_named_scenario_the_core_ones_are_judged_and_one_is_timed(job):
    job = msgspec.structs.replace(job, scenarios=(), repetitions=1, options=EngineOptions())
    assert [s.scenario for s in time_job(job).scenarios] == ["s2-capture-edges"]
    assert len(judge_job(job)) > 1


def test_a_planted_slowdown_slows_the_candidate_by_its_share(job):
    before, after = (
        time_job(msgspec.structs.replace(job, slowdown=share)).scenarios[0].metrics["itl"].ratio
        for share in (0.0, 1.0)
    )
    assert 1.6 < after / before < 2.5


def test_tokens_that_change_between_timed_runs_are_counted(job, monkeypatch):
    from pcpbench.targets.builtin import BuiltinArm

    sampled, calls = BuiltinArm.sampled, []

    def fickle(self):
        calls.append(self)
        return [token + (len(calls) > 45) for token in sampled(self)]

    monkeypatch.setattr(BuiltinArm, "sampled", fickle)
    assert time_job(job).scenarios[0].num_wrong > 0


def test_the_judge_of_the_gate_counts_what_is_wrong(job, sample_the_worst):
    (clean,) = judge_job(job)
    assert (clean.outcome, clean.num_drifts, clean.num_violations) == ("pass", 0, 0)
    assert clean.full_share == 1.0
    sample_the_worst()
    (bad,) = judge_job(job)
    assert bad.outcome == "fail"
    assert bad.num_drifts + bad.num_violations > 0 or bad.reasons


def test_a_worker_is_a_process_of_its_own_and_this_code(job, tmp_path, monkeypatch):
    """A package of the same name in the working directory must not be what is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pcpbench").mkdir()
    (tmp_path / "pcpbench" / "__init__.py").write_text("raise SystemExit(9)", encoding="utf-8")
    sample = processes.sample_once(job, 120.0)
    assert sample.scenarios[0].scenario == "short"


def code(text):
    return lambda: [sys.executable, "-c", text]


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", processes.WorkerCrash, "sig"),
        ("raise SystemExit(3)", processes.WorkerCrash, "ended with 3: it said nothing"),
        ("print('pcpbench: no', file=__import__('sys').stderr); exit(2)", UsageError, "^no$"),
        (
            "print('pcpbench: C8 broke', file=__import__('sys').stderr); exit(1)",
            MeasuredFailure,
            "^C8 broke$",
        ),
        ("import nowhere_to_be_found", processes.WorkerCrash, "ended with 1: ModuleNotFound"),
        ("def broken(:", processes.WorkerCrash, "ended with 1: SyntaxError"),
        ("print('x: no', file=__import__('sys').stderr); exit(2)", processes.WorkerCrash, "with 2"),
        ("exit(1)", processes.WorkerCrash, "ended with 1: it said nothing"),
        ("print('{}')", processes.WorkerCrash, "no result"),
        ("print('[1')", processes.WorkerCrash, "no result"),
        ("", processes.WorkerCrash, "no result"),
    ],
)
def test_every_bad_end_of_a_worker_is_told_apart(job, monkeypatch, text, kind, told):
    monkeypatch.setattr(processes, "command", code(text))
    with pytest.raises(kind, match=told):
        processes.sample_once(job)


def test_a_package_that_cannot_be_imported_is_a_crash(job, tmp_path, monkeypatch):
    (tmp_path / "pcpbench").mkdir()
    for name in ("__init__", "__main__"):
        (tmp_path / "pcpbench" / f"{name}.py").write_text("def broken(:\n", encoding="utf-8")
    broken = {**processes.worker_environment(), "PYTHONPATH": str(tmp_path)}
    monkeypatch.setattr(processes, "worker_environment", lambda: broken)
    with pytest.raises(processes.WorkerCrash, match="ended with 1: SyntaxError"):
        processes.sample_once(job, 60.0)


def test_a_worker_that_hangs_is_ended(job, monkeypatch):
    monkeypatch.setattr(processes, "command", code("import time; time.sleep(60)"))
    with pytest.raises(processes.WorkerCrash, match="more than 1 s"):
        processes.sample_once(job, 1.0)


def test_a_person_who_starts_a_worker_is_told_what_it_is_for():
    done = subprocess.run(
        processes.command(),
        input="",
        capture_output=True,
        text=True,
        env=processes.worker_environment(),
        check=False,
    )
    assert done.returncode == 2
    assert "started by `pcpbench gate`" in done.stderr
