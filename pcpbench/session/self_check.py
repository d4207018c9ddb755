"""`pcpbench gate --self-check`: what the gate can and cannot see on this machine, now.

Owns the run from fresh processes to the table of rates: it measures processes of the code as it is
and some with a slowdown really planted, then draws whole gates from them (checks/power.py).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from pcpbench.checks.gate import value_of
from pcpbench.checks.power import SLOWDOWNS, Rates, Table, simulate, smallest_called
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import CannotMeasure
from pcpbench.gate_jobs import GateRequest, Measured, SampleJob
from pcpbench.gate_results import SelfCheckResult
from pcpbench.gate_rules import CAPTURE_TIME, Form, Rule
from pcpbench.gate_samples import ProcessSample
from pcpbench.gate_settings import GateSettings, resolve_settings
from pcpbench.report.console import make_console
from pcpbench.report.gate_files import SelfCheckFiles
from pcpbench.report.progress import make_progress
from pcpbench.report.self_check_view import print_self_check, print_self_check_json
from pcpbench.session.baseline import SAMPLES_NAME, read_measured, samples_bytes
from pcpbench.session.baseline_runs import BASELINE_PROCESSES
from pcpbench.session.gate import job_of
from pcpbench.session.gathering import Gathering, check_sound
from pcpbench.session.here import measured_here

PLANTED: Final = 0.05
MAX_PROCESSES: Final = 200
PLANTED_NAME: Final = "planted.jsonl"
DEFAULT_TIME_S: Final = 300.0
JUDGING_SHARE: Final = 0.25
"""Of a gate's time, what goes into judging before the first process is timed; a guess that only
bounds how many processes a simulated gate may use."""
UNMOVED: Final = (CAPTURE_TIME, "launch")
"""Metrics that a slowdown of every step leaves alone, or moves by more than its share."""


def run_self_check(request: GateRequest) -> int:
    """Measure for --max-time (300 s where it is not given), print the rates, return 0 or 3."""
    start = time.monotonic()
    request.check()
    settings = resolve_settings(request.options)
    time_s = request.options.max_time_s or DEFAULT_TIME_S
    job = _job(request.baseline)
    here = measured_here(job)
    with SelfCheckFiles(request.out, settings=here.settings, environment=here.environment) as files:
        clean = _gather(files, job, SAMPLES_NAME, start + 0.75 * time_s)
        slowed = _gather(
            files,
            msgspec.structs.replace(job, slowdown=PLANTED),
            PLANTED_NAME,
            start + time_s,
        )
        result = check(clean, slowed, settings, time.monotonic() - start, str(files.path))
        files.finish_check(result)
    if request.json:
        print_self_check_json(result)
    print_self_check(result, make_console(sys.stderr if request.json else None))
    return result.exit_code


def check(
    clean: Measured,
    slowed: Measured,
    settings: GateSettings,
    wall_s: float,
    run_dir: str = "",
) -> SelfCheckResult:
    """Rates of gates drawn from clean processes; and whether a planted slowdown shows as it should.

    Raises CannotMeasure where there are too few processes to draw gates from.
    """
    rules = [rule for rule in settings.rules if rule.form is Form.MORE]
    columns = [(r, s.scenario) for r in rules for s in clean.processes[0].scenarios]
    table, kept = _table(clean.processes, columns)
    num_first = settings.processes
    num_baseline = min(BASELINE_PROCESSES, len(clean.processes) - num_first)
    if not kept or num_baseline < num_first // 2 + 1:
        raise CannotMeasure(
            f"--self-check measured {len(clean.processes)} processes, too few to draw gates from: "
            "give it more --max-time."
        )
    each_s = float(np.median([process.wall_s for process in clean.processes])) + 0.5
    num_most = int(settings.max_time_s * (1 - JUDGING_SHARE) / each_s)

    def rates(slowdown: float) -> Rates:
        return simulate(
            table,
            slowdown,
            num_baseline=num_baseline,
            num_first=num_first,
            num_most=num_most,
        )

    found = [rates(slowdown) for slowdown in (0.0, *SLOWDOWNS)]
    least = smallest_called(found[1:])
    return SelfCheckResult(
        num_processes=len(clean.processes),
        num_planted=len(slowed.processes),
        num_baseline=num_baseline,
        num_most=min(num_most, len(clean.processes) - num_baseline),
        rates=tuple(msgspec.structs.asdict(rate) for rate in found),
        smallest_called=None if least is None else least.slowdown,
        spreads=tuple(
            (rule.text, scenario, _spread([row[i] for row in table.values]))
            for i, (rule, scenario) in enumerate(kept)
        ),
        planted=PLANTED,
        seen=tuple(
            (rule.text, scenario, _seen(clean, slowed, rule, scenario))
            for rule, scenario in kept
            if rule.metric not in UNMOVED
        ),
        environment=clean.environment,
        wall_s=wall_s,
        run_dir=run_dir,
    )


def _job(baseline: Path | None) -> SampleJob:
    if baseline is not None:
        return job_of(read_measured(baseline))
    return SampleJob(base="eager", candidate="full", options=EngineOptions())


def _gather(files: SelfCheckFiles, job: SampleJob, name: str, deadline: float) -> Measured:
    run = measured_here(job)
    files.add_lines(name, samples_bytes(run))
    with make_progress() as progress:
        progress.start(f"fresh processes, slowdown {job.slowdown:g}", 1, "processes")
        gathering = Gathering(
            measured=run,
            progress=progress,
            write=lambda line: files.add_lines(name, line),
        )
        gathering.take_until(lambda grown: len(grown.processes) >= MAX_PROCESSES, 0, deadline)
    check_sound(gathering.measured, "nothing can be said of this machine")
    return gathering.measured


def _table(
    processes: tuple[ProcessSample, ...], columns: list[tuple[Rule, str]]
) -> tuple[Table, list[tuple[Rule, str]]]:
    """Columns of which every process has a value."""
    values = {
        (rule.text, scenario): [_value(process, rule, scenario) for process in processes]
        for rule, scenario in columns
    }
    kept = [(r, s) for r, s in columns if None not in values[r.text, s]]
    rows = [
        [value for r, s in kept if (value := values[r.text, s][number]) is not None]
        for number in range(len(processes))
    ]
    table = Table(
        values=rows,
        limits=[rule.limit for rule, _ in kept],
        slowed=[rule.metric not in UNMOVED for rule, _ in kept],
    )
    return table, kept


def _value(process: ProcessSample, rule: Rule, scenario: str) -> float | None:
    sample = next((s for s in process.scenarios if s.scenario == scenario), None)
    return None if sample is None else value_of(sample, rule)


def _seen(clean: Measured, slowed: Measured, rule: Rule, scenario: str) -> float | None:
    """The planted slowdown as the medians show it; None where no slowed process was measured."""
    medians = []
    for measured in (clean, slowed):
        values = [_value(process, rule, scenario) for process in measured.processes]
        known = [value for value in values if value is not None]
        if not known:
            return None
        medians.append(float(np.median(known)))
    return float(np.expm1(medians[1] - medians[0]))


def _spread(values: list[float]) -> float:
    """Standard deviation of one process's value, from the middle half."""
    low, high = np.percentile(values, [25, 75])
    return float(high - low) / 1.349
