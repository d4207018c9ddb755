"""One scenario on a console: times of both arms, how steps were served, drift, what broke.

Owns the order of these facts and what a narrow console leaves out. No ratio is shown for a scenario
that did not pass.
"""

from __future__ import annotations

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pcpbench.report import units
from pcpbench.report.compare_rows import base_arm
from pcpbench.report.console import Facts, add_notices, badge, is_wide, new_table
from pcpbench.report.findings_view import add_differences, add_reasons, add_violations
from pcpbench.results import ArmSummary, DriftSummary, Outcome, Ratio, ScenarioResult, Stat

OUTCOMES = {
    "bitwise": "bitwise equal",
    "within_budget": "within budget",
    "exceeds_budget": "exceeds budget",
    "non_finite": "non-finite values",
    "shape_mismatch": "shapes differ",
}


def print_scenario(console: Console, result: ScenarioResult, base: str, candidate: str) -> None:
    """Print one scenario. base, candidate: the two arms, as asked or as labelled."""
    console.print()
    console.print(_heading(result))
    arms = [find_arm(result, name) for name in (base, candidate)]
    facts = Facts()
    add_reasons(facts, result)
    add_differences(facts, result)
    add_violations(facts, result)
    facts.print(console)
    known = [arm for arm in arms if arm is not None]
    if len(known) == 2:
        console.print(_arm_table(console, result, known[0], known[1]))
    if result.drifts:
        console.print(_drift_table(console, result))
    after = Facts()
    if len(known) == 2 and result.outcome is not Outcome.PASS:
        after.add("No ratio", "the scenario did not pass, so its times are not compared.")
    for arm in known:
        missed = (
            f"{units.count(number, 'step')}: {reason}"
            for reason, number in arm.miss_reasons.items()
        )
        after.add_all(f"Not FULL ({base_arm(arm.arm)})", missed)
    add_notices(after, result.notices)
    after.print(console)


def find_arm(result: ScenarioResult, name: str) -> ArmSummary | None:
    """The arm with this label, or the first of this kind (`eager_padded` for its labelled twin)."""
    exact = [arm for arm in result.arms if arm.arm == name]
    alike = [arm for arm in result.arms if base_arm(arm.arm) == name]
    return next(iter(exact + alike), None)


def _heading(result: ScenarioResult) -> Group:
    counts = max(result.arms, key=lambda arm: arm.num_steps, default=None)
    title = badge(result.outcome) + Text(f"  {result.scenario}", style="bold")
    if counts is not None:
        told = (
            units.count(counts.num_steps, "step"),
            units.count(counts.num_requests, "request"),
            f"{units.count(counts.num_output_tokens, 'output token')}",
        )
        title += Text("  " + ", ".join(told), style="dim")
    return Group(Rule(style="dim"), title)


def _arm_table(
    console: Console, result: ScenarioResult, base: ArmSummary, candidate: ArmSummary
) -> Table:
    wide, passed = is_wide(console), result.outcome is Outcome.PASS
    table = new_table()
    table.add_column("", no_wrap=True)
    for arm in (base, candidate):
        table.add_column(base_arm(arm.arm), justify="right", overflow="fold")
        if wide:
            table.add_column("p99", justify="right", no_wrap=True)
    if passed:
        names = f"{base_arm(candidate.arm)} / {base_arm(base.arm)}"
        table.add_column(f"{names} [95 %]", overflow="fold")
        if wide:
            table.add_column("that is", no_wrap=True)
    timed = (
        ("TPOT, median", base.tpot, candidate.tpot, result.tpot_ratio),
        ("ITL, median", base.itl, candidate.itl, result.itl_ratio),
        ("Launch overhead, median", base.launch, candidate.launch, result.launch_ratio),
    )
    for label, ours, theirs, ratio in timed:
        table.add_row(*_time_cells(label, ours, theirs, ratio, wide=wide, passed=passed))
    counted = (
        ("Steps served by", served_by(base), served_by(candidate)),
        ("FULL, of coverable", coverage(base), coverage(candidate)),
        ("Padding waste", units.percent(base.padding_waste),
         units.percent(candidate.padding_waste)),
    )  # fmt: skip
    for label, left, right in counted:
        table.add_row(label, *((left, "", right) if wide else (left, right)))
    return table


def _time_cells(
    label: str, ours: Stat | None, theirs: Stat | None, ratio: Ratio | None, *, wide: bool,
    passed: bool,
) -> list[str]:  # fmt: skip
    stats = (ours, theirs)
    medians = units.times(*(None if stat is None else stat.median for stat in stats))
    p99s = units.times(*(None if stat is None else stat.p99 for stat in stats))
    cells = [label]
    for median, p99 in zip(medians, p99s, strict=True):
        cells += [median, p99] if wide else [median]
    if passed:
        cells.append(units.ratio(ratio))
        if wide:
            cells.append(units.reading(ratio))
    return cells


def served_by(arm: ArmSummary) -> str:
    """`40 FULL, 8 eager, 1 idle`; what is 0 is left out. A number never leaves its word."""
    counts = (
        (arm.steps_full, "FULL"),
        (arm.steps_piecewise, "PIECEWISE"),
        (arm.steps_none, "eager"),
        (arm.steps_idle, "idle"),
    )
    told = ", ".join(f"{number}\u00a0{word}" for number, word in counts if number)
    return told or "no step"


def coverage(arm: ArmSummary) -> str:
    """`40 of 40 (100 %)`: coverable decode steps that FULL served."""
    if not arm.coverable:
        return units.NOTHING
    share = units.percent(arm.coverable_full / arm.coverable)
    return f"{arm.coverable_full} of {arm.coverable} ({share})"


def _drift_table(console: Console, result: ScenarioResult) -> Table:
    wide = is_wide(console)
    table = new_table()
    table.add_column("Drift", no_wrap=True)
    if wide:
        table.add_column("of, from", overflow="fold")
    table.add_column("Verdict", overflow="fold")
    table.add_column("Steps", justify="right", no_wrap=True)
    for name in ("Max abs", "Max ULP", "Top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        for name in ("Max rel", "KL", "Tokens"):
            table.add_column(name, justify="right", no_wrap=True)
    kinds = [drift.kind for drift in result.drifts]
    for drift in result.drifts:
        name = drift.kind
        if kinds.count(name) > 1 and not wide:
            name += f"\n ({drift.arm.rpartition('[')[2].rstrip(']')})"
        cells = [name, f"{drift.arm}, {drift.twin}"] if wide else [name]
        worst = drift.worst
        cells += [drift_words(drift), str(drift.num_steps_compared), units.small(worst.max_abs),
                  units.small(worst.max_ulp), units.percent(drift.top1_agreement)]  # fmt: skip
        if wide:
            cells += [units.small(worst.max_rel), units.small(drift.max_kl),
                      str(drift.token_mismatches)]  # fmt: skip
        table.add_row(*cells, style="" if drift.ok else "red")
    return table


def drift_words(drift: DriftSummary) -> str:
    """`within budget`; a drift that is not allowed says so."""
    words = OUTCOMES.get(drift.worst.outcome, drift.worst.outcome)
    if drift.ok:
        return words
    return f"NOT ALLOWED: {words}, {drift.worst.tensor}"
