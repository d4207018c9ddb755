"""Baselines and samples on disk: written whole or by lines, refused when they are not ours.

Owns two files of the same content. A baseline is one JSON object with a checksum. `samples.jsonl`
of a run has the same object without processes in its first line, and a line with a checksum of its
own for each process as soon as it ends: what a killed run leaves can be read. Runs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench import __version__
from pcpbench.checks.shift import MIN_PROCESSES
from pcpbench.errors import UsageError
from pcpbench.gate_jobs import Measured
from pcpbench.gate_lines import FORMAT, SCHEMA_VERSION, checksum_of, process_bytes, process_of
from pcpbench.gate_samples import (
    TIME_METRICS,
    MetricSample,
    ProcessFailure,
    ProcessSample,
)
from pcpbench.paths import reachable

LINES_SUFFIX: Final = ".jsonl"
SAMPLES_NAME: Final = f"samples{LINES_SUFFIX}"
MAX_FILE_BYTES: Final = 256 << 20


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    schema_version: int
    pcpbench_version: str
    checksum: str
    measured: Measured


def baseline_bytes(measured: Measured) -> bytes:
    """The text of a baseline file (and, without processes, of the first line of samples)."""
    document = _Document(
        format=FORMAT,
        schema_version=SCHEMA_VERSION,
        pcpbench_version=__version__,
        checksum=checksum_of(measured),
        measured=measured,
    )
    return msgspec.json.encode(document) + b"\n"


def samples_bytes(measured: Measured) -> bytes:
    """All of a `samples.jsonl`."""
    head = msgspec.structs.replace(measured, processes=(), failures=())
    lines = [process_bytes(sample) for sample in measured.processes]
    lines += [process_bytes(failure) for failure in measured.failures]
    return b"".join((baseline_bytes(head), *lines))


def write_baseline(path: Path, measured: Measured) -> None:
    """Put a baseline in place of the old one at once; raises UsageError where it cannot be."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as stream:
            stream.write(msgspec.json.format(baseline_bytes(measured), indent=1) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(
            f"--save-baseline is {str(path)!r}, which cannot be written ({error.strerror}): name a "
            "file in a directory that is there."
        ) from error


def check_writable(path: Path) -> None:
    """Raise UsageError, before anything runs, for a place that a baseline must not or cannot take.

    A baseline is written over an older one; any other file is left alone.
    """
    if path.suffix == LINES_SUFFIX:
        raise UsageError(
            f"--save-baseline is {str(path)!r}, and a {LINES_SUFFIX} file is read as the samples "
            f"of a run: name it {path.stem}.json."
        )
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            f"--save-baseline is {str(path)!r}, which cannot be written: name a file in a "
            "directory that is there and can be written to."
        )
    data = _read(path, "--save-baseline") if path.exists() else b""
    if data.strip():  # an empty file is nobody's: `mktemp` makes one
        _check_replaceable(path, data)


def _check_replaceable(path: Path, data: bytes) -> None:
    """Raise UsageError for a file that no baseline may be written over."""
    try:
        head = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        is_cut = FORMAT.encode() in data[:200]
        what = "a baseline that is damaged or cut short" if is_cut else "a file of something else"
    else:
        what = "a file of something else"
        if isinstance(head, dict) and head.get("format") == FORMAT:
            version = head.get("schema_version")
            if not isinstance(version, int) or version <= SCHEMA_VERSION:
                return
            what = f"a baseline of a newer pcpbench ({head.get('pcpbench_version', 'unknown')})"
    raise UsageError(
        f"--save-baseline is {str(path)!r}, which is {what}: delete it, or name a new file."
    )


def read_measured(path: Path, what: str = "baseline") -> Measured:
    """A baseline, a `samples.jsonl`, or that of a run's directory.

    Raises UsageError, naming file and remedy, for one that is missing, cut short, damaged, foreign
    or newer, and for a baseline of too few processes to be judged.
    """
    file = path / SAMPLES_NAME if reachable(path, what).is_dir() else path
    if not reachable(file, what).is_file():
        held = "is no regular file" if path.exists() else "does not exist"
        raise _refusal(path, what, f"holds no {SAMPLES_NAME}" if path.is_dir() else held)
    data = _read(file, what)
    head, _, rest = data.partition(b"\n") if file.suffix == LINES_SUFFIX else (data, b"", b"")
    measured = _document(file, what, head).measured
    for number, line in enumerate(rest.splitlines(keepends=True), start=2):
        if not line.endswith(b"\n"):
            break  # a run that was killed while it wrote
        measured = _grown(measured, line, number, file, what)
    problem = _problem(measured, MIN_PROCESSES if what == "baseline" else 0)
    if problem:
        raise _refusal(file, what, problem)
    return measured


def _grown(measured: Measured, line: bytes, number: int, file: Path, what: str) -> Measured:
    """The run with what one line holds."""
    try:
        _, ended = process_of(line)
    except (ValueError, RecursionError) as error:
        raise _refusal(file, what, f"is damaged in line {number} ({error})") from error
    if isinstance(ended, ProcessFailure):
        return measured.with_failure(ended)
    return measured.with_process(ended)


def _document(file: Path, what: str, data: bytes) -> _Document:
    head = _decode(file, data, what)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise _refusal(file, what, "is no file of pcpbench's gate")
    version = head.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        maker = head.get("pcpbench_version", "a newer version")
        raise UsageError(
            f"{what} {str(file)!r} was written by pcpbench {maker} in schema version {version}, "
            f"and this is pcpbench {__version__}, which reads {SCHEMA_VERSION}: install the newer "
            "one, or record the baseline with this one."
        )
    if version != SCHEMA_VERSION:
        raise _refusal(file, what, f"has schema version {version!r}, not {SCHEMA_VERSION}")
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (ValueError, RecursionError) as error:
        raise _refusal(file, what, f"is damaged ({error})") from error
    # Over what the file says: a field that came later has no say in an older file's checksum.
    if document.checksum != checksum_of(head["measured"]):
        raise _refusal(file, what, "is damaged: its checksum is not that of its content")
    return document


def _decode(file: Path, data: bytes, what: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # no JSON, or nested without end
        state = "is empty" if not data.strip() else f"is damaged or cut short ({error})"
        raise _refusal(file, what, state) from error


def _read(file: Path, what: str) -> bytes:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise _refusal(file, what, "is far larger than any baseline")
        return file.read_bytes()
    except OSError as error:
        raise _refusal(file, what, f"cannot be read ({error.strerror})") from error


def _problem(measured: Measured, least: int) -> str:
    """What is wrong with a file whose types are right, "" for nothing."""
    processes = measured.processes
    if len(processes) < least:
        return f"holds {len(processes)} measured processes, and {least} is the least"
    if least:
        unsound = _unsound(measured)
        if unsound:
            return unsound
    if not processes:
        return ""
    return _damage(processes)


def _damage(processes: Sequence[ProcessSample]) -> str:
    """What no process can have measured, "" for nothing."""
    if len(set(map(checksum_of, processes))) < len(processes):
        return "is damaged (it holds a process twice)"
    names = [[s.scenario for s in process.scenarios] for process in processes]
    if not names[0] or len(set(names[0])) != len(names[0]) or any(n != names[0] for n in names):
        return "is damaged (its processes did not time the same scenarios)"
    for process in processes:
        for scenario in process.scenarios:
            missing = set(TIME_METRICS) - scenario.metrics.keys()
            if missing:
                return f"is damaged (a process lacks {min(missing)})"
            if not all(map(_is_sound, scenario.metrics.values())):
                return "is damaged (a time is negative)"
    return ""


def _unsound(measured: Measured) -> str:
    """Why nothing may be held against a run that was read whole, "" for nothing."""
    if measured.failures:
        return f"has a process that ended without a sample ({measured.failures[0].why})"
    if measured.job.slowdown:
        return f"was slowed on purpose, by {100 * measured.job.slowdown:g} %"
    if not measured.judged:
        return "holds times alone: nothing was judged"
    for judged in measured.judged:
        if judged.outcome == "fail":
            return f"has a scenario that failed ({judged.scenario})"
    return f"has wrong tokens: {measured.wrong}" if measured.wrong else ""


def _is_sound(sample: MetricSample) -> bool:
    """Whether its times could be times; a launch overhead alone may come out below zero."""
    stats = [stat for stat in (sample.base, sample.candidate) if stat is not None]
    return all(stat.num_samples > 0 and stat.std >= 0 for stat in stats)


def _refusal(path: Path, what: str, problem: str) -> UsageError:
    return UsageError(
        f"{what} {str(path)!r} {problem}: name a file that `pcpbench compare --save-baseline` "
        "wrote, or the directory of a run that `pcpbench gate` measured."
    )
