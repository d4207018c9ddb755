"""What a comparison found: the frozen result that session builds and every report renders.

Owns the shape of a result and its outcome. Times are seconds. Knows neither engine nor report.
A speed-up can only be read from a scenario whose outcome is PASS (HOUSE rule 9): `Ratio` values are
None otherwise.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from pcpbench.records import Difference, Drift, Environment, Notice, Violation


class Outcome(Enum):
    """Of a scenario or a whole comparison; `exit_code` is the process's."""

    PASS = "pass"
    FAIL = "fail"
    NOT_COMPARED = "not compared"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 a broken contract, 3 could not measure."""
        return {"pass": 0, "fail": 1, "not compared": 3}[self.value]


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """A sample in seconds: mean, median, population std, p99 (linear), and its size."""

    mean: float
    median: float
    std: float
    p99: float
    num_samples: int


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """candidate / base, measured side by side: the median over pairs with a 95 % interval."""

    median: float
    low: float
    high: float
    num_pairs: int


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of one scenario.

    arm: as asked (`full`), or `eager_padded[full]` for the twin padded like that arm.
    steps_full, steps_piecewise, steps_none: steps served as each. steps_idle: dummy steps.
    decode_steps: steps without prefill. coverable: decode steps that a captured size covers;
    coverable_full: those that FULL served. miss_reasons: why steps were not served by FULL, counted.
    real_tokens, padded_tokens: rank-local tokens summed over ranks and steps, before and after
    padding. tpot, itl, ttft, step, launch, kernel: times in seconds, None where not measured.
    """

    arm: str
    num_steps: int
    num_requests: int
    num_output_tokens: int
    steps_full: int
    steps_piecewise: int
    steps_none: int
    steps_idle: int
    decode_steps: int
    coverable: int
    coverable_full: int
    miss_reasons: dict[str, int]
    real_tokens: int
    padded_tokens: int
    tpot: Stat | None = None
    itl: Stat | None = None
    ttft: Stat | None = None
    step: Stat | None = None
    launch: Stat | None = None
    kernel: Stat | None = None

    @property
    def padding_waste(self) -> float | None:
        """Share of executed tokens that were padding."""
        if not self.padded_tokens:
            return None
        return 1.0 - self.real_tokens / self.padded_tokens


class DriftSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Worst drift of one kind (`partition`, `padding`, `capture`) between two arms.

    num_steps_compared: steps with common outputs; 0 makes the scenario NOT_COMPARED.
    top1_agreement, kl: of the next-token distribution; None where nothing was sampled.
    """

    kind: str
    arm: str
    twin: str
    num_steps_compared: int
    worst: Drift
    top1_agreement: float | None
    token_mismatches: int
    max_kl: float | None
    ok: bool


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything found on one scenario."""

    scenario: str
    outcome: Outcome
    reasons: tuple[str, ...]
    arms: tuple[ArmSummary, ...]
    drifts: tuple[DriftSummary, ...]
    violations: tuple[Violation, ...]
    first_differences: tuple[Difference, ...]
    tpot_ratio: Ratio | None = None
    itl_ratio: Ratio | None = None
    launch_ratio: Ratio | None = None
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0


class CompareResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench compare`: base against candidate over scenarios."""

    base: str
    candidate: str
    outcome: Outcome
    reasons: tuple[str, ...]
    scenarios: tuple[ScenarioResult, ...]
    settings: dict[str, Any]
    environment: Environment
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    run_dir: str = ""


def overall(scenarios: tuple[ScenarioResult, ...]) -> tuple[Outcome, tuple[str, ...]]:
    """The outcome over scenarios: any FAIL fails; nothing compared is never a pass."""
    if not scenarios:
        return Outcome.NOT_COMPARED, ("no scenario was run",)
    for outcome in (Outcome.FAIL, Outcome.NOT_COMPARED):
        hit = [s for s in scenarios if s.outcome is outcome]
        if hit:
            return outcome, tuple(f"{s.scenario}: {r}" for s in hit for r in s.reasons)
    return Outcome.PASS, ()
