"""What the files of every run have in common: a directory, and a manifest that is always true.

Owns how a run ends on disk, also one that is cut short. Which files a command leaves is known by
compare_files.py and capture_files.py.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pcpbench.errors import PcpbenchError
from pcpbench.records import Environment
from pcpbench.report.manifest import Manifest
from pcpbench.report.run_dir import RunDir
from pcpbench.results import CaptureResult, CompareResult, Outcome


class RunFiles:
    """A run's directory with its manifest; leaving the `with` block early is noted in it."""

    def __init__(
        self,
        command: str,
        out: Path | None,
        settings: dict[str, Any],
        environment: Environment,
        root: Path,
    ) -> None:
        self._run_dir = RunDir.create(command, out, root)
        self._manifest = Manifest(self._run_dir, command, settings, environment)
        self._finished = False

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self._run_dir.path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._finished:
            return
        if error is None:
            self._manifest.finish("error", reasons=("the run ended without a result",))
        elif isinstance(error, PcpbenchError):
            code = error.exit_code
            outcome = Outcome.FAIL if code == Outcome.FAIL.exit_code else Outcome.NOT_COMPARED
            self._manifest.finish(outcome.value, reasons=(str(error),), exit_code=code)
        else:
            outcome_name = "error" if isinstance(error, Exception) else "interrupted"
            self._manifest.finish(outcome_name, reasons=(f"{type(error).__name__}: {error}",))

    def _end(self, result: CompareResult | CaptureResult) -> None:
        self._manifest.finish(
            result.outcome.value,
            reasons=result.reasons,
            exit_code=result.outcome.exit_code,
            notices=result.notices,
            wall_s=result.wall_s,
        )
        self._finished = True
