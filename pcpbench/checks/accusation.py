"""Which finding of a failed scenario came first, and which pair of arms it is about.

Owns the order among findings: the earliest step; there a drift before a broken contract, since it
has two sides; then the rung of the ladder that comes first. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pcpbench.checks.setup import Pair
from pcpbench.divergence import Accusation
from pcpbench.results import ScenarioResult

FINDINGS: Final = ("drift", "contract", "non_finite")


def first_accusation(result: ScenarioResult, pairs: Sequence[Pair]) -> Accusation | None:
    """The earliest finding; None where nothing of a step was found (nothing was compared, say)."""
    rungs = {arm.arm: number for number, arm in enumerate(result.arms)}
    found = [*_drifts(result), *_violations(result, pairs), *_non_finite(result, pairs)]
    return min(
        found,
        key=lambda a: (a.step, FINDINGS.index(a.finding), rungs.get(a.arm, len(rungs))),
        default=None,
    )


def _drifts(result: ScenarioResult) -> Iterator[Accusation]:
    for found in result.first_differences:
        drift = found.drift
        counts = f"{drift.num_mismatched} of {drift.num_elements} values differ"
        yield Accusation(
            finding="drift",
            kind=found.kind,
            arm=found.arm,
            twin=found.twin,
            step=found.step,
            last_step=found.step,
            rank=found.rank,
            layer=found.layer,
            tensor=found.tensor,
            contract="C13" if found.kind == "capture" else "",
            message=f"{counts} ({drift.outcome})",
        )


def _violations(result: ScenarioResult, pairs: Sequence[Pair]) -> Iterator[Accusation]:
    for violation in result.violations:
        left = [d.step for d in result.first_differences if d.arm == violation.arm]
        if violation.contract == "C14":  # what the next step does to outputs is seen in it
            left.append(violation.step + 1)
        yield Accusation(
            finding="contract",
            **_pair_of(violation.arm, pairs),
            step=violation.step,
            last_step=max([violation.step, *left]),
            rank=violation.rank,
            layer=None,
            tensor=violation.tensor,
            contract=violation.contract,
            message=violation.message,
        )


def _non_finite(result: ScenarioResult, pairs: Sequence[Pair]) -> Iterator[Accusation]:
    for bad in result.non_finite:
        yield Accusation(
            finding="non_finite",
            **_pair_of(bad.arm, pairs),
            step=bad.step,
            last_step=bad.step,
            rank=None,
            layer=None,
            tensor=bad.tensor,
            contract="",
            message=f"row {bad.row} is not finite",
        )


def _pair_of(arm: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    pair = next((pair for pair in pairs if pair.arm == arm), None)
    if pair is None:
        return {"kind": "", "arm": arm, "twin": None}
    return {"kind": pair.kind, "arm": arm, "twin": pair.twin}
