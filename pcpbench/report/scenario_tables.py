"""The two tables of a scenario: times and counts of both arms, and drift.

Owns which columns a narrow console does without. No ratio is shown for a scenario that did not
pass.
"""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from pcpbench.report import units
from pcpbench.report.arms import base_arm
from pcpbench.report.console import is_wide, new_table
from pcpbench.results import ArmSummary, DriftSummary, Outcome, Ratio, ScenarioResult, Stat

OUTCOMES: Final = {
    "bitwise": "bitwise equal",
    "within_budget": "within budget",
    "exceeds_budget": "exceeds budget",
    "non_finite": "non-finite values",
    "shape_mismatch": "shapes differ",
}


def arm_table(
    console: Console, result: ScenarioResult, base: ArmSummary, candidate: ArmSummary
) -> Table:
    """Medians (with p99 where there is room), ratio with interval and pairs, steps, padding.

    A result without times has none of their rows and columns.
    """
    is_timed = has_times(result)
    wide, passed = is_wide(console) and is_timed, result.outcome is Outcome.PASS and is_timed
    table = new_table(["Median" if is_timed else "Arm"])
    for arm in (base, candidate):
        table.add_column(base_arm(arm.arm), justify="right", overflow="fold")
        if wide:
            table.add_column("p99", justify="right", overflow="fold")
    if passed:
        ratio_name = f"{base_arm(candidate.arm)} / {base_arm(base.arm)}"
        table.add_column(ratio_name, overflow="fold")
        table.add_column("Pairs", overflow="fold", justify="right")
        if wide:
            table.add_column("that is", overflow="fold")
    timed = (
        ("TPOT", base.tpot, candidate.tpot, result.tpot_ratio),
        ("ITL", base.itl, candidate.itl, result.itl_ratio),
        ("Launch overhead", base.launch, candidate.launch, result.launch_ratio),
    )
    for label, ours, theirs, ratio in timed if is_timed else ():
        ratios = _ratio_cells(ratio, wide) if passed else []
        table.add_row(label, *_time_cells(ours, theirs, wide), *ratios)
    counted = [
        ("Steps served as", served_by),
        ("FULL of coverable", coverage),
        ("In microbatches", _cut),
        ("Padding waste", lambda arm: units.percent(arm.padding_waste)),
    ]
    if base.num_draft_tokens or candidate.num_draft_tokens:
        counted.append(("Drafts accepted", accepted))
    for label, tell in counted:
        left, right = tell(base), tell(candidate)
        if left == right == units.NOTHING:
            continue
        table.add_row(label, *((left, "", right) if wide else (left, right)))
    return table


def has_times(result: ScenarioResult) -> bool:
    """Whether any arm was timed: neither with `--repetitions 0` nor where a step failed first."""
    return any(arm.step is not None for arm in result.arms)


def _time_cells(base: Stat | None, candidate: Stat | None, wide: bool) -> list[str]:
    seconds = [value for stat in (base, candidate) for value in _median_and_p99(stat)]
    return list(units.times(*(seconds if wide else seconds[::2])))


def _median_and_p99(stat: Stat | None) -> tuple[float | None, float | None]:
    return (None, None) if stat is None else (stat.median, stat.p99)


def _ratio_cells(ratio: Ratio | None, wide: bool) -> list[str]:
    pairs = units.NOTHING if ratio is None else str(ratio.num_pairs)
    return [units.ratio(ratio), pairs, *([units.reading(ratio)] if wide else [])]


def served_by(arm: ArmSummary) -> str:
    """`40 FULL, 8 eager`; what is 0 is left out. A number never leaves its word."""
    counts = (
        (arm.steps_full, "FULL"),
        (arm.steps_piecewise, "PIECEWISE"),
        (arm.steps_none, "eager"),
    )
    told = ", ".join(f"{number}\u00a0{word}" for number, word in counts if number)
    return told or "no step"


def accepted(arm: ArmSummary) -> str:
    """`150 of 200`: draft tokens accepted of those verified."""
    if not arm.num_draft_tokens:
        return units.NOTHING
    return f"{arm.num_accepted_tokens} of {arm.num_draft_tokens}"


def _cut(arm: ArmSummary) -> str:
    """`45 of 52 steps`; nothing where none was cut."""
    num_steps = arm.num_steps - arm.steps_idle
    return f"{arm.steps_cut} of {num_steps} steps" if arm.steps_cut else units.NOTHING


def coverage(arm: ArmSummary) -> str:
    """`40 of 40 (100 %)`: coverable decode steps that FULL served."""
    if not arm.coverable:
        return units.NOTHING
    share = units.percent(arm.coverable_full / arm.coverable)
    return f"{arm.coverable_full} of {arm.coverable} ({share})"


def drift_table(console: Console, result: ScenarioResult) -> Table:
    """The drift of each pair of arms, worst over steps, beside what it is judged on."""
    wide = is_wide(console)
    more = ["Tokens\ndiffer"] if wide else []
    table = new_table(
        ["Drift", *(["of, from"] if wide else []), "Verdict"],
        ["Steps", "Relative\n(limit)", "1 - cosine\n(limit)", "Top-1", *more],
    )
    for column in table.columns[-4 - len(more) :]:
        column.no_wrap = True  # a long verdict folds, numbers do not
    kinds = [drift.kind for drift in result.drifts]
    for drift in result.drifts:
        alone = wide or kinds.count(drift.kind) == 1
        cells = [drift.kind if alone else f"{drift.kind}, {padded_like(drift.arm)}"]
        cells += [f"{drift.arm}, {drift.twin}"] if wide else []
        cells += [drift_words(drift), str(drift.num_steps_compared)]
        cells += [
            units.against(drift.max_relative, drift.limit_relative),
            units.against(drift.max_cosine_gap, drift.limit_cosine_gap),
        ]
        cells += [units.percent(drift.top1_agreement)]
        if wide:
            cells += [str(drift.token_mismatches)]
        table.add_row(*cells, style="" if drift.ok else "red")
    return table


def padded_like(label: str) -> str:
    """The graph arm that a label is about: `full` of `eager_padded[full]` and of `full`."""
    return label.rpartition("[")[2].rstrip("]")


def drift_words(drift: DriftSummary) -> str:
    """`within budget`; a drift that is not allowed says so and names the tensor."""
    words = OUTCOMES.get(drift.worst.outcome, drift.worst.outcome)
    return words if drift.ok else f"NOT ALLOWED: {words} in {drift.worst.tensor}"
