"""stdout and stderr that nobody can read: real processes, real pipes."""

import os
import subprocess
import sys
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
