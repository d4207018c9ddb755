"""How an engine's processes are started, heard and ended."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pcpbench.engine_request import EngineRequest
from pcpbench.engine_results import Started
from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.targets.engine.host import PROGRAM, engine_environment
from pcpbench.targets.engine.order import load_of, order_of
from pcpbench.targets.engine.process import (
    EngineBroke,
    EventFile,
    decode,
    probe_python,
    run_engine,
)


@pytest.fixture
def start(fake_vllm, tmp_path):
    """Runs the arm with context parallelism; on_event as in run_engine."""

    def run(words, on_event=lambda event: None, timeout_s=30.0):
        python = fake_vllm(words)
        request = EngineRequest(base="reference", candidate="eager", repetitions=0)
        arm = request.arms[1]
        probe = probe_python(python)
        order = order_of(
            arm, load_of(request.scenario, 0), probe, checkpoint=tmp_path, dtype="float32",
            repetitions=0,
        )  # fmt: skip
        environment = engine_environment(probe, arm, (0,))
        return run_engine("eager", python, order, tmp_path, environment, timeout_s, on_event)

    return run


def test_an_engine_is_run_to_its_end(start):
    run = start("")
    assert len(run.workers) == 2
    assert len(run.judged.requests) == 12
    assert len(run.judged.requests[0].logprobs[0]) == 256


@pytest.mark.parametrize("words", ["child", "child,die"])
def test_nothing_of_an_engine_is_left_behind(start, group_members, words):
    seen = []
    try:
        start(words, seen.append)
    except EngineBroke:
        assert words != "child"
    started = seen[0]
    assert isinstance(started, Started)
    assert group_members(started.pid) == []


def test_an_interrupt_ends_the_engine(start, group_members):
    seen = []

    def interrupt(event):
        seen.append(event)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start("child,hang", interrupt)
    assert group_members(seen[0].pid) == []


def test_an_engine_ends_with_whoever_ordered_it(start, tmp_path, group_members):
    with pytest.raises(EngineBroke):
        start("hang", timeout_s=0.5)
    files = [str(tmp_path / name) for name in ("eager.order.json", "again.jsonl")]
    outside = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"]}
    engine = subprocess.Popen(
        [sys.executable, str(PROGRAM), *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=outside,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    while not list(EventFile(tmp_path / "again.jsonl").read()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.poll() is None
    engine.stdin.close()  # as when we are killed
    assert engine.wait(10) == -9
    assert group_members(engine.pid) == []


def test_a_line_that_is_not_finished_is_left_for_later(tmp_path):
    file = tmp_path / "events.jsonl"
    events = EventFile(file)
    file.write_text('{"event": "started", "pid": 7, "versions": {}}\n{"event": "do')
    assert [event.pid for event in events.read()] == [7]
    assert list(events.read()) == []
    with file.open("a") as more:
        more.write('ne"}\n')
    assert len(list(events.read())) == 1


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"event": "unknown"}\n', b'{"pid": 1}\n'])
def test_a_line_that_is_no_event_is_refused(line):
    with pytest.raises(CannotMeasure, match="no event"):
        decode(line)


def test_a_path_that_is_no_interpreter_is_bad_input(tmp_path):
    text = tmp_path / "text"
    text.write_text("not a program")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    for path in (tmp_path, tmp_path / "none", text, program):
        with pytest.raises(UsageError, match="--engine-python is"):
            probe_python(path)


def test_an_interpreter_that_does_not_answer_is_given_up(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    with pytest.raises(CannotMeasure, match="did not say what it has"):
        probe_python(program, timeout_s=0.3)


def test_nothing_that_an_interpreter_started_lives_on(tmp_path):
    program, started = tmp_path / "python", tmp_path / "started"
    program.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {started}\nwait\n")
    program.chmod(0o755)
    with pytest.raises(CannotMeasure, match="did not say what it has"):
        probe_python(program, timeout_s=2.0)
    process = Path("/proc", started.read_text().strip(), "stat")
    assert not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_interpreter_of_this_directory_needs_no_slash(fake_vllm, monkeypatch):
    python = fake_vllm()
    monkeypatch.chdir(python.parent)
    assert probe_python(Path(python.name)).error == ""


def test_an_interpreter_tells_what_it_has(fake_vllm):
    probe = probe_python(fake_vllm())
    assert probe.error == ""
    assert (probe.platform, probe.has_pcp) == ("cpu", True)
    assert probe.versions["python"] == ".".join(map(str, sys.version_info[:3]))


def test_an_interpreter_without_vllm_says_why(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise ImportError('broken on purpose')")
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = probe_python(Path(sys.executable))
    assert "broken on purpose" in probe.error
