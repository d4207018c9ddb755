"""Scenario x arms x target -> records, verdicts, files. The only place where they all meet."""

from __future__ import annotations

from pcpbench.session.capture import run_capture
from pcpbench.session.compare import run_compare

__all__ = ["run_capture", "run_compare"]
