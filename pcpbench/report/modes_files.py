"""The files of a task run: `modes.csv`, `modes.json` and `manifest.json`.

Owns the shape of both documents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pcpbench.modes_results import ModeRow, ModesResult, Speed, TokenTrace
from pcpbench.records import Environment
from pcpbench.report import columns
from pcpbench.report.csv_files import Cell, Row, header, lines, ms
from pcpbench.report.json_out import head, in_ms
from pcpbench.report.plain import to_json
from pcpbench.report.run_dir import RESULTS
from pcpbench.report.run_files import RunFiles
from pcpbench.results import Ratio, Stat

_STATS = (
    ("tpot", "tpot"),
    ("ttft", "ttft"),
    ("step", "step"),
    ("launch", "launch_overhead"),
)


class ModesFiles(RunFiles):
    """Use as a context manager: `finish` writes both files."""

    def __init__(
        self,
        out: Path | None,
        *,
        settings: dict[str, Any],
        environment: Environment,
        root: Path = RESULTS,
    ) -> None:
        super().__init__("modes", out, settings, environment, root)

    def finish(self, result: ModesResult) -> None:
        """Write what the run came to."""
        rows = lines(columns.MODES, (mode_csv_row(result, row) for row in result.rows))
        self._run_dir.write_text("modes.csv", header(columns.MODES) + rows)
        self._run_dir.write_text("modes.json", modes_json(result))
        self._end(result)


def modes_json(result: ModesResult) -> str:
    """One JSON object; times in milliseconds where a name says so, seconds where it says `_s`."""
    document = {
        **head("modes", result),
        "num_steps": result.num_steps,
        "modes": [_mode(row) for row in result.rows],
        "traces": [_trace(each) for each in result.traces],
    }
    return to_json(document)


def mode_csv_row(result: ModesResult, row: ModeRow) -> Row:
    """Row of `modes.csv`."""
    first, speed = row.first, row.speed or Speed()
    cells: dict[str, Cell] = {
        "mode": row.mode,
        "arm": row.arm,
        "outcome": result.outcome.value,
        **{c.name: result.settings.get(c.name) for c in columns.SETTINGS[1:]},
        "feed": result.settings.get("feed"),
        "num_requests": row.num_requests,
        "num_requests_equal": row.num_requests_equal,
        "num_output_tokens": row.num_tokens,
        "num_tokens_equal": row.num_equal,
        "num_traced": row.num_traced,
        "num_unexplained": row.num_unexplained,
        "first_request": None if first is None else first.request,
        "first_token_index": None if first is None else first.token_index,
        "first_step": None if first is None else first.step,
        "first_gap": None if first is None else first.gap,
        "first_drift": None if first is None else first.drift,
    }
    for kind in ("full", "piecewise", "none"):
        cells[f"steps_{kind}"] = getattr(row.steps, kind)
        cells[f"tokens_{kind}"] = getattr(row.tokens, kind)
    for field, name in _STATS:
        cells |= _stat_cells(name, getattr(speed, field))
    rates = speed.tokens_per_s
    cells["mean_tokens_per_s"] = sum(rates) / len(rates) if rates else None
    cells["min_tokens_per_s"] = min(rates, default=None)
    cells["max_tokens_per_s"] = max(rates, default=None)
    for prefix, name in columns.MODE_RATIOS:
        found: Ratio | None = getattr(speed, f"{prefix}_ratio")
        cells[f"{name}_ratio"] = None if found is None else found.median
        cells[f"{name}_ratio_low"] = None if found is None else found.low
        cells[f"{name}_ratio_high"] = None if found is None else found.high
    return cells


def _stat_cells(name: str, stat: Stat | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {
        f"{each}_{name}_ms": None if stat is None else ms(getattr(stat, each))
        for each in columns.STAT_NAMES
    }
    return {**cells, f"num_{name}_samples": None if stat is None else stat.num_samples}


def _mode(row: ModeRow) -> dict[str, Any]:
    document = {**msgspec.structs.asdict(row), "agreement": row.agreement}
    document["first"] = None if row.first is None else _trace(row.first)
    for served in ("steps", "tokens"):
        found = getattr(row, served)
        shares = {f"share_{kind}": found.share(kind) for kind in ("full", "piecewise")}
        document[served] = {**msgspec.structs.asdict(found), **shares}
    if row.speed is not None:
        speed = msgspec.structs.asdict(row.speed)
        for field, name in _STATS:
            speed[f"{name}_ms"] = in_ms(speed.pop(field))
        speed["launch_overhead_ratio"] = speed.pop("launch_ratio")
        document["speed"] = speed
    return document


def _trace(found: TokenTrace) -> dict[str, Any]:
    return {**msgspec.structs.asdict(found), "explained": found.explained}
