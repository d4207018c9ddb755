"""The gate's judge: rules, what a baseline measured, what a run measured -> one finding each.

Owns what each metric of a rule is in samples and how a finding is decided. Reads records only; it
starts nothing and knows no file. The statistics are in shift.py, docs/gate.md argues for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

import msgspec

from pcpbench.checks.acceptances import acceptance_of
from pcpbench.checks.shift import MIN_PROCESSES, num_needed, num_needed_of_both, shift_of
from pcpbench.gate_results import Finding, GateVerdict
from pcpbench.gate_rules import (
    CAPTURE_TIME,
    COUNTS,
    DEFAULT_SOURCE,
    FULL_SHARE,
    Acceptance,
    Form,
    Rule,
)
from pcpbench.gate_samples import JudgedScenario, ProcessSample, ScenarioSample, wrong_tokens
from pcpbench.records import Notice

ALPHA: Final = 0.01
"""Chance, at each look, that an interval of any finding lies wholly on the wrong side."""


CHANGED: Final = "the steps are not those of the baseline"


@dataclass(frozen=True)
class Side:
    """What was measured of one side: processes, and what the judge said of each scenario."""

    processes: tuple[ProcessSample, ...]
    judged: tuple[JudgedScenario, ...]

    def scenarios(self) -> list[str]:
        """Names in the order of the first process."""
        return [s.scenario for s in self.processes[0].scenarios] if self.processes else []

    def samples(self, scenario: str) -> list[ScenarioSample]:
        """One scenario's sample of each process that has it."""
        return [s for p in self.processes for s in p.scenarios if s.scenario == scenario]

    def verdict_on(self, scenario: str) -> JudgedScenario | None:
        """What the judge said of a scenario; None where it was not asked."""
        return next((j for j in self.judged if j.scenario == scenario), None)


@dataclass(frozen=True)
class Case:
    """Two sides and what must be known to hold one against the other.

    other_times: why absolute times of the two may not be compared, "" where they may.
    incomparable: why nothing may be, "" for a sound pair. today: the day on which acceptances are
    looked at.
    """

    baseline: Side
    run: Side
    today: date
    other_times: str = ""
    incomparable: str = ""


def judge_gate(
    case: Case, rules: Sequence[Rule], acceptances: Sequence[Acceptance] = ()
) -> tuple[Finding, ...]:
    """One finding for each rule, and for each scenario where the rule is about times."""
    timed = [(rule, scenario) for rule in rules for scenario in _timed_scenarios(rule, case)]
    alpha = ALPHA / max(len(timed), 1)
    findings = []
    for rule in rules:
        accepted = acceptance_of(rule, acceptances, case.today)
        if rule.metric in COUNTS:
            findings.append(_judge_count(rule, case))
        elif case.incomparable:
            findings.append(_no_answer(rule, "", case.incomparable))
        elif rule.metric == FULL_SHARE:
            findings.append(_judge_share(rule, case, accepted))
        else:
            places = [scenario for other, scenario in timed if other is rule]
            findings += [_judge_time(rule, place, case, accepted, alpha) for place in places]
            if not places:
                why = f"no scenario of the baseline has a {rule.metric}"
                findings.append(_no_answer(rule, "", why))
    return tuple(findings)


def applicable(rules: Sequence[Rule], baseline: Side) -> tuple[tuple[Rule, ...], list[Notice]]:
    """Rules without the default ones about times that no scenario of the baseline has.

    Arms without graphs have no time to capture. What somebody asked for stays, and has no answer.
    """
    case = Case(baseline=baseline, run=baseline, today=date.min)
    left = tuple(
        rule
        for rule in rules
        if rule.source == DEFAULT_SOURCE
        and rule.metric not in (*COUNTS, FULL_SHARE)
        and not _timed_scenarios(rule, case)
    )
    message = "left out: the baseline has no such time."
    notices = [Notice(setting=rule.text, message=message) for rule in left]
    return tuple(rule for rule in rules if rule not in left), notices


def is_settled(findings: Sequence[Finding]) -> bool:
    """Whether the gate need not measure more: one rule is broken for sure, or none is undecided."""
    if any(finding.verdict is GateVerdict.REGRESSION for finding in findings):
        return True
    return not any(
        finding.verdict is GateVerdict.UNDECIDED or finding.num_needed for finding in findings
    )


def is_broken(findings: Sequence[Finding]) -> bool:
    """Whether numbers are wrong: no process more could mend that, or has a speed to compare."""
    return any(
        finding.verdict is GateVerdict.REGRESSION and finding.rule.metric in COUNTS
        for finding in findings
    )


def value_of(sample: ScenarioSample, rule: Rule) -> float | None:
    """The number that one process gives a rule: a log ratio, or seconds; None where it has none.

    Ratios are to the base arm of the same process: of pairs for a median, of the two arms' own
    statistics for a mean or p99; capture time is counted in steps of the base arm.
    """
    base = sample.metrics[rule.metric if rule.metric != CAPTURE_TIME else "step"]
    if rule.metric == CAPTURE_TIME:
        found, per = sample.capture_s, None if base.base is None else base.base.median
    else:
        found, per = (
            None if stat is None else float(getattr(stat, rule.stat))
            for stat in (base.candidate, base.base)
        )
    if rule.form is Form.MORE_SECONDS:
        return found
    ratio = base.ratio
    if rule.metric == CAPTURE_TIME or rule.stat != "median":
        ratio = found / per if found is not None and per is not None and per > 0 else None
    return math.log(ratio) if ratio is not None and ratio > 0 else None


def _timed_scenarios(rule: Rule, case: Case) -> list[str]:
    """Scenarios of which the baseline has values for a rule about times."""
    if rule.metric in (*COUNTS, FULL_SHARE):
        return []
    baseline = case.baseline
    return [
        scenario
        for scenario in baseline.scenarios()
        if any(_has(sample, rule) for sample in baseline.samples(scenario))
    ]


def _has(sample: ScenarioSample, rule: Rule) -> bool:
    if rule.metric == CAPTURE_TIME:
        return sample.capture_s is not None
    return sample.metrics[rule.metric].candidate is not None


def _judge_time(
    rule: Rule, scenario: str, case: Case, accepted: Acceptance | None, alpha: float
) -> Finding:
    problem = _problem(rule, scenario, case)
    if problem:
        return _no_answer(rule, scenario, problem)
    ours, theirs = (
        [v for sample in side.samples(scenario) if (v := value_of(sample, rule)) is not None]
        for side in (case.run, case.baseline)
    )
    for values, side, name in ((theirs, case.baseline, "baseline"), (ours, case.run, "run")):
        total = len(side.processes)
        why = f"{len(values)} of {total} processes of the {name} have a value"
        if len(values) < total:  # those that lack one are no sample: theirs was too small to tell
            return _no_answer(rule, scenario, f"{why}: use a rule in us or ms")
        if total < MIN_PROCESSES:
            remedy = f"it takes {MIN_PROCESSES}: raise --max-time"
            found = _no_answer(rule, scenario, f"{why}, and {remedy}")
            return msgspec.structs.replace(found, num_needed=MIN_PROCESSES)
    decide = _Decision(rule, scenario, theirs, ours, alpha)
    found = decide.at(rule.limit)
    if found.verdict is GateVerdict.PASS or accepted is None:
        return found
    within = decide.at(accepted.rule.limit)
    if within.verdict is not GateVerdict.PASS:
        return within
    return msgspec.structs.replace(within, verdict=GateVerdict.ACCEPTED, accepted=accepted)


class _Decision:
    """One rule on one scenario, for whatever limit applies."""

    def __init__(
        self,
        rule: Rule,
        scenario: str,
        baseline: Sequence[float],
        run: Sequence[float],
        alpha: float,
    ) -> None:
        self.rule, self.scenario, self.alpha = rule, scenario, alpha
        self.baseline, self.run = baseline, run
        self.shift = shift_of(baseline, run, alpha)
        self._is_ratio = rule.form is Form.MORE

    def at(self, limit: float) -> Finding:
        """The finding if this much more is allowed (a share, or seconds)."""
        bound = math.log1p(limit) if self._is_ratio else limit
        side = self.shift.side_of(bound)
        verdict = {1: GateVerdict.REGRESSION, -1: GateVerdict.PASS, 0: GateVerdict.UNDECIDED}[side]
        needed = both = None
        if verdict is GateVerdict.UNDECIDED:
            known = self.baseline, self.run, bound, self.alpha
            needed = num_needed(*known)
            both = num_needed_of_both(*known) if needed is None else None
        back: Callable[[float], float] = math.exp if self._is_ratio else float
        more: Callable[[float], float] = math.expm1 if self._is_ratio else float
        low, high = (
            more(end) if math.isfinite(end) else None for end in (self.shift.low, self.shift.high)
        )
        return Finding(
            rule=self.rule,
            scenario=self.scenario,
            verdict=verdict,
            why=_WHY[verdict],
            limit=limit,
            baseline=back(_median(self.baseline)),
            run=back(_median(self.run)),
            change=more(self.shift.estimate),
            low=low,
            high=high,
            confidence=1 - 2 * self.alpha,
            num_baseline=len(self.baseline),
            num_run=len(self.run),
            num_needed=needed,
            num_baseline_needed=both,
            baseline_values=tuple(map(back, self.baseline)),
            run_values=tuple(map(back, self.run)),
        )


_WHY: Final = {
    GateVerdict.REGRESSION: "the whole interval is above the limit",
    GateVerdict.PASS: "the whole interval is below the limit",
    GateVerdict.UNDECIDED: "the interval holds the limit",
}


def _problem(rule: Rule, scenario: str, case: Case) -> str:
    """Why a scenario's times may not be compared, "" where they may."""
    judged, samples = case.run.verdict_on(scenario), case.run.samples(scenario)
    hashes = {s.plan_hash for side in (case.baseline, case.run) for s in side.samples(scenario)}
    if judged is not None:
        hashes.add(judged.plan_hash)
    if len(hashes) > 1:
        return f"the scenario is another one now: {CHANGED}"
    if judged is None or judged.outcome != "pass":
        outcome = "was not judged" if judged is None else f"is {judged.outcome}"
        return f"the run's scenario {outcome}: it has no speed to compare"
    if not case.run.processes:
        return "the run has not timed this scenario: it has no process"
    if not samples:
        return "the run has not timed this scenario"
    if rule.form is Form.MORE_SECONDS and case.other_times:
        return f"{case.other_times}: use a rule in %, such as {rule.metric}:5%"
    return ""


def _judge_count(rule: Rule, case: Case) -> Finding:
    judged = case.run.judged
    unknown = case.incomparable or _unknown(case)
    if not judged:
        return _no_answer(rule, "", case.incomparable or "no scenario was judged")
    skipped = [j for j in judged if j.outcome not in ("pass", "fail")]
    counts = {j.scenario: _count(j, rule.metric, case.run) for j in judged}
    total = sum(counts.values())
    where = ", ".join(f"{name} ({number})" for name, number in counts.items() if number)
    if total > rule.limit:
        reasons = [r for j in judged if counts[j.scenario] for r in j.reasons[:1]]
        if rule.metric == "contracts":
            reasons += [
                wrong_tokens(j.scenario, n) for j in judged if (n := _num_wrong(j, case.run))
            ]
        verdict, why = GateVerdict.REGRESSION, "; ".join([where, *reasons[:2]])
    elif skipped:
        first = skipped[0]
        told = next(iter(first.reasons), "no reason was given")
        verdict, why = GateVerdict.NOT_COMPARABLE, f"{first.scenario} is {first.outcome}: {told}"
    elif unknown:
        verdict, why = GateVerdict.NOT_COMPARABLE, unknown
    else:
        verdict, why = GateVerdict.PASS, where or "none"
    baseline = sum(_count(j, rule.metric, case.baseline) for j in case.baseline.judged)
    return Finding(
        rule=rule,
        scenario="",
        verdict=verdict,
        why=why,
        limit=rule.limit,
        baseline=float(baseline),
        run=float(total),
    )


def _unknown(case: Case) -> str:
    """Scenarios of the baseline that the run says nothing of, or that are others now; "" for
    none."""
    before = {judged.scenario: judged.plan_hash for judged in case.baseline.judged}
    now = {judged.scenario: judged.plan_hash for judged in case.run.judged}
    lacking = [name for name in before if name not in now]
    if lacking:
        return (
            f"the run did not judge {', '.join(lacking)} of the baseline: run the same scenarios, "
            "or record the baseline anew"
        )
    changed = [name for name, steps in before.items() if now[name] != steps]
    if not changed:
        return ""
    verb = "is another one" if len(changed) == 1 else "are others"
    return f"{', '.join(changed)} {verb} now: {CHANGED}"


def _count(judged: JudgedScenario, metric: str, side: Side) -> int:
    """Drifts that are not allowed, or contracts broken: by the judge's count, in timed runs, or
    once for a scenario that failed for anything else."""
    if metric == "drift":
        return judged.num_drifts
    wrong = _num_wrong(judged, side)
    other = judged.outcome == "fail" and not (judged.num_drifts or judged.num_violations)
    return judged.num_violations + wrong + int(other)


def _num_wrong(judged: JudgedScenario, side: Side) -> int:
    return sum(sample.num_wrong for sample in side.samples(judged.scenario))


def _judge_share(rule: Rule, case: Case, accepted: Acceptance | None) -> Finding:
    """The scenario whose share of FULL steps is worst off under the rule."""
    limit = rule.limit if accepted is None else max(rule.limit, accepted.rule.limit)
    found: list[tuple[float, str, float, float | None]] = []
    for judged in case.run.judged:
        share, before = judged.full_share, case.baseline.verdict_on(judged.scenario)
        was = None if before is None else before.full_share
        if share is None or (rule.form is Form.LESS and was is None):
            continue
        if before is not None and before.plan_hash != judged.plan_hash:
            continue
        least = rule.limit if rule.form is Form.AT_LEAST else (was or 0.0) - rule.limit
        found.append((share - least, judged.scenario, share, was))
    unknown, least_room = _unknown(case), -1e-12
    if not found:
        return _no_answer(rule, "", unknown or "no scenario of both sides has a decode step")
    room, scenario, share, was = min(found)
    verdict = GateVerdict.PASS
    if room < least_room:
        slack = limit - rule.limit
        verdict = GateVerdict.ACCEPTED if room + slack >= least_room else GateVerdict.REGRESSION
    if unknown and verdict is not GateVerdict.REGRESSION:
        return _no_answer(rule, "", unknown)
    return Finding(
        rule=rule,
        scenario="" if verdict is GateVerdict.PASS else scenario,
        verdict=verdict,
        why=_share_words(rule, limit, share, was),
        limit=limit,
        baseline=was,
        run=share,
        accepted=accepted if verdict is GateVerdict.ACCEPTED else None,
    )


def _share_words(rule: Rule, limit: float, share: float, was: float | None) -> str:
    """`FULL served 100 % -> 80 % of decode steps, limit: a fall by 1 point`."""
    before = "" if was is None else f"{100 * was:.4g} % -> "
    held = (
        f"at least {100 * limit:g} %"
        if rule.form is Form.AT_LEAST
        else f"a fall by {100 * limit:g} points"
    )
    return f"FULL served {before}{100 * share:.4g} % of decode steps, limit: {held}"


def _no_answer(rule: Rule, scenario: str, why: str) -> Finding:
    return Finding(
        rule=rule,
        scenario=scenario,
        verdict=GateVerdict.NOT_COMPARABLE,
        why=why,
        limit=rule.limit,
    )


def _median(values: Sequence[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    if len(values) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
