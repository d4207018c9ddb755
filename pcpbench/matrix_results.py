"""What the cells of a matrix came to: frozen values, one file each on disk.

Owns the outcomes of a cell and the exit code over all of them. Knows no engine and no process.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from pcpbench.matrix_cells import Cell
from pcpbench.records import Environment, Notice
from pcpbench.results import Outcome


class CellOutcome(Enum):
    """Of one cell.

    PASS, FAIL, NOT_COMPARED: as in a comparison. REFUSED: the settings are none that the engine
    takes. NOT_MEASURED: this machine could not give an answer. CRASHED: the process ended without
    one. NOT_RUN: no time was left, or the run was interrupted.
    """

    PASS = "pass"
    FAIL = "fail"
    NOT_COMPARED = "not compared"
    REFUSED = "refused"
    NOT_MEASURED = "could not measure"
    CRASHED = "crashed"
    NOT_RUN = "not run"


FINISHED = frozenset(
    {CellOutcome.PASS, CellOutcome.FAIL, CellOutcome.NOT_COMPARED, CellOutcome.REFUSED}
)
"""Outcomes that stand: a resumed run would come to the same. The others are tried again."""


class FaultCount(msgspec.Struct, frozen=True, kw_only=True):
    """Faults injected into one cell's world. missed: those not caught, and how."""

    num_faults: int = 0
    num_caught: int = 0
    num_without_verdict: int = 0
    num_false_alarms: int = 0
    missed: tuple[str, ...] = ()


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One cell.

    reason: why it is no pass, "" where it is one. exit_code: of its process, negative for a signal,
    None where none ran. num_scenarios: compared to the end; num_passed: of these. num_steps: of the
    plans. capture_is_zero: whether every replay was bitwise equal to its padded twin; None where
    none was compared. num_capture_steps: steps behind that. violated: contracts. steps_full,
    steps_piecewise: served by graphs in the arm full_and_piecewise. faults: None where none was
    asked for; faults_reason: why none could be injected. run: the cell's directory, within the
    run's. attempt: which process of this cell it was, from 1.
    """

    cell: Cell
    outcome: CellOutcome
    reason: str = ""
    exit_code: int | None = None
    num_scenarios: int = 0
    num_passed: int = 0
    num_steps: int = 0
    capture_is_zero: bool | None = None
    num_capture_steps: int = 0
    violated: tuple[str, ...] = ()
    steps_full: int = 0
    steps_piecewise: int = 0
    faults: FaultCount | None = None
    faults_reason: str = ""
    wall_s: float = 0.0
    run: str = ""
    attempt: int = 1


class MatrixResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench matrix`: a record for every cell asked for. num_kept: from an earlier run."""

    cells: tuple[CellRecord, ...]
    settings: dict[str, Any]
    environment: Environment
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    run_dir: str = ""
    num_kept: int = 0

    @property
    def outcome(self) -> Outcome:
        """FAIL for one cell that fails; a pass only where every cell is one."""
        found = {record.outcome for record in self.cells}
        if CellOutcome.FAIL in found:
            return Outcome.FAIL
        return Outcome.PASS if found == {CellOutcome.PASS} else Outcome.NOT_COMPARED

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is no pass: one line a cell."""
        return tuple(
            f"{record.cell.name}: {record.outcome.value}: {record.reason}"
            for record in self.cells
            if record.outcome is not CellOutcome.PASS
        )

    def count(self, outcome: CellOutcome) -> int:
        """Cells of one outcome."""
        return sum(record.outcome is outcome for record in self.cells)
