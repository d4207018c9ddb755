"""A task run on a console: the verdict, one row a mode, the traced tokens, how to read it.

Owns the layout. A cell with times has the value above and its ratio to NONE below; a narrow
console leaves the intervals to the files.
"""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table

from pcpbench.modes_results import ModeRow, ModesResult, Served, Speed, TokenTrace
from pcpbench.report import units
from pcpbench.report.console import (
    Facts,
    add_notices,
    add_planted,
    is_wide,
    new_table,
    verdict_line,
)
from pcpbench.results import Outcome, Ratio, Stat

SHOWN: Final = 8
"""Traced tokens that are shown of each verdict; modes.json has all of them."""

ROOM_FOR_INTERVALS: Final = 136
_NARROW: Final = {
    "FULL_DECODE_ONLY": "FULL_\nDECODE_ONLY",
    "FULL_AND_PIECEWISE": "FULL_AND_\nPIECEWISE",
}


def print_modes(result: ModesResult, console: Console) -> None:
    """Print the whole report."""
    print_modes_verdict(result, console)
    console.print()
    console.print(_table(result, console))
    facts = Facts()
    for label, kind in (("NOT explained", False), ("Explained", True)):
        mine = [each for each in result.traces if each.explained is kind]
        facts.add_all(label, [_traced(each) for each in mine[:SHOWN]])
        if len(mine) > SHOWN:
            facts.add("", f"and {len(mine) - SHOWN} more, in modes.json")
    add_notices(facts, result.notices)
    facts.add_all("Reading", _reading(result, console.width >= ROOM_FOR_INTERVALS))
    facts.add("Files", result.run_dir)
    console.print()
    facts.print(console)


def print_modes_verdict(result: ModesResult, console: Console) -> None:
    """The verdict in one sentence, and what was run; also the talk beside `--json`."""
    verdict_line(console, result.outcome, _verdict(result))
    facts = Facts()
    add_planted(facts, result.settings)
    facts.add("Run", _run(result), style="dim")
    if result.outcome is not Outcome.PASS:
        facts.add_all("Because", result.reasons)
    facts.print(console)


def _verdict(result: ModesResult) -> str:
    apart = len(result.traces)
    if result.outcome is Outcome.FAIL:
        more = f"; and {len(result.reasons) - 1} more" if len(result.reasons) > 1 else ""
        return f"the graph modes do not compute what NONE computes: {result.reasons[0]}{more}."
    if result.outcome is Outcome.NOT_COMPARED:
        return f"the modes could not be compared: {'; '.join(result.reasons)}."
    if not apart:
        return "all four modes generated the same tokens, and every contract held."
    return f"{units.count(apart, 'differing token')}, each explained by padding drift."


def _run(result: ModesResult) -> str:
    settings, row = result.settings, next(iter(result.rows), None)
    names = (
        ("pcp", "prefill_context_parallel_size"),
        ("dcp", "decode_context_parallel_size"),
        ("tp", "tensor_parallel_size"),
        ("interleave", "cp_kv_cache_interleave_size"),
        ("spec-tokens", "num_speculative_tokens"),
    )
    sizes = " ".join(f"{short} {settings[name]}" for short, name in names if settings.get(name))
    sizes += ", microbatches" if settings.get("enable_dbo") else ""
    counts = "" if row is None else f"{row.num_requests} prompts, {row.num_tokens} output tokens"
    parts = (
        counts,
        units.count(result.num_steps, "step"),
        sizes,
        *(str(settings[key]) for key in ("model", "dtype", "device", "feed") if key in settings),
        f"{result.wall_s:.1f} s",
    )
    return ", ".join(part for part in parts if part)


def _table(result: ModesResult, console: Console) -> Table:
    wide = is_wide(console)
    timed = any(row.speed is not None for row in result.rows)
    columns = ["TPOT", "TTFT", "Tokens\nper s", "Launch\noverhead" if wide else "Launch"]
    table = new_table(
        ["Mode", "Tokens equal,\nfirst difference" if wide else "Equal,\nfirst"],
        [*(columns if timed else []), "FULL", "PIECEWISE" if wide else "PIECE-\nWISE"],
    )
    table.columns[0].no_wrap = True
    for row, times in zip(
        result.rows, _times(result, console.width >= ROOM_FOR_INTERVALS), strict=True
    ):
        table.add_row(
            row.mode if wide else _NARROW.get(row.mode, row.mode),
            f"{_agreement(row)}\n{_first(row, wide)}",
            *(times if timed else []),
            _shares(row.steps, row.tokens, "full"),
            _shares(row.steps, row.tokens, "piecewise"),
        )
    return table


def _times(result: ModesResult, has_room: bool) -> list[list[str]]:
    """Cells of the timed columns, mode after mode; the times of a column have one unit."""
    speeds = [row.speed or Speed() for row in result.rows]
    columns = []
    for field, prefix in (("tpot", "tpot"), ("ttft", "ttft"), ("rate", "throughput"),
                          ("launch", "launch")):  # fmt: skip
        if field == "rate":
            values = [_rate(speed) for speed in speeds]
        else:
            values = list(units.times(*(_median(getattr(speed, field)) for speed in speeds)))
        ratios = [_ratio(getattr(speed, f"{prefix}_ratio"), has_room) for speed in speeds]
        columns.append([f"{v}\n{r}" for v, r in zip(values, ratios, strict=True)])
    return [list(cells) for cells in zip(*columns, strict=True)]


def _rate(speed: Speed) -> str:
    rates = speed.tokens_per_s
    return f"{sum(rates) / len(rates):,.0f}" if rates else units.NOTHING


def _ratio(found: Ratio | None, has_room: bool) -> str:
    if found is None:
        return ""
    return units.ratio(found) if has_room else units.rough_ratio(found)


def _median(stat: Stat | None) -> float | None:
    return None if stat is None else stat.median


def _agreement(row: ModeRow) -> str:
    return units.percent(row.agreement)


def _first(row: ModeRow, wide: bool) -> str:
    if row.first is None:
        return units.NOTHING
    first = row.first
    if not wide:
        return f"{first.request}:{first.token_index} at {first.step}"
    return f"{first.request} token {first.token_index}, step {first.step}"


def _shares(steps: Served, tokens: Served, kind: str) -> str:
    if not getattr(steps, kind):
        return f"{units.NOTHING}\n{units.NOTHING}"
    return f"{units.percent(steps.share(kind))}\n{units.percent(tokens.share(kind))}"


def _traced(found: TokenTrace) -> str:
    place = f"{found.mode}, {found.request} token {found.token_index}, step {found.step}"
    tokens = f"{found.mode_token} for {found.none_token}"
    numbers = ""
    if found.gap is not None:
        numbers = (
            f"; gap in NONE {units.small(found.gap)}, padding drift {units.small(found.drift)} "
            f"(at most {units.small(found.limit)})"
        )
    why = "" if found.explained else f": {found.why}"
    return f"{place}: {tokens}{numbers}{why}"


def _reading(result: ModesResult, has_room: bool) -> list[str]:
    forced = result.settings.get("feed") == "teacher-forced"
    lines = [
        "tokens equal: share of output tokens that are those of NONE at the same place"
        + (", all modes fed the same tokens" if forced else ", each mode fed its own tokens"),
        "FULL, PIECEWISE: share of the steps that it served, below of the tokens scheduled in them",
        "a differing token is explained where NONE held the two candidates closer than twice the "
        "padding drift of that row's logits, and the drift is within its budget",
    ]
    if any(row.speed is not None for row in result.rows):
        lines += [
            "below a time: its ratio to NONE, median over pairs"
            + (", [95 % interval in this process]" if has_room else "")
            + "; ~ no clear difference: the 95 % interval holds 1",
            "scope = worker: all ranks run one after the other; not to be set against a served "
            "system's times",
        ]
    elif result.outcome is not Outcome.PASS:
        lines.append("no times: the tokens were not judged sound")
    return lines
