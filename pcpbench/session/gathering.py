"""Gathers processes for a run until its verdict stands or its time is over.

Owns the loop: start a fresh process, put its sample on disk, ask whether more would change
anything. Does not judge; it is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pcpbench.errors import CannotMeasure, MeasuredFailure
from pcpbench.gate_jobs import Measured
from pcpbench.gate_results import Finding, GateVerdict
from pcpbench.gate_rules import PROCESS_RULE
from pcpbench.gate_samples import ProcessSample
from pcpbench.report.progress import Progress
from pcpbench.session.processes import sample_once

MAX_BROKEN = 2
"""Processes that may end without a sample before no more are started."""
TIMEOUT_S = 600.0


@dataclass
class Gathering:
    """A run that grows. failures: one finding for each process that ended without a sample.

    on_sample: is given each sample as soon as there is one. sample: starts a process.
    """

    measured: Measured
    progress: Progress
    on_sample: Callable[[ProcessSample], None]
    sample: Callable[..., ProcessSample] = field(default_factory=lambda: sample_once)
    clock: Callable[[], float] = time.monotonic
    failures: list[Finding] = field(default_factory=list)

    def take(self, num: int) -> None:
        """Measure until the run has `num` processes; stops early where processes break."""
        while len(self.measured.processes) < num and not self._is_broken():
            self._one()

    def take_until(
        self, is_settled: Callable[[Measured], bool], num_first: int, deadline: float
    ) -> None:
        """Measure `num_first` processes, then more while it is unsettled and another one fits
        before the deadline (of `clock`)."""
        started, num_before = self.clock(), len(self.measured.processes)
        while not self._is_broken():
            taken = len(self.measured.processes) - num_before
            now = self.clock()
            each_s = (now - started) / taken if taken else 0.0
            if now + each_s > deadline:
                return
            if len(self.measured.processes) >= num_first and is_settled(self.measured):
                return
            self._one()

    def _is_broken(self) -> bool:
        return len(self.failures) >= MAX_BROKEN

    def _one(self) -> None:
        try:
            sample = self.sample(self.measured.job, TIMEOUT_S)
        except (MeasuredFailure, CannotMeasure) as error:
            self.failures.append(failure(error))
            self.progress.say(f"process: {error}")
            return
        self.measured = self.measured.with_process(sample)
        self.on_sample(sample)
        self.progress.advance()


def failure(error: MeasuredFailure | CannotMeasure) -> Finding:
    """A process that ended without a result: the engine's doing, or nobody knows whose."""
    is_ours = isinstance(error, CannotMeasure)
    return Finding(
        rule=PROCESS_RULE,
        scenario="",
        verdict=GateVerdict.CRASHED if is_ours else GateVerdict.REGRESSION,
        why=str(error),
        limit=PROCESS_RULE.limit,
    )
