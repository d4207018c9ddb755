"""What broke in a scenario, on a console: reasons, first differences, violations by contract.

Owns how many of many are shown. Nothing is told twice: a reason that repeats a violation's message
gives way to the violation.
"""

from __future__ import annotations

from collections.abc import Iterable

from pcpbench.divergence import Divergence
from pcpbench.records import Difference, Violation
from pcpbench.report import units
from pcpbench.report.arms import contract_order
from pcpbench.report.console import Facts
from pcpbench.results import Outcome, ScenarioResult

SHOWN_PER_CONTRACT = 2


def add_reasons(facts: Facts, result: ScenarioResult) -> None:
    """Why the scenario did not pass, as far as no violation below tells it."""
    if result.outcome is Outcome.PASS:
        return
    messages = [violation.message for violation in result.violations]
    left = [r for r in result.reasons if not any(message in r for message in messages)]
    facts.add_all("Why", left, style="bold")


def add_differences(
    facts: Facts, result: ScenarioResult, located: Divergence | None = None
) -> None:
    """The first output in which each arm left its twin.

    located: what was looked into further; its own pair has been told.
    """
    for difference in result.first_differences:
        if located is None:
            facts.add("First difference", difference_text(difference), style="bold")
        elif (difference.arm, difference.twin) != (located.accusation.arm, located.accusation.twin):
            facts.add("Also", difference_text(difference))


def difference_text(difference: Difference) -> str:
    """One sentence with scenario place and values."""
    drift = difference.drift
    sizes = (
        ("max abs", units.small(drift.max_abs)),
        ("max rel", units.small(drift.max_rel)),
        ("max ULP", units.small(drift.max_ulp)),
    )
    values = ", ".join(f"{name} {size}" for name, size in sizes if size != units.NOTHING)
    return (
        f"{difference.kind}: {difference.arm} left {difference.twin} at "
        f"{_place(difference.step, difference.rank, difference.layer)}, tensor "
        f"{difference.tensor}: {drift.num_mismatched} of {drift.num_elements} values differ"
        + (f", {values}" if values else "")
    )


def add_violations(facts: Facts, result: ScenarioResult) -> None:
    """Each broken contract: how often, and its first few violations."""
    for contract, found in _by_contract(result.violations):
        total = max(result.num_violations.get(contract, 0), len(found))
        lines = [violation_text(violation) for violation in found[:SHOWN_PER_CONTRACT]]
        rest = total - len(lines)
        if rest:
            lines.append(f"... and {rest} more")
        facts.add_all(f"{contract} broken {total}x", lines, style="bold red")


def violation_text(violation: Violation) -> str:
    """One line: arm, place, what is wrong."""
    place = _place(violation.step, violation.rank, None)
    named = violation.tensor and violation.tensor not in violation.message
    tensor = f", {violation.tensor}" if named else ""
    return f"{violation.arm}, {place}{tensor}: {violation.message}"


def _by_contract(violations: Iterable[Violation]) -> list[tuple[str, list[Violation]]]:
    groups: dict[str, list[Violation]] = {}
    for violation in violations:
        groups.setdefault(violation.contract, []).append(violation)
    return sorted(groups.items(), key=lambda item: contract_order(item[0]))


def _place(step: int, rank: int | None, layer: int | None) -> str:
    parts = [f"step {step}"]
    parts += [] if rank is None else [f"rank {rank}"]
    parts += [] if layer is None else [f"layer {layer}"]
    return ", ".join(parts)
