"""Starts the gate's worker processes, one after the other, and reads what each measured.

Owns how a worker is run and how its end is told apart: a sample, a broken contract, bad input, or
a crash. Every worker is a fresh interpreter, so that memory layout, caches and luck are drawn anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

import pcpbench
from pcpbench.errors import CannotMeasure, MeasuredFailure, PcpbenchError, UsageError
from pcpbench.gate_jobs import SampleJob
from pcpbench.gate_samples import JudgedScenario, ProcessSample

WORKER_COMMAND = "worker"
OURS = "pcpbench: "
"""What the last line begins with where pcpbench itself says how it ended (cli.py)."""
T = TypeVar("T")


class WorkerCrash(CannotMeasure):
    """A worker ended without a result: killed, out of time, or an error of its own."""


class WorkerFailure(MeasuredFailure):
    """The engine broke a contract in a worker."""


def sample_once(job: SampleJob, timeout_s: float | None = None) -> ProcessSample:
    """Time one fresh process; raises WorkerCrash, WorkerFailure or UsageError."""
    return _run(job, ProcessSample, timeout_s)


def judge_once(job: SampleJob, timeout_s: float | None = None) -> tuple[JudgedScenario, ...]:
    """Judge all scenarios of a job in one fresh process; raises as `sample_once`."""
    return _run(msgspec.structs.replace(job, judge=True), tuple[JudgedScenario, ...], timeout_s)


def _run(job: SampleJob, kind: type[T], timeout_s: float | None) -> T:
    try:
        done = subprocess.run(
            command(),
            input=msgspec.json.encode(job),
            capture_output=True,
            timeout=timeout_s,
            env=worker_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerCrash(
            f"a worker took more than {timeout_s:.0f} s and was ended: it hangs, or it needs more "
            "time here than it was given."
        ) from error
    last_line = _last_line(done.stderr)
    if done.returncode:
        raise _error(done.returncode, last_line)
    try:
        return msgspec.json.decode(done.stdout, type=kind)
    except msgspec.DecodeError as error:
        raise WorkerCrash(f"a worker ended with 0 and no result ({error}): {last_line}") from error


def command() -> list[str]:
    """The command line of a worker: this interpreter, this pcpbench, not one in the directory."""
    return [sys.executable, "-P", "-m", "pcpbench", WORKER_COMMAND]


def worker_environment() -> dict[str, str]:
    """Ours, with the package that this process runs in front of any other of its name."""
    root = str(Path(pcpbench.__file__).resolve().parent.parent)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *([before] if before else [])])}


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _error(exit_code: int, last_line: str) -> PcpbenchError:
    """What an exit code other than 0 means.

    Python ends with 1 and 2 as well, for a package that cannot be imported or a start that fails:
    they are a verdict only where pcpbench has said why.
    """
    told = last_line.removeprefix(OURS)
    if told != last_line and exit_code == MeasuredFailure.exit_code:
        return WorkerFailure(told)
    if told != last_line and exit_code == UsageError.exit_code:
        return UsageError(told)
    ended = f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with {exit_code}"
    return WorkerCrash(f"a worker {ended}: {told}")
