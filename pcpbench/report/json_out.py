"""Results as JSON text: `--json` on stdout and the JSON file of a run.

Owns the shape of the document, which carries a `schema_version`. Non-finite numbers: see plain.py.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO

import msgspec

from pcpbench import __version__
from pcpbench.records import Environment
from pcpbench.report.arms import base_arm
from pcpbench.report.columns import STATS
from pcpbench.report.dispatch_view import run_totals
from pcpbench.report.manifest import SCHEMA_VERSION
from pcpbench.report.plain import to_json
from pcpbench.report.printable import ascii_json
from pcpbench.report.run_files import Ended
from pcpbench.results import ArmSummary, CaptureResult, CompareResult, ScenarioResult, Stat


class Headed(Ended, Protocol):
    """A result that knows where and how it was made."""

    @property
    def settings(self) -> dict[str, Any]:
        """The effective configuration."""

    @property
    def environment(self) -> Environment:
        """Where it ran."""

    @property
    def run_dir(self) -> str:
        """The directory of its files."""


def compare_json(result: CompareResult) -> str:
    """One JSON object; times in milliseconds where a name says so, seconds where it says `_s`.

    `dispatch` has the audit of each arm over the run, `dispatch` of an arm that of one scenario.
    """
    document = {
        **head("compare", result),
        "base": result.base,
        "candidate": result.candidate,
        "dispatch": run_totals(result.scenarios),
        "divergence": result.divergence,
        "scenarios": [_scenario(scenario) for scenario in result.scenarios],
    }
    return to_json(document)


def capture_json(result: CaptureResult) -> str:
    """One JSON object; the address book is in `address_book.csv`, unowned memory is here too."""
    document = {
        **head("capture", result),
        "mode": result.mode,
        "pool_bytes": result.pool_bytes,
        "graphs": result.graphs,
        "unowned": result.unowned,
    }
    return to_json(document)


def print_json(result: CompareResult | CaptureResult, stream: TextIO | None = None) -> None:
    """Write the result's JSON to a stream, stdout by default."""
    text = compare_json(result) if isinstance(result, CompareResult) else capture_json(result)
    print_text(text, stream)


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Write a JSON document to a stream, stdout by default, in whatever the stream can encode."""
    out = sys.stdout if stream is None else stream
    try:
        text.encode(getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = ascii_json(text)
    out.write(text)
    out.flush()


def head(command: str, result: Headed) -> dict[str, Any]:
    """What every document begins with."""
    return {
        "schema_version": SCHEMA_VERSION,
        "pcpbench_version": __version__,
        "command": command,
        "outcome": result.outcome,
        "exit_code": result.outcome.exit_code,
        "reasons": result.reasons,
        "notices": result.notices,
        "settings": result.settings,
        "environment": result.environment,
        "wall_s": result.wall_s,
        "run_dir": result.run_dir,
    }


def _scenario(result: ScenarioResult) -> dict[str, Any]:
    document = msgspec.structs.asdict(result)
    document["launch_overhead_ratio"] = document.pop("launch_ratio")
    document["arms"] = [_arm(arm) for arm in result.arms]
    return document


def _arm(arm: ArmSummary) -> dict[str, Any]:
    document = msgspec.structs.asdict(arm)
    for field, name, _ in STATS:
        document[f"{name}_ms"] = in_ms(document.pop(field))
    document["kind"] = base_arm(arm.arm)
    document["padding_waste"] = arm.padding_waste
    return document


def in_ms(stat: Stat | None) -> dict[str, Any] | None:
    """A sample of times in milliseconds, None kept."""
    if stat is None:
        return None
    values = msgspec.structs.asdict(stat)
    num_samples = values.pop("num_samples")
    return {name: 1e3 * value for name, value in values.items()} | {"num_samples": num_samples}
