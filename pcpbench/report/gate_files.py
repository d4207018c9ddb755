"""The files of a gate: `samples.jsonl`, `gate.csv`, `gate.json`, `junit.xml` and `manifest.json`.

Owns when each is written, and the rows of `gate.csv`. Samples come line by line while processes
end; the rest when there is a verdict.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pcpbench.errors import CannotMeasure
from pcpbench.gate_results import Finding, GateResult, SelfCheckResult
from pcpbench.gate_rules import COUNTS, FULL_SHARE, Form
from pcpbench.records import Environment
from pcpbench.report.csv_files import Row, header, lines, ms
from pcpbench.report.gate_columns import GATE
from pcpbench.report.gate_json import gate_json
from pcpbench.report.gate_view import sentence
from pcpbench.report.junit import junit_of_error, junit_xml
from pcpbench.report.run_dir import RESULTS
from pcpbench.report.run_files import RunFiles
from pcpbench.report.self_check_view import self_check_json


class _LineFiles(RunFiles):
    """Files that grow by whole lines while processes end."""

    def __init__(
        self,
        out: Path | None,
        *,
        settings: dict[str, Any],
        environment: Environment,
        root: Path = RESULTS,
    ) -> None:
        super().__init__(self.command, out, settings, environment, root)

    command = "gate"

    def add_lines(self, name: str, data: bytes) -> None:
        """Add whole lines to a file and wait until they are on disk."""
        self._run_dir.append_text(name, data.decode())


class GateFiles(_LineFiles):
    """Use as a context manager: `add_lines` while it runs, then `finish_gate`.

    A gate that an error ends leaves a `junit.xml` that says so.
    """

    def finish_gate(self, result: GateResult) -> None:
        """Write what the gate came to."""
        rows = [gate_row(finding) for finding in result.findings]
        self._run_dir.write_text("gate.csv", header(GATE) + lines(GATE, rows))
        self._run_dir.write_text("gate.json", gate_json(result))
        self._run_dir.write_text("junit.xml", junit_xml(result))
        self._manifest.finish(
            result.verdict.value,
            reasons=result.reasons,
            exit_code=result.exit_code,
            notices=result.notices,
            wall_s=result.wall_s,
        )
        self._finished = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave a `junit.xml` also where an error ended the gate, if there is room for it."""
        if isinstance(error, Exception) and not self._finished:
            with suppress(CannotMeasure):
                self._run_dir.write_text("junit.xml", junit_of_error(str(error) or repr(error)))
        super().__exit__(kind, error, trace)


class SelfCheckFiles(_LineFiles):
    """The files of `gate --self-check`: samples of both kinds and `self-check.json`."""

    command = "gate-self-check"

    def finish_check(self, result: SelfCheckResult) -> None:
        """Write what the self-check came to."""
        self._run_dir.write_text("self-check.json", self_check_json(result))
        self._manifest.finish("pass", exit_code=0, wall_s=result.wall_s)
        self._finished = True


def gate_row(finding: Finding) -> Row:
    """Row of `gate.csv`: a finding's numbers stand in the columns of their unit."""
    rule = finding.rule
    is_time = rule.form is Form.MORE_SECONDS
    is_ratio = rule.form is Form.MORE
    is_share, is_count = rule.metric == FULL_SHARE, rule.metric in (*COUNTS, "process")
    accepted = finding.accepted

    def only(when: bool, value: float | None, scale: float = 1.0) -> float | None:
        return value * scale if when and value is not None else None

    return {
        "rule": rule.text,
        "metric": rule.metric,
        "stat": rule.stat,
        "scenario": finding.scenario or None,
        "verdict": finding.verdict.value,
        "baseline_ratio": only(is_ratio, finding.baseline),
        "run_ratio": only(is_ratio, finding.run),
        "change_percent": only(is_ratio, finding.change, 100),
        "change_low_percent": only(is_ratio, finding.low, 100),
        "change_high_percent": only(is_ratio, finding.high, 100),
        "limit_percent": only(is_ratio or is_share, finding.limit, 100),
        "baseline_ms": ms(only(is_time, finding.baseline)),
        "run_ms": ms(only(is_time, finding.run)),
        "change_ms": ms(only(is_time, finding.change)),
        "change_low_ms": ms(only(is_time, finding.low)),
        "change_high_ms": ms(only(is_time, finding.high)),
        "limit_ms": ms(only(is_time, finding.limit)),
        "baseline_percent": only(is_share, finding.baseline, 100),
        "run_percent": only(is_share, finding.run, 100),
        "baseline_count": only(is_count, finding.baseline),
        "run_count": only(is_count, finding.run),
        "limit_count": only(is_count, finding.limit),
        "confidence": finding.confidence,
        "num_baseline_processes": finding.num_baseline,
        "num_run_processes": finding.num_run,
        "num_needed_processes": finding.num_needed,
        "num_needed_of_both": finding.num_baseline_needed,
        "accepted_until": str(accepted.until) if accepted else None,
        "accepted_reason": accepted.reason if accepted else None,
        "why": sentence(finding),
        "next_step": finding.next_step or None,
    }
