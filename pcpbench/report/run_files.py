"""What the files of every run have in common: a directory, and a manifest that is always true.

Owns how a run ends on disk, also one that is cut short. Which files a command leaves is known by
compare_files.py and capture_files.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from pcpbench.errors import PcpbenchError
from pcpbench.records import Environment, Notice
from pcpbench.report.manifest import Manifest
from pcpbench.report.run_dir import RunDir
from pcpbench.results import Outcome


class Ended(Protocol):
    """What a manifest says of the result of any command."""

    @property
    def outcome(self) -> Outcome:
        """The verdict."""

    @property
    def reasons(self) -> Sequence[str]:
        """Why it is no pass."""

    @property
    def notices(self) -> Sequence[Notice]:
        """What was left out or changed."""

    @property
    def wall_s(self) -> float:
        """Seconds that the run took."""


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
        try:
            self._manifest.begin()
            self._begin()
        except BaseException as error:  # an interrupt here would leave a run that never ends
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _begin(self) -> None:
        """Write what the files of this command begin with."""

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
            told = (f"{type(error).__name__}: {error}",)
            if isinstance(error, Exception):
                self._manifest.finish("error", reasons=told)
            else:
                self._manifest.finish("interrupted", reasons=told, exit_code=_exit_code(error))

    def _end(self, result: Ended) -> None:
        self._manifest.finish(
            result.outcome.value,
            reasons=result.reasons,
            exit_code=result.outcome.exit_code,
            notices=result.notices,
            wall_s=result.wall_s,
        )
        self._finished = True


def _exit_code(stop: BaseException) -> int:
    """What the process ends with: 130 after Ctrl-C, 128 + its number after another signal."""
    return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
