"""`pcpbench matrix`: every cell in a process of its own, a record on disk as soon as it ends.

Owns the order of a run: which cells are left, how many at once, and how it ends early. A directory
of records is all the state there is, so that a run can be taken up again.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

import msgspec

from pcpbench.code_version import code_digest, versions
from pcpbench.device.backends import resolve_device
from pcpbench.device.environment import environment_of
from pcpbench.errors import CannotMeasure, PcpbenchError, ScenarioError
from pcpbench.faults.registry import catalogue
from pcpbench.matrix_cells import Cell
from pcpbench.matrix_request import MatrixRequest, MatrixSettings, scenario_digests
from pcpbench.matrix_results import CellOutcome, CellRecord, MatrixResult
from pcpbench.records import Notice
from pcpbench.report.console import make_console
from pcpbench.report.json_out import print_text
from pcpbench.report.matrix_files import MatrixFiles, locked, matrix_json
from pcpbench.report.matrix_view import print_matrix, print_matrix_verdict
from pcpbench.report.progress import Progress, make_progress
from pcpbench.report.units import count
from pcpbench.session.matrix_cell import OUT_OF_TIME, CellRunner, Children, Stopped
from pcpbench.session.matrix_faults import faults_for
from pcpbench.session.matrix_resume import VERSIONS, kept_records, kept_settings

WAITING = "it was not run yet; --resume goes on"
Run = Callable[[Cell, float | None], CellRecord]


def run_matrix(request: MatrixRequest) -> int:
    """Run what is left of the matrix, print its table and return the exit code."""
    start = time.monotonic()
    request.check()
    code = versions()
    kept: dict[str, CellRecord] = {}
    with ExitStack() as stack:
        if request.resume is None:
            settings = _on_this_device(request.settings())
        else:
            settings = kept_settings(request, code)
            stack.enter_context(locked(request.resume))
            kept = kept_records(request.resume, settings)
        faults = catalogue()
        if settings.inject is not None and settings.inject not in faults.faults:
            raise faults.lacks("--inject", settings.inject)
        environment = environment_of(resolve_device(settings.device))
        stored = {**msgspec.to_builtins(settings), VERSIONS: code}
        files = stack.enter_context(
            MatrixFiles(request.out, request.resume, settings=stored, environment=environment)
        )
        if request.resume is None:
            stack.enter_context(locked(files.path))

        def result(records: Sequence[CellRecord]) -> MatrixResult:
            return MatrixResult(
                cells=tuple(records),
                settings=stored,
                environment=environment,
                wall_s=time.monotonic() - start,
                run_dir=str(files.path),
                num_kept=len(kept),
            )

        def keep(record: CellRecord, records: Sequence[CellRecord]) -> None:
            files.add_cell(record, result(records))

        children = Children()
        check = _input_check(code, settings)
        runner = CellRunner(files.path, settings, children, faults_for, check)
        loop = MatrixLoop(settings.cells, kept, runner, keep, children.stop, check)
        files.write_tables(result(loop.records))
        notices: tuple[Notice, ...] = ()
        deadline = None if request.max_time is None else start + request.max_time
        with make_progress() as progress:
            try:
                loop.run(request.jobs, deadline, progress)
            except (KeyboardInterrupt, SystemExit):
                progress.say(f"finished cells stand: pcpbench matrix --resume {files.path} goes on")
                raise
            except CannotMeasure as error:  # a cell that has failed stands
                if not any(record.outcome is CellOutcome.FAIL for record in loop.records):
                    raise
                notices = (Notice(setting="matrix", message=str(error)),)
        ended = msgspec.structs.replace(result(loop.records), notices=notices)
        files.finish(ended)
    _print(ended, request.json)
    return ended.outcome.exit_code


def _on_this_device(settings: MatrixSettings) -> MatrixSettings:
    """Settings with the device that `auto` is here, so that no other one goes on with the run."""
    return msgspec.structs.replace(settings, device=str(resolve_device(settings.device)))


def _print(result: MatrixResult, as_json: bool) -> None:
    if as_json:
        print_text(matrix_json(result))
        print_matrix_verdict(result, make_console(sys.stderr))
    else:
        print_matrix(result, make_console())


def _input_check(code: Mapping[str, str], settings: MatrixSettings) -> Callable[[], None]:
    """Raises CannotMeasure where code or scenarios are not what they were when the run began."""

    def check() -> None:
        if code_digest() != code["code"]:
            raise CannotMeasure(
                "pcpbench's own code has changed since the run began: its other cells would be of "
                "another version, so start a new run."
            )
        try:
            changed = "" if scenario_digests(settings.scenario) == settings.scenarios else "changed"
        except ScenarioError as error:
            changed = f"become unreadable ({str(error).rstrip('.')})"
        if changed:
            raise CannotMeasure(
                f"a scenario file has {changed} since the run began: its other cells would be of "
                "another scenario, so put the file back and --resume, or start a new run."
            )

    return check


class MatrixLoop:
    """Runs the cells that have no record, and keeps a record of each as soon as it ends.

    kept: records that stand, by the cell's name. run: runs one cell up to a deadline. keep: puts a
    record on disk, given all records so far. stop: ends whatever runs. check: raises where no
    further cell may begin, and where one that has ended tells of something else than was asked.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        kept: Mapping[str, CellRecord],
        run: Run,
        keep: Callable[[CellRecord, Sequence[CellRecord]], None],
        stop: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._cells, self._run, self._keep = cells, run, keep
        self._stop, self._check = stop, check
        self._done = dict(kept)

    @property
    def records(self) -> list[CellRecord]:
        """One for each cell, in order; those without a record are NOT_RUN."""
        return [self._done.get(cell.name) or _not_run(cell, WAITING) for cell in self._cells]

    def run(self, jobs: int, deadline: float | None, progress: Progress) -> None:
        """Run all cells that are left, at most `jobs` at once; no new one after the deadline."""
        left = deque(cell for cell in self._cells if cell.name not in self._done)
        if len(left) < len(self._cells):
            kept = count(len(self._cells) - len(left), "cell")
            progress.say(f"{kept} finished in an earlier run")
        progress.start("matrix", len(left), "cells")
        pending: dict[Future[CellRecord], Cell] = {}
        with ThreadPoolExecutor(jobs) as pool:
            try:
                while left or pending:
                    while left and len(pending) < jobs:
                        cell = left.popleft()
                        if deadline is not None and time.monotonic() >= deadline:
                            self._done[cell.name] = _not_run(cell, OUT_OF_TIME)
                            continue
                        self._check()
                        pending[pool.submit(self._run, cell, deadline)] = cell
                    ended, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in ended:
                        record = _record(pending.pop(future), future)
                        self._check()
                        self._take(record, progress)
            except BaseException:
                self._stop()  # the threads of the pool end with their processes
                raise

    def _take(self, record: CellRecord, progress: Progress) -> None:
        self._done[record.cell.name] = record
        self._keep(record, self.records)
        told = f": {record.reason}" if record.reason else ""
        progress.advance()
        outcome = record.outcome.value
        progress.say(f"{record.cell.name}: {outcome} ({record.wall_s:.1f} s){told}")


def _record(cell: Cell, future: Future[CellRecord]) -> CellRecord:
    """What a cell came to; what breaks while one is run is that cell's row, and no other's."""
    try:
        return future.result()
    except (PcpbenchError, Stopped):
        raise
    except Exception as error:
        reason = f"it could not be run: {type(error).__name__}: {error}"
        return CellRecord(cell=cell, outcome=CellOutcome.CRASHED, reason=reason)


def _not_run(cell: Cell, reason: str) -> CellRecord:
    return CellRecord(cell=cell, outcome=CellOutcome.NOT_RUN, reason=reason)
