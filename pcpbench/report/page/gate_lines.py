"""The processes of a gate read back: `samples.jsonl`, a line for each in the order they ended.

Reads what a gate writes, into the gate's own records and by their checksums. A gate
refuses a file of which one line is damaged, since a verdict would rest on it; here a line that
cannot be trusted is left out and counted, and the rest is shown. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from pcpbench.gate_lines import FORMAT, SCHEMA_VERSION, checksum_of, process_of
from pcpbench.gate_samples import JudgedScenario, ProcessFailure, ProcessSample
from pcpbench.report.stored import StoredRun

BAD_CONTENT: Final = (ValueError, TypeError, RecursionError)


class _Job(msgspec.Struct, frozen=True):
    base: str
    candidate: str


class _Head(msgspec.Struct, frozen=True):
    job: _Job
    judged: tuple[JudgedScenario, ...] = ()


@dataclass(frozen=True)
class GateProcess:
    """One process. number: of its line among those of processes, from 1. ended: with what."""

    number: int
    ended: ProcessSample | ProcessFailure


@dataclass(frozen=True)
class GateLines:
    """What a file of samples tells.

    base, candidate: the arms, and judged: what the judge said of each scenario; has_head: whether
    the line that tells them could be read. num_cut, num_damaged, num_twice: lines left out, because
    they were being written, are not what their checksum says, or stand there before.
    """

    name: str
    base: str = "base"
    candidate: str = "candidate"
    judged: tuple[JudgedScenario, ...] = ()
    has_head: bool = False
    processes: tuple[GateProcess, ...] = ()
    num_cut: int = 0
    num_damaged: int = 0
    num_twice: int = 0

    @property
    def samples(self) -> list[tuple[int, ProcessSample]]:
        """Processes that ended with a sample, by number."""
        return [(p.number, p.ended) for p in self.processes if isinstance(p.ended, ProcessSample)]

    @property
    def failures(self) -> list[tuple[int, ProcessFailure]]:
        """Those that ended without one."""
        return [(p.number, p.ended) for p in self.processes if isinstance(p.ended, ProcessFailure)]

    @property
    def is_readable(self) -> bool:
        """Whether a gate would take the file; the last line may be cut short."""
        return self.has_head and not self.num_damaged and not self.num_twice

    def left_out(self) -> list[str]:
        """A sentence for each kind of line that is not shown."""
        kinds = (
            (self.num_cut, "cut short: the run was ended while it was written"),
            (self.num_damaged, "damaged: no process, or not the one of its checksum"),
            (self.num_twice, "a process that an earlier line holds already"),
        )
        told = [
            f"{self.name}: {n} {'line is' if n == 1 else 'lines are'} left out, {why}."
            for n, why in kinds
            if n
        ]
        if not self.has_head:
            told.append(
                f"{self.name}: its first line cannot be read, which names the arms and what was "
                "judged."
            )
        return told


def read_lines(run: StoredRun, name: str) -> GateLines | None:
    """A file of samples of a run, None where the run has none; raises UsageError for one that
    cannot be read at all."""
    data = run.data(name)
    if data is None:
        return None
    head, _, rest = data.partition(b"\n")
    processes: list[GateProcess] = []
    seen: set[str] = set()
    num_cut = num_damaged = num_twice = 0
    for number, line in enumerate(rest.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            num_cut += 1
            continue
        try:
            checksum, ended = process_of(line)
        except BAD_CONTENT:
            num_damaged += 1
            continue
        if checksum in seen and isinstance(ended, ProcessSample):
            num_twice += 1
            continue
        seen.add(checksum)
        processes.append(GateProcess(number, ended))
    found = GateLines(
        name,
        processes=tuple(processes),
        num_cut=num_cut,
        num_damaged=num_damaged,
        num_twice=num_twice,
    )
    return _with_head(found, head)


def _with_head(found: GateLines, line: bytes) -> GateLines:
    """The lines with what the first one tells, as they are where it is not ours or not whole."""
    try:
        plain = msgspec.json.decode(line)
        known = (plain["format"], plain["schema_version"]) == (FORMAT, SCHEMA_VERSION)
        if not known or plain["checksum"] != checksum_of(plain["measured"]):
            return found
        head = msgspec.convert(plain["measured"], _Head)
    except (*BAD_CONTENT, KeyError):
        return found
    job = head.job
    return replace(found, base=job.base, candidate=job.candidate, judged=head.judged, has_head=True)


def scenarios_of(samples: Sequence[tuple[int, ProcessSample]]) -> list[str]:
    """Scenarios that any process timed, in the order of the first that did."""
    return list(dict.fromkeys(s.scenario for _, process in samples for s in process.scenarios))
