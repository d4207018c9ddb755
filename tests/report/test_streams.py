"""stdout and stderr that nobody can read: real processes, real pipes."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

JUDGED = "compare eager full --scenario s2-capture-edges --repetitions 0 --out run"
NEVER_SERVED = "compare eager full --scenario never.yaml --capture-sizes 1 --out run"


def pcpbench(arguments: str, place: Path, **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pcpbench", *arguments.split()]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | streams
    return subprocess.run(command, cwd=place, text=True, **streams)  # type: ignore[call-overload]


@pytest.fixture
def closed_pipe():
    """The writing end of a pipe whose reader has gone away."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.fixture
def full_disk():
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, which Linux has")
    with open("/dev/full", "w", encoding="utf-8") as device:
        yield device


@pytest.mark.parametrize(
    "arguments",
    ["--version", "--help", "scenarios list", "scenarios schema", JUDGED, f"{JUDGED} --json"],
)
def test_a_closed_pipe_does_not_change_the_exit_code(tmp_path, closed_pipe, arguments):
    done = pcpbench(arguments, tmp_path, stdout=closed_pipe)
    assert done.returncode == 0
    assert "pcpbench: " not in done.stderr
    assert "Traceback" not in done.stderr


def test_behind_a_closed_pipe_what_is_no_pass_stays_none(tmp_path, closed_pipe):
    (tmp_path / "never.yaml").write_text(
        "name: never\ndescription: d\nrequests: [{prompt_len: 4, output_len: 6, count: 8}]\n"
    )
    assert pcpbench(NEVER_SERVED, tmp_path, stdout=closed_pipe).returncode == 3
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    "arguments", ["--version", "--help", "scenarios list", "scenarios schema", JUDGED]
)
def test_a_full_stdout_is_one_sentence_and_3(tmp_path, full_disk, arguments):
    done = pcpbench(arguments, tmp_path, stdout=full_disk)
    assert done.returncode == 3
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("pcpbench: ")]
    assert "stdout cannot be written (No space left on device)" in told
    assert "Exception" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "exit_code"), [("compare x y", 2), (JUDGED, 0)])
def test_talk_that_cannot_be_written_never_looks_like_a_regression(
    tmp_path, full_disk, arguments, exit_code
):
    assert pcpbench(arguments, tmp_path, stderr=full_disk).returncode == exit_code


@pytest.fixture
def slow_pipe():
    """A pipe that does not block, full from the start; called, its reader begins to read."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    filled, read = 0, []
    try:
        while True:
            filled += os.write(writing, b"." * 4096)
    except BlockingIOError:
        pass

    def listen():
        time.sleep(1.5)
        while chunk := os.read(reading, 65536):
            read.append(chunk)

    def begin():
        listener = threading.Thread(target=listen)
        listener.start()

        def told():
            os.close(writing)
            listener.join(timeout=60)
            return b"".join(read)[filled:].decode()

        return told

    yield writing, begin
    os.close(reading)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_slow_reader_of_a_pipe_that_does_not_block_is_waited_for(tmp_path, slow_pipe, stream):
    writing, begin = slow_pipe
    told = begin()
    done = pcpbench("scenarios list" if stream == "stdout" else "compare x y", tmp_path,
                    **{stream: writing})  # fmt: skip
    assert done.returncode == (0 if stream == "stdout" else 2)
    assert ("s1-grow-shrink" if stream == "stdout" else "arm 'x' is unknown") in told()


def test_talk_that_nobody_reads_is_dropped_after_a_while(slow_pipe):
    writing, _ = slow_pipe
    code = (
        "import sys; from pcpbench.report import streams; streams.MAX_TALK_WAIT_S = 0.2; "
        "streams.guard_streams(); print('one', file=sys.stderr); print('two', file=sys.stderr)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], stderr=writing, timeout=60)
    os.close(writing)
    assert done.returncode == 0
    assert time.monotonic() - began < 30


SHELL = "exec {python} -m pcpbench {arguments}"


def in_shell(arguments, place):
    command = SHELL.format(python=sys.executable, arguments=arguments)
    return subprocess.run(["bash", "-c", command], cwd=place, capture_output=True, text=True)


def test_a_closed_stderr_leaves_the_json_alone(tmp_path):
    done = in_shell(f"{JUDGED} --json 2>&-", tmp_path)
    assert done.returncode == 0
    assert json.loads(done.stdout)["outcome"] == "pass"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("form", ["--json", ""])
def test_a_closed_stdout_changes_no_exit_code(tmp_path, closed, form):
    done = in_shell(f"{JUDGED} {form} {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["outcome"], manifest["exit_code"]) == ("pass", 0)


def test_a_refusal_with_everything_closed_is_2(tmp_path):
    assert in_shell("compare x y >&- 2>&-", tmp_path).returncode == 2
