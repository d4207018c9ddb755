"""What the gate orders of a worker process, and what it knows of a measured run.

Owns the frozen values that cross a process or a file with the options of a comparison in them.
Knows no rule, no statistics and no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.gate_samples import JudgedScenario, ProcessFailure, ProcessSample, wrong_tokens
from pcpbench.gate_settings import GateOptions, resolve_settings
from pcpbench.paths import reachable
from pcpbench.records import Environment

MAX_REPETITIONS = 1000
DEFAULT_TIMED: Final = ("s2-capture-edges",)
"""What is timed where no scenario is named: every batch size from 16 down to 1, in one scenario,
since a gate has to fit in a CI job and each finding more makes an undecided one more likely."""


class SampleJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker process is to do.

    base, candidate: arms. scenarios: shipped names or files; empty to judge the core ones and time
    DEFAULT_TIMED. repetitions: timed runs of each scenario; floor_repetitions: how many of these,
    the first, measure kernel floors, too, without which a step has no launch overhead. judge: run
    the whole ladder under the judge and time nothing; checks: how closely it looks. slowdown:
    share of its own time that every timed step of the candidate waits on top; planted to see what
    the gate sees.
    """

    base: str
    candidate: str
    options: EngineOptions
    scenarios: tuple[str, ...] = ()
    repetitions: int = 10
    floor_repetitions: int = 2
    judge: bool = False
    checks: str = "quick"
    slowdown: float = 0.0

    @property
    def timed_scenarios(self) -> tuple[str, ...]:
        """What a process times."""
        return self.scenarios or DEFAULT_TIMED

    def comparison_of(self, scenarios: Sequence[str]) -> str:
        """The command line that judges these scenarios alone, and shows where they break."""
        named = [word for name in scenarios for word in ("--scenario", name)]
        closely = [] if self.checks == "quick" else ["--check", self.checks]
        words = [*self.options.words, *named, *closely, "--repetitions", "0"]
        return shlex.join(["pcpbench", "compare", self.base, self.candidate, *words])


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which machine a run was made on. id: a hash that two machines do not share; cpu: in words."""

    id: str
    cpu: str
    num_cpus: int


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A comparison that was measured by fresh processes: a baseline, or a run held against one.

    settings: effective ones by vLLM's names, with the arms and the repetitions; settings_hash is of
    them. code_hash: of pcpbench's own sources. judged: what the judge said of each scenario.
    processes: one sample each, in the order they ran. failures: those that ended without one.
    """

    job: SampleJob
    settings: dict[str, Any]
    settings_hash: str
    code_hash: str
    machine: Machine
    environment: Environment
    created_at: str
    judged: tuple[JudgedScenario, ...]
    processes: tuple[ProcessSample, ...] = ()
    failures: tuple[ProcessFailure, ...] = ()

    @property
    def wrong(self) -> str:
        """What is told of the first timed steps that sampled other tokens, "" for none."""
        for process in self.processes:
            for scenario in process.scenarios:
                if scenario.num_wrong:
                    return wrong_tokens(scenario.scenario, scenario.num_wrong)
        return ""

    def with_process(self, sample: ProcessSample) -> Measured:
        """The same run with one more process."""
        return msgspec.structs.replace(self, processes=(*self.processes, sample))

    def with_failure(self, failure: ProcessFailure) -> Measured:
        """The same run with one more process that ended without a sample."""
        return msgspec.structs.replace(self, failures=(*self.failures, failure))


class GateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`pcpbench gate`. baseline, run: files or directories; without a run one is measured now.

    quiet: stdout holds other data, so the report goes to stderr.
    """

    baseline: Path | None = None
    run: Path | None = None
    options: GateOptions = GateOptions()
    json: bool = False
    out: Path | None = None
    self_check: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Raise UsageError for a request that could not be run whatever the machine is."""
        if self.baseline is None and not self.self_check:
            raise UsageError(
                "BASELINE is missing: name a file that `pcpbench compare --save-baseline FILE` "
                "wrote, or ask for --self-check."
            )
        if self.self_check and self.run is not None:
            raise UsageError("--self-check measures its own runs: leave RUN out.")
        named = {"baseline": self.baseline, "run": self.run}
        both = [p for name, p in named.items() if p is not None and reachable(p, name).exists()]
        if len(both) == 2 and both[0].samefile(both[1]):
            raise UsageError(
                f"RUN is {str(self.run)!r}, the baseline itself: name another run, or leave RUN "
                "out to have one measured now."
            )
        resolve_settings(self.options)
