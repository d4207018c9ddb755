"""One scenario on a console: what broke, times of both arms, drift, why steps missed FULL.

Owns the order of these facts. The tables are in scenario_tables.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pcpbench.divergence import Divergence
from pcpbench.report import units
from pcpbench.report.arms import base_arm, find_arm
from pcpbench.report.console import Facts, badge
from pcpbench.report.dispatch_view import add_dispatch
from pcpbench.report.divergence_view import add_divergence
from pcpbench.report.findings_view import add_differences, add_reasons, add_violations
from pcpbench.report.scenario_tables import arm_table, drift_table, has_times
from pcpbench.results import ArmSummary, Outcome, ScenarioResult


def print_scenario(
    console: Console,
    result: ScenarioResult,
    base: str,
    candidate: str,
    divergence: Divergence | None = None,
) -> None:
    """Print one scenario. base, candidate: the two arms, as asked or as labelled.

    divergence: of the comparison; shown if it is this scenario's.
    """
    arms = [find_arm(result, name) for name in (base, candidate)]
    known = [arm for arm in arms if arm is not None]
    broken, after = Facts(), Facts()
    located = divergence if divergence and divergence.scenario == result.scenario else None
    if located is not None:
        add_divergence(broken, located)
    add_reasons(broken, result)
    add_differences(broken, result, located)
    add_violations(broken, result)
    if result.outcome is not Outcome.PASS:
        what = (
            "its times are not compared" if has_times(result) else "there are no times to compare"
        )
        after.add("No ratio", f"the scenario did not pass, so {what}.")
    add_misses(after, known)
    add_dispatch(after, known)
    parts = [
        broken.grid,
        arm_table(console, result, *known) if len(known) == 2 else None,
        drift_table(console, result) if result.drifts else None,
        after.grid,
    ]
    console.print()
    console.print(_heading(result))
    for part in parts:
        if part is not None and part.row_count:
            console.print()
            console.print(part)


def add_misses(facts: Facts, arms: Sequence[ArmSummary]) -> None:
    """Why steps of the arms were not served by FULL, counted."""
    told = [arm for arm in arms if arm.miss_reasons]
    for arm in told:
        name = f"{base_arm(arm.arm)}: " if len(told) > 1 else ""
        facts.add_all(
            "Missed FULL" if arm is told[0] else "",
            (f"{name}{units.count(n, 'step')}, {why}" for why, n in arm.miss_reasons.items()),
        )


def _heading(result: ScenarioResult) -> Group:
    grid = Table.grid(padding=(0, 2))
    for _ in range(3):
        grid.add_column(overflow="fold")
    counts = max(result.arms, key=lambda arm: arm.num_steps, default=None)
    told = "" if counts is None else _counts(counts)
    grid.add_row(badge(result.outcome), Text(result.scenario, "bold"), Text(told, "dim"))
    return Group(Rule(style="dim"), grid)


def _counts(arm: ArmSummary) -> str:
    idle = f" ({arm.steps_idle} idle)" if arm.steps_idle else ""
    return (
        f"{units.count(arm.num_steps, 'step')}{idle}, {units.count(arm.num_requests, 'request')}, "
        f"{units.count(arm.num_output_tokens, 'token')}"
    )
