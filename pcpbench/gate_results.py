"""What a gate found: one frozen finding for each rule and scenario, and the exit code that follows.

Owns verdicts and their order. Times are seconds, shares are fractions. Knows no statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import msgspec

from pcpbench.gate_rules import Acceptance, Rule
from pcpbench.records import Environment, Notice

ON_UNDECIDED: Final = ("fail", "warn", "pass")


class GateVerdict(Enum):
    """Of one finding or of the whole gate.

    ACCEPTED: over its rule, within what was accepted for a while. UNDECIDED: the interval holds the
    limit. NOT_COMPARABLE: the two sides have nothing that may be set against each other. CRASHED:
    a process of the gate ended without a result.
    """

    PASS = "pass"
    ACCEPTED = "accepted"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"
    CRASHED = "crashed"
    REGRESSION = "regression"


_ORDER: Final = (
    GateVerdict.REGRESSION,
    GateVerdict.CRASHED,
    GateVerdict.NOT_COMPARABLE,
    GateVerdict.UNDECIDED,
    GateVerdict.ACCEPTED,
    GateVerdict.PASS,
)
"""Worst first: a regression that was seen stays one, whatever else could not be measured."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One rule on one scenario ("" where it is about the whole run).

    baseline, run: the two numbers: medians over processes, of ratios to the base arm for a rule in
    percent, of seconds for one in us or ms; shares and counts as they are. change: how much more
    the run has than the baseline, a share or seconds; low, high: its interval at `confidence`. None
    where there is no such number. limit: what applied, after acceptance. num_baseline, num_run:
    processes behind the two. num_needed: processes of the run that would decide at this spread;
    None where the finding is decided or no number would do. baseline_values, run_values: what each
    process gave, ratios or seconds. accepted: what excuses an ACCEPTED one. num_baseline_needed:
    where the baseline has too few processes for any run to be decided, how many each side would
    take. next_step: the command that shows where numbers went wrong, "" where none would.
    """

    rule: Rule
    scenario: str
    verdict: GateVerdict
    why: str
    limit: float
    baseline: float | None = None
    run: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    num_baseline: int = 0
    num_run: int = 0
    num_needed: int | None = None
    num_baseline_needed: int | None = None
    baseline_values: tuple[float, ...] = ()
    run_values: tuple[float, ...] = ()
    accepted: Acceptance | None = None
    next_step: str = ""


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """One gate. baseline, run: what was held against each other, as they were named.

    rules: those that applied. settings: of the measurement; gate_settings: of the gate itself, with
    where each came from.
    """

    baseline: str
    run: str
    findings: tuple[Finding, ...]
    rules: tuple[Rule, ...]
    on_undecided: str
    settings: dict[str, Any]
    gate_settings: dict[str, Any]
    baseline_environment: Environment
    environment: Environment
    num_baseline: int
    num_run: int
    same_machine: bool
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    run_dir: str = ""

    @property
    def verdict(self) -> GateVerdict:
        """The worst finding's; a gate that found nothing is not comparable, never a pass."""
        return worst(self.findings)

    @property
    def exit_code(self) -> int:
        """0 pass, 1 regression, 3 could not measure; undecided as `on_undecided` says."""
        return exit_code_of(self.verdict, self.on_undecided)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is not a pass."""
        bad = [f for f in self.findings if f.verdict is self.verdict]
        if self.verdict is GateVerdict.PASS:
            return ()
        return tuple(f"{f.scenario or 'all'}, {f.rule.text}: {f.why}" for f in bad) or (
            "no rule found anything to judge",
        )


def worst(findings: Sequence[Finding]) -> GateVerdict:
    """The first of the order above that any finding has."""
    verdicts = {finding.verdict for finding in findings}
    return next((v for v in _ORDER if v in verdicts), GateVerdict.NOT_COMPARABLE)


def exit_code_of(verdict: GateVerdict, on_undecided: str) -> int:
    """The exit code of a gate; see docs/gate.md."""
    if verdict is GateVerdict.REGRESSION:
        return 1
    if verdict in (GateVerdict.CRASHED, GateVerdict.NOT_COMPARABLE):
        return 3
    return int(verdict is GateVerdict.UNDECIDED and on_undecided == "fail")


class SelfCheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate can see on a machine.

    num_baseline, num_first, num_most: processes of a gate: of its baseline, of its run at the first
    look and at most, in gate_time_s. num_gates: cut from the num_processes that were measured, in
    order of time; num_apart: of these, how many at most share no process. rates: for each true
    slowdown the shares of gates that ended as `regression`, `undecided` and `passed`, the first
    without any. smallest_called: slowdown called in 95 % of gates, as are all
    larger ones; None where none is. spreads, seen: (rule, scenario, value): the standard deviation
    of one process, and the planted slowdown as it was measured.
    """

    num_processes: int
    num_planted: int
    num_baseline: int
    num_first: int
    num_most: int
    num_gates: int
    num_apart: int
    rates: tuple[dict[str, Any], ...]
    smallest_called: float | None
    spreads: tuple[tuple[str, str, float], ...]
    planted: float
    seen: tuple[tuple[str, str, float | None], ...]
    environment: Environment
    gate_time_s: float = 0.0
    wall_s: float = 0.0
    run_dir: str = ""
