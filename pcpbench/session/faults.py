"""`pcpbench faults`: inject each fault of the catalogue and see which contracts it trips.

Owns the order of runs, which stands are used again, and the verdict on each fault. A run judges
only; it times nothing. Stands are shared by faults of one setting, since `Arm.start` brings each
arm back to its beginning; that this holds is itself tested by a clean run before the first fault
of a setting and another after the last. A fault that acts at capture, one that says it leaves
marks, and a run that could not be finished get a stand of their own, or leave none behind.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec
import torch

from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import make_clock, one_thread
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import MeasuredFailure, NoMemory, NothingToDamage, PcpbenchError, UsageError
from pcpbench.fault_results import (
    CleanOutcome,
    CleanRun,
    FaultInfo,
    FaultRun,
    FaultsResult,
    Verdict,
)
from pcpbench.faults.entries import Unusable
from pcpbench.faults.fault import Fault, Setting, Site
from pcpbench.faults.registry import SHIPPED_FOR, choose_faults, choose_unusable, source_of
from pcpbench.plan import ScenarioPlan
from pcpbench.report.clean_view import print_without_verdict
from pcpbench.report.console import make_console
from pcpbench.report.faults_view import (
    faults_json,
    print_catalogue,
    print_faults,
    print_markdown,
)
from pcpbench.report.json_out import print_text
from pcpbench.report.progress import Progress, make_progress
from pcpbench.results import Outcome, ScenarioResult
from pcpbench.scenarios.loader import load_scenario
from pcpbench.session.faults_request import FaultsRequest, check_target, options_of
from pcpbench.session.inject import planted
from pcpbench.session.ladder import build_ladder
from pcpbench.session.planning import plan_for
from pcpbench.session.stand import Stand, StandBuilder
from pcpbench.session.trial import Trial
from pcpbench.targets.builtin import BuiltinArm
from pcpbench.targets.choice import make_target


@dataclass(frozen=True)
class _Case:
    """One fault in one setting, with its place in the report."""

    place: int
    fault: Fault
    setting: Setting


def run_list(target: str = "builtin") -> int:
    """Print the catalogue of a target and return the exit code."""
    check_target(target)
    entries = [info_of(fault) for fault in choose_faults((), target)]
    entries += [_info_of_unusable(entry) for entry in choose_unusable((), target)]
    print_catalogue(entries, make_console())
    return 0


def run_faults(request: FaultsRequest) -> int:
    """Run the faults asked for, print the table and return the exit code."""
    start = time.perf_counter()
    request.check()
    device = resolve_device(request.device)
    faults = choose_faults(request.faults, request.target)
    unusable = choose_unusable(request.faults, request.target)
    runner = FaultRunner(device, request)
    shipped = {fault.name for fault in SHIPPED_FOR[request.target]}
    cases = []
    for fault in faults:
        refused = None if fault.name in shipped else runner.refusal(fault)
        if refused is not None:
            unusable.append(refused)
            continue
        for setting in request.settings(fault):
            runner.options(setting).check()  # first, even where the fault lacks something
            if not fault.lacks(setting):
                runner.check(setting)
            cases.append((fault, setting))
    with one_thread(device), make_progress() as progress:
        runs, clean = runner.run(cases, progress)
    runs += tuple(_unusable_run(entry) for entry in unusable)
    wall_s = time.perf_counter() - start
    result = FaultsResult(target=request.target, runs=runs, clean=clean, wall_s=wall_s)
    if request.json:
        print_text(faults_json(result))
    elif request.markdown:
        print_markdown(result)
    else:
        print_faults(result, make_console())
    talk = sys.stderr if request.json or request.markdown else None
    print_without_verdict(result.clean, make_console(talk))
    return result.exit_code


def info_of(fault: Fault) -> FaultInfo:
    """A fault in words."""
    return FaultInfo(
        name=fault.name,
        class_id=fault.class_id,
        description=fault.description,
        reports=fault.reports,
        contracts=tuple(sorted(fault.contracts, key=finding_order)),
        world=fault.setting.world,
        scenario=fault.setting.scenario,
    )


def _info_of_unusable(entry: Unusable) -> FaultInfo:
    return FaultInfo(
        name=entry.name,
        class_id="-",
        description=f"Cannot be used ({entry.told}).",
        reports=(),
        contracts=(),
        world="",
        scenario="",
        is_usable=False,
    )


def _unusable_run(entry: Unusable) -> FaultRun:
    return FaultRun(
        fault=_info_of_unusable(entry),
        world="",
        scenario="",
        fired=(),
        verdict=Verdict.UNUSABLE,
        detail=entry.told,
    )


def finding_order(finding: str) -> tuple[int, str]:
    """C2 before C10, contracts before drifts."""
    number = finding[1:]
    return (int(number), "") if number.isdigit() else (1000, finding)


class FaultRunner:
    """Runs faults on one device and keeps the stand of the setting that it is at.

    request: checks (full ones add second replays and poisoned runs; a setting that needs them gets
    them in any case), whose faults these are and whose code runs, dtype and seed.
    """

    def __init__(self, device: torch.device, request: FaultsRequest | None = None) -> None:
        self._device, self._request = device, request or FaultsRequest()
        backend = resolve_backend("auto", device)
        self._target = make_target(self._request.target, device, backend)
        self._accused: dict[Setting, set[str]] = {}
        self._at: Setting | None = None
        self._stand: Stand | None = None

    def options(self, setting: Setting) -> EngineOptions:
        """The settings of the engines of a setting."""
        options = options_of(setting, self._target.name)
        return msgspec.structs.replace(options, dtype=self._request.dtype, seed=self._request.seed)

    def check(self, setting: Setting) -> None:
        """Raise UsageError or ScenarioError for a setting that the engine refuses."""
        self._builder(setting).check(self._plan(setting))

    def refusal(self, fault: Fault) -> Unusable | None:
        """What the engine has against the setting that a fault brings itself; None for nothing."""
        try:
            self.check(fault.setting)
        except UsageError as error:
            reason = f"the engine refuses its setting, {fault.setting.world}: {error}".rstrip(".")
            return Unusable(fault.name, source_of(fault.name, fault.target), reason)
        return None

    def run(
        self, cases: Sequence[tuple[Fault, Setting]], progress: Progress
    ) -> tuple[tuple[FaultRun, ...], tuple[CleanRun, ...]]:
        """All cases, in the order given, and the clean runs of their settings.

        Cases of one setting run together; those that act at capture come last.
        """
        groups: dict[Setting, list[_Case]] = {}
        for place, (fault, setting) in enumerate(cases):
            groups.setdefault(setting, []).append(_Case(place, fault, setting))
        runs: dict[int, FaultRun] = {}
        clean: list[CleanRun] = []
        progress.start("faults", len(cases), "faults")
        for setting, group in groups.items():
            fit = [case for case in group if not case.fault.lacks(setting)]
            if fit:
                clean.append(self._clean(setting, progress))
            for case in sorted(group, key=lambda case: case.fault.at_capture):
                runs[case.place] = run = self._case(case)
                progress.advance()
                progress.say(f"{run.fault.name}: {run.verdict.value} ({run.wall_s:.1f} s)")
            # Engines were used again: were they as sound afterwards as before?
            if any(not case.fault.at_capture for case in fit) and self._stand is not None:
                clean.append(self._clean(setting, progress))
        return tuple(runs[place] for place in sorted(runs)), tuple(clean)

    def _clean(self, setting: Setting, progress: Progress) -> CleanRun:
        start = time.perf_counter()
        outcome, accused, detail = judged_clean(
            lambda: self._trial(setting, self._stand_for(setting)).run()
        )
        if outcome is CleanOutcome.NO_MEMORY:
            self._stand = None
        wall_s = time.perf_counter() - start
        self._accused.setdefault(setting, set()).update(accused)
        told = f"accused by {', '.join(accused)}" if accused else outcome.value
        progress.say(f"{setting.world}, {setting.scenario}, no fault: {told} ({wall_s:.1f} s)")
        return CleanRun(
            world=setting.world,
            scenario=setting.scenario,
            outcome=outcome,
            accused=accused,
            detail=detail,
            wall_s=wall_s,
        )

    def _case(self, case: _Case) -> FaultRun:
        fault, setting, start = case.fault, case.setting, time.perf_counter()
        fired: tuple[str, ...] = ()
        lacks = fault.lacks(setting)
        if lacks:
            verdict, detail = Verdict.NOT_RUN, lacks
        else:
            try:
                site, fired, detail = self._inject(fault, setting)
                known = self._accused.get(setting, set())
                verdict = verdict_of(fault, fired, site.num_hits, known)
            except NothingToDamage as error:
                verdict, detail = Verdict.NOT_RUN, str(error)
            except NoMemory as error:  # says nothing of the fault, nor of the judge
                self._stand = None
                verdict, detail = Verdict.NO_MEMORY, str(error)
            except Exception as error:  # whatever an injected engine may raise is a result
                self._stand = None
                told = str(error) if isinstance(error, PcpbenchError) else ""
                verdict, detail = Verdict.CRASHED, told or f"{type(error).__name__}: {error}"
        return FaultRun(
            fault=info_of(fault),
            world=setting.world,
            scenario=setting.scenario,
            fired=fired,
            verdict=verdict,
            detail=detail,
            wall_s=time.perf_counter() - start,
        )

    def _inject(self, fault: Fault, setting: Setting) -> tuple[Site, tuple[str, ...], str]:
        """Run one fault; what it tripped, and the first finding."""
        if fault.at_capture:
            site = Site(api=self._target.api)
            with planted(fault, site):
                try:
                    stand = self._builder(setting).stand_for(self._plan(setting))
                except MeasuredFailure as failure:
                    return site, (failure.contract,), str(failure)
                result = self._trial(setting, stand).run()
            return site, findings(result), _first(result)
        stand = self._stand_for(setting)
        site = Site(
            {label: arm.engine for label, arm in stand.arms.items() if isinstance(arm, BuiltinArm)},
            self._target.api,
        )
        with planted(fault, site):
            result = self._trial(setting, stand).run()
        if fault.leaves_marks or any(
            arm.num_steps < len(self._plan(setting).steps) for arm in result.arms
        ):
            self._stand = None
        return site, findings(result), _first(result)

    def _stand_for(self, setting: Setting) -> Stand:
        if self._stand is None or self._at != setting:
            self._stand = None
            self._stand = self._builder(setting).stand_for(self._plan(setting))
            self._at = setting
        return self._stand

    def _builder(self, setting: Setting) -> StandBuilder:
        options = self.options(setting)
        options.check()
        ladder = build_ladder("eager", setting.candidate)
        return StandBuilder(self._target, ladder, options, str(self._device))

    def _trial(self, setting: Setting, stand: Stand) -> Trial:
        return Trial(
            self._plan(setting),
            stand,
            make_clock(self._device),
            dtype=self._request.dtype,
            teacher_forced=True,
            repetitions=0,
            checks="full" if "full" in (self._request.checks, setting.checks) else "quick",
        )

    def _plan(self, setting: Setting) -> ScenarioPlan:
        return plan_for(self._target, load_scenario(setting.scenario), self.options(setting))


def judged_clean(
    run: Callable[[], ScenarioResult],
) -> tuple[CleanOutcome, tuple[str, ...], str]:
    """What a run of sound engines came to, what it was accused of, and the first reason."""
    try:
        result = run()
    except MeasuredFailure as failure:  # from capture
        return CleanOutcome.ACCUSED, (failure.contract,), str(failure)
    except NoMemory as error:
        return CleanOutcome.NO_MEMORY, (), str(error)
    accused = findings(result)
    if result.outcome is Outcome.FAIL or accused:
        return CleanOutcome.ACCUSED, accused or (result.outcome.value,), _first(result)
    passed = result.outcome is Outcome.PASS
    return CleanOutcome.CLEAN if passed else CleanOutcome.NOT_COMPARED, (), _first(result)


def findings(result: ScenarioResult) -> tuple[str, ...]:
    """Contracts broken and drifts out of budget, in order."""
    drifts = {f"{drift.kind} drift" for drift in result.drifts if not drift.ok}
    found = {violation.contract for violation in result.violations} | drifts
    return tuple(sorted(found - {"capture drift"}, key=finding_order))


def verdict_of(
    fault: Fault, fired: Sequence[str], num_hits: int, known: Collection[str] = ()
) -> Verdict:
    """What the findings say of a fault; one that never acted proves nothing.

    known: what a run without it is accused of as well, which says nothing of the fault.
    """
    own = set(fired) - set(known)
    if not num_hits:
        return Verdict.NOT_TRIGGERED
    if not fault.contracts:
        return Verdict.ACCUSED if own else Verdict.QUIET
    if fault.contracts & own:
        return Verdict.CAUGHT
    return Verdict.MISNAMED if fired else Verdict.ESCAPED


def _first(result: ScenarioResult) -> str:
    return result.reasons[0] if result.reasons else ""
