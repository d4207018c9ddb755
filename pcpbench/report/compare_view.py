"""A comparison on a console: the verdict first, then every scenario, then how to read it.

Owns the order of the report and the overview over scenarios. Scenarios are in scenario_view.py.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pcpbench.records import Notice
from pcpbench.report import units
from pcpbench.report.arms import contract_order, find_arm
from pcpbench.report.console import (
    Facts,
    add_notices,
    add_planted,
    badge,
    is_wide,
    new_table,
    verdict_line,
)
from pcpbench.report.dispatch_view import add_totals, add_unserved
from pcpbench.report.scenario_tables import has_times
from pcpbench.report.scenario_view import print_scenario
from pcpbench.results import CompareResult, Outcome, Ratio, ScenarioResult

SHOWN = 3
"""Scenarios that the verdict names."""


def print_compare(result: CompareResult, console: Console) -> None:
    """Print the whole report."""
    print_verdict(result, console)
    if len(result.scenarios) > 1:
        console.print()
        console.print(_overview(result, console))
    for scenario in result.scenarios:
        print_scenario(console, scenario, result.base, result.candidate, result.divergence)
    console.print()
    facts = Facts()
    if len(result.scenarios) > 1:
        add_totals(facts, result.scenarios, (result.base, result.candidate))
    add_notices(facts, _notices(result))
    facts.add("Not located", _unlocated(result))
    _add_reading(facts, result)
    facts.print(console)
    if len(result.scenarios) > 1:
        console.print()
        verdict_line(console, result.outcome, verdict(result))  # the first one has scrolled away


def _unlocated(result: CompareResult) -> str:
    """Says so when more scenarios failed than the one whose first difference was looked for."""
    if result.divergence is None:
        return ""
    located = result.divergence.scenario
    others = [
        s.scenario for s in result.scenarios if s.outcome is Outcome.FAIL and s.scenario != located
    ]
    if not others:
        return ""
    failed = units.count(len(others), "more scenario")
    return (
        f"{failed} failed ({', '.join(others[:SHOWN])}{', ...' if others[SHOWN:] else ''}); the "
        f"first difference was looked for in {located} only: use --scenario {others[0]} for another"
    )


def _notices(result: CompareResult) -> tuple[Notice, ...]:
    """Those of the run and of its scenarios, each once: scenarios with equal limits repeat them."""
    found = [*result.notices, *(n for scenario in result.scenarios for n in scenario.notices)]
    return tuple(dict.fromkeys(found))


def print_verdict(result: CompareResult, console: Console) -> None:
    """The verdict in one sentence, and what was compared; also the talk beside `--json`."""
    verdict_line(console, result.outcome, verdict(result))
    facts = Facts()
    add_planted(facts, result.settings)
    facts.add("Compared", _compared(result), style="dim")
    add_unserved(facts, result.scenarios)
    if result.outcome is Outcome.PASS:
        ranges = [_range("TPOT", [s.tpot_ratio for s in result.scenarios])]
        ranges.append(_range("launch overhead", [s.launch_ratio for s in result.scenarios]))
        told = ", ".join(text for text in ranges if text)
        if told:
            facts.add("Ratio", f"{result.candidate} / {result.base}: {told}")
    facts.print(console)


def verdict(result: CompareResult) -> str:
    """One sentence: what the outcome is of, and the reason."""
    arms, total = f"{result.candidate} vs {result.base}", len(result.scenarios)
    if result.outcome is Outcome.PASS:
        captured = any(d.kind == "capture" for s in result.scenarios for d in s.drifts)
        what = "replays bitwise equal" if captured else "drift within budget"
        planted = result.settings.get("inject")  # only what is no fault leaves a PASS
        told = f", as it must be with {planted} planted, which is no fault" if planted else ""
        return f"{arms}, {units.count(total, 'scenario')}: {what}, contracts held{told}."
    hit = [s for s in result.scenarios if s.outcome is result.outcome]
    if not hit:
        return f"{arms}: {'; '.join(result.reasons) or 'no reason was given'}."
    causes = "; ".join(f"{s.scenario} ({cause(s)})" for s in hit[:SHOWN])
    more = f"; and {len(hit) - SHOWN} more" if len(hit) > SHOWN else ""
    verb = "failed" if result.outcome is Outcome.FAIL else "could not be compared"
    return f"{arms}: {len(hit)} of {units.count(total, 'scenario')} {verb}: {causes}{more}."


def cause(scenario: ScenarioResult) -> str:
    """The shortest true answer to why: contracts by id, drifts by kind, else the first reason."""
    parts = sorted({v.contract for v in scenario.violations}, key=contract_order)
    parts += [f"{d.kind} drift" for d in scenario.drifts if not d.ok]
    if scenario.outcome is Outcome.FAIL and parts:
        return ", ".join(dict.fromkeys(parts))
    return next(iter(scenario.reasons), "no reason was given")


def _compared(result: CompareResult) -> str:
    settings = result.settings
    names = (
        ("pcp", "prefill_context_parallel_size"),
        ("dcp", "decode_context_parallel_size"),
        ("tp", "tensor_parallel_size"),
        ("interleave", "cp_kv_cache_interleave_size"),
    )
    sizes = " ".join(f"{short} {settings[name]}" for short, name in names if name in settings)
    if settings.get("num_speculative_tokens"):
        sizes += f" spec-tokens {settings['num_speculative_tokens']}"
    if settings.get("enable_expert_parallel"):
        sizes += f", experts by {settings['all2all_backend']}"
    if settings.get("dynamic_spec", "off") != "off":
        sizes += f" (dynamic by {settings['dynamic_spec']})"
    if settings.get("draft_model", "planned") != "planned":
        sizes += f" (draft model {settings['draft_model']})"
    sizes += ", microbatches" if settings.get("enable_dbo") else ""
    settings = {**settings, "device": result.environment.device}
    keys = ("model", "dtype", "device", "backend", "feed")
    kinds = [str(settings[key]) for key in keys if settings.get(key, "auto") != "auto"]
    target = str(settings.get("target", "builtin"))
    driven = "" if target == "builtin" else f"{target} {settings.get('target_version', '')}".strip()
    return ", ".join(part for part in (driven, sizes, *kinds, f"{result.wall_s:.1f} s") if part)


def _range(name: str, ratios: list[Ratio | None]) -> str:
    """`TPOT 0.80 to 0.88 (clear in 3 of 4)`: the others' intervals hold 1."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return ""
    medians = [ratio.median for ratio in known]
    low, high = f"{min(medians):.2f}", f"{max(medians):.2f}"
    told = f"{name} {low}" if low == high else f"{name} {low} to {high}"
    num_clear = sum(units.is_clear(ratio) for ratio in known)
    return told if num_clear == len(known) else f"{told} (clear in {num_clear} of {len(known)})"


def _overview(result: CompareResult, console: Console) -> Table:
    wide = is_wide(console)
    is_timed = any(has_times(scenario) for scenario in result.scenarios)
    table = new_table(
        ["Scenario", "Verdict", *(["TPOT\nratio", "Launch\nratio"] if is_timed else [])],
        ["FULL of\ncoverable", "Padding\nwaste", *(["Took"] if wide else [])],
    )
    for scenario in result.scenarios:
        arm = find_arm(scenario, result.candidate)
        passed = scenario.outcome is Outcome.PASS
        ratios = [scenario.tpot_ratio, scenario.launch_ratio] if passed else [None, None]
        cells = [units.ratio(r) if wide else units.rough_ratio(r) for r in ratios]
        cells = cells if is_timed else []
        covered = f"{arm.coverable_full} of {arm.coverable}" if arm and arm.coverable else "-"
        waste = units.percent(arm.padding_waste) if arm else units.NOTHING
        took = [f"{scenario.wall_s:.1f} s"] if wide else []
        table.add_row(scenario.scenario, badge(scenario.outcome), *cells, covered, waste, *took)
    return table


def _add_reading(facts: Facts, result: CompareResult) -> None:
    settings = result.settings
    if any(has_times(scenario) for scenario in result.scenarios):
        facts.add_all("Times", _reading(result))
    elif settings.get("repetitions") == 0:
        facts.add("Times", "not timed (--repetitions 0 or --quick)")
    elif result.scenarios:
        facts.add("Times", "not timed: no scenario passed")
    if result.run_dir:
        facts.add("Files", result.run_dir)


def _reading(result: CompareResult) -> list[str]:
    settings = result.settings
    ranks = settings.get("prefill_context_parallel_size", 1) * settings.get(
        "tensor_parallel_size", 1
    )
    launch = (
        "step time - kernel floor (its kernels alone)"
        if result.environment.device.startswith("cpu")
        else "time until a step's launch calls return"
    )
    lines = [
        "TPOT = (last - first token time) / (output tokens - 1)",
        "ITL = gap between successive steps that gave a request tokens"
        if settings.get("num_speculative_tokens")
        else "ITL = gap between successive tokens of a request",
        f"launch overhead = {launch}",
        "ratio = median over pairs, [95 % interval in this process]; pairs: of the same request, "
        "gap or step; ~ no clear difference: the interval holds 1",
        "scope = worker: not to be set against a served system's TPOT",
    ]
    if ranks > 1:
        lines.append(
            "ranks share one device and run one after the other: times are sums over "
            f"{ranks} ranks (the reference arm has one)"
        )
    return lines
