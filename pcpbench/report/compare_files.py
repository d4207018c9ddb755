"""The files of a comparison: its CSV tables, `summary.json` and `manifest.json`.

Owns when each is written: a scenario's rows as soon as it ends, the rest at the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pcpbench.plan import ScenarioPlan
from pcpbench.records import Environment, StepRecord
from pcpbench.report import columns
from pcpbench.report.compare_rows import step_rows, summary_rows
from pcpbench.report.csv_files import header, lines
from pcpbench.report.json_out import compare_json
from pcpbench.report.raw_rows import drift_rows, phase_rows, sample_rows
from pcpbench.report.run_dir import RESULTS
from pcpbench.report.run_files import RunFiles
from pcpbench.results import (
    CompareResult,
    Outcome,
    PlaceDrift,
    ScenarioResult,
    StepAudit,
    StepDrift,
)
from pcpbench.timings import Phase, Sample, StepTiming

RAW = (
    ("samples.csv", columns.SAMPLES),
    ("drift.csv", columns.DRIFT),
    ("phases.csv", columns.PHASES),
)


class CompareFiles(RunFiles):
    """Use as a context manager: `add_scenario` for each scenario that has ended, then `finish`.

    base, candidate: labels of the two arms as in their records. settings: the effective
    configuration, flat, by vLLM's names. async_device: whether the device runs behind the host.
    """

    def __init__(
        self,
        out: Path | None,
        *,
        base: str,
        candidate: str,
        settings: dict[str, Any],
        environment: Environment,
        async_device: bool = False,
        root: Path = RESULTS,
    ) -> None:
        super().__init__("compare", out, settings, environment, root)
        self._base, self._candidate = base, candidate
        self._settings = {**settings, "device": environment.device}
        self._async_device = async_device

    def _begin(self) -> None:
        self._run_dir.append_text("summary.csv", header(columns.SUMMARY))
        self._run_dir.append_text("steps.csv", header(columns.STEPS))
        for name, table in RAW:
            self._run_dir.append_text(name, header(table))

    def add_scenario(
        self,
        result: ScenarioResult,
        plan: ScenarioPlan,
        records: Iterable[StepRecord],
        timings: Iterable[StepTiming] = (),
        step_drifts: Iterable[StepDrift] = (),
        step_audits: Iterable[StepAudit] = (),
        *,
        samples: Iterable[Sample] = (),
        place_drifts: Iterable[PlaceDrift] = (),
        phases: Iterable[Phase] = (),
    ) -> None:
        """Put a scenario that has ended on disk; its rows in `summary.csv` say that all are there.

        Samples and phases of a scenario that did not pass are left out: it has no times to quote.
        """
        passed = result.outcome is Outcome.PASS
        raw = (
            sample_rows(result.scenario, samples if passed else ()),
            drift_rows(result.scenario, place_drifts),
            phase_rows(result.scenario, phases if passed else ()),
        )
        steps = step_rows(
            result, plan, records, timings, step_drifts, step_audits, self._async_device
        )
        arms = summary_rows(result, self._base, self._candidate, self._settings)
        self._run_dir.append_text("steps.csv", lines(columns.STEPS, steps))
        for (name, table), rows in zip(RAW, raw, strict=True):
            self._run_dir.append_text(name, lines(table, rows))
        self._run_dir.append_text("summary.csv", lines(columns.SUMMARY, arms))

    def add_files(self, directory: str, files: Mapping[str, bytes]) -> Path:
        """Put a directory of files on disk and return its path."""
        for name, data in files.items():
            self._run_dir.write_bytes(f"{directory}/{name}", data)
        return self.path / directory

    def finish(self, result: CompareResult) -> None:
        """Write what the whole run came to."""
        self._run_dir.write_text("summary.json", compare_json(result))
        self._end(result)
