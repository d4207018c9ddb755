"""`pcpbench gate`: hold a run against a baseline; measure where nobody has, until it is decided.

Owns the run of one request from files to an exit code. Everything that can be refused is refused
before anything is measured or written. The judging is in checks/gate.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from pcpbench.checks.acceptances import expired, idle
from pcpbench.checks.gate import Case, Side, applicable, is_broken, is_settled, judge_gate
from pcpbench.errors import CannotMeasure, MeasuredFailure, UsageError
from pcpbench.gate_jobs import GateRequest, Measured, SampleJob
from pcpbench.gate_results import Finding, GateResult, GateVerdict
from pcpbench.gate_rules import Form
from pcpbench.gate_samples import TIME_METRICS
from pcpbench.gate_settings import GateSettings, resolve_settings
from pcpbench.records import Notice
from pcpbench.report import units
from pcpbench.report.console import make_console
from pcpbench.report.gate_files import GateFiles
from pcpbench.report.gate_json import print_gate_json
from pcpbench.report.gate_view import print_gate
from pcpbench.report.github import tell_github, tell_github_error
from pcpbench.report.progress import Progress, make_progress
from pcpbench.session.baseline import SAMPLES_NAME, read_measured, samples_bytes
from pcpbench.session.gathering import SLACK_S, Gathering, expected_of, failure_of, finding_of
from pcpbench.session.here import (
    can_extend,
    differences,
    incomparable,
    measured_here,
    other_times,
)
from pcpbench.session.processes import judge_once

MOVED: Final = (GateVerdict.REGRESSION, GateVerdict.ACCEPTED, GateVerdict.UNDECIDED)


def run_gate(request: GateRequest, compared: Measured | None = None) -> GateResult:
    """Gate a run and print the report.

    compared: the `compare` that this gate belongs to, with its job and what the judge said of each
    scenario, and no process timed yet: none is where one of them is no pass. None does the
    baseline's job and has it judged.
    """
    try:
        result = _gated(request, compared)
    except Exception as error:
        tell_github_error(error)
        raise
    talk = make_console(sys.stderr) if request.json or request.quiet else make_console()
    if request.json:
        print_gate_json(result)
    print_gate(result, talk)
    tell_github(result)
    return result


def _gated(request: GateRequest, compared: Measured | None) -> GateResult:
    start = time.monotonic()
    request.check()
    settings = resolve_settings(request.options)
    baseline = read_measured(request.baseline or Path(), "baseline")
    run = None if request.run is None else read_measured(request.run, "run")
    if run is not None and any(process in baseline.processes for process in run.processes):
        raise UsageError(
            f"RUN is {str(request.run)!r}, which holds processes of the baseline itself: name "
            "another run, or leave RUN out to have one measured now."
        )
    gate = Gate(request, settings, baseline, start)
    return gate.measure(compared) if run is None else gate.extend(run)


class Gate:
    """One baseline against one run."""

    def __init__(
        self, request: GateRequest, settings: GateSettings, baseline: Measured, start: float
    ) -> None:
        self.request, self.settings, self.baseline = request, settings, baseline
        self._start, self._deadline = start, start + settings.max_time_s
        self._rules, self._notices = applicable(settings.rules, side_of(baseline))

    def measure(self, compared: Measured | None) -> GateResult:
        """Measure a run with the code that is installed, of the baseline's job where no comparison
        brings its own, and judge it."""
        run = measured_here(job_of(self.baseline)) if compared is None else compared
        with self._files(run) as files, make_progress() as progress:
            if not incomparable(self.baseline, run) and compared is None:
                progress.say("judging the scenarios in a process of their own")
                left_s = self._deadline + SLACK_S - time.monotonic()
                try:
                    run = msgspec.structs.replace(run, judged=judge_once(run.job, left_s))
                except (MeasuredFailure, CannotMeasure) as error:
                    run = run.with_failure(failure_of(error))
            gathering = self._gathering(run, files, progress)
            has_passed = compared is None or all(j.outcome == "pass" for j in run.judged)
            if not run.failures and has_passed and not self._is_hopeless(run):
                progress.start("fresh processes", self.settings.processes, "processes")
                expected_s = expected_of(self.baseline.processes)
                gathering.take_until(
                    self._is_settled, self.settings.processes, self._deadline, expected_s
                )
                if not (gathering.measured.processes or gathering.measured.failures):
                    self._notices.append(self._too_short(expected_s))
            return self._finish(files, gathering.measured)

    def extend(self, run: Measured) -> GateResult:
        """Judge a run that was measured before; go on measuring if it is undecided and ours."""
        with self._files(run) as files, make_progress() as progress:
            gathering = self._gathering(run, files, progress)
            is_bare = bool(run.judged) and not (run.processes or run.failures)
            if (is_bare and not self._is_hopeless(run)) or not is_settled(self.judge(run)):
                problem = _why_not_extended(run)
                if problem:
                    message = f"the run is judged as it is and was not extended: {problem}."
                    self._notices.append(Notice(setting="run", message=message))
                else:
                    progress.say("undecided as it is: measuring on")
                    gathering.take_until(
                        self._is_settled,
                        self.settings.processes,
                        self._deadline,
                        expected_of(run.processes or self.baseline.processes),
                    )
            if not (run.judged or run.processes or run.failures):
                message = "it was ended before anything was known of it: gate again without RUN."
                self._notices.append(Notice(setting="run", message=message))
            return self._finish(files, gathering.measured)

    def judge(self, run: Measured) -> tuple[Finding, ...]:
        """Every process that ended without a sample, and every rule over what there is."""
        case = Case(
            baseline=side_of(self.baseline),
            run=side_of(run),
            today=datetime.now(UTC).date(),
            other_times=other_times(self.baseline, run),
            incomparable=incomparable(self.baseline, run),
        )
        failures = tuple(map(finding_of, run.failures))
        if failures and not run.judged and not run.processes:
            return failures
        return failures + judge_gate(case, self._rules, self.settings.accept)

    def _is_settled(self, run: Measured, at_look: bool) -> bool:
        """Whether no process more is wanted; before the first look only where counts have said so.

        Each look at times has its chance to err; a count is as it is after the first process.
        """
        findings = self.judge(run)
        return is_settled(findings) if at_look else is_broken(findings)

    def _gathering(self, run: Measured, files: GateFiles, progress: Progress) -> Gathering:
        """The run, on disk as far as it is measured, and ready to grow."""
        files.add_lines(SAMPLES_NAME, samples_bytes(run))
        return Gathering(
            measured=run,
            progress=progress,
            write=lambda line: files.add_lines(SAMPLES_NAME, line),
        )

    def _is_hopeless(self, run: Measured) -> bool:
        """Whether times would change nothing: settings differ, a scenario failed already, or each
        that would be timed is another one now."""
        failed = any(scenario.outcome == "fail" for scenario in run.judged)
        return failed or bool(incomparable(self.baseline, run)) or self._has_changed(run)

    def _has_changed(self, run: Measured) -> bool:
        steps = {judged.scenario: judged.plan_hash for judged in run.judged}
        timed = self.baseline.processes[0].scenarios
        return all(steps.get(s.scenario, s.plan_hash) != s.plan_hash for s in timed)

    def _too_short(self, expected_s: float) -> Notice:
        message = (
            f"no process was timed: those of the baseline took {expected_s:.0f} s each, and of "
            f"{self.settings.max_time_s:g} s less were left after judging: raise --max-time."
        )
        return Notice(setting="max-time", message=message)

    def _files(self, run: Measured) -> GateFiles:
        return GateFiles(
            self.request.out,
            settings={**run.settings, "gate": self.settings.shown()},
            environment=run.environment,
        )

    def _finish(self, files: GateFiles, run: Measured) -> GateResult:
        today, findings = datetime.now(UTC).date(), _with_next_steps(self.judge(run), run)
        result = GateResult(
            baseline=str(self.request.baseline),
            run=str(self.request.run or "measured now"),
            findings=findings,
            rules=self._rules,
            on_undecided=self.settings.on_undecided,
            settings=run.settings,
            gate_settings=self.settings.shown(),
            baseline_environment=self.baseline.environment,
            environment=run.environment,
            num_baseline=len(self.baseline.processes),
            num_run=len(run.processes),
            same_machine=self.baseline.machine.id == run.machine.id,
            notices=(
                *self._notices,
                *_each_arm(self.baseline, run, findings),
                *_untimed(run),
                *_unknown(self.baseline, run),
                *differences(self.baseline, run),
                *expired(self.settings.accept, today),
                *idle(self.settings.accept, self._rules),
            ),
            wall_s=time.monotonic() - self._start,
            run_dir=str(files.path),
        )
        files.finish_gate(result)
        return result


def _with_next_steps(findings: Sequence[Finding], run: Measured) -> tuple[Finding, ...]:
    """Findings of wrong numbers with the comparison that shows the step, rank and tensor."""
    timed = {s.scenario for p in run.processes for s in p.scenarios if s.num_wrong}
    names = [j.scenario for j in run.judged if j.outcome == "fail" or j.scenario in timed]
    if not names:
        return tuple(findings)
    command = run.job.comparison_of(_as_typed(names, run.job))
    return tuple(
        msgspec.structs.replace(finding, next_step=command) if is_broken([finding]) else finding
        for finding in findings
    )


def _as_typed(names: Sequence[str], job: SampleJob) -> Sequence[str]:
    """Scenarios as the command line has them: by file, where they are not shipped.

    A file may hold a scenario of another name; all that were typed are named then.
    """
    if not job.scenarios or "all" in job.scenarios:
        return names
    typed = {name: each for each in job.scenarios for name in (each, Path(each).stem)}
    found = [typed[name] for name in names if name in typed]
    return found if len(found) == len(names) else job.scenarios


def _each_arm(baseline: Measured, run: Measured, findings: Sequence[Finding]) -> tuple[Notice, ...]:
    """What each arm took itself, where a ratio is broken or open: which of the two has moved?"""
    if other_times(baseline, run):
        return ()
    told = []
    for finding in findings:
        rule, is_open = finding.rule, finding.verdict in MOVED
        if not is_open or rule.form is not Form.MORE or rule.metric not in TIME_METRICS:
            continue
        moves = [
            f"{arm} {' -> '.join(units.times(*ends))}"
            for role, arm in (("base", run.job.base), ("candidate", run.job.candidate))
            if None not in (ends := [_own(m, finding, role) for m in (baseline, run)])
        ]
        told.append(f"{rule.name} of {finding.scenario}: {', '.join(moves)}")
    if not told:
        return ()
    message = (
        f"{'; '.join(told)}. A faster {run.job.base} raises the ratio as a slower "
        f"{run.job.candidate} does."
    )
    return (Notice(setting="each arm itself", message=message),)


def _own(measured: Measured, finding: Finding, role: str) -> float | None:
    """Seconds of an arm: the median over processes."""
    stats = [
        getattr(sample.metrics[finding.rule.metric], role)
        for sample in side_of(measured).samples(finding.scenario)
    ]
    known = [float(getattr(stat, finding.rule.stat)) for stat in stats if stat is not None]
    return median(known) if known else None


def _untimed(run: Measured) -> tuple[Notice, ...]:
    """Scenarios that were judged and not timed."""
    timed = {s.scenario for process in run.processes for s in process.scenarios}
    names = [judged.scenario for judged in run.judged if judged.scenario not in timed]
    if not timed or not names:
        return ()
    message = (
        f"{', '.join(names)}: numbers and contracts were judged, no time was taken. To time a "
        "scenario, name it with --scenario when the baseline is recorded."
    )
    return (Notice(setting="scenario", message=message),)


def _unknown(baseline: Measured, run: Measured) -> tuple[Notice, ...]:
    """Scenarios of the run that the baseline does not know."""
    known = {judged.scenario for judged in baseline.judged}
    timed = {s.scenario for process in baseline.processes for s in process.scenarios}
    ran = {s.scenario for process in run.processes for s in process.scenarios}
    new = [judged.scenario for judged in run.judged if judged.scenario not in known]
    new += sorted(ran - timed - set(new))
    if not new:
        return ()
    message = f"{', '.join(new)}: not in the baseline, so there are no times to hold theirs against"
    return (Notice(setting="scenario", message=f"{message}; record it anew."),)


def _why_not_extended(run: Measured) -> str:
    """Why a run cannot go on here, "" where it can."""
    try:
        return can_extend(run, measured_here(run.job))
    except CannotMeasure as error:
        return str(error).rstrip(".")


def job_of(baseline: Measured) -> SampleJob:
    """The baseline's job, to be done again."""
    return msgspec.structs.replace(baseline.job, judge=False, slowdown=0.0)


def side_of(measured: Measured) -> Side:
    """What the judge may see of a run."""
    return Side(processes=measured.processes, judged=measured.judged)
