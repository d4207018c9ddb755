"""An engine that cannot be captured is a failed run with all its files, not a crash."""

from __future__ import annotations

import json

import pytest

from pcpbench import cli
from pcpbench.engine.engine import Engine
from pcpbench.errors import CaptureError

COMPARE = ["compare", "eager", "full", "--repetitions", "0", "--out", "run"]
SCENARIOS = ["--scenario", "s2-capture-edges", "--scenario", "s1-grow-shrink"]
FAILURES = {
    "C0": LookupError("no such graph"),
    "C8": CaptureError("aten.item cannot be captured: it reads a tensor on the host"),
}


@pytest.fixture(params=FAILURES)
def contract(request, tmp_path, monkeypatch):
    """Arms with graphs fail in their capture; the contract that it counts against."""
    capture = Engine.capture

    def faulty(self, *on_captured):
        if self.graphs is not None:
            raise FAILURES[request.param]
        return capture(self, *on_captured)

    monkeypatch.setattr(Engine, "capture", faulty)
    monkeypatch.chdir(tmp_path)
    return request.param


def test_every_scenario_fails_by_name_and_all_files_are_there(contract, tmp_path, capsys):
    assert cli.run([*COMPARE, *SCENARIOS, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [scenario["outcome"] for scenario in told["scenarios"]] == ["fail", "fail"]
    for scenario in told["scenarios"]:
        (violation,) = scenario["violations"]
        assert (violation["contract"], violation["arm"]) == (contract, "full")
        assert violation["message"].startswith("in capture: ")
        assert str(FAILURES[contract]) in violation["message"]
    run = tmp_path / "run"
    assert json.loads((run / "manifest.json").read_text(encoding="utf-8"))["exit_code"] == 1
    assert json.loads((run / "summary.json").read_text(encoding="utf-8")) == told
    assert len((run / "summary.csv").read_text(encoding="utf-8").splitlines()) == 1 + 2 * 4


def test_it_is_replayed_and_the_task_run_tells_it(contract, capsys):
    assert cli.run([*COMPARE, *SCENARIOS[:2]]) == 1
    printed = capsys.readouterr().out
    assert f"{contract} broken 1x" in printed
    assert "Dispatch" not in printed  # no step ran
    assert cli.run(["repro", "run/divergence"]) == 1
    assert cli.run(["modes", "--prompts", "2", "--out", "modes"]) == 1
    assert f"{contract} broken" in capsys.readouterr().out
