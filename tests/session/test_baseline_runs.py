"""`compare --save-baseline` and `--baseline`: what a comparison's verdict allows to happen next."""

import json

import msgspec
import pytest

from pcpbench import cli
from pcpbench.engine_options import EngineOptions
from pcpbench.gate_defaults import DEFAULT_PROCESSES
from pcpbench.session import gathering
from pcpbench.session.baseline import read_measured
from pcpbench.session.processes import WorkerCrash, WorkerFailure
from pcpbench.session.sampling import hash_of, plans_of

ARMS = ["compare", "eager", "full", "--scenario", "short.yaml"]
COMPARE = [*ARMS, "--capture-sizes", "1,2", "--repetitions", "0"]


@pytest.fixture
def world(tmp_path, monkeypatch, fake):
    """The comparison is real; the fresh processes behind it are not."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.yaml").write_text(
        "name: short\ndescription: d\nrequests: [{prompt_len: 3, output_len: 4, count: 2}]\n",
        encoding="utf-8",
    )
    plan_hash = hash_of(plans_of(("short.yaml",), EngineOptions())[0])

    class World:
        ratio, broken, num, num_wrong = 0.8, None, 0, 0

        def sample(self, job, timeout_s):
            self.num += 1
            if self.broken:
                raise self.broken
            ratio = self.ratio * (1 + 0.001 * (self.num % 5))
            scenario = fake.scenario("short", ratio=ratio, plan_hash=plan_hash)
            scenario = msgspec.structs.replace(scenario, num_wrong=self.num_wrong)
            return fake.process(scenario, started_at=f"second {self.num}")

        def compare(self, *arguments):
            return cli.run([*COMPARE, *arguments])

    world = World()
    monkeypatch.setattr(gathering, "sample_once", world.sample)
    return world


def test_a_comparison_that_passed_becomes_a_baseline(world, tmp_path, capsys):
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    stored = read_measured(tmp_path / "main.json")
    assert len(stored.processes) == 12
    assert (stored.judged[0].scenario, stored.judged[0].full_share) == ("short", 1.0)
    assert stored.settings["cudagraph_capture_sizes"] == [1, 2]
    assert read_measured(tmp_path / "run", "run") == stored
    assert "baseline of 12 processes: main.json" in capsys.readouterr().err


def test_a_comparison_is_held_against_a_baseline(world, tmp_path, capsys):
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    capsys.readouterr()
    assert world.compare("--baseline", "main.json", "--out", "same", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["command"] == "compare"
    assert "full vs eager: no rule was broken" in " ".join(printed.err.split())
    world.ratio = 0.86
    assert world.compare("--baseline", "main.json", "--out", "slow") == 1
    found = json.loads((tmp_path / "slow" / "gate" / "gate.json").read_text(encoding="utf-8"))
    assert found["verdict"] == "regression"
    assert found["num_run"] == DEFAULT_PROCESSES


def test_a_comparison_under_other_settings_is_not_held_against_it(world, tmp_path):
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    world.num = 0
    other = ("--dtype", "bfloat16", "--baseline", "main.json", "--out", "other")
    assert world.compare(*other) == 3
    assert world.num == 0
    found = json.loads((tmp_path / "other" / "gate" / "gate.json").read_text(encoding="utf-8"))
    assert "dtype was 'float32' and is 'bfloat16'" in found["reasons"][0]


def test_a_comparison_that_failed_is_neither_stored_nor_timed(world, tmp_path, sample_the_worst):
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    before, world.num = (tmp_path / "main.json").read_bytes(), 0
    sample_the_worst()
    both = ("--save-baseline", "main.json", "--baseline", "main.json")
    assert world.compare(*both, "--out", "bad") == 1
    assert (tmp_path / "main.json").read_bytes() == before
    assert world.num == 0


@pytest.mark.parametrize("save", [(), ("--save-baseline", "new.json")])
def test_a_comparison_that_failed_is_told_as_a_gate_tells_it(
    world, tmp_path, sample_the_worst, monkeypatch, capsys, save
):
    """A CI job reads junit.xml and annotations, whichever of the two commands it runs."""
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    world.num = 0
    sample_the_worst()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    capsys.readouterr()
    assert world.compare("--baseline", "main.json", *save, "--out", "bad") == 1
    gate = tmp_path / "bad" / "gate"
    found = json.loads((gate / "gate.json").read_text(encoding="utf-8"))
    assert (found["verdict"], found["num_run"], world.num) == ("regression", 0, 0)
    again = "pcpbench compare eager full --capture-sizes 1,2 --scenario short.yaml --repetitions 0"
    broken = [f for f in found["findings"] if f["verdict"] == "regression"]
    assert {finding["next_step"] for finding in broken} == {again}
    assert again in (gate / "junit.xml").read_text(encoding="utf-8")
    assert f"to see where: {again}" in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()


def test_a_comparison_that_could_not_compare_stays_a_3(world, tmp_path, monkeypatch):
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    world.num = 0
    none = ["--capture-sizes", "64", "--repetitions", "0", "--baseline", "main.json"]
    assert cli.run([*ARMS, *none, "--out", "none"]) == 3
    assert world.num == 0
    found = json.loads((tmp_path / "none" / "gate" / "gate.json").read_text(encoding="utf-8"))
    assert found["verdict"] == "not comparable"


def test_a_baseline_has_as_many_processes_as_asked_for(world, tmp_path, capsys):
    many = ("--save-baseline", "main.json", "--processes", "20")
    assert world.compare(*many, "--out", "run") == 0
    assert len(read_measured(tmp_path / "main.json").processes) == 20
    for wrong in (["--processes", "20"], ["--processes", "3", "--save-baseline", "main.json"]):
        assert world.compare(*wrong) == 2
        assert "--processes is " in capsys.readouterr().err


def test_what_a_gate_does_not_repeat_of_a_comparison_is_told(world, tmp_path, capsys):
    asked = ["--repetitions", "1", "--feed", "free-running", "--check", "full"]
    told = [*ARMS, "--capture-sizes", "1,2", *asked, "--save-baseline", "main.json"]
    assert cli.run([*told, "--out", "run"]) == 0
    said = capsys.readouterr().err
    assert "--feed free-running is of this comparison alone" in said
    assert "--repetitions 1 is of this comparison alone: each process of a gate times 10" in said
    assert read_measured(tmp_path / "main.json").job.checks == "full"


def test_a_process_that_breaks_leaves_the_old_baseline(world, tmp_path):
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    before = (tmp_path / "main.json").read_bytes()
    world.broken = WorkerCrash("a worker was ended by signal 9: it said nothing")
    assert world.compare("--save-baseline", "main.json", "--out", "again") == 3
    assert (tmp_path / "main.json").read_bytes() == before


@pytest.mark.parametrize("name", ["main.json", "new.json"])
def test_a_regression_is_no_new_baseline(world, tmp_path, name, capsys):
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    before = (tmp_path / "main.json").read_bytes()
    world.ratio = 0.86
    both = ("--baseline", "main.json", "--save-baseline", name)
    assert world.compare(*both, "--out", "slow") == 1
    assert "no baseline was written: the gate says regression" in capsys.readouterr().err
    assert (tmp_path / "main.json").read_bytes() == before
    assert not (tmp_path / "new.json").exists()


def test_a_run_that_passed_its_gate_is_the_next_baseline(world, tmp_path):
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 0
    before = read_measured(tmp_path / "main.json")
    both = ("--baseline", "main.json", "--save-baseline", "main.json")
    assert world.compare(*both, "--out", "again") == 0
    assert read_measured(tmp_path / "main.json").processes != before.processes
    assert read_measured(tmp_path / "again" / "gate", "run").processes[0].scenarios


def test_a_process_that_breaks_a_contract_or_samples_wrongly_makes_no_baseline(
    world, tmp_path, capsys
):
    world.broken = WorkerFailure("C8 broke")
    assert world.compare("--save-baseline", "main.json", "--out", "broken") == 1
    assert world.num == 1
    world.broken, world.num_wrong = None, 3
    assert world.compare("--save-baseline", "main.json", "--out", "wrong") == 1
    assert "3 timed steps of short sampled other tokens" in capsys.readouterr().err
    assert not (tmp_path / "main.json").exists()


def test_a_bad_baseline_is_refused_before_anything_runs(world, tmp_path):
    (tmp_path / "main.json").write_text("{", encoding="utf-8")
    assert world.compare("--baseline", "main.json", "--out", "run") == 2
    assert world.compare("--save-baseline", "main.json", "--out", "run") == 2
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "main.json").read_text(encoding="utf-8") == "{"
