"""`pcpbench compare builtin vllm` as it was asked: frozen, and checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pcpbench.config import DRAFT_MODELS
from pcpbench.engine_options import PREPARING_TARGETS, EngineOptions
from pcpbench.errors import UsageError
from pcpbench.modes import CUDAGraphMode
from pcpbench.request import CHECKS, DEFAULT_REPETITIONS, FEEDS, QUICK_SCENARIOS
from pcpbench.scenarios.loader import choose_scenarios

MODE = CUDAGraphMode.FULL_AND_PIECEWISE
"""The configured mode: every step is dispatched under it, and padded to what was chosen."""


class TargetsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Two targets on the same steps, metadata held against each other."""

    base: str
    candidate: str
    options: EngineOptions
    scenarios: tuple[str, ...] = ()
    quick: bool = False
    repetitions: int = DEFAULT_REPETITIONS
    feed: str = FEEDS[0]
    checks: str = CHECKS[0]
    inject: str | None = None
    save_baseline: Path | None = None
    processes: int | None = None
    baseline: Path | None = None
    engine_python: Path | None = None
    engine_timeout: float | None = None
    json: bool = False
    out: Path | None = None

    @property
    def scenario_names(self) -> tuple[str, ...]:
        """Scenarios asked for; empty for the core ones."""
        return self.scenarios or (QUICK_SCENARIOS if self.quick else ())

    def check(self) -> None:
        """Raise UsageError for what could not be run whatever the machine is."""
        if (self.base, self.candidate) != PREPARING_TARGETS:
            raise UsageError(
                f"{self.base!r} and {self.candidate!r} cannot be compared: name two arms, or the "
                f"targets {' '.join(PREPARING_TARGETS)}, in this order."
            )
        if self.options.target != PREPARING_TARGETS[0]:
            raise UsageError("--target names one target for both arms: leave it out here.")
        if self.options.microbatch:
            raise UsageError(
                "--microbatch: every batch is cut here anyway, after it was prepared: leave it out."
            )
        if self.options.dynamic_spec != "off":
            raise UsageError("--dynamic-spec is not driven through vLLM's runner: leave it out.")
        if self.options.draft_model != DRAFT_MODELS[0]:
            raise UsageError(
                "--draft-model: vLLM's speculators are not on the stand: leave it out."
            )
        repetitions = self.repetitions if self.repetitions != DEFAULT_REPETITIONS else None
        for flag, value in (
            ("--repetitions", repetitions),
            ("--feed", self.feed if self.feed != FEEDS[0] else None),
            ("--check", self.checks if self.checks != CHECKS[0] else None),
            ("--inject", self.inject),
            ("--save-baseline", self.save_baseline),
            ("--processes", self.processes),
            ("--baseline", self.baseline),
            ("--engine-python", self.engine_python),
            ("--engine-timeout", self.engine_timeout),
        ):
            if value is not None:
                raise UsageError(
                    f"{flag} is {str(value)!r}, which comparing targets has no use for: leave it "
                    "out, or name two arms."
                )
        self.options.check()
        choose_scenarios(self.scenario_names)


def names_targets(base: str, candidate: str) -> bool:
    """Whether a comparison is one of targets, not of arms."""
    return base in PREPARING_TARGETS or candidate in PREPARING_TARGETS
