"""pytest plugin: how each test ended, and which of pcpbench's functions it ran.

Owns the outcomes file. A test that ran none of pcpbench's functions says nothing of pcpbench,
whatever it ended with: that is measured here, not claimed by a list.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import pcpbench

PACKAGE = str(Path(pcpbench.__file__).parent)
STAGE = str(Path(pcpbench.__file__).parent / "targets")
"""Where pcpbench makes vLLM run on this machine: no test is about that."""


class Recorder:
    """Collects the outcomes of one pytest process and writes them at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._ran: set[CodeType] = set()

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(PACKAGE) and not file.startswith(STAGE) and code.co_name[0] != "<":
            self._ran.add(code)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note which functions a test and its fixtures run, in its threads too."""
        self._ran.clear()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            outcome = self.outcomes.setdefault(item.nodeid, _outcome("failed", "never ran"))
            outcome["ran"] = sorted({_name(code) for code in self._ran})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of the call, or of what ended the test before or after it."""
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = _outcome(report.outcome, _message(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read is one outcome."""
        if report.failed:
            self.outcomes[report.nodeid] = _outcome("unreadable", _message(report))

    def pytest_sessionfinish(self) -> None:
        """Write the outcomes."""
        self.path.write_text(json.dumps(self.outcomes, indent=1))


def _name(code: CodeType) -> str:
    module = Path(code.co_filename).relative_to(PACKAGE).with_suffix("")
    return f"{'.'.join(module.parts)}:{code.co_qualname}"


def _outcome(outcome: str, message: str) -> dict[str, Any]:
    return {"outcome": outcome, "message": message, "ran": []}


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The last line that says what went wrong; "" where nothing did."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]


def pytest_addoption(parser: pytest.Parser) -> None:
    """--outcomes FILE."""
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Start recording."""
    config.pluginmanager.register(Recorder(config.getoption("--outcomes")))
