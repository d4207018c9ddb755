"""The dispatch audit on a console and in JSON: per scenario, and over the run.

Owns its words and the sums over scenarios.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pcpbench.report import units
from pcpbench.report.arms import base_arm
from pcpbench.report.console import Facts
from pcpbench.results import ArmSummary, BatchClass, DispatchSummary, ScenarioResult

SHOWN = 3
"""Classes that the top of a report names."""

MODE_WORDS = {"FULL": "FULL", "PIECEWISE": "PIECEWISE", "NONE": "eager", "IDLE": "idle"}


def add_dispatch(facts: Facts, arms: Sequence[ArmSummary]) -> None:
    """What stands out in the dispatch of these arms; nothing where all went as it should."""
    for arm in arms:
        audit, name = arm.dispatch, base_arm(arm.arm)
        if audit is None:
            continue
        for batch in audit.never_served:
            facts.add("Never served", f"{name}: {class_text(batch)}", style="bold yellow")
        if audit.steps_ranks_disagree:
            number = units.count(audit.steps_ranks_disagree, "step")
            facts.add("Ranks disagree", f"{name}: {number}", style="bold red")
        if audit.steps_larger_than_needed:
            number = units.count(audit.steps_larger_than_needed, "step")
            cost = units.count(audit.excess_tokens, "padding token")
            facts.add("Larger graph", f"{name}: {number} ran one that cost {cost} more than needed")


def add_unserved(facts: Facts, scenarios: Sequence[ScenarioResult]) -> None:
    """At the top of a report: the classes of batches that no graph ever served, by name."""
    for arm, total in run_totals(scenarios).items():
        names = list(dict.fromkeys(batch["name"] for batch in total["never_served"]))
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            told = f"{base_arm(arm)}: {', '.join(names[:SHOWN])}{more}"
            facts.add("Never served", told, style="bold yellow")


def class_text(batch: BatchClass) -> str:
    """`decode with 9 requests: never FULL in 12 steps (eager), larger than ... size 8`."""
    steps = units.count(batch.num_steps, "step")
    return f"{batch.name}: never {batch.wanted} in {steps} ({', '.join(batch.ran_as)}), {batch.why}"


def add_totals(facts: Facts, scenarios: Sequence[ScenarioResult], names: Iterable[str]) -> None:
    """Modes and reasons of each named arm over all scenarios, one line an arm and reason."""
    totals = run_totals(scenarios)
    lines: list[str] = []
    for name in names:
        for arm, total in totals.items():
            if (arm != name and base_arm(arm) != name) or not total["modes"]:
                continue
            modes = total["modes"].items()
            told = ", ".join(f"{count} {MODE_WORDS.get(mode, mode)}" for mode, count in modes)
            lines.append(f"{arm}: {told}")
            reasons = total["reasons"].items()
            lines += [f"  {units.count(count, 'step')}, {why}" for why, count in reasons]
    facts.add_all("Dispatch", lines)


def run_totals(scenarios: Iterable[ScenarioResult]) -> dict[str, dict[str, Any]]:
    """Arm -> the sums of its audits; classes never served keep the scenario they are of."""
    found: dict[str, list[tuple[str, DispatchSummary]]] = {}
    for scenario in scenarios:
        for arm in scenario.arms:
            if arm.dispatch is not None:
                found.setdefault(arm.arm, []).append((scenario.scenario, arm.dispatch))
    return {arm: _total(audits) for arm, audits in found.items()}


def _total(audits: Sequence[tuple[str, DispatchSummary]]) -> dict[str, Any]:
    modes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for _, audit in audits:
        modes.update(audit.modes)
        reasons.update(audit.reasons)
    counts = ("steps_ranks_disagree", "steps_larger_than_needed", "excess_tokens")
    return {
        "modes": dict(modes.most_common()),
        "reasons": dict(reasons.most_common()),
        **{name: sum(getattr(audit, name) for _, audit in audits) for name in counts},
        "never_served": [
            {"scenario": scenario, **msgspec.structs.asdict(batch)}
            for scenario, audit in audits
            for batch in audit.never_served
        ],
    }
