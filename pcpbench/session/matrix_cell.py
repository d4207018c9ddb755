"""One cell of a matrix: its processes, and what their files say.

Owns the command lines of a cell and how an ended process becomes a record. A verdict counts only
where process and files tell the same: an exit code alone proves nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pcpbench.code_version import PACKAGE
from pcpbench.fault_results import CleanOutcome, Verdict
from pcpbench.matrix_cells import Cell
from pcpbench.matrix_request import MatrixSettings
from pcpbench.matrix_results import CellOutcome, CellRecord, FaultCount

ARMS: Final = ("full", "full_and_piecewise")
"""Both graph modes in one process: they share reference, eager, and the proof of both."""

SECONDS_TO_END: Final = 10.0
OUT_OF_TIME: Final = "no time was left (--max-time); --resume runs it again"


class Stopped(Exception):
    """The run was interrupted while the cell ran."""


class Children:
    """Processes of the cells that run now; `stop` ends them all, and no other begins after."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def run(self, command: Sequence[str], stem: Path, deadline: float | None) -> int | None:
        """Run a command and return its exit code; None where it was ended at the deadline.

        stem: stdout goes to `<stem>.out`, stderr to `<stem>.err`. deadline: of time.monotonic.
        Raises Stopped once `stop` was called.
        """
        path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "140"}
        with stem.with_suffix(".out").open("wb") as out, stem.with_suffix(".err").open("wb") as err:
            with self._lock:
                if self._is_stopped:
                    raise Stopped
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
                )
                self._running.add(process)
            try:
                code = _wait(process, deadline)
            finally:
                with self._lock:
                    self._running.discard(process)
        if self._is_stopped:
            raise Stopped
        return code

    def stop(self) -> None:
        """End every process: asked first, then killed."""
        with self._lock:
            self._is_stopped = True
            running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            _end(process)


class CellRunner:
    """Runs cells of one matrix.

    root: the run's directory. faults_for: names of the faults to inject in a cell's world. check:
    raises where code or scenarios are not what they were when the run began.
    """

    def __init__(
        self,
        root: Path,
        settings: MatrixSettings,
        children: Children,
        faults_for: Callable[[Cell], Sequence[str]],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._settings, self._children = root, settings, children
        self._faults_for, self._check = faults_for, check

    def __call__(self, cell: Cell, deadline: float | None) -> CellRecord:
        """Run a cell to its end; raises Stopped where it was interrupted."""
        start = time.perf_counter()
        place, attempt = self._new_place(cell)
        directory = self._root / place
        record = self._compared(cell, directory, deadline)
        if self._settings.faults and record.outcome is CellOutcome.PASS:
            record = self._with_faults(record, directory, deadline)
        wall_s = time.perf_counter() - start
        return replace(record, run=place, attempt=attempt, wall_s=wall_s)

    def _compared(self, cell: Cell, directory: Path, deadline: float | None) -> CellRecord:
        """The record of a cell's comparison.

        A refusal stands for good, and a file that was broken for a moment is refused like settings
        that no engine takes: so only what a second process says as well is one.
        """
        out, first = directory / "compare", directory / "report"
        code = self._children.run(self._compare(cell, out), first, deadline)
        record = read_cell(cell, code, out, first.with_suffix(".err"))
        if record.outcome is not CellOutcome.REFUSED:
            return record
        self._check()
        second = directory / "again"
        code = self._children.run(self._compare(cell, out), second, deadline)
        again = read_cell(cell, code, out, second.with_suffix(".err"))
        if again.outcome is CellOutcome.REFUSED and again.reason != record.reason:
            told = f"two processes refused it for different reasons: {record.reason}"
            return replace(record, outcome=CellOutcome.NOT_MEASURED, reason=told)
        return again

    def _new_place(self, cell: Cell) -> tuple[str, int]:
        """A directory of its own for every attempt, so that none writes over another."""
        for attempt in count(1):
            place = f"cells/{cell.name}" + (f".{attempt}" if attempt > 1 else "")
            with suppress(FileExistsError):
                (self._root / place).mkdir(parents=True)
                break
        return place, attempt

    def _compare(self, cell: Cell, out: Path) -> list[str]:
        settings = self._settings
        chosen = [part for name in settings.scenario for part in ("--scenario", name)]
        inject = [] if settings.inject is None else ["--inject", settings.inject]
        return [
            *_program("compare", *ARMS),
            *cell.flags,
            *chosen,
            *("--repetitions", "0", "--check", settings.checks, "--dtype", settings.dtype),
            *("--seed", str(settings.seed), "--device", settings.device, "--out", str(out)),
            *inject,
        ]

    def _with_faults(
        self, record: CellRecord, directory: Path, deadline: float | None
    ) -> CellRecord:
        cell = record.cell
        names = self._faults_for(cell)
        if not names:
            return replace(record, faults_reason="no fault of the catalogue fits this world")
        self._check()
        stem = directory / "faults"
        code = self._children.run(self._faults(cell, names), stem, deadline)
        return with_faults(record, code, stem)

    def _faults(self, cell: Cell, names: Sequence[str]) -> list[str]:
        return [
            *_program("faults", "run", "--json"),
            *[part for name in names for part in ("--fault", name)],
            *cell.flags,
            *("--check", self._settings.checks, "--dtype", self._settings.dtype),
            *("--seed", str(self._settings.seed), "--device", self._settings.device),
        ]


def read_cell(cell: Cell, code: int | None, out: Path, talk: Path) -> CellRecord:
    """The record of a comparison that has ended. code: None where time ran out.

    out: the comparison's directory, which may not be there. talk: what it said on stderr.
    """
    record = CellRecord(cell=cell, outcome=CellOutcome.CRASHED, exit_code=code)
    if code is None:
        return replace(record, outcome=CellOutcome.NOT_RUN, reason=OUT_OF_TIME)
    said = _last_line(talk)
    if code == 2 and not out.exists():
        return replace(record, outcome=CellOutcome.REFUSED, reason=said)
    try:
        manifest = _read_json(out / "manifest.json")
        summary = _read_json(out / "summary.json") if (out / "summary.json").exists() else None
        ended = (manifest["outcome"], manifest["exit_code"])
        if ended[1] != code or (summary is not None and summary["exit_code"] != code):
            return replace(record, reason=_ending(code, said))
        if summary is not None:
            return _judged(record, summary)
        reason = "; ".join(manifest["reasons"]) or said
        outcomes = {1: CellOutcome.FAIL, 3: CellOutcome.NOT_MEASURED}
        if code in outcomes:
            return replace(record, outcome=outcomes[code], reason=reason)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if code == 3 and said:
            return replace(record, outcome=CellOutcome.NOT_MEASURED, reason=said)
        return replace(record, reason=f"{_ending(code, said)} ({type(error).__name__}: {error})")
    return replace(record, reason=_ending(code, said))


def with_faults(record: CellRecord, code: int | None, stem: Path) -> CellRecord:
    """The record of a cell whose comparison passed, after faults were injected in its world.

    It stays a pass where every fault with a verdict was caught and no fault is without one but
    those that its world does not have.
    """
    if code is None:
        return replace(record, outcome=CellOutcome.NOT_RUN, reason=OUT_OF_TIME)
    said = _last_line(stem.with_suffix(".err"))
    try:
        found = _read_json(stem.with_suffix(".out"))
        if found["exit_code"] != code:
            raise ValueError(f"its result says {found['exit_code']}")
        verdicts = {run["verdict"] for run in found["runs"]}
        clean = {run["outcome"] for run in found["clean"]}
        count = FaultCount(
            num_faults=found["num_faults"],
            num_caught=found["num_caught"],
            num_without_verdict=len(found["runs"]) - found["num_judged"],
            num_false_alarms=found["num_false_alarms"],
            missed=tuple(found["missed"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if code == 3 and said:
            outcome, reason = CellOutcome.NOT_MEASURED, f"faults run: {said}"
        else:
            outcome, reason = CellOutcome.CRASHED, f"faults run: {_ending(code, said)} ({error})"
        return replace(record, outcome=outcome, exit_code=code, reason=reason)
    record = replace(record, faults=count)
    if code == 1:
        accused = ["a sound engine was accused"] if count.num_false_alarms else []
        outcome, reason = CellOutcome.FAIL, ", ".join([*count.missed, *accused])
    elif Verdict.NO_MEMORY.value in verdicts or CleanOutcome.NO_MEMORY.value in clean:
        outcome, reason = CellOutcome.NOT_MEASURED, "memory ran out for some of them"
    elif CleanOutcome.NOT_COMPARED.value in clean:
        outcome, reason = CellOutcome.NOT_COMPARED, "without one, an arm never ran as asked"
    elif code == 3:
        return replace(record, faults_reason="no injected fault ended in a verdict")
    else:
        return record
    return replace(record, outcome=outcome, exit_code=code, reason=f"faults: {reason}")


def _judged(record: CellRecord, summary: Mapping[str, Any]) -> CellRecord:
    """What a comparison's own summary says; raises for one that says too little for a verdict."""
    scenarios = summary["scenarios"]
    outcomes = {each.value: each for each in CellOutcome}
    outcome = outcomes[summary["outcome"]]
    drifts = [d for s in scenarios for d in s["drifts"] if d["kind"] == "capture"]
    arms = [arm for s in scenarios for arm in s["arms"] if arm["arm"] == ARMS[-1]]
    if outcome is CellOutcome.PASS and {drift["arm"] for drift in drifts} != set(ARMS):
        raise ValueError("a pass that compared no replay of one of the two arms")
    return replace(
        record,
        outcome=outcome,
        reason="; ".join(summary["reasons"]),
        num_scenarios=len(scenarios),
        num_passed=sum(s["outcome"] == CellOutcome.PASS.value for s in scenarios),
        num_steps=sum(arm["num_steps"] for arm in arms),
        capture_is_zero=all(d["worst"]["outcome"] == "bitwise" and d["ok"] for d in drifts)
        if drifts
        else None,
        num_capture_steps=sum(d["num_steps_compared"] for d in drifts),
        violated=tuple(sorted({c for s in scenarios for c in s["num_violations"]}, key=_order)),
        steps_full=sum(arm["steps_full"] for arm in arms),
        steps_piecewise=sum(arm["steps_piecewise"] for arm in arms),
    )


def _program(*arguments: str) -> list[str]:
    """This pcpbench, and no other that the working directory may hold (-P)."""
    return [sys.executable, "-P", "-m", "pcpbench", *arguments]


def _order(contract: str) -> tuple[int, str]:
    number = contract[1:]
    return (int(number) if number.isdigit() else 1000, contract)


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])


def _last_line(path: Path) -> str:
    """The last thing a process said on stderr, without the program's name."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("pcpbench: ").strip()[:500] if lines else ""


def _ending(code: int, said: str) -> str:
    """How a process ended that left no sound result."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"its process was ended by {name}"
    told = f": {said}" if said else ""
    return f"its process ended with {code} and left no result that fits{told}"


def _wait(process: subprocess.Popen[bytes], deadline: float | None) -> int | None:
    timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        _end(process)
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
