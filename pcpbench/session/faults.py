"""`pcpbench faults`: inject each fault of the catalogue and see which contracts it trips.

Owns the order of runs, which stands are used again, and the verdict on each fault. A run judges
only; it times nothing. Stands are shared by faults of one setting, since `Arm.start` brings each
arm back to its beginning; that this holds is itself tested by a clean run before the first fault
of a setting and another after the last. A fault that acts at capture, one that says it leaves
marks, and a run that could not be finished get a stand of their own, or leave none behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import make_clock, one_thread
from pcpbench.errors import MeasuredFailure, PcpbenchError, UsageError
from pcpbench.fault_results import CleanRun, FaultInfo, FaultRun, FaultsResult, Verdict
from pcpbench.faults.entries import Unusable
from pcpbench.faults.fault import Fault, Setting, Site
from pcpbench.faults.registry import SHIPPED_NAMES, choose_faults, choose_unusable, source_of
from pcpbench.model.presets import model_shape
from pcpbench.plan import ScenarioPlan
from pcpbench.report.console import make_console
from pcpbench.report.faults_view import (
    faults_json,
    print_catalogue,
    print_faults,
    print_markdown,
)
from pcpbench.report.json_out import print_text
from pcpbench.report.progress import Progress, make_progress
from pcpbench.request import CHECKS, EngineOptions
from pcpbench.results import Outcome, ScenarioResult
from pcpbench.scenarios.loader import load_scenario
from pcpbench.session.inject import planted
from pcpbench.session.ladder import build_ladder
from pcpbench.session.planning import plan_scenario
from pcpbench.session.stand import Stand, StandBuilder
from pcpbench.session.trial import Trial
from pcpbench.targets.builtin import BuiltinArm, BuiltinTarget


class FaultsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`pcpbench faults run`. None and empty: what each fault asks for itself."""

    faults: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    pcp: int | None = None
    tp: int | None = None
    dcp: int | None = None
    interleave: int | None = None
    spec_tokens: int | None = None
    model: str | None = None
    device: str = "auto"
    checks: str = "quick"
    microbatch: bool = False
    markdown: bool = False
    json: bool = False

    def check(self) -> None:
        """Raise UsageError for a request that could not be run whatever the machine is."""
        if self.checks not in CHECKS:
            raise UsageError(f"--check is {self.checks!r}: use one of {', '.join(CHECKS)}.")
        if self.interleave is not None and self.interleave < 1:
            raise UsageError(
                f"--interleave is {self.interleave}: it must be a whole number from 1 up."
            )
        if self.markdown and self.json:
            raise UsageError("--markdown and --json are two forms of one table: use one of them.")
        if (self.interleave or 1) > 1 and (self.dcp or 1) == 1:
            raise UsageError(
                f"--interleave is {self.interleave} without --dcp: it changes nothing there, so "
                "set --dcp above 1, or leave --interleave out."
            )

    def settings(self, fault: Fault) -> list[Setting]:
        """Where to run a fault: its own setting, or the world and the scenarios asked for.

        A world that is named is named whole: what is left out is 1. Draft tokens are no part of it.
        """
        setting = fault.setting
        asked = (self.pcp, self.tp, self.dcp, self.interleave)
        if any(size is not None for size in asked):
            pcp, tp, dcp, interleave = (1 if size is None else size for size in asked)
            setting = replace(setting, pcp=pcp, tp=tp, dcp=dcp, interleave=interleave)
            if pcp > 1 and dcp > 1:  # nothing else runs there
                is_sparse = model_shape(setting.model).is_sparse
                model = setting.model if is_sparse else "tiny-sparse"
                setting = replace(setting, model=model, dcp_backend="ag_rs")
        if self.model is not None:
            setting = replace(setting, model=self.model)
        if self.spec_tokens is not None:
            setting = replace(setting, spec_tokens=self.spec_tokens)
        if self.microbatch:
            setting = replace(setting, microbatch=True)
        several = len(model_shape(setting.model).kv_groups) > 1
        if not setting.spec_tokens or setting.microbatch or several:  # none can run there
            setting = replace(setting, draft_model="planned")
        names = self.scenarios or (setting.scenario,)
        return [replace(setting, scenario=name) for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class _Case:
    """One fault in one setting, with its place in the report."""

    place: int
    fault: Fault
    setting: Setting


def run_list() -> int:
    """Print the catalogue and return the exit code."""
    entries = [info_of(fault) for fault in choose_faults(())]
    entries += [_info_of_unusable(entry) for entry in choose_unusable(())]
    print_catalogue(entries, make_console())
    return 0


def run_faults(request: FaultsRequest) -> int:
    """Run the faults asked for, print the table and return the exit code."""
    start = time.perf_counter()
    request.check()
    device = resolve_device(request.device)
    runner = FaultRunner(device, request.checks)
    unusable = choose_unusable(request.faults)
    cases = []
    for fault in choose_faults(request.faults):
        refused = None if fault.name in SHIPPED_NAMES else runner.refusal(fault)
        if refused is not None:
            unusable.append(refused)
            continue
        for setting in request.settings(fault):
            options_of(setting).check()  # first, even where the fault lacks something
            if not fault.lacks(setting):
                runner.check(setting)
            cases.append((fault, setting))
    with one_thread(device), make_progress() as progress:
        runs, clean = runner.run(cases, progress)
    runs += tuple(_unusable_run(entry) for entry in unusable)
    result = FaultsResult(runs=runs, clean=clean, wall_s=time.perf_counter() - start)
    if request.json:
        print_text(faults_json(result))
    elif request.markdown:
        print_markdown(result)
    else:
        print_faults(result, make_console())
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

    checks: `quick` or `full` contracts; full ones add second replays and poisoned runs. A setting
    that needs full ones gets them in any case.
    """

    def __init__(self, device: torch.device, checks: str = "quick") -> None:
        self._device, self._checks = device, checks
        self._target = BuiltinTarget(device, resolve_backend("auto", device))
        self._at: Setting | None = None
        self._stand: Stand | None = None

    def check(self, setting: Setting) -> None:
        """Raise UsageError or ScenarioError for a setting that the engine refuses."""
        self._builder(setting).check(_plan(setting))

    def refusal(self, fault: Fault) -> Unusable | None:
        """What the engine has against the setting that a fault brings itself; None for nothing."""
        try:
            self.check(fault.setting)
        except UsageError as error:
            reason = f"the engine refuses its setting, {fault.setting.world}: {error}".rstrip(".")
            return Unusable(fault.name, source_of(fault.name), reason)
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
        accused, detail = accused_of(lambda: self._trial(setting, self._stand_for(setting)).run())
        wall_s = time.perf_counter() - start
        told = f"accused by {', '.join(accused)}" if accused else "clean"
        progress.say(f"{setting.world}, {setting.scenario}, no fault: {told} ({wall_s:.1f} s)")
        return CleanRun(
            world=setting.world,
            scenario=setting.scenario,
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
                verdict = verdict_of(fault, fired, site.num_hits)
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
            site = Site()
            with planted(fault, site):
                try:
                    stand = self._builder(setting).stand_for(_plan(setting))
                except MeasuredFailure as failure:
                    return site, (failure.contract,), str(failure)
                result = self._trial(setting, stand).run()
            return site, findings(result), _first(result)
        stand = self._stand_for(setting)
        site = Site(
            {label: arm.engine for label, arm in stand.arms.items() if isinstance(arm, BuiltinArm)}
        )
        with planted(fault, site):
            result = self._trial(setting, stand).run()
        if fault.leaves_marks or any(
            arm.num_steps < len(_plan(setting).steps) for arm in result.arms
        ):
            self._stand = None
        return site, findings(result), _first(result)

    def _stand_for(self, setting: Setting) -> Stand:
        if self._stand is None or self._at != setting:
            self._stand = None
            self._stand = self._builder(setting).stand_for(_plan(setting))
            self._at = setting
        return self._stand

    def _builder(self, setting: Setting) -> StandBuilder:
        options = options_of(setting)
        options.check()
        ladder = build_ladder("eager", setting.candidate)
        return StandBuilder(self._target, ladder, options, str(self._device))

    def _trial(self, setting: Setting, stand: Stand) -> Trial:
        return Trial(
            _plan(setting),
            stand,
            make_clock(self._device),
            dtype=options_of(setting).dtype,
            teacher_forced=True,
            repetitions=0,
            checks="full" if "full" in (self._checks, setting.checks) else "quick",
        )


def accused_of(run: Callable[[], ScenarioResult]) -> tuple[tuple[str, ...], str]:
    """What a run of sound engines was accused of, () for nothing, and the first finding."""
    try:
        result = run()
    except MeasuredFailure as failure:  # from capture
        return (failure.contract,), str(failure)
    accused = findings(result)
    if result.outcome is not Outcome.PASS and not accused:
        accused = (result.outcome.value,)
    return accused, _first(result)


def findings(result: ScenarioResult) -> tuple[str, ...]:
    """Contracts broken and drifts out of budget, in order."""
    drifts = {f"{drift.kind} drift" for drift in result.drifts if not drift.ok}
    found = {violation.contract for violation in result.violations} | drifts
    return tuple(sorted(found - {"capture drift"}, key=finding_order))


def verdict_of(fault: Fault, fired: Sequence[str], num_hits: int) -> Verdict:
    """What the findings say of a fault; one that never acted proves nothing."""
    if not num_hits:
        return Verdict.NOT_TRIGGERED
    if not fault.contracts:
        return Verdict.ACCUSED if fired else Verdict.QUIET
    if fault.contracts & set(fired):
        return Verdict.CAUGHT
    return Verdict.MISNAMED if fired else Verdict.ESCAPED


def _first(result: ScenarioResult) -> str:
    return result.reasons[0] if result.reasons else ""


def options_of(setting: Setting) -> EngineOptions:
    """What a command line would say for the world that a fault is triggered in."""
    return EngineOptions(
        pcp=setting.pcp,
        tp=setting.tp,
        dcp=setting.dcp,
        interleave=setting.interleave,
        capture_sizes=setting.capture_sizes,
        spec_tokens=setting.spec_tokens,
        dynamic_spec=setting.dynamic_spec,
        draft_model=setting.draft_model,
        microbatch=setting.microbatch,
        model=setting.model,
        dcp_backend=setting.dcp_backend,
        expert_parallel=setting.expert_parallel,
        all2all_backend=setting.all2all_backend,
    )


def _plan(setting: Setting) -> ScenarioPlan:
    return plan_scenario(load_scenario(setting.scenario), options_of(setting))
