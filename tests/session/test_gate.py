"""Whole gates over fake processes: exit codes, extension, files, and what is never a pass."""

import csv
import io
import json
import sys
import xml.etree.ElementTree as ET
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from pcpbench import cli
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.gate_defaults import DEFAULT_PROCESSES
from pcpbench.gate_jobs import SampleJob
from pcpbench.gate_rules import parse_rule
from pcpbench.session import gate as gate_module
from pcpbench.session import gathering, processes
from pcpbench.session.baseline import read_measured, samples_bytes, write_baseline
from pcpbench.session.gathering import SLACK_S
from pcpbench.session.here import measured_here
from pcpbench.session.processes import WorkerCrash, WorkerFailure

JOB = SampleJob(
    base="eager", candidate="full", options=EngineOptions(), scenarios=("s2-capture-edges",)
)


class World:
    """A machine whose processes are drawn: `ratio` and `sd` of the next one; a baseline on disk."""

    def __init__(self, fake, path, monkeypatch):
        self.fake, self.path = fake, path
        self.ratio, self.sd, self.num, self.stop_at, self.error = 0.8, 0.004, 0, None, None
        self.judged, self.judge_s, self.wall_s = (fake.judged(),), None, 0.001
        self.rng = np.random.default_rng(2)
        monkeypatch.setattr(gathering, "START_S", 0.0)
        monkeypatch.setattr(gathering, "sample_once", self.sample)
        monkeypatch.setattr(gate_module, "judge_once", self.judge)
        self.here = measured_here(JOB, self.judged)
        self.save()

    def draw(self):
        return self.fake.scenario(ratio=self.ratio * float(np.exp(self.rng.normal(0, self.sd))))

    def sample(self, job, timeout_s):
        if self.error is not None:
            raise self.error
        if self.num == self.stop_at:
            raise KeyboardInterrupt
        self.num += 1
        return self.process()

    def process(self):
        return self.fake.process(self.draw(), wall_s=self.wall_s)

    def judge(self, job, timeout_s):
        self.judge_s = timeout_s
        if isinstance(self.judged, Exception):
            raise self.judged
        return self.judged

    def measured(self, num=12, **changes):
        processes = tuple(self.process() for _ in range(num))
        return msgspec.structs.replace(self.here, processes=processes, **changes)

    def save(self, name="main.json", **changes):
        write_baseline(self.path / name, self.measured(**changes))

    def gate(self, *arguments):
        return cli.run(["gate", "main.json", *arguments, "--out", "out"])

    def found(self):
        return json.loads((self.path / "out" / "gate.json").read_text(encoding="utf-8"))


@pytest.fixture
def world(fake, tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return World(fake, tmp_path, monkeypatch)


def test_equal_code_passes_with_as_few_processes_as_were_asked_for(world, capsys):
    assert world.gate() == 0
    assert world.num == DEFAULT_PROCESSES
    found = world.found()
    assert (found["verdict"], found["num_run"], found["num_baseline"]) == (
        "pass",
        DEFAULT_PROCESSES,
        12,
    )
    assert [rule["source"] for rule in found["rules"]] == ["default"] * 6
    assert "code: baseline and run are of the same" in " ".join(capsys.readouterr().out.split())


def test_a_slowdown_is_a_regression(world):
    world.ratio = 0.84
    assert world.gate() == 1
    with (world.path / "out" / "gate.csv").open(encoding="utf-8") as stream:
        rows = {row["metric"]: row for row in csv.DictReader(stream)}
    assert rows["tpot"]["verdict"] == "regression"
    assert float(rows["tpot"]["change_low_percent"]) > 2.5


@pytest.mark.parametrize(("how", "code"), [("fail", 1), ("warn", 0), ("pass", 0)])
def test_what_no_process_decides_is_undecided_and_ends_as_asked(world, how, code):
    world.sd = 0.2
    world.save()
    assert world.gate("--on-undecided", how, "--max-time", "0.4") == code
    found = world.found()
    assert found["verdict"] == "undecided"
    assert found["num_run"] > DEFAULT_PROCESSES
    assert found["on_undecided"] == how


def test_it_measures_on_until_it_is_decided(world):
    world.sd = 0.012
    world.save()
    assert world.gate("--processes", "4", "--fail-on", "capture_time:off") == 0
    assert 4 < world.num < 60


def test_a_run_that_goes_on_is_not_looked_at_before_it_has_all_processes_asked_for(world):
    world.sd = 0.05
    world.save("killed.json", num=4)
    world.sd = 0.0001
    assert world.gate("killed.json", "--processes", "20") == 0
    assert world.found()["num_run"] == 20


def test_which_arm_has_moved_is_told_where_a_ratio_is_broken(world, capsys):
    world.ratio = 0.84
    assert world.gate() == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "each arm itself: tpot of s: eager 3.00 ms -> 3.00 ms, full 2.40 ms -> 2.52 ms" in told
    world.ratio = 0.8
    assert cli.run(["gate", "main.json", "--out", "again"]) == 0
    assert "each arm itself" not in capsys.readouterr().out


def test_a_baseline_that_cannot_be_read_is_told_to_ci(world, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (world.path / "main.json").unlink()
    assert world.gate() == 2
    assert "::error title=pcpbench gate::baseline 'main.json' does not exist" in (
        capsys.readouterr().err
    )


def test_json_is_written_in_what_the_stream_can_encode(world, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    accept = "tpot:9% until 2127-01-31 because für später \U0001f600"
    assert world.gate("--json", "--accept", accept) == 0
    document = json.loads(stdout.buffer.getvalue().decode("ascii"))
    assert "für später \U0001f600" in json.dumps(document["gate_settings"], ensure_ascii=False)


def test_a_failure_that_was_seen_stays_in_the_files_of_the_run(world):
    world.error = WorkerFailure("C8 broke")
    assert world.gate() == 1
    world.error = None
    assert cli.run(["gate", "main.json", "out", "--out", "again"]) == 1
    world.error = WorkerCrash("a worker was ended by signal 9")
    assert cli.run(["gate", "main.json", "--out", "crashed"]) == 3
    world.error = None
    assert cli.run(["gate", "main.json", "crashed", "--out", "again2"]) == 3


def test_a_share_that_fell_is_a_regression_though_every_process_crashes(world):
    world.judged = (world.fake.judged(steps=(0, 10)),)
    world.error = WorkerCrash("a worker was ended by signal 9")
    assert world.gate() == 1


@pytest.mark.parametrize("name", ["main.json", "copy.json"])
def test_a_baseline_is_not_held_against_itself(world, name, capsys):
    (world.path / "copy.json").write_bytes((world.path / "main.json").read_bytes())
    assert cli.run(["gate", "main.json", name, "--out", "out"]) == 2
    assert "name another run" in capsys.readouterr().err
    assert not (world.path / "out").exists()


def test_a_run_that_holds_a_process_of_the_baseline_is_no_run(world, capsys):
    baseline = read_measured(world.path / "main.json")
    shared = (*baseline.processes[:1], *world.measured(num=6).processes)
    write_baseline(world.path / "part.json", msgspec.structs.replace(world.here, processes=shared))
    assert world.gate("part.json") == 2
    assert "holds processes of the baseline itself" in capsys.readouterr().err


def test_a_scenario_that_is_another_one_now_is_not_timed(world):
    world.judged = (world.fake.judged("s", plan_hash="another"),)
    world.save()
    assert world.gate() == 3
    assert world.num == 0
    assert "the scenario is another one now" in world.found()["reasons"][0]


def test_wrong_tokens_end_a_gate_before_its_first_look(world, monkeypatch):
    def wrong(job, timeout_s):
        world.num += 1
        return world.fake.process(world.fake.scenario(num_wrong=3))

    monkeypatch.setattr(gathering, "sample_once", wrong)
    assert world.gate() == 1
    assert world.num == 1


def test_a_run_that_was_killed_before_its_first_process_goes_on(world, capsys):
    bare = msgspec.structs.replace(world.here, processes=())
    (world.path / "bare").mkdir()
    (world.path / "bare" / "samples.jsonl").write_bytes(samples_bytes(bare))
    assert cli.run(["gate", "main.json", "bare", "--out", "out"]) == 0
    assert world.num == DEFAULT_PROCESSES
    unjudged = msgspec.structs.replace(bare, judged=())
    (world.path / "bare" / "samples.jsonl").write_bytes(samples_bytes(unjudged))
    assert cli.run(["gate", "main.json", "bare", "--out", "again"]) == 3
    assert world.num == DEFAULT_PROCESSES
    assert "gate again without RUN" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_cannot_go_on_here_is_judged_as_it_is(world, monkeypatch):
    world.sd = 0.2
    world.save("run.json", num=5)
    missing = CannotMeasure("device 'cuda' is not here.")

    def elsewhere(job):
        raise missing

    monkeypatch.setattr(gate_module, "measured_here", elsewhere)
    assert cli.run(["gate", "main.json", "run.json", "--out", "out"]) == 0
    found = world.found()
    assert found["verdict"] == "undecided"
    assert "was not extended: device 'cuda' is not here." in str(found["notices"])


def test_scenarios_that_the_baseline_does_not_know_are_told(world):
    world.judged = (world.fake.judged(), world.fake.judged("brand-new"))
    assert world.gate() == 0
    assert "brand-new: not in the baseline" in str(world.found()["notices"])


def test_time_that_is_over_before_anything_was_measured_is_no_pass(world):
    assert world.gate("--max-time", "0.000001") == 3
    assert world.found()["verdict"] == "not comparable"


def test_a_change_that_hangs_is_ended_soon_after_the_time_of_the_gate(world, monkeypatch):
    def hang():
        return [sys.executable, "-c", "import time; time.sleep(60)"]

    monkeypatch.setattr(processes, "command", hang)
    monkeypatch.setattr(gate_module, "judge_once", processes.judge_once)
    monkeypatch.setattr(gate_module, "SLACK_S", 0.5)
    assert world.gate("--max-time", "0.5") == 3
    assert world.num == 0
    found = world.found()
    assert found["verdict"] == "crashed"
    assert "a worker took more than 1 s and was ended: it hangs" in found["reasons"][0]


def test_the_judge_has_what_is_left_of_the_time_and_some_slack(world):
    assert world.gate("--max-time", "20") == 0
    assert 19 + SLACK_S < world.judge_s <= 20 + SLACK_S


def test_a_process_is_not_started_where_those_of_the_baseline_took_too_long(world):
    world.wall_s = 80.0
    world.save()
    assert world.gate() == 3
    assert world.num == 0
    (notice,) = (n for n in world.found()["notices"] if n["setting"] == "max-time")
    assert "took 80 s each, and of 75 s less were left" in notice["message"]


def test_a_crash_is_not_a_regression_and_a_broken_contract_is_one(world):
    world.error = WorkerCrash("a worker was ended by signal 9: it said nothing")
    assert world.gate() == 3
    assert world.found()["verdict"] == "crashed"


def test_a_contract_that_breaks_in_a_process_is_a_regression(world):
    world.judged = WorkerFailure("the engine raised IndexError")
    assert world.gate() == 1
    assert "IndexError" in world.found()["reasons"][0]
    assert world.num == 0


def test_a_judge_that_fails_stops_the_timing(world):
    world.judged = (world.fake.judged(outcome="fail", drifts=1),)
    assert world.gate() == 1
    assert world.num == 0


@pytest.mark.parametrize("ends", ["a job that is refused", "a full disk", "a mistake of ours"])
def test_an_error_that_ends_a_gate_is_told_to_ci_as_well(world, monkeypatch, capsys, ends):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    error, code = UsageError("scenario 'x.yaml' does not exist."), 2
    if ends == "a full disk":
        error, code = CannotMeasure("'out/samples.jsonl' cannot be written."), 3
        monkeypatch.setattr(gate_module.GateFiles, "add_lines", Mock(side_effect=error))
    elif ends == "a mistake of ours":
        error, code = ZeroDivisionError("division by zero"), 3
        monkeypatch.setattr(gate_module.Gate, "judge", Mock(side_effect=error))
    else:
        world.judged = error
    assert world.gate() == code
    case = ET.parse(world.path / "out" / "junit.xml").getroot().find("testsuite/testcase")
    assert case.find("error").text == str(error)
    assert f"::error title=pcpbench gate::{error}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "names", "told"),
    [
        ((), ["s1-grow-shrink"], ["s1-grow-shrink"]),
        (("all",), ["s1-grow-shrink"], ["s1-grow-shrink"]),
        (("a/b.yaml", "c.yaml"), ["c"], ["c.yaml"]),
        (("a/b.yaml", "c.yaml"), ["named otherwise"], ["a/b.yaml", "c.yaml"]),
    ],
)
def test_the_command_that_shows_more_names_scenarios_as_they_were_typed(world, typed, names, told):
    """By files, where they are not shipped: their names alone would be refused."""
    judged = tuple(world.fake.judged(name, drifts=1, outcome="fail") for name in names)
    job = msgspec.structs.replace(JOB, scenarios=typed)
    run = msgspec.structs.replace(world.here, job=job, judged=judged)
    bad = [gate_module.Finding(rule=parse_rule("drift:0"), scenario="", why="",
                               verdict=gate_module.GateVerdict.REGRESSION, limit=0)]  # fmt: skip
    (found,) = gate_module._with_next_steps(bad, run)
    words = [word for name in told for word in ("--scenario", name)]
    assert found.next_step == " ".join(["pcpbench compare eager full", *words, "--repetitions 0"])


def test_a_judge_that_crashes_is_an_error(world):
    world.judged = WorkerCrash("killed")
    assert world.gate() == 3


def test_other_settings_are_told_and_nothing_is_measured(world):
    world.save(settings={**world.here.settings, "dtype": "float16"}, settings_hash="other")
    assert world.gate() == 3
    assert world.num == 0
    found = world.found()
    assert found["verdict"] == "not comparable"
    assert "dtype was 'float16' and is 'float32'" in found["reasons"][0]


def test_another_machine_is_judged_by_ratios_and_never_by_times(world, capsys):
    machine = msgspec.structs.replace(world.here.machine, id="elsewhere", cpu="Another CPU")
    world.save(machine=machine)
    assert world.gate() == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "made on another machine (Another CPU" in told
    assert cli.run(["gate", "main.json", "--fail-on", "tpot:1ms", "--out", "abs"]) == 3
    found = json.loads((world.path / "abs" / "gate.json").read_text(encoding="utf-8"))
    assert "another machine" in found["reasons"][0]


def test_the_rules_that_applied_are_stored_with_where_they_came_from(world):
    (world.path / "pyproject.toml").write_text(
        '[tool.pcpbench]\nfail-on = ["launch:30%"]\n', encoding="utf-8"
    )
    assert world.gate("--fail-on", "tpot:4%") == 0
    sources = {rule["text"]: rule["source"] for rule in world.found()["rules"]}
    assert sources["tpot:4%"] == "command line"
    assert sources["launch:30%"] == "[tool.pcpbench] of pyproject.toml"
    assert sources["drift:0"] == "default"


def test_a_run_that_was_measured_before_is_judged_as_it_is(world):
    world.ratio = 0.84
    world.save("slow.json", num=8)
    assert world.gate("slow.json") == 1
    assert world.num == 0


def test_an_undecided_run_of_this_code_is_extended_and_another_is_not(world, capsys):
    world.sd = 0.015
    world.save()
    world.save("few.json", num=4)
    assert world.gate("few.json") == 0
    assert world.num > 0
    assert world.found()["num_run"] == 4 + world.num
    before = world.num
    world.save("old.json", num=4, code_hash="other")
    assert cli.run(["gate", "main.json", "old.json", "--out", "again"]) == 0
    assert world.num == before
    told = " ".join(capsys.readouterr().out.split())
    assert "was not extended: it was measured with other code" in told
    assert "UNDECIDED" in told


def test_a_run_that_is_killed_leaves_what_had_finished(world):
    world.stop_at = DEFAULT_PROCESSES - 1
    assert world.gate() == 130
    assert len(read_measured(world.path / "out", "run").processes) == DEFAULT_PROCESSES - 1
    manifest = json.loads((world.path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["outcome"] == "interrupted"
    world.stop_at = None
    world.save("b.json")
    assert cli.run(["gate", "b.json", "out", "--out", "later"]) == 0


@pytest.mark.parametrize("damage", ["cut", "foreign", "newer", "missing", "empty"])
def test_a_bad_baseline_is_refused_and_changes_nothing(world, capsys, damage):
    path = world.path / "main.json"
    whole = path.read_text(encoding="utf-8")
    if damage == "missing":
        path.unlink()
    else:
        newer = json.dumps({**json.loads(whole), "schema_version": 9})
        text = {"cut": whole[:900], "foreign": "{}", "newer": newer, "empty": ""}[damage]
        path.write_text(text, encoding="utf-8")
    before = {p: p.read_bytes() for p in world.path.rglob("*") if p.is_file()}
    assert world.gate() == 2
    assert world.num == 0
    told = capsys.readouterr().err
    assert told.startswith("pcpbench: baseline 'main.json' ")
    assert told.count("\n") == 1
    assert {p: p.read_bytes() for p in world.path.rglob("*") if p.is_file()} == before
    assert not (world.path / "out").exists()


def test_json_is_on_stdout_and_talk_on_stderr(world, capsys):
    assert world.gate("--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == world.found()
    assert "PASS  full vs eager" in printed.err
