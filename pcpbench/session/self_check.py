"""`pcpbench gate --self-check`: what the gate can and cannot see on this machine, now.

Owns the run from fresh processes to the table of rates: it measures processes of the code as it is
and some with a slowdown really planted, then cuts whole gates from the first (checks/power.py).
--max-time is the time for that; the gates are those of the settings that hold without it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from pcpbench.checks.gate import value_of
from pcpbench.checks.power import SLOWDOWNS, GateSize, Table, simulate, smallest_called
from pcpbench.checks.shift import MIN_PROCESSES
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.gate_defaults import BASELINE_PROCESSES, SELF_CHECK_GATES
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
from pcpbench.session.gate import job_of
from pcpbench.session.gathering import Gathering, check_sound, expected_of
from pcpbench.session.here import measured_here

PLANTED: Final = 0.05
MAX_PROCESSES: Final = 200
MAX_RUN: Final = 50
"""Processes after which a simulated gate looks no further."""
PLANTED_NAME: Final = "planted.jsonl"
CLEAN_SHARE: Final = 0.75
"""Of the time to measure, what goes into processes without a slowdown."""
JUDGING_SHARE: Final = 0.25
"""Of a gate's time, what goes into judging before the first process is timed; a guess that only
bounds how many processes a simulated gate may use."""
UNMOVED: Final = (CAPTURE_TIME, "launch")
"""Metrics that a slowdown of every step leaves alone, or moves by more than its share."""


def run_self_check(request: GateRequest) -> int:
    """Measure for --max-time (or four times a gate's), print the rates and return 0.

    Raises UsageError where no rule is in percent, CannotMeasure where the time is too short for a
    self-check or that of a gate for a verdict, and what a process ends with that breaks.
    """
    start = time.monotonic()
    request.check()
    settings = resolve_settings(msgspec.structs.replace(request.options, max_time_s=None))
    rules = _rules(settings)
    time_s = request.options.max_time_s or SELF_CHECK_GATES * settings.max_time_s
    job = _job(request.baseline)
    here = measured_here(job)
    with SelfCheckFiles(request.out, settings=here.settings, environment=here.environment) as files:
        clean = _gather(files, job, SAMPLES_NAME, start + CLEAN_SHARE * time_s)
        size = size_of(clean.processes, settings)
        slowed = _gather(
            files,
            msgspec.structs.replace(job, slowdown=PLANTED),
            PLANTED_NAME,
            start + time_s,
            expected_of(clean.processes),
        )
        result = msgspec.structs.replace(
            check(clean, slowed, rules, size),
            gate_time_s=settings.max_time_s,
            wall_s=time.monotonic() - start,
            run_dir=str(files.path),
        )
        files.finish_check(result)
    if request.json:
        print_self_check_json(result)
    print_self_check(result, make_console(sys.stderr if request.json else None))
    return 0


def size_of(processes: Sequence[ProcessSample], settings: GateSettings) -> GateSize:
    """How many processes a gate under these settings takes here.

    Raises CannotMeasure where it would end without a verdict, or where these are too few for one.
    """
    if not processes:
        raise CannotMeasure("--self-check has measured no process: give it more --max-time.")
    each_s, time_s = expected_of(processes), settings.max_time_s
    num_most = min(int(time_s * (1 - JUDGING_SHARE) / each_s), MAX_RUN)
    if num_most < MIN_PROCESSES:
        raise CannotMeasure(
            f"a gate of {time_s:g} s has time for {num_most} processes of {each_s:.0f} s here, and "
            f"{MIN_PROCESSES} is the least that is judged: set a longer max-time for it in "
            "pyproject.toml or a --config file."
        )
    num_first = min(settings.processes, num_most)
    size = GateSize(num_baseline=BASELINE_PROCESSES, num_first=num_first, num_most=num_most)
    if not size.num_apart(len(processes)):
        least_s = (BASELINE_PROCESSES + num_most) * each_s / CLEAN_SHARE
        raise CannotMeasure(
            f"a gate takes {BASELINE_PROCESSES} processes for its baseline and up to {num_most} "
            f"for its run, and --self-check has measured {len(processes)}: give it --max-time "
            f"{10 * math.ceil(least_s / 10)} or more."
        )
    return size


def check(
    clean: Measured, slowed: Measured, rules: Sequence[Rule], size: GateSize
) -> SelfCheckResult:
    """Rates of gates cut from clean processes; and whether a planted slowdown shows as it should.

    Raises CannotMeasure where no rule has a value in every process.
    """
    columns = [(r, s.scenario) for r in rules for s in clean.processes[0].scenarios]
    table, kept = _table(clean.processes, columns)
    if not kept:
        raise CannotMeasure(
            f"not every process has a value for {', '.join(rule.text for rule in rules)}: add "
            "--fail-on tpot:2.5%."
        )
    found = [simulate(table, slowdown, size) for slowdown in (0.0, *SLOWDOWNS)]
    least = smallest_called(found[1:])
    num = len(clean.processes)
    return SelfCheckResult(
        num_processes=num,
        num_planted=len(slowed.processes),
        num_baseline=size.num_baseline,
        num_first=size.num_first,
        num_most=size.num_most,
        num_gates=len(size.places(num)),
        num_apart=size.num_apart(num),
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
    )


def _rules(settings: GateSettings) -> list[Rule]:
    """Those in percent: a ratio is what a slowdown can be planted into."""
    rules = [rule for rule in settings.rules if rule.form is Form.MORE]
    if not rules:
        raise UsageError(
            f"--self-check has no rule in percent among {', '.join(r.text for r in settings.rules)}"
            ": add --fail-on tpot:2.5%."
        )
    return rules


def _job(baseline: Path | None) -> SampleJob:
    if baseline is not None:
        return job_of(read_measured(baseline))
    return SampleJob(base="eager", candidate="full", options=EngineOptions())


def _gather(
    files: SelfCheckFiles, job: SampleJob, name: str, deadline: float, expected_s: float = 0.0
) -> Measured:
    run = measured_here(job)
    files.add_lines(name, samples_bytes(run))
    with make_progress() as progress:
        progress.say(f"measuring fresh processes, slowdown {job.slowdown:g}")
        gathering = Gathering(
            measured=run,
            progress=progress,
            write=lambda line: files.add_lines(name, line),
        )
        gathering.take_until(
            lambda grown, _: len(grown.processes) >= MAX_PROCESSES, 0, deadline, expected_s
        )
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
