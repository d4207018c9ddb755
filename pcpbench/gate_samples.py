"""What one fresh process measured, and what a baseline holds: times and counts, no bit patterns.

Owns the frozen records that workers print, baselines store and the gate reads. Times are seconds.
Knows no rule and no statistics.

A process is the sampling unit: samples of one process share its memory layout and its luck, so each
process gives one value of each metric and scenario (a median over its own samples).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from pcpbench.records import Environment
from pcpbench.results import Stat

TIME_METRICS: Final = ("tpot", "itl", "ttft", "step", "launch")
"""Names of what is timed, as in ArmSummary; `docs/measures.md` has the formulas."""
Count = Annotated[int, msgspec.Meta(ge=0)]


class MetricSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One time metric of one scenario in one process.

    base, candidate: of all samples of each arm. ratio: candidate / base, median over pairs measured
    side by side; None where no ratio can be formed.
    """

    base: Stat | None
    candidate: Stat | None
    ratio: float | None
    num_pairs: int


class ScenarioSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scenario in one process.

    plan_hash: of the steps that the scenario turned into. metrics: by name of TIME_METRICS.
    capture_s: time to warm up and capture all graphs; None where it captures none, or replays
    those of an earlier scenario with equal limits.
    num_wrong: timed steps that sampled other tokens than the first run of their arm.
    """

    scenario: str
    plan_hash: str
    metrics: dict[str, MetricSample]
    capture_s: float | None = None
    num_wrong: Count = 0


def wrong_tokens(scenario: str, number: int) -> str:
    """What is told of a scenario's timed steps that are counted in `num_wrong`."""
    return (
        f"{number} timed steps of {scenario} sampled other tokens than the first run of their arm "
        "(C14)"
    )


class ProcessSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one fresh process measured. wall_s: from its first line to its last."""

    scenarios: tuple[ScenarioSample, ...]
    environment: Environment
    wall_s: float
    started_at: str = ""


class ProcessFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fresh process that ended without a sample.

    why: in one sentence. is_crash: nobody knows whose doing it was; otherwise the engine broke a
    contract.
    """

    why: str
    is_crash: bool


class JudgedScenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the judge said of one scenario.

    outcome: `pass`, `fail` or `not compared`. num_drifts: pairs of arms whose drift is not allowed.
    num_violations: contracts broken, counted. decode_steps, steps_full: steps of the candidate
    without a prefill, and those of them that FULL graphs served.
    """

    scenario: str
    plan_hash: str
    outcome: str
    reasons: tuple[str, ...]
    num_drifts: Count
    num_violations: Count
    decode_steps: Count
    steps_full: Count

    @property
    def full_share(self) -> float | None:
        """Share of decode steps that FULL served; None where there is no decode step."""
        return self.steps_full / self.decode_steps if self.decode_steps else None
