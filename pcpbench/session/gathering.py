"""Gathers processes for a run until its verdict stands or its time is over.

Owns the loop: start a fresh process, put its sample on disk, ask whether more would change
anything. Does not judge; it is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from pcpbench.errors import CannotMeasure, MeasuredFailure
from pcpbench.gate_jobs import Measured
from pcpbench.gate_lines import process_bytes
from pcpbench.gate_results import Finding, GateVerdict
from pcpbench.gate_rules import PROCESS_RULE
from pcpbench.gate_samples import ProcessFailure, ProcessSample
from pcpbench.report.progress import Progress
from pcpbench.session.processes import sample_once

MAX_BROKEN = 2
"""Processes that may end without a sample before no more are started."""
TIMEOUT_S = 600.0
"""Of a process, where the whole run has no time limit."""
SLACK_S = 30.0
"""How far past its time a gate waits for a process: one that hangs is ended, a slow one is not."""
START_S = 1.5
"""An interpreter's start, before a process's own clock runs."""


@dataclass
class Gathering:
    """A run that grows, with the processes that ended without a sample.

    write: is given a line of `samples.jsonl` as soon as a process has ended. sample: starts one.
    max_broken: processes that may end without a sample before no more are started.
    """

    measured: Measured
    progress: Progress
    write: Callable[[bytes], None]
    sample: Callable[..., ProcessSample] = field(default_factory=lambda: sample_once)
    clock: Callable[[], float] = time.monotonic
    max_broken: int = MAX_BROKEN
    num_broken: int = 0

    def take(self, num: int) -> None:
        """Measure until the run has `num` processes; stops early where processes break."""
        while len(self.measured.processes) < num and not self._is_broken():
            self._one(TIMEOUT_S)

    def take_until(
        self,
        is_settled: Callable[[Measured, bool], bool],
        num_first: int,
        deadline: float,
        expected_s: float = 0.0,
    ) -> None:
        """Measure `num_first` processes, then more while it is unsettled and another one fits
        before the deadline (of `clock`). is_settled: is asked with the run, and whether it has
        `num_first` processes yet. expected_s: what the first one is taken to need."""
        started, num_before = self.clock(), len(self.measured.processes)
        while not self._is_broken():
            taken = len(self.measured.processes) - num_before
            now = self.clock()
            each_s = (now - started) / taken if taken else expected_s
            if now + each_s > deadline:
                return
            if is_settled(self.measured, len(self.measured.processes) >= num_first):
                return
            self._one(deadline + SLACK_S - now)

    def _is_broken(self) -> bool:
        return self.num_broken >= self.max_broken

    def _one(self, timeout_s: float) -> None:
        try:
            sample = self.sample(self.measured.job, timeout_s)
        except (MeasuredFailure, CannotMeasure) as error:
            broken = failure_of(error)
            self.measured = self.measured.with_failure(broken)
            self.num_broken += 1
            self.write(process_bytes(broken))
            self.progress.say(f"process: {error}")
            return
        self.measured = self.measured.with_process(sample)
        self.write(process_bytes(sample))
        self.progress.advance()


def expected_of(processes: Sequence[ProcessSample]) -> float:
    """Seconds that one more process takes if it is like these."""
    return median(process.wall_s for process in processes) + START_S


def failure_of(error: MeasuredFailure | CannotMeasure) -> ProcessFailure:
    """A process that ended without a result: the engine's doing, or nobody knows whose."""
    return ProcessFailure(why=str(error).rstrip("."), is_crash=isinstance(error, CannotMeasure))


def finding_of(failure: ProcessFailure) -> Finding:
    """The same as a finding of the gate."""
    return Finding(
        rule=PROCESS_RULE,
        scenario="",
        verdict=GateVerdict.CRASHED if failure.is_crash else GateVerdict.REGRESSION,
        why=failure.why,
        limit=PROCESS_RULE.limit,
    )


def check_sound(measured: Measured, told: str) -> None:
    """Raise for the first process that nothing can be held against. told: what did not happen.

    Raises MeasuredFailure for a broken contract, or for timed steps that sampled other tokens than
    before, and CannotMeasure for a process that crashed.
    """
    for failure in measured.failures:
        kind = CannotMeasure if failure.is_crash else MeasuredFailure
        raise kind(f"{told}: {failure.why}.")
    if measured.wrong:
        raise MeasuredFailure(f"{told}: {measured.wrong}.")
