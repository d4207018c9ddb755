"""The directory of a matrix: a record for each cell, `matrix.csv`, `matrix.json`, `manifest.json`.

Owns their shape and when each is written: a cell's record as soon as it ends, the two tables with
it. One process at a time may write in it.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench.errors import UsageError
from pcpbench.matrix_results import CellOutcome, CellRecord, MatrixResult
from pcpbench.records import Environment
from pcpbench.report import columns
from pcpbench.report.csv_files import Row, header, lines
from pcpbench.report.json_out import head
from pcpbench.report.manifest import Manifest
from pcpbench.report.plain import to_json
from pcpbench.report.run_dir import RESULTS, RunDir
from pcpbench.report.run_files import RunFiles

CELLS: Final = "cells"
_LOCK: Final = ".lock"


class MatrixFiles(RunFiles):
    """Use as a context manager: `add_cell` for each cell that has ended, then `finish`.

    out: as in every command. resume: the directory of an earlier run to go on in, instead.
    """

    def __init__(
        self,
        out: Path | None,
        resume: Path | None,
        *,
        settings: dict[str, Any],
        environment: Environment,
        root: Path = RESULTS,
    ) -> None:
        if resume is None:
            super().__init__("matrix", out, settings, environment, root)
            return
        self._run_dir = RunDir(resume)
        self._manifest = Manifest(self._run_dir, "matrix", settings, environment)
        self._finished = False

    def add_cell(self, record: CellRecord, result: MatrixResult) -> None:
        """Put a cell that has ended on disk, and the tables over all cells so far."""
        self._run_dir.write_text(f"{CELLS}/{record.cell.name}.json", to_json(record))
        self.write_tables(result)

    def finish(self, result: MatrixResult) -> None:
        """Write what the whole run came to."""
        self.write_tables(result)
        self._end(result)

    def write_tables(self, result: MatrixResult) -> None:
        """Write `matrix.csv` and `matrix.json` as far as the run is."""
        rows = lines(columns.MATRIX, map(cell_row, result.cells))
        self._run_dir.write_text("matrix.csv", header(columns.MATRIX) + rows)
        self._run_dir.write_text("matrix.json", matrix_json(result))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from going on in this directory; raises UsageError where one does."""
    with (directory / _LOCK).open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(
                f"another pcpbench is running in {str(directory)!r}: wait for it, or end it."
            ) from error
        yield


def matrix_json(result: MatrixResult) -> str:
    """One JSON object; `cells` has a record for each cell asked for, run or not."""
    document = {
        **head("matrix", result),
        "num_cells": len(result.cells),
        "num_kept": result.num_kept,
        "counts": {each.value: result.count(each) for each in CellOutcome},
        "cells": [
            {
                "name": record.cell.name,
                "preset": record.cell.preset,
                **msgspec.structs.asdict(record),
            }
            for record in result.cells
        ],
    }
    return to_json(document)


def cell_row(record: CellRecord) -> Row:
    """Row of `matrix.csv`."""
    cell, sizes, faults = record.cell, record.cell.parallel, record.faults
    return {
        "cell": cell.name,
        "outcome": record.outcome.value,
        "prefill_context_parallel_size": sizes.pcp,
        "decode_context_parallel_size": sizes.dcp,
        "tensor_parallel_size": sizes.tp,
        "cp_kv_cache_interleave_size": sizes.interleave,
        "enable_dbo": cell.microbatch,
        "model": cell.preset,
        "model_kind": cell.model,
        "num_speculative_tokens": cell.spec_tokens,
        "capture_is_zero": record.capture_is_zero,
        "num_capture_steps": record.num_capture_steps,
        "violated_contracts": ";".join(record.violated),
        "num_scenarios": record.num_scenarios,
        "num_passed": record.num_passed,
        "num_steps": record.num_steps,
        "steps_full": record.steps_full,
        "steps_piecewise": record.steps_piecewise,
        "num_faults": None if faults is None else faults.num_faults,
        "num_faults_caught": None if faults is None else faults.num_caught,
        "num_faults_without_verdict": None if faults is None else faults.num_without_verdict,
        "exit_code": record.exit_code,
        "wall_s": record.wall_s,
        "attempt": record.attempt,
        "run": record.run,
        "reason": record.reason or record.faults_reason,
    }
