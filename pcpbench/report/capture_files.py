"""The files of a capture: `capture.csv`, `address_book.csv`, `capture.json` and `manifest.json`.

Owns when each is written: a graph's row as soon as it is captured, the rest at the end of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pcpbench.records import Environment
from pcpbench.report import columns
from pcpbench.report.csv_files import address_row, capture_row, header, lines
from pcpbench.report.json_out import capture_json
from pcpbench.report.run_dir import RESULTS
from pcpbench.report.run_files import RunFiles
from pcpbench.results import CapturedGraph, CaptureResult


class CaptureFiles(RunFiles):
    """Use as a context manager: `add_graph` for each graph captured, then `finish`."""

    def __init__(
        self,
        out: Path | None,
        *,
        settings: dict[str, Any],
        environment: Environment,
        root: Path = RESULTS,
    ) -> None:
        super().__init__("capture", out, settings, environment, root)
        self._pool_bytes = 0

    def _begin(self) -> None:
        self._run_dir.append_text("capture.csv", header(columns.CAPTURE))

    def add_graph(self, graph: CapturedGraph) -> None:
        """Put a graph that has been captured on disk."""
        row = capture_row(graph, self._pool_bytes)
        self._pool_bytes = graph.pool_bytes_after
        self._run_dir.append_text("capture.csv", lines(columns.CAPTURE, [row]))

    def finish(self, result: CaptureResult) -> None:
        """Write the address book and what the whole run came to."""
        book = lines(columns.ADDRESS_BOOK, map(address_row, result.addresses))
        self._run_dir.write_text("address_book.csv", header(columns.ADDRESS_BOOK) + book)
        self._run_dir.write_text("capture.json", capture_json(result))
        self._end(result)
