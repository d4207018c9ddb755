"""What a command was asked to do, as frozen values, checked before anything runs.

Owns the requests of `capture` and `compare`. Knows no engine and imports no torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pcpbench.engine_options import EngineOptions, one_of
from pcpbench.engine_request import EngineRequest, engine_request_of
from pcpbench.errors import UsageError
from pcpbench.gate_settings import check_processes
from pcpbench.modes import ARM_MODES, CUDAGraphMode
from pcpbench.scenarios.loader import choose_scenarios

FEEDS = ("teacher-forced", "free-running")
CHECKS = ("quick", "full")
QUICK_SCENARIOS = ("s3-idle-and-reuse", "s14-uneven-ranks")
"""Small batches that still hold idle steps, reuse of slots and blocks, and ranks without work."""
DEFAULT_REPETITIONS = 3


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`pcpbench capture`."""

    mode: str
    options: EngineOptions
    json: bool = False
    out: Path | None = None

    @property
    def graph_mode(self) -> CUDAGraphMode:
        """The configured mode; raises UsageError for one that captures nothing here."""
        captured = [mode for mode in CUDAGraphMode if mode is not CUDAGraphMode.NONE]
        modes = {mode.name.lower(): mode for mode in captured}
        if self.options.pcp > 1:
            del modes["full"]
        if self.mode == "full" and self.mode not in modes:
            raise UsageError(
                f"--mode is {self.mode!r} with --pcp {self.options.pcp}: a prefill that is cut "
                f"over ranks cannot be captured whole: use one of {', '.join(modes)}, or --pcp 1."
            )
        one_of("--mode", self.mode, tuple(modes))
        return modes[self.mode]

    def check(self) -> None:
        """Raise UsageError for a request that could not be run whatever the machine is."""
        self.options.check()
        if self.options.target == "engine":
            raise UsageError(
                "--target is 'engine': nothing can be seen of the graphs that whole engines "
                "capture: use builtin or vllm."
            )
        self.graph_mode  # noqa: B018 - raises for a mode that cannot be captured


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`pcpbench compare`. inject: a fault of the catalogue to plant, by name.

    quick: without scenarios of its own, two small ones; judged, not timed.

    save_baseline: file to write a baseline to. processes: how many it has, None for as many as by
    default. baseline: file to hold this comparison against.
    engine_python, engine_timeout: of `--target engine` only.
    """

    base: str
    candidate: str
    options: EngineOptions
    scenarios: tuple[str, ...] = ()
    feed: str = "teacher-forced"
    repetitions: int = DEFAULT_REPETITIONS
    checks: str = "quick"
    json: bool = False
    out: Path | None = None
    inject: str | None = None
    save_baseline: Path | None = None
    processes: int | None = None
    baseline: Path | None = None
    engine_python: Path | None = None
    engine_timeout: float | None = None
    quick: bool = False

    @property
    def scenario_names(self) -> tuple[str, ...]:
        """Scenarios asked for; empty for the core ones."""
        return self.scenarios or (QUICK_SCENARIOS if self.quick else ())

    @property
    def num_repetitions(self) -> int:
        """Timed runs."""
        return 0 if self.quick else self.repetitions

    def check(self) -> None:
        """Raise UsageError or ScenarioError for what could not be run whatever the machine is."""
        if self.options.target == "engine":
            self._check_numbers()
            return self.engine_request.check()
        for flag, value in (
            ("--engine-python", self.engine_python),
            ("--engine-timeout", self.engine_timeout),
        ):
            if value is not None:
                raise UsageError(
                    f"{flag} is {str(value)!r} with --target {self.options.target}: it is for "
                    "--target engine, which alone starts vLLM: leave one of the two out."
                )
        for arm in (self.base, self.candidate):
            if arm not in ARM_MODES:
                raise UsageError(f"arm {arm!r} is unknown: use one of {', '.join(ARM_MODES)}.")
        if self.base == self.candidate:
            raise UsageError(f"both arms are {self.base!r}: name two different arms.")
        self._check_numbers()
        if self.options.spec_tokens and self.feed != FEEDS[0]:
            raise UsageError(
                f"--feed is {self.feed} with --spec-tokens {self.options.spec_tokens}: the drafts "
                "are made from the reference's tokens, so use --feed teacher-forced."
            )
        choose_scenarios(self.scenario_names)
        if self.options.target != "builtin":
            self._check_builtin_only()
        if self.inject and (self.baseline or self.save_baseline):
            raise UsageError(
                f"--inject is {self.inject!r} with a baseline: the fresh processes behind one run "
                "without faults, so leave one of the two out."
            )

    def _check_numbers(self) -> None:
        one_of("--feed", self.feed, FEEDS)
        one_of("--check", self.checks, CHECKS)
        if not 0 <= self.repetitions <= 1000:
            raise UsageError(
                f"--repetitions is {self.repetitions}: use 1 to 1000, or 0 to judge without timing."
            )
        if self.quick and self.repetitions not in (0, DEFAULT_REPETITIONS):
            raise UsageError(
                f"--repetitions is {self.repetitions} with --quick, which times nothing: leave one "
                "of the two out."
            )
        if self.processes is not None:
            if self.save_baseline is None:
                raise UsageError(
                    f"--processes is {self.processes} without --save-baseline: nothing else here "
                    "starts fresh processes, so leave it out."
                )
            check_processes("--processes", self.processes)
        self.options.check()

    @property
    def engine_request(self) -> EngineRequest:
        """The same for whole engines."""
        return engine_request_of(
            msgspec.structs.asdict(self),
            msgspec.structs.asdict(self.options),
            msgspec.structs.asdict(EngineOptions()),
            capture_sizes=self.options.requested_sizes,
            repetitions=self.num_repetitions,
        )

    def _check_builtin_only(self) -> None:
        """What only the built-in engine has."""
        for flag, value in (
            ("--baseline", self.baseline),
            ("--save-baseline", self.save_baseline),
        ):
            if value:
                raise UsageError(
                    f"{flag} is {str(value)!r} with --target {self.options.target}: that is for "
                    "the built-in engine only: leave one of the two out."
                )
