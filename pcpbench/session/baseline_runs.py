"""What `compare` does with baselines once it has a verdict: write one, or gate against one.

Owns the order: what can be refused is refused before the comparison starts. A comparison that did
not pass becomes no baseline; held against one, it is told as the gate tells it, and nothing of it
is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pcpbench.errors import UsageError
from pcpbench.gate_defaults import BASELINE_PROCESSES
from pcpbench.gate_jobs import GateRequest, Measured, SampleJob
from pcpbench.gate_results import GateVerdict
from pcpbench.gate_settings import GateOptions, resolve_settings
from pcpbench.plan import ScenarioPlan
from pcpbench.report.github import tell_github_error
from pcpbench.report.printable import printable
from pcpbench.report.progress import make_progress
from pcpbench.report.run_dir import RunDir
from pcpbench.request import DEFAULT_REPETITIONS, FEEDS, CompareRequest
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

GATE_DIRECTORY: Final = "gate"


def check_baselines(request: CompareRequest) -> None:
    """Raise UsageError for a baseline that cannot be read, or a place that cannot take one."""
    if request.save_baseline is not None:
        check_writable(request.save_baseline)
    if request.baseline is not None:
        try:
            read_measured(request.baseline)
            resolve_settings(GateOptions())
        except UsageError as error:
            tell_github_error(error)
            raise


def after_compare(request: CompareRequest, result: CompareResult, plans: list[ScenarioPlan]) -> int:
    """Do what the request wants done with baselines, and return the exit code of it all."""
    if request.save_baseline is None and request.baseline is None:
        return result.outcome.exit_code
    has_passed = result.outcome is Outcome.PASS
    if not has_passed and request.save_baseline is not None:
        told = "no baseline was written: the comparison did not pass."
        print(f"pcpbench: {told}", file=sys.stderr)
    for told in _of_the_comparison_alone(request):
        print(f"pcpbench: {told}", file=sys.stderr)
    verdicts = tuple(
        judged(scenario, plan, result.candidate)
        for scenario, plan in zip(result.scenarios, plans, strict=has_passed)
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
        if has_passed:  # what did not pass has said so already, and keeps its own exit code
            exit_code = gated.exit_code
        if has_passed and request.save_baseline and gated.verdict is not GateVerdict.PASS:
            told = f"the gate says {gated.verdict.value}"
            print(f"pcpbench: no baseline was written: {told}.", file=sys.stderr)
            return exit_code
    if request.save_baseline is not None and has_passed:
        measured = _measure(run, request.processes or BASELINE_PROCESSES, Path(result.run_dir))
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
        checks=request.checks,
    )


def _of_the_comparison_alone(request: CompareRequest) -> Iterator[str]:
    """What was asked of the comparison and is not asked of a gate's own runs."""
    if request.feed != FEEDS[0]:
        yield (
            f"--feed {request.feed} is of this comparison alone: a gate judges and times runs that "
            f"are {FEEDS[0]}."
        )
    if request.repetitions not in (0, DEFAULT_REPETITIONS):
        yield (
            f"--repetitions {request.repetitions} is of this comparison alone: each process of a "
            f"gate times {job_of(request).repetitions} of its own."
        )


def _measure(run: Measured, num: int, run_dir: Path) -> Measured:
    """The run with its processes; each is in `samples.jsonl` as soon as it has ended.

    Raises MeasuredFailure where one breaks a contract or samples other tokens than were judged, and
    CannotMeasure where one ends without a sample: a baseline is whole or is not written.
    """
    files = RunDir(run_dir)
    files.append_text(SAMPLES_NAME, samples_bytes(run).decode())
    with make_progress() as progress:
        progress.start("fresh processes", num, "processes")
        gathering = Gathering(
            measured=run,
            progress=progress,
            write=lambda line: files.append_text(SAMPLES_NAME, line.decode()),
            max_broken=1,
        )
        gathering.take(num)
    check_sound(gathering.measured, "no baseline was written")
    return gathering.measured
