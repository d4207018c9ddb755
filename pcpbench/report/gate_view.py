"""A gate on a console: the verdict first, then every rule with both numbers, then what to do.

Owns the words and the table; the same words stand in JUnit, annotations and the step summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from pcpbench.gate_results import Finding, GateResult, GateVerdict
from pcpbench.gate_rules import (
    CAPTURE_TIME,
    COUNTS,
    DEFAULT_SOURCE,
    FULL_SHARE,
    Form,
    effective_rules,
)
from pcpbench.report import units
from pcpbench.report.console import Facts, add_notices, is_wide, new_table, words_line

STYLES: Final = {
    GateVerdict.PASS: "bold green",
    GateVerdict.ACCEPTED: "bold green",
    GateVerdict.REGRESSION: "bold red",
    GateVerdict.UNDECIDED: "bold yellow",
    GateVerdict.NOT_COMPARABLE: "bold yellow",
    GateVerdict.CRASHED: "bold yellow",
}
SHOWN: Final = 3
"""Findings that the verdict names."""
LONGEST_NAME: Final = 36
"""Up to here a name stays whole, and it is the numbers that stand in two lines."""
UNANSWERED: Final = (GateVerdict.UNDECIDED, GateVerdict.NOT_COMPARABLE, GateVerdict.CRASHED)


def print_gate(result: GateResult, console: Console) -> None:
    """Print the whole report."""
    words_line(console, word(result.verdict), STYLES[result.verdict], summary(result))
    facts = Facts()
    facts.add("Compared", compared(result), style="dim")
    facts.add("Rules", rules_of(result), style="dim")
    facts.print(console)
    console.print()
    wide = is_wide(console)
    table = new_table(
        ["Rule", *(["Scenario"] if wide else []), "Verdict"],
        ["Baseline", "Run", "Change [interval]", *(["Confidence", "Processes"] if wide else [])],
    )
    longest = max((len(finding.scenario) for finding in result.findings), default=0)
    table.columns[0].no_wrap = longest <= LONGEST_NAME
    for finding in result.findings:
        name = Text(finding.rule.text)
        if wide:
            names = [name, Text(finding.scenario or "all")]
        else:  # both in one cell: there is no room for two columns of them
            names = [name.append(f"\n  {finding.scenario}", "dim") if finding.scenario else name]
        cells = cells_of(finding)
        more = [confidence(finding), processes(finding)] if wide else []
        badge = Text(finding.verdict.value, style=STYLES[finding.verdict])
        table.add_row(*names, badge, *cells, *more)
    console.print(table)
    console.print()
    facts = Facts()
    for verdict in (GateVerdict.REGRESSION, *UNANSWERED):
        found = [finding for finding in result.findings if finding.verdict is verdict]
        facts.add_all(verdict.value.capitalize(), distinct(found))
    for finding in result.findings:
        if finding.accepted is not None:
            facts.add("Accepted", acceptance(finding))
    add_notices(facts, result.notices)
    for command in dict.fromkeys(f.next_step for f in result.findings if f.next_step):
        facts.add("Next", command)
    facts.add_all("Reading", reading(result))
    if result.run_dir:
        facts.add("Files", result.run_dir)
    facts.print(console)


def word(verdict: GateVerdict) -> str:
    """The verdict as a word that no colour is needed for."""
    return verdict.value.upper()


def summary(result: GateResult) -> str:
    """One sentence: how many rules held, and the worst of those that did not."""
    arms = f"{result.settings.get('candidate')} vs {result.settings.get('base')}"
    bad = [f for f in result.findings if f.verdict is result.verdict]
    total = units.count(len(result.findings), "finding")
    if result.verdict in (GateVerdict.PASS, GateVerdict.ACCEPTED):
        accepted = sum(f.verdict is GateVerdict.ACCEPTED for f in result.findings)
        told = f", {accepted} of them accepted for a while" if accepted else ""
        return f"{arms}: no rule was broken, {total}{told}."
    sentences = distinct(bad)
    named = "; ".join(sentences[:SHOWN])
    more = f"; and {len(sentences) - SHOWN} more" if len(sentences) > SHOWN else ""
    unanswered = sum(f.verdict in UNANSWERED for f in result.findings) - (
        len(bad) if result.verdict in UNANSWERED else 0
    )
    silent = f" ({unanswered} without an answer)" if unanswered > 0 else ""
    return f"{arms}: {len(bad)} of {total}{silent}: {named or 'nothing could be judged'}{more}."


def distinct(findings: Sequence[Finding]) -> list[str]:
    """A sentence for each finding; one for several that have no numbers and the same reason."""
    by_reason: dict[str, str] = {}
    for finding in findings:
        text = sentence(finding)
        key = text if finding.change is not None else finding.why
        first = by_reason.setdefault(key, text)
        if first != text:
            by_reason[key] = finding.why
    return list(by_reason.values())


def sentence(finding: Finding) -> str:
    """The facts of one finding: what, both numbers, the interval, the limit, what would decide."""
    where = f" of {finding.scenario}" if finding.scenario else ""
    text = f"{finding.rule.name}{where}: {finding.why}"
    if finding.change is None:
        return text
    base, run, change = cells_of(finding)
    text = f"{finding.rule.name}{where}: {base} -> {run}, {change}, limit {limit(finding)}"
    if finding.verdict is not GateVerdict.UNDECIDED:
        return text
    if finding.num_baseline_needed is not None:
        return (
            f"{text}; a baseline of {finding.num_baseline} processes is too small to decide it: "
            f"record one of about {finding.num_baseline_needed} (`compare --save-baseline FILE "
            f"--processes {finding.num_baseline_needed}`)"
        )
    if finding.num_needed is None:
        return f"{text}; no sensible number of processes would decide it at this spread"
    return (
        f"{text}; about {finding.num_needed} processes would decide it, {finding.num_run} were "
        "measured: raise --max-time"
    )


def told(finding: Finding) -> str:
    """The facts of one finding, and the command that shows more where there is one."""
    more = f"; to see where: {finding.next_step}" if finding.next_step else ""
    return f"{sentence(finding)}{more}"


def acceptance(finding: Finding) -> str:
    """How far a finding is excused, until when and why; "" for one that is not."""
    accepted = finding.accepted
    if accepted is None:
        return ""
    return f"{accepted.rule.text} until {accepted.until}: {accepted.reason}"


def cells_of(finding: Finding) -> tuple[str, str, str]:
    """Baseline, run, and change with its interval."""
    if finding.run is None:
        return units.NOTHING, units.NOTHING, units.NOTHING
    rule = finding.rule
    if rule.metric in COUNTS:
        was = units.NOTHING if finding.baseline is None else f"{finding.baseline:.0f}"
        return was, f"{finding.run:.0f}", units.NOTHING
    if rule.metric == FULL_SHARE:
        return units.percent(finding.baseline), units.percent(finding.run), units.NOTHING
    if rule.form is Form.MORE_SECONDS:
        base, run = units.times(finding.baseline, finding.run)
        ends = units.times(finding.change, finding.low, finding.high)
        return base, run, f"{_signed(ends[0])} [{_signed(ends[1])}, {_signed(ends[2])}]"
    digits = 1 if rule.metric == CAPTURE_TIME else 3
    base, run = f"{finding.baseline:.{digits}f}", f"{finding.run:.{digits}f}"
    return base, run, f"{_share(finding.change)} % {_interval(finding)}"


def limit(finding: Finding) -> str:
    """What applied, with its unit, and whether that is more than the rule says."""
    excused = " (accepted)" if finding.limit != finding.rule.limit else ""
    if finding.rule.form is Form.MORE_SECONDS:
        return f"+{units.times(finding.limit)[0]}{excused}"
    if finding.rule.metric in COUNTS:
        return f"{finding.limit:.0f}"
    return f"+{100 * finding.limit:g} %{excused}"


def compared(result: GateResult) -> str:
    """What was held against what."""
    return (
        f"{result.run} ({units.count(result.num_run, 'process').replace('processs', 'processes')}) "
        f"against {result.baseline} ({result.num_baseline}), {result.wall_s:.0f} s"
    )


def rules_of(result: GateResult) -> str:
    """Where the rules came from, what somebody set first, and which default ones do not apply."""
    by_source: dict[str, list[str]] = {}
    for rule in sorted(result.rules, key=lambda rule: rule.source == DEFAULT_SOURCE):
        by_source.setdefault(rule.source, []).append(rule.text)
    told = [f"{source}: {', '.join(texts)}" for source, texts in by_source.items()]
    names = {rule.name for rule in result.rules}
    off = [rule.name for rule in effective_rules([]) if rule.name not in names]
    return "; ".join([*told, *([f"not judged: {', '.join(off)}"] if off else [])])


def confidence(finding: Finding) -> str:
    """Of the interval."""
    return units.NOTHING if finding.confidence is None else f"{100 * finding.confidence:.1f} %"


def processes(finding: Finding) -> str:
    """Behind the run and behind the baseline."""
    return f"{finding.num_run} / {finding.num_baseline}" if finding.num_run else units.NOTHING


def reading(result: GateResult) -> list[str]:
    """How to read the numbers."""
    base = result.settings.get("base")
    return [
        f"a rule in % judges the ratio to the {base} arm of the same process (capture_time: in "
        f"steps of {base}); what slows both arms alike does not show in it",
        "numbers are medians over fresh processes; change: how much more the run has, with an "
        "interval; a regression lies above the limit with all of it, a pass below",
    ]


def _interval(finding: Finding) -> str:
    return f"[{_share(finding.low)}, {_share(finding.high)}]"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:+.1f}"


def _signed(text: str) -> str:
    return "?" if text == units.NOTHING else text if text.startswith("-") else f"+{text}"
