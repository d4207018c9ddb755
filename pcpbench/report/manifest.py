"""`manifest.json`: what ran, where, with which settings, and how it ended.

Owns the file's shape. It is written when a run starts, with the outcome `running`, and once more
when it ends; a run that was killed is known by the outcome that it left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pcpbench import __version__
from pcpbench.records import Environment, Notice
from pcpbench.report.plain import to_json
from pcpbench.report.run_dir import RunDir

SCHEMA_VERSION = 1
NAME = "manifest.json"


class Manifest:
    """The manifest of one run.

    command: `compare` or `capture`. settings: the effective configuration, flat, by vLLM's names.
    """

    def __init__(
        self,
        run_dir: RunDir,
        command: str,
        settings: dict[str, Any],
        environment: Environment,
        arguments: Sequence[str] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._known: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "pcpbench_version": __version__,
            "command": command,
            "arguments": list(sys.argv[1:] if arguments is None else arguments),
            "started_at": _now(),
            "settings": settings,
            "environment": environment,
        }

    def begin(self) -> None:
        """Write that the run has started."""
        self._write("running", (), None)

    def finish(
        self,
        outcome: str,
        *,
        reasons: Sequence[str] = (),
        exit_code: int | None = None,
        notices: Sequence[Notice] = (),
        wall_s: float | None = None,
    ) -> None:
        """Write how the run ended.

        outcome: `pass`, `fail`, `not compared`; `interrupted` or `error` for a run cut short.
        """
        self._known |= {"finished_at": _now(), "wall_s": wall_s, "notices": list(notices)}
        self._write(outcome, reasons, exit_code)

    def _write(self, outcome: str, reasons: Sequence[str], exit_code: int | None) -> None:
        ended = {"outcome": outcome, "reasons": list(reasons), "exit_code": exit_code}
        files = {"files": sorted({*self._run_dir.files, NAME})}
        self._run_dir.write_text(NAME, to_json({**self._known, **ended, **files}))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
