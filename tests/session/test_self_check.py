"""`gate --self-check` over fake processes: what it says of a machine, and when it cannot."""

import json

import numpy as np
import pytest

from pcpbench import cli
from pcpbench.session import gathering, self_check


class Machine:
    """Times processes as it is told. ratios: of candidate to base, one for each clean process."""

    def __init__(self, fake, path, monkeypatch):
        self.fake, self.path, self.wall_s = fake, path, 5.5
        self.ratios = 0.8 * np.exp(np.random.default_rng(2).normal(0, 0.004, 40))
        self.num = self.num_planted = 0
        monkeypatch.setattr(gathering, "sample_once", self.sample)
        monkeypatch.setattr(self_check, "MAX_PROCESSES", len(self.ratios))

    def sample(self, job, timeout_s):
        number = self.num_planted if job.slowdown else self.num
        if job.slowdown:
            self.num_planted += 1
        else:
            self.num += 1
        ratio = float(self.ratios[number] * (1 + job.slowdown))
        return self.fake.process(self.fake.scenario(ratio=ratio), wall_s=self.wall_s)

    def check(self, *arguments):
        return cli.run(["gate", "--self-check", "--out", "out", *arguments])

    def found(self):
        return json.loads((self.path / "out" / "self-check.json").read_text(encoding="utf-8"))


@pytest.fixture
def machine(fake, tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return Machine(fake, tmp_path, monkeypatch)


def test_it_says_what_a_gate_can_see(machine, capsys):
    assert machine.check("--json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found == machine.found()
    assert found["rates"][0]["regression"] == 0.0
    assert 0.02 <= found["smallest_called"] <= 0.05
    assert all(abs(value - 0.05) < 0.01 for _, _, value in found["seen"])
    # 75 s less a quarter for judging, at 5.5 + 1.5 s a process
    assert [found[f"num_{n}"] for n in ("baseline", "first", "most")] == [12, 5, 8]
    assert (found["num_processes"], found["num_gates"], found["num_apart"]) == (40, 231, 2)
    told = " ".join(printed.err.split())
    assert "0 % false alarms" in told
    assert "(231 gates, at most 2 without overlap)" in told
    assert "231 gates of 75 s, cut from the first kind in order of time" in told


def test_a_machine_that_drifts_is_told_by_its_false_alarms(machine):
    machine.ratios[12:] *= 1.05
    assert machine.check() == 0
    assert machine.found()["rates"][0]["regression"] > 0.1


def test_the_time_to_measure_is_not_the_time_of_a_gate(machine):
    assert machine.check("--max-time", "600") == 0
    assert (machine.found()["gate_time_s"], machine.found()["num_most"]) == (75.0, 8)
    (machine.path / "pyproject.toml").write_text(
        "[tool.pcpbench]\nmax-time = 100\n", encoding="utf-8"
    )
    machine.num = machine.num_planted = 0
    assert cli.run(["gate", "--self-check", "--max-time", "600", "--out", "again"]) == 0
    found = json.loads((machine.path / "again" / "self-check.json").read_text(encoding="utf-8"))
    assert (found["gate_time_s"], found["num_most"]) == (100.0, 10)


def test_a_gate_looks_first_when_its_time_is_over_where_that_comes_first(machine):
    machine.wall_s = 12.0
    assert machine.check() == 0
    assert (machine.found()["num_first"], machine.found()["num_most"]) == (4, 4)


@pytest.mark.parametrize(
    ("wall_s", "num", "arguments", "told"),
    [
        (5.5, 40, ["--max-time", "0.000001"], "has measured no process: give it more --max-time"),
        (25.0, 40, [], "a gate of 75 s has time for 2 processes of 26 s here, and 4 is the least"),
        (5.5, 19, [], "baseline and up to 8 for its run, and --self-check has measured 19: give"),
        (5.5, 19, [], ": give it --max-time 190 or more."),
    ],
    ids=["no process", "slow processes", "few processes", "how long it takes"],
)
def test_what_it_cannot_measure_is_told(machine, monkeypatch, capsys, wall_s, num, arguments, told):
    machine.wall_s = wall_s
    monkeypatch.setattr(self_check, "MAX_PROCESSES", num)
    assert machine.check(*arguments) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("pcpbench: ")
    assert told in last


def test_without_a_rule_in_percent_nothing_is_measured(machine, capsys):
    off = [f"--fail-on={metric}:off" for metric in ("tpot", "itl", "capture_time")]
    assert machine.check("--fail-on", "launch:40us", *off) == 2
    told = capsys.readouterr().err
    assert "no rule in percent among full_share:0%, drift:0, contracts:0, launch:40us" in told
    assert machine.num == 0
    assert not (machine.path / "out").exists()


def test_a_rule_that_no_process_has_a_value_for_is_named(machine, capsys):
    machine.ratios *= -1
    off = [f"--fail-on={metric}:off" for metric in ("itl", "capture_time")]
    assert machine.check("--fail-on", "tpot:2%", *off) == 3
    assert "not every process has a value for tpot:2%: add" in capsys.readouterr().err
