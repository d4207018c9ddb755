"""What `compare` does with baselines once its verdict is a pass: write one, or gate against one.

Owns the order: what can be refused is refused before the comparison starts, and a comparison that
did not pass neither becomes a baseline nor is held against one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from pcpbench.gate_jobs import GateRequest, Measured, SampleJob
from pcpbench.gate_results import GateVerdict
from pcpbench.gate_settings import GateOptions, resolve_settings
from pcpbench.plan import ScenarioPlan
from pcpbench.report.printable import printable
from pcpbench.report.progress import make_progress
from pcpbench.report.run_dir import RunDir
from pcpbench.request import CompareRequest
from pcpbench.results import CompareResult, Outcome
from pcpbench.session.baseline import (
    SAMPLES_NAME,
    check_writable,
    read_measured,
    samples_bytes,
    write_baseline,
)
from pcpbench.session.gate import run_gate
from pcpbench.session.gathering import Gathering, check_sound
from pcpbench.session.here import measured_here
from pcpbench.session.judging import judged

BASELINE_PROCESSES: Final = 12
GATE_DIRECTORY: Final = "gate"


def check_baselines(request: CompareRequest) -> None:
    """Raise UsageError for a baseline that cannot be read, or a place that cannot take one."""
    if request.save_baseline is not None:
        check_writable(request.save_baseline)
    if request.baseline is not None:
        read_measured(request.baseline)
        resolve_settings(GateOptions())


def after_compare(request: CompareRequest, result: CompareResult, plans: list[ScenarioPlan]) -> int:
    """Do what the request wants done with baselines, and return the exit code of it all."""
    if request.save_baseline is None and request.baseline is None:
        return result.outcome.exit_code
    if result.outcome is not Outcome.PASS:
        told = "no baseline was written" if request.save_baseline else "nothing was gated"
        print(f"pcpbench: {told}: the comparison did not pass.", file=sys.stderr)
        return result.outcome.exit_code
    verdicts = tuple(
        judged(scenario, plan, result.candidate)
        for scenario, plan in zip(result.scenarios, plans, strict=True)
    )
    run = measured_here(job_of(request), verdicts)
    exit_code = result.outcome.exit_code
    if request.baseline is not None:
        gate = GateRequest(
            baseline=request.baseline,
            out=Path(result.run_dir) / GATE_DIRECTORY,
            quiet=request.json,
        )
        gated = run_gate(gate, run)
        exit_code = gated.exit_code
        if request.save_baseline is not None and gated.verdict is not GateVerdict.PASS:
            told = f"the gate says {gated.verdict.value}"
            print(f"pcpbench: no baseline was written: {told}.", file=sys.stderr)
            return exit_code
    if request.save_baseline is not None:
        measured = _measure(run, Path(result.run_dir))
        write_baseline(request.save_baseline, measured)
        told = f"baseline of {len(measured.processes)} processes: {request.save_baseline}"
        print(f"pcpbench: {printable(told)}", file=sys.stderr)
    return exit_code


def job_of(request: CompareRequest) -> SampleJob:
    """What the fresh processes behind a comparison have to do."""
    return SampleJob(
        base=request.base,
        candidate=request.candidate,
        options=request.options,
        scenarios=request.scenario_names,
    )


def _measure(run: Measured, run_dir: Path) -> Measured:
    """The run with its processes; each is in `samples.jsonl` as soon as it has ended.

    Raises MeasuredFailure where one breaks a contract or samples other tokens than were judged, and
    CannotMeasure where one ends without a sample: a baseline is whole or is not written.
    """
    files = RunDir(run_dir)
    files.append_text(SAMPLES_NAME, samples_bytes(run).decode())
    with make_progress() as progress:
        progress.start("fresh processes", BASELINE_PROCESSES, "processes")
        gathering = Gathering(
            measured=run,
            progress=progress,
            write=lambda line: files.append_text(SAMPLES_NAME, line.decode()),
            max_broken=1,
        )
        gathering.take(BASELINE_PROCESSES)
    check_sound(gathering.measured, "no baseline was written")
    return gathering.measured
