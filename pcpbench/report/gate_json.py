"""A gate's result as JSON, and the schema of that JSON, which are one definition.

Owns the shape of `gate.json`; `docs/gate.schema.json` is printed by `pcpbench gate --schema`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pcpbench import __version__
from pcpbench.gate_results import Finding, GateResult, GateVerdict
from pcpbench.gate_rules import Rule
from pcpbench.records import Environment, Notice
from pcpbench.report.json_out import print_text
from pcpbench.report.manifest import SCHEMA_VERSION
from pcpbench.report.plain import to_json


class GateDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gate.json`. Times in seconds, shares and changes as fractions; null: there is no value."""

    schema_version: int
    pcpbench_version: str
    command: str
    verdict: GateVerdict
    exit_code: int
    reasons: tuple[str, ...]
    baseline: str
    run: str
    num_baseline: int
    num_run: int
    same_machine: bool
    on_undecided: str
    rules: tuple[Rule, ...]
    findings: tuple[Finding, ...]
    notices: tuple[Notice, ...]
    settings: dict[str, Any]
    gate_settings: dict[str, Any]
    baseline_environment: Environment
    environment: Environment
    wall_s: float
    run_dir: str


def gate_json(result: GateResult) -> str:
    """The text of `gate.json`."""
    known = {name: getattr(result, name) for name in result.__struct_fields__}
    document = GateDocument(
        schema_version=SCHEMA_VERSION,
        pcpbench_version=__version__,
        command="gate",
        verdict=result.verdict,
        exit_code=result.exit_code,
        reasons=result.reasons,
        **known,
    )
    return to_json(msgspec.to_builtins(document))


def gate_schema() -> str:
    """The JSON Schema of `gate.json`."""
    return to_json(msgspec.json.schema(GateDocument))


def print_gate_json(result: GateResult) -> None:
    """Write the result's JSON to stdout."""
    print_text(gate_json(result))
