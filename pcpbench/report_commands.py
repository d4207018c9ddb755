"""What `pcpbench report` and `pcpbench trace` do: read runs on disk, write one file. Owns no logic.

Runs no engine and needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pcpbench.errors import UsageError
from pcpbench.paths import reachable
from pcpbench.report.page.faults import read_faults
from pcpbench.report.page.page import MAIN_TABLES, MARK, render_page
from pcpbench.report.stored import KEYS, read_run
from pcpbench.report.trace import MARK as TRACE_MARK
from pcpbench.report.trace import render_trace
from pcpbench.report.whole_file import check_target, write_whole

REPORT_NAME = "report.html"
TRACE_NAME = "trace.json"
TABLES = (*KEYS, *MAIN_TABLES.values())


def write_report(paths: Sequence[Path], out: Path | None) -> Path:
    """Write the page over runs and files of the fault catalogue, and return where it is."""
    files = [path for path in paths if reachable(path).is_file()]
    directories = [path for path in paths if not path.is_file()]
    seen = [path.resolve() for path in paths]
    twice = next((path for path in seen if seen.count(path) > 1), None)
    if twice is not None:
        raise UsageError(f"{str(twice)!r} is named twice: name each run once.")
    target = out or _beside(directories, paths)
    check_target(target, MARK, "report")
    runs = [read_run(path, TABLES) for path in directories]
    write_whole(target, render_page(runs, [read_faults(path) for path in files]))
    return target


def write_trace(path: Path, out: Path | None) -> Path:
    """Write the trace of a run and return where it is."""
    run = read_run(path)
    target = out or path / TRACE_NAME
    check_target(target, TRACE_MARK, "trace")
    write_whole(target, render_trace(run))
    return target


def _beside(directories: Sequence[Path], paths: Sequence[Path]) -> Path:
    """In the run's directory for one run; several have no place of their own."""
    if len(paths) == 1 and directories:
        read_run(directories[0], ())  # a directory that is no run is refused before --out is asked
        return directories[0] / REPORT_NAME
    if len(paths) == 1:
        return paths[0].parent / REPORT_NAME
    return Path(REPORT_NAME)
