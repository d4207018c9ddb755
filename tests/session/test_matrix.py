"""`pcpbench matrix`: resuming over a fake runner, how an ended process is read, one real cell."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from msgspec.structs import replace

from pcpbench import cli
from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.fault_results import (
    CleanOutcome,
    CleanRun,
    FaultInfo,
    FaultRun,
    FaultsResult,
    Verdict,
)
from pcpbench.matrix_cells import Cell, Parallel, all_cells
from pcpbench.matrix_request import MatrixRequest
from pcpbench.matrix_results import FINISHED, CellOutcome, CellRecord, MatrixResult
from pcpbench.records import Environment
from pcpbench.report.faults_view import faults_json
from pcpbench.report.plain import to_json
from pcpbench.report.progress import make_progress
from pcpbench.results import Outcome
from pcpbench.session import matrix as session
from pcpbench.session.matrix import MatrixLoop
from pcpbench.session.matrix_cell import (
    ARMS,
    CellRunner,
    Children,
    Stopped,
    read_cell,
    with_faults,
)
from pcpbench.session.matrix_faults import faults_for

CELL = Cell(parallel=Parallel(pcp=2), spec_tokens=0, microbatch=False, model="dense")
ONE = "matrix --parallel pcp2 --k 0 --microbatch off --model dense"
QUICK = "--scenario s2-capture-edges"
OWN = """name: own
description: One request.
limits: {max_num_seqs: 4, max_num_batched_tokens: 16, max_model_len: 32, num_blocks: 24,
  block_size: 4}
requests: [{name: one, prompt_len: 9, output_len: 3}]
"""
STALE = FaultInfo(
    name="stale", class_id="K01", description="", reports=(), contracts=("C1",), world="w",
    scenario="s",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fake(monkeypatch):
    """A runner that runs nothing: outcomes by the cell's name, PASS for all others."""

    class Fake:
        def __init__(self, *arguments):
            pass

        def __call__(self, cell, deadline):
            Fake.ran.append(cell.name)
            outcome = Fake.outcomes.get(cell.name, CellOutcome.PASS)
            if isinstance(outcome, BaseException):
                raise outcome
            reason = "" if outcome is CellOutcome.PASS else f"it is {outcome.value}"
            return CellRecord(cell=cell, outcome=outcome, reason=reason, wall_s=0.5)

    Fake.outcomes, Fake.ran = {}, []
    monkeypatch.setattr(session, "CellRunner", Fake)
    return Fake


def run(arguments, exit_code):
    assert cli.run(arguments.split()) == exit_code


def names(k="0 1 3"):
    return [f"pcp2_k{each}_dense" for each in k.split()]


THREE = "matrix --parallel pcp2 --microbatch off --model dense --out run"


def test_the_matrix_is_the_product_and_every_cell_has_a_name_of_its_own():
    cells = MatrixRequest().settings().cells
    assert len(cells) == len({cell.name for cell in cells}) == 60
    presets = {(c.parallel.name, c.model): c.preset for c in cells}
    assert presets["pcp2", "dense"] == "tiny"
    assert presets["tp4-dcp2-i4", "moe"] == "tiny-moe"
    assert presets["pcp2-dcp2", "dense"] == "tiny-sparse"
    assert presets["pcp2-tp2-dcp4", "moe"] == "tiny-sparse-moe"
    assert all(Parallel.parse(cell.parallel.name) == cell.parallel for cell in cells)


def test_cells_asked_for_twice_run_once():
    assert len(all_cells(["pcp2", "pcp2-tp1"], [0, 0], ["off"], ["moe"])) == 1


def test_a_finished_cell_stands_and_an_unfinished_one_runs_again(fake, capsys):
    crashed, refused = names()[1:]
    fake.outcomes = {crashed: CellOutcome.CRASHED, refused: CellOutcome.REFUSED}
    run(THREE, 3)
    assert fake.ran == names()
    fake.ran.clear()
    fake.outcomes = {}
    run("matrix --resume run --json", 3)
    assert fake.ran == [crashed]
    result = json.loads(capsys.readouterr().out[-20000:].partition("\n{")[2].join(["{", ""]))
    assert result["num_kept"] == 2
    assert [cell["outcome"] for cell in result["cells"]] == ["pass", "pass", "refused"]


def test_a_failing_cell_is_exit_1_beside_whatever_else_and_each_has_its_row(fake, capsys):
    first, second, third = names()
    fake.outcomes = {first: CellOutcome.FAIL, second: CellOutcome.NOT_MEASURED,
                     third: CellOutcome.REFUSED}  # fmt: skip
    run(THREE, 1)
    table = pd.read_csv("run/matrix.csv")
    assert table["outcome"].tolist() == ["fail", "could not measure", "refused"]
    manifest = json.loads(Path("run/manifest.json").read_text())
    assert (manifest["outcome"], manifest["exit_code"]) == ("fail", 1)
    assert len(manifest["reasons"]) == 3
    assert "1 fail, 1 refused, 1 could not measure" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("outcome", [o for o in CellOutcome if o is not CellOutcome.PASS])
def test_only_passes_pass(outcome):
    passed = CellRecord(cell=CELL, outcome=CellOutcome.PASS)
    other = CellRecord(cell=CELL, outcome=outcome)
    known = {"settings": {}, "environment": Environment()}
    assert MatrixResult(cells=(passed,), **known).outcome is Outcome.PASS
    assert MatrixResult(cells=(), **known).outcome is Outcome.NOT_COMPARED
    expected = Outcome.FAIL if outcome is CellOutcome.FAIL else Outcome.NOT_COMPARED
    assert MatrixResult(cells=(passed, other), **known).outcome is expected


def test_an_interrupted_run_leaves_what_had_finished_and_goes_on(fake, capsys):
    fake.outcomes = {names()[1]: KeyboardInterrupt()}
    run(THREE, 130)
    assert "pcpbench matrix --resume run goes on" in capsys.readouterr().err
    manifest = json.loads(Path("run/manifest.json").read_text())
    assert manifest["outcome"] == "interrupted"
    table = pd.read_csv("run/matrix.csv")
    assert table["outcome"].tolist() == ["pass", "not run", "not run"]
    fake.ran.clear()
    fake.outcomes = {}
    run("matrix --resume run", 0)
    assert fake.ran == names()[1:]
    assert pd.read_csv("run/matrix.csv")["outcome"].tolist() == ["pass"] * 3


def test_a_runner_that_breaks_is_a_row_and_the_next_cell_runs(fake):
    fake.outcomes = {names()[0]: RuntimeError("out of luck")}
    run(THREE, 3)
    table = pd.read_csv("run/matrix.csv")
    assert table["outcome"].tolist() == ["crashed", "pass", "pass"]
    assert "out of luck" in table["reason"][0]


def test_no_cell_begins_after_the_time_and_none_is_recorded(fake, monkeypatch):
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 20.0 * len(fake.ran)))
    run(f"{THREE} --max-time 15", 3)
    assert fake.ran == names()[:1]
    table = pd.read_csv("run/matrix.csv")
    assert table["outcome"].tolist() == ["pass", "not run", "not run"]
    assert "--max-time" in table["reason"][1]
    assert sorted(path.name for path in Path("run/cells").iterdir()) == [f"{names()[0]}.json"]


def edit(path, change):
    found = json.loads(Path(path).read_text())
    change(found)
    Path(path).write_text(json.dumps(found))


def test_a_run_stays_on_the_device_that_it_began_on(fake, monkeypatch, capsys):
    """`auto` is another device on another machine, and half a table of each is neither's."""
    fake.outcomes = {names()[1]: CellOutcome.CRASHED}
    run(THREE, 3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("pcpbench.session.matrix.environment_of", lambda device: Environment())
    fake.outcomes = {}
    run("matrix --resume run", 0)
    assert json.loads(Path("run/manifest.json").read_text())["settings"]["device"] == "cpu"
    run("matrix --resume run --device cuda", 2)
    assert "--device is cuda, but the run in 'run' has cpu" in capsys.readouterr().err
    run("matrix --resume run --device auto", 2)  # here that is cuda


@pytest.mark.parametrize("here", [True, False])
def test_a_device_may_be_typed_again_by_any_of_its_names(fake, monkeypatch, here):
    run(THREE, 0)
    run("matrix --resume run --device auto", 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("pcpbench.session.matrix.environment_of", lambda device: Environment())
    run(THREE.replace("run", "gpu"), 0)
    if here:
        for name in ("auto", "cuda", "cuda:0"):
            run(f"matrix --resume gpu --device {name}", 0)
    else:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        run("matrix --resume gpu --device cuda:0", 3)  # the same one, which is not there
        run("matrix --resume run --device cuda", 2)
    run("matrix --resume gpu --device cuda:1", 2)
    run("matrix --resume gpu --device tpu", 2)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--k 2", "--k is 2, but the run in 'run' has 0, 1, 3"),
        ("--dtype bfloat16", "--dtype is bfloat16, but the run in 'run' has float32"),
        ("--check full", "--check is full"),
        ("--faults", "--faults is True"),
        ("--scenario s11-long-kv", "--scenario is s11-long-kv, but the run in 'run' has all"),
    ],
)
def test_other_settings_are_refused(fake, capsys, typed, words):
    run(THREE, 0)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    fake.ran.clear()
    capsys.readouterr()
    run(f"matrix --resume run {typed}", 2)
    assert words in capsys.readouterr().err
    assert not fake.ran
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}


def test_settings_typed_again_are_taken(fake):
    run(THREE, 0)
    run("matrix --resume run --parallel pcp2 --k 0 --k 1 --k 3 --jobs 2 --max-time 60", 0)


def break_record(text):
    def change():
        Path(f"run/cells/{names()[0]}.json").write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: edit("run/manifest.json", lambda m: m["settings"]["versions"].update(code="old")),
         "another version (code old, now"),
        (lambda: edit("run/manifest.json", lambda m: m["settings"]["versions"].update(torch="1")),
         "another version (torch 1, now"),
        (lambda: edit("run/manifest.json", lambda m: m.update(command="compare")),
         "a run of pcpbench compare"),
        (lambda: edit("run/manifest.json", lambda m: m.update(schema_version=99)),
         "schema_version 99"),
        (lambda: edit("run/manifest.json", lambda m: m["settings"].update(parallel=3)),
         "damaged (Expected `array`, got `int` - at `$.parallel`): start a new run"),
        (lambda: edit("run/manifest.json", lambda m: m["settings"]["scenarios"].popitem()),
         "a scenario file has changed"),
        (lambda: edit("run/manifest.json", lambda m: m["settings"].update(versions=None)),
         "damaged (its versions are None): start a new run"),
        (lambda: edit("run/manifest.json", lambda m: m["settings"].update(versions="2.13")),
         "damaged (its versions are '2.13'): start a new run"),
        (lambda: Path("run/manifest.json").write_text("{"), "start a new run"),
        (lambda: Path("run/manifest.json").unlink(), "holds no manifest.json"),
        (break_record("{"), "remove this file to run its cell again"),
        (break_record('{"cell": 1}'), "damaged"),
        (lambda: Path(f"run/cells/{names()[0]}.json").write_bytes(
            Path(f"run/cells/{names()[1]}.json").read_bytes()), "it is of pcp2_k1_dense"),
    ],
)  # fmt: skip
def test_a_directory_that_cannot_go_on_is_refused(fake, capsys, change, words):
    run(THREE, 0)
    change()
    fake.ran.clear()
    capsys.readouterr()
    run("matrix --resume run", 2)
    assert words in capsys.readouterr().err
    assert not fake.ran


def test_two_runs_in_one_directory_are_refused(fake, capsys):
    run(THREE, 0)
    from pcpbench.report.matrix_files import locked

    with locked(Path("run")):
        run("matrix --resume run", 2)
    assert "another pcpbench is running" in capsys.readouterr().err


def test_code_that_changes_under_a_run_ends_it(fake, monkeypatch, capsys):
    monkeypatch.setattr(session, "code_digest", lambda: "new")
    run(THREE, 3)
    assert "own code has changed" in capsys.readouterr().err
    assert not fake.ran


def changes(fake, monkeypatch, cell, change):
    """Make a change to the inputs while one cell runs for the first time."""
    call, left = fake.__call__, [cell]

    def changed(self, asked, deadline):
        if asked.name in left:
            left.remove(asked.name)
            change()
        return call(self, asked, deadline)

    monkeypatch.setattr(fake, "__call__", changed)


def test_a_cell_that_ran_while_the_code_changed_is_not_kept(fake, monkeypatch, capsys):
    def change():
        monkeypatch.setattr(session, "code_digest", lambda: "new")

    changes(fake, monkeypatch, names()[2], change)
    run(THREE, 3)
    assert "own code has changed" in capsys.readouterr().err
    kept = sorted(path.name for path in Path("run/cells").iterdir())
    assert kept == [f"{name}.json" for name in names()[:2]]


def test_a_cell_that_failed_before_the_code_changed_stands(fake, monkeypatch, capsys):
    def change():
        monkeypatch.setattr(session, "code_digest", lambda: "new")

    fake.outcomes = {names()[0]: CellOutcome.FAIL}
    changes(fake, monkeypatch, names()[1], change)
    run(THREE, 1)
    assert "own code has changed" in " ".join(capsys.readouterr().out.split())
    assert pd.read_csv("run/matrix.csv")["outcome"].tolist() == ["fail", "not run", "not run"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("output_len: 3", "output_len: 4"), "has changed since"),
        (lambda text: text[:40], "has become unreadable (own.yaml"),
    ],
)
def test_a_scenario_file_that_changes_under_a_run_ends_it_and_back_again_it_goes_on(
    fake, monkeypatch, capsys, change, words
):
    own = Path("own.yaml")
    own.write_text(OWN)
    fake.outcomes = {names()[1]: CellOutcome.REFUSED}
    changes(fake, monkeypatch, names()[1], lambda: own.write_text(change(OWN)))
    run(f"{THREE} --scenario own.yaml", 3)
    assert words in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in Path("run/cells").iterdir()] == [f"{names()[0]}.json"]
    own.write_text(OWN)
    fake.outcomes = {}
    run("matrix --resume run", 0)
    assert fake.ran == [names()[0], names()[1], *names()[1:]]


def test_as_many_cells_run_at_once_as_jobs_allow():
    running, most = [], []

    def slow(cell, deadline):
        running.append(cell)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(cell)
        return CellRecord(cell=cell, outcome=CellOutcome.PASS)

    cells = MatrixRequest(parallel=("pcp2",)).settings().cells
    loop = MatrixLoop(cells, {}, slow, lambda *_: None, lambda: None)
    with make_progress() as progress:
        loop.run(3, None, progress)
    assert max(most) == 3
    assert [record.cell for record in loop.records] == cells


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--parallel pcp", "--parallel is 'pcp'"),
        ("--parallel pcp2-pcp4", "--parallel is 'pcp2-pcp4'"),
        ("--parallel pcp0", "--parallel is 'pcp0'"),
        ("--k 17", "--k is 17"),
        ("--k -1", "--k is -1"),
        ("--microbatch maybe", "--microbatch is 'maybe'"),
        ("--model tiny", "--model is 'tiny': use one of dense, moe"),
        ("--scenario nope", "'nope'"),
        ("--dtype int8", "--dtype is 'int8'"),
        ("--check most", "--check is 'most'"),
        ("--seed -1", "--seed is -1"),
        ("--jobs 0", "--jobs is 0"),
        ("--max-time 0", "--max-time is 0"),
        ("--max-time nan", "--max-time is nan"),
        ("--max-time inf", "--max-time is inf"),
        ("--inject nope", "--inject is 'nope'"),
        ("--resume nowhere", "'nowhere'"),
        ("--resume x --out y", "--out is 'y' with --resume 'x'"),
    ],
)
def test_bad_requests_are_refused_and_nothing_is_written(tmp_path, capsys, arguments, words):
    run(f"matrix {arguments}", 2)
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


PASSED = {
    "outcome": "pass", "exit_code": 0, "reasons": [],
    "scenarios": [{
        "scenario": "s", "outcome": "pass", "num_violations": {},
        "drifts": [{"kind": "capture", "arm": arm, "ok": True, "num_steps_compared": 7,
                    "worst": {"outcome": "bitwise"}} for arm in ARMS],
        "arms": [{"arm": "full_and_piecewise", "num_steps": 9, "steps_full": 5,
                  "steps_piecewise": 3}],
    }],
}  # fmt: skip


def one_arm_only():
    (scenario,) = PASSED["scenarios"]
    return {**PASSED, "scenarios": [{**scenario, "drifts": scenario["drifts"][:1]}]}


def ended(tmp_path, code, *, said="", manifest=None, summary=None):
    out, talk = tmp_path / "compare", tmp_path / "talk"
    talk.write_text(said)
    for name, found in (("manifest.json", manifest), ("summary.json", summary)):
        if found is not None:
            out.mkdir(exist_ok=True)
            (out / name).write_text(found if isinstance(found, str) else json.dumps(found))
    return read_cell(CELL, code, out, talk)


def manifest_of(outcome, code, *reasons):
    return {"outcome": outcome, "exit_code": code, "reasons": list(reasons)}


def test_a_pass_needs_process_and_files_to_say_the_same(tmp_path):
    record = ended(tmp_path, 0, manifest=manifest_of("pass", 0), summary=PASSED)
    assert record.outcome is CellOutcome.PASS
    assert (record.capture_is_zero, record.num_steps, record.num_capture_steps) == (True, 9, 14)


@pytest.mark.parametrize(
    ("code", "left", "outcome", "words"),
    [
        (0, {}, CellOutcome.CRASHED, "left no result"),
        (0, {"manifest": manifest_of("running", None)}, CellOutcome.CRASHED, "left no result"),
        (0, {"manifest": manifest_of("pass", 0)}, CellOutcome.CRASHED, "left no result"),
        (0, {"manifest": manifest_of("pass", 0), "summary": {**PASSED, "scenarios": []}},
         CellOutcome.CRASHED, "compared no replay"),
        (0, {"manifest": manifest_of("pass", 0), "summary": one_arm_only()},
         CellOutcome.CRASHED, "compared no replay"),
        (0, {"manifest": manifest_of("pass", 0), "summary": "{"}, CellOutcome.CRASHED, "left no"),
        (0, {"manifest": manifest_of("fail", 1), "summary": PASSED}, CellOutcome.CRASHED, "with 0"),
        (1, {"said": "ModuleNotFoundError: no torch"}, CellOutcome.CRASHED, "no torch"),
        (1, {"manifest": manifest_of("fail", 1, "a sync during capture")}, CellOutcome.FAIL,
         "a sync during capture"),
        (2, {"said": "pcpbench: --tp is 3: use 1."}, CellOutcome.REFUSED, "--tp is 3: use 1."),
        (3, {"manifest": manifest_of("not compared", 3, "no memory")}, CellOutcome.NOT_MEASURED,
         "no memory"),
        (3, {"said": "pcpbench: no such device."}, CellOutcome.NOT_MEASURED, "no such device."),
        (3, {"manifest": manifest_of("not compared", 3),
             "summary": {**PASSED, "outcome": "not compared", "exit_code": 3, "reasons": ["s: x"]}},
         CellOutcome.NOT_COMPARED, "s: x"),
        (-9, {"manifest": manifest_of("running", None)}, CellOutcome.CRASHED, "SIGKILL"),
        (None, {}, CellOutcome.NOT_RUN, "--max-time"),
    ],
)  # fmt: skip
def test_every_other_end_has_its_own_outcome(tmp_path, code, left, outcome, words):
    record = ended(tmp_path, code, **left)
    assert record.outcome is outcome
    assert words in record.reason


def test_a_summary_with_drift_and_violations_is_told(tmp_path):
    scenario = PASSED["scenarios"][0]
    drift = {**scenario["drifts"][0], "ok": False, "worst": {"outcome": "exceeds_budget"}}
    failed = {
        **scenario,
        "outcome": "fail",
        "drifts": [drift],
        "num_violations": {"C13": 2, "C5": 1},
    }
    summary = {"outcome": "fail", "exit_code": 1, "reasons": ["s: C13"], "scenarios": [failed]}
    record = ended(tmp_path, 1, manifest=manifest_of("fail", 1), summary=summary)
    assert record.outcome is CellOutcome.FAIL
    assert (record.capture_is_zero, record.violated) == (False, ("C5", "C13"))


def faults_told(verdicts="caught", clean="clean"):
    """What `faults run --json` prints of some verdicts and clean runs, and its exit code."""
    runs = tuple(
        FaultRun(fault=STALE, world="w", scenario="s", fired=(), verdict=Verdict(each), detail="")
        for each in verdicts.split(", ")
    )
    sound = tuple(
        CleanRun(world="w", scenario="s", outcome=CleanOutcome(each),
                 accused=("C1",) if each == "accused" else ())
        for each in clean.split(", ")
    )  # fmt: skip
    result = FaultsResult(runs=runs, clean=sound)
    return result.exit_code, json.loads(faults_json(result))


@pytest.mark.parametrize(
    ("verdicts", "clean", "outcome", "words"),
    [
        ("caught", "clean", CellOutcome.PASS, ""),
        ("caught, not triggered, not run, unusable", "clean", CellOutcome.PASS, ""),
        ("not triggered, not run, unusable", "clean", CellOutcome.PASS, ""),
        ("escaped", "clean", CellOutcome.FAIL, "stale escaped"),
        ("caught", "accused", CellOutcome.FAIL, "a sound engine was accused"),
        ("not triggered", "accused", CellOutcome.FAIL, "a sound engine was accused"),
        ("caught, no memory", "clean", CellOutcome.NOT_MEASURED, "memory ran out"),
        ("no memory", "clean", CellOutcome.NOT_MEASURED, "memory ran out"),
        ("caught", "no memory", CellOutcome.NOT_MEASURED, "memory ran out"),
        ("escaped, no memory", "no memory", CellOutcome.FAIL, "stale escaped"),
        ("caught", "not compared", CellOutcome.NOT_COMPARED, "never ran as asked"),
    ],
)
def test_what_the_faults_came_to_is_in_the_cell(tmp_path, verdicts, clean, outcome, words):
    code, found = faults_told(verdicts, clean)
    (tmp_path / "faults.out").write_text(json.dumps(found))
    (tmp_path / "faults.err").write_text("")
    passed = CellRecord(cell=CELL, outcome=CellOutcome.PASS)
    record = with_faults(passed, code, tmp_path / "faults")
    assert record.outcome is outcome
    assert words in record.reason
    assert bool(record.reason) == (outcome is not CellOutcome.PASS)


@pytest.mark.parametrize(
    ("code", "left", "said", "outcome"),
    [
        (0, json.dumps(faults_told("escaped")[1]), "", CellOutcome.CRASHED),
        (-11, "", "", CellOutcome.CRASHED),
        (3, "", "", CellOutcome.CRASHED),
        (3, "", "pcpbench: there is not enough memory.", CellOutcome.NOT_MEASURED),
        (None, "", "", CellOutcome.NOT_RUN),
    ],
)
def test_faults_whose_process_told_nothing_are_run_again(tmp_path, code, left, said, outcome):
    (tmp_path / "faults.out").write_text(left)
    (tmp_path / "faults.err").write_text(said)
    passed = CellRecord(cell=CELL, outcome=CellOutcome.PASS)
    record = with_faults(passed, code, tmp_path / "faults")
    assert record.outcome is outcome
    assert record.outcome not in FINISHED


class Script:
    """Children that run nothing: each call leaves what its entry says. `asked`: the commands."""

    def __init__(self, *entries):
        self.entries, self.asked = list(entries), []

    def run(self, command, stem, deadline):
        self.asked.append(command)
        code, said, files = self.entries.pop(0)
        stem.with_suffix(".err").write_text(said)
        if "--out" in command:
            out = Path(command[command.index("--out") + 1])
            for name, found in files.items():
                out.mkdir(exist_ok=True)
                (out / name).write_text(json.dumps(found))
        else:
            stem.with_suffix(".out").write_text(json.dumps(files))
        return code


def run_cell(root, *entries, check=lambda: None, **asked):
    settings, script = MatrixRequest(**asked).settings(), Script(*entries)
    runner = CellRunner(root, settings, script, lambda cell: ["stale-block-rows"], check)
    return runner(CELL, None), script


BROKEN = (2, "pcpbench: own.yaml: it is no YAML.", {})
REFUSED = (2, "pcpbench: --tp is 3: use 1.", {})


def passing():
    return 0, "", {"manifest.json": manifest_of("pass", 0), "summary.json": PASSED}


@pytest.mark.parametrize(
    ("entries", "outcome"),
    [
        ([REFUSED, REFUSED], CellOutcome.REFUSED),
        ([BROKEN, passing()], CellOutcome.PASS),
        ([BROKEN, REFUSED], CellOutcome.NOT_MEASURED),
        ([REFUSED, (3, "pcpbench: no memory.", {})], CellOutcome.NOT_MEASURED),
    ],
)
def test_a_cell_is_refused_by_two_processes_that_say_the_same(tmp_path, entries, outcome):
    record, script = run_cell(tmp_path, *entries)
    assert record.outcome is outcome
    assert len(script.asked) == 2


def test_inputs_are_looked_at_again_before_the_faults_and_after_a_refusal(tmp_path):
    def changed():
        raise CannotMeasure("it has changed")

    for entry in (REFUSED, passing()):
        with pytest.raises(CannotMeasure, match="it has changed"):
            run_cell(tmp_path, entry, check=changed, faults=True)


def test_faults_run_with_the_settings_of_the_matrix(tmp_path):
    asked = {"dtype": "bfloat16", "seed": 7, "checks": "full", "device": "cpu", "faults": True}
    record, script = run_cell(tmp_path, passing(), (0, "", faults_told()[1]), **asked)
    assert record.outcome is CellOutcome.PASS
    command = script.asked[1]
    told = {flag: command[command.index(flag) + 1] for flag in command if flag.startswith("--")
            and flag not in ("--json",)}  # fmt: skip
    expected = {"--dtype": "bfloat16", "--seed": "7", "--check": "full", "--device": "cpu"}
    assert expected.items() <= told.items()


def test_a_cell_gets_one_fault_of_each_class_that_its_world_can_hold():
    from pcpbench.faults.registry import all_faults

    chosen = [all_faults()[name] for name in faults_for(CELL)]
    assert len({fault.class_id for fault in chosen}) == len(chosen) > 15
    assert not any(f.min_dcp > 1 or f.needs_microbatch or f.at_capture for f in chosen)
    own = faults_for(replace(CELL, spec_tokens=1))
    assert "one-token-prompt-as-decode" in faults_for(CELL)
    assert "one-token-prompt-as-decode" not in own  # with drafts no decode has one token
    assert any(all_faults()[name].min_spec_tokens for name in own)
    experts = faults_for(replace(CELL, model="moe"))
    assert any(all_faults()[name].needs_experts for name in experts)
    with_drafts = faults_for(replace(CELL, spec_tokens=3, microbatch=True))
    assert {all_faults()[name].class_id for name in with_drafts} > {f.class_id for f in chosen}


def test_records_survive_their_file():
    import msgspec

    record = CellRecord(cell=CELL, outcome=CellOutcome.FAIL, violated=("C5",), wall_s=1.5)
    assert msgspec.json.decode(to_json(record), type=CellRecord) == record


def test_a_child_past_its_time_is_ended_and_none_begins_after_a_stop(tmp_path):
    children = Children()
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    assert children.run(sleeper, tmp_path / "a", start + 0.3) is None
    assert time.monotonic() - start < 10
    children.stop()
    with pytest.raises(Stopped):
        children.run(sleeper, tmp_path / "b", None)


def test_a_real_cell_and_a_real_resume(capsys):
    run(f"{ONE} {QUICK} --out run", 0)
    printed = capsys.readouterr()
    assert "1 cell: 1 pass" in printed.out
    row = pd.read_csv("run/matrix.csv").iloc[0]
    assert row["capture_is_zero"]
    assert row["num_passed"] == row["num_scenarios"] == 1
    assert row["steps_full"] > 0 < row["steps_piecewise"]
    assert Path("run/cells/pcp2_k0_dense/compare/summary.json").is_file()
    run("matrix --resume run", 0)
    assert "1 from an earlier run" in capsys.readouterr().out


def test_a_planted_fault_is_exit_1_and_a_cell_that_is_refused_is_none(capsys):
    run(f"{ONE} --parallel pcp2-tp3 {QUICK} --inject stale-block-rows --out run", 1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 cells: 1 fail, 1 refused" in printed
    assert "C5" in printed


def test_ctrl_c_ends_the_children_and_leaves_a_run_that_goes_on(tmp_path):
    command = [sys.executable, "-m", "pcpbench", *ONE.split(), *QUICK.split(), "--out", "run"]
    asked = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=asked
    ) as process:
        child_talk = tmp_path / "run" / "cells" / "pcp2_k0_dense" / "report.err"
        while not child_talk.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        _, talk = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in talk
    assert "Traceback" not in talk
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["outcome"] == "interrupted"
    assert not (tmp_path / "run" / "cells" / "pcp2_k0_dense.json").exists()


def test_refusals_name_their_setting():
    with pytest.raises(UsageError, match="--parallel is 'x'"):
        MatrixRequest(parallel=("x",)).check()
    assert CannotMeasure.exit_code == 3
