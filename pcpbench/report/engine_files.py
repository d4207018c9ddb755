"""The files of a comparison of whole engines: `summary.csv`, `summary.json`, `manifest.json`.

Owns the shape of both documents. What each engine was ordered, told and printed lies in `engine/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench.engine_results import ArmResult, EngineResult
from pcpbench.records import Environment
from pcpbench.report.column import STAT_NAMES
from pcpbench.report.csv_files import Cell, Row, header, lines, ms
from pcpbench.report.engine_columns import ENGINE
from pcpbench.report.json_out import head, in_ms
from pcpbench.report.manifest import Manifest
from pcpbench.report.plain import to_json
from pcpbench.report.run_dir import RESULTS
from pcpbench.report.run_files import RunFiles
from pcpbench.results import Ratio, Stat

COMMAND: Final = "compare --target engine"


class EngineFiles(RunFiles):
    """Use as a context manager: `finish` writes both files."""

    def __init__(
        self,
        out: Path | None,
        *,
        settings: dict[str, Any],
        environment: Environment,
        root: Path = RESULTS,
    ) -> None:
        super().__init__("engine", out, settings, environment, root)
        self._manifest = Manifest(self._run_dir, COMMAND, settings, environment)

    @property
    def engines(self) -> Path:
        """Directory of what the engines left."""
        return self._made("engine")

    @property
    def checkpoint(self) -> Path:
        """Directory of the checkpoint that all engines load."""
        return self._made("engine/checkpoint")

    def _made(self, name: str) -> Path:
        directory = self.path / name
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def finish(self, result: EngineResult) -> None:
        """Write what the run came to."""
        rows = lines(ENGINE, (engine_csv_row(result, row) for row in result.arms))
        self._run_dir.write_text("summary.csv", header(ENGINE) + rows)
        self._run_dir.write_text("summary.json", engine_json(result))
        self._end(result)


def engine_json(result: EngineResult) -> str:
    """One JSON object; times in milliseconds where a name says so, seconds where it says `_s`."""
    document = {
        **head(COMMAND, result),
        "base": result.base,
        "candidate": result.candidate,
        "arms": [_arm(row) for row in result.arms],
    }
    return to_json(document)


def role(result: EngineResult, arm: str) -> str:
    """`base`, `candidate` or `rung`."""
    return {result.base: "base", result.candidate: "candidate"}.get(arm, "rung")


def engine_csv_row(result: EngineResult, row: ArmResult) -> Row:
    """Row of `summary.csv`."""
    settings, counts = result.settings, row.counts
    alone = row.arm == "reference"
    cells: dict[str, Cell] = {
        "scenario": settings.get("scenario"),
        "arm": row.arm,
        "role": role(result, row.arm),
        "outcome": result.outcome.value,
        "cudagraph_mode": row.cudagraph_mode,
        "prefill_context_parallel_size": row.pcp_size,
        "decode_context_parallel_size": 1 if alone else settings["decode_context_parallel_size"],
        "tensor_parallel_size": 1 if alone else settings["tensor_parallel_size"],
        **{name: settings[name] for name in ("model", "dtype", "device")},
        "num_requests": row.num_requests,
        "num_output_tokens": row.num_tokens,
        "twin": row.twin,
        "drift_kind": row.kind,
        "num_tokens_equal": row.num_equal if row.num_rows else None,
        "num_requests_equal": row.num_requests_equal if row.num_rows else None,
        "num_rows_compared": row.num_rows,
        "max_dlogprob": row.max_dlogprob,
        "dlogprob_limit": row.limit,
        "dlogprob_at": row.dlogprob_at,
        "median_dlogprob": row.median_dlogprob,
        "median_dlogprob_limit": row.median_limit,
        "top1_agreement": row.top1_agreement,
        "max_kl": row.max_kl,
        "num_flips": len(row.flips),
        "num_flips_unexplained": sum(bool(flip.why) for flip in row.flips),
        "num_steps": counts.steps,
        **{f"steps_{name.lower()}": counts.modes.get(name, 0)
           for name in ("FULL", "PIECEWISE", "NONE")},
        **{f"steps_{name}": getattr(counts, name)
           for name in ("partitioned", "mixed", "uneven", "empty", "continued", "faulted")},
        "init_s": row.init_s,
        "reasons": "; ".join(result.reasons),
        "wall_s": result.wall_s,
    }  # fmt: skip
    for name in ("tpot", "ttft"):
        cells |= _time_cells(name, getattr(row, name), getattr(row, f"{name}_ratio"))
    return cells


def _time_cells(name: str, stat: Stat | None, found: Ratio | None) -> dict[str, Cell]:
    return {
        **{
            f"{each}_{name}_ms": None if stat is None else ms(getattr(stat, each))
            for each in STAT_NAMES
        },
        f"num_{name}_samples": None if stat is None else stat.num_samples,
        f"{name}_ratio": None if found is None else found.median,
        f"{name}_ratio_low": None if found is None else found.low,
        f"{name}_ratio_high": None if found is None else found.high,
    }


def _arm(row: ArmResult) -> dict[str, Any]:
    document = {**msgspec.structs.asdict(row), "agreement": row.agreement}
    for name in ("tpot", "ttft"):
        document[f"{name}_ms"] = in_ms(document.pop(name))
    return document
