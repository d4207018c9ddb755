"""Finding arms, drifts and contracts in a result by name. Knows no file and no console."""

from __future__ import annotations

from pcpbench.results import ArmSummary, DriftSummary, ScenarioResult


def base_arm(label: str) -> str:
    """The kind of arm behind a label: `eager_padded` of `eager_padded[full]`."""
    return label.partition("[")[0]


def find_arm(result: ScenarioResult, name: str) -> ArmSummary | None:
    """The arm with this label, or the first of this kind (`eager_padded` for its labelled twin)."""
    exact = [arm for arm in result.arms if arm.arm == name]
    alike = [arm for arm in result.arms if base_arm(arm.arm) == name]
    return next(iter(exact + alike), None)


def drift_of(result: ScenarioResult, arm: str) -> DriftSummary | None:
    """The drift of an arm from its twin; one that is not allowed first, should there be several."""
    found = [drift for drift in result.drifts if drift.arm == arm]
    return min(found, key=lambda drift: drift.ok, default=None)


def contract_order(contract: str) -> tuple[int, str]:
    """Sorts C2 before C10."""
    digits = contract.lstrip("C")
    return (int(digits) if digits.isdigit() else 99, contract)
