"""Runs one engine's processes, from start to the last of them, and reads what they told.

Owns time-outs, deaths and the killing. An engine is a process group of its own: whatever happens,
none of it is left behind, nor its shared memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from pcpbench.engine_results import ArmRun, Broke, Done, Event, Generation, Probe, Ready, Started
from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.paths import reachable
from pcpbench.targets.engine.host import PROGRAM, probe_environment

POLL_S: Final = 0.1
GRACE_S: Final = 10.0
PROBE_TIMEOUT_S: Final = 180.0
TAIL_LINES: Final = 15
_EXCEPTION: Final = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt)\b: \S.*")
_SHARED: Final = re.compile(r"/dev/shm/(psm_\w+|sem\.mp-\w+)")


class EngineBroke(CannotMeasure):
    """An engine did not start, died or fell silent. tail: the end of its log."""

    def __init__(self, message: str, tail: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tail = tail


def probe_python(python: Path, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
    """Ask an interpreter what it has; raises UsageError for a path that is none."""
    told = f"--engine-python is {str(python)!r}"
    if not reachable(python, "--engine-python").is_file() or not os.access(python, os.X_OK):
        raise UsageError(
            f"{told}, which is no file that can be executed: name a Python interpreter, such as "
            "DIRECTORY/bin/python."
        )
    try:
        asked = subprocess.Popen(
            [str(python.absolute()), str(PROGRAM), "--probe"],  # a bare name would be one of PATH
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=probe_environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(
            f"{told}, which cannot be executed ({error.strerror}): name a Python interpreter, such "
            "as DIRECTORY/bin/python."
        ) from error
    try:
        answer, _ = asked.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise CannotMeasure(
            f"{told}, which did not say what it has within {timeout_s:.0f} s."
        ) from error
    finally:
        _end(asked)  # a script may have started others, which would live on
    try:
        return msgspec.json.decode(answer, type=Probe)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{told}, which did not answer as a Python interpreter (exit code "
            f"{asked.returncode}): name one, such as DIRECTORY/bin/python."
        ) from error


def run_engine(
    arm: str,
    python: Path,
    order: Mapping[str, Any],
    directory: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    on_event: Callable[[Event], None] = lambda event: None,
) -> ArmRun:
    """Run one engine to its end; raises EngineBroke where it has none.

    directory: gets `<arm>.order.json`, `<arm>.jsonl` (what it told) and `<arm>.log` (what it
    printed). timeout_s: the longest time between two events. on_event: told each as it comes.
    """
    order_file, log = directory / f"{arm}.order.json", directory / f"{arm}.log"
    order_file.write_bytes(msgspec.json.format(msgspec.json.encode(order)) + b"\n")
    events = EventFile(directory / f"{arm}.jsonl")
    told: list[Event] = []
    with log.open("wb") as out:
        engine = subprocess.Popen(
            [
                str(python.absolute()),
                str(PROGRAM),
                str(order_file.resolve()),
                str(events.path.resolve()),
            ],
            stdin=subprocess.PIPE,  # it ends with us, however we end: see engine_child.py
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    try:
        heard = time.monotonic()
        while not any(isinstance(event, Done | Broke) for event in told):
            has_ended = engine.poll() is not None
            for event in events.read():
                told.append(event)
                on_event(event)
                heard = time.monotonic()
            if has_ended:
                break
            if time.monotonic() - heard > timeout_s:
                _break(arm, log, f"told nothing for {timeout_s:g} s {_after(told)}")
            time.sleep(POLL_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            engine.wait(GRACE_S)
    finally:
        _end(engine)
    return _arm_run(arm, told, engine.returncode, log)


class EventFile:
    """A file of JSON lines that another process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._offset = 0

    def read(self) -> Iterator[Event]:
        """Events whose lines have been finished since the last call; raises CannotMeasure."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield decode(line)


def decode(line: bytes) -> Event:
    """One event; raises CannotMeasure for a line that is none."""
    try:
        found: Event = msgspec.json.decode(line, type=Event)
    except msgspec.DecodeError as error:
        raise CannotMeasure(f"an engine told something that is no event ({error}).") from error
    return found


def _arm_run(arm: str, told: list[Event], exit_code: int | None, log: Path) -> ArmRun:
    by_type = {type(event): event for event in told}
    broke = by_type.get(Broke)
    if isinstance(broke, Broke):
        _break(arm, log, f"raised {broke.kind} {_after(told)}: {' '.join(broke.message.split())}")
    ready, started = by_type.get(Ready), by_type.get(Started)
    if Done not in by_type or not isinstance(ready, Ready):
        code = exit_code or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        _break(arm, log, f"{how} {_after(told)}")
    return ArmRun(
        arm=arm,
        init_s=ready.init_s,
        workers=ready.workers,
        generations=tuple(event for event in told if isinstance(event, Generation)),
        versions=started.versions if isinstance(started, Started) else {},
    )


def _after(told: list[Event]) -> str:
    """Where in its life an engine was."""
    last = next((event for event in reversed(told) if not isinstance(event, Broke)), None)
    if last is None:
        return "before its process ran"
    if isinstance(last, Started):
        return "while it started"
    return "while it generated"


def _break(arm: str, log: Path, what: str) -> NoReturn:
    lines = log.read_text(errors="replace").splitlines()
    found = (_EXCEPTION.search(line) for line in lines if "WARNING" not in line)
    first = next((match.group(0) for match in found if match is not None), "")
    cause = f"; the first error in its log: {first.rstrip('.')}" if first else ""
    raise EngineBroke(
        f"the engine of arm {arm!r} {what.rstrip('.')}{cause}. Its log is {str(log)!r}.",
        tuple(lines[-TAIL_LINES:]),
    )


def _end(engine: subprocess.Popen[bytes]) -> None:
    """End the whole group and remove the shared memory that it would leave."""
    shared = _shared_memory(engine.pid)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(engine.pid, signum)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + (GRACE_S if signum == signal.SIGTERM else 1.0)
        while _members(engine.pid) and time.monotonic() < deadline:
            engine.poll()
            time.sleep(POLL_S)
    if engine.stdin is not None:
        engine.stdin.close()
    engine.wait()
    for name in shared:
        Path("/dev/shm", name).unlink(missing_ok=True)


def _members(group: int) -> list[int]:
    """Processes of a group that are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # `pid (name) state parent group ...`: the name may hold blanks and brackets.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _shared_memory(group: int) -> set[str]:
    """Names of the shared memory that a group's processes hold: the killed cannot remove it."""
    names: set[str] = set()
    for pid in _members(group):
        with contextlib.suppress(OSError):
            names |= set(_SHARED.findall(Path(f"/proc/{pid}/maps").read_text()))
    return names
