"""Finds where an accused arm first left its twin: runs the two alone again, with taps.

Owns the way from a failed scenario to a `Divergence`, and the one re-run that `compare` and `repro`
share. Nothing here runs for a scenario that did not fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from pcpbench.checks.accusation import first_accusation
from pcpbench.checks.metadata import METADATA, metadata_difference
from pcpbench.checks.probe import Probe
from pcpbench.checks.setup import ArmSetup, Pair
from pcpbench.checks.tap_compare import TapFinding
from pcpbench.device.clock import make_clock
from pcpbench.divergence import Accusation, Divergence, TensorDifference
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import EngineError, MeasuredFailure, NoMemory
from pcpbench.plan import PLAN, ScenarioPlan
from pcpbench.records import Environment, Notice
from pcpbench.report.compare_files import CompareFiles
from pcpbench.request import CompareRequest
from pcpbench.results import Outcome, ScenarioResult
from pcpbench.session.bundle import DIRECTORY, bundle_files, make_bundle
from pcpbench.session.case import Case, plan_findings
from pcpbench.session.inject import fault_named, planted_stand
from pcpbench.session.ladder import Ladder, build_ladder
from pcpbench.session.stand import Stand, StandBuilder
from pcpbench.session.trial import Trial
from pcpbench.targets.protocol import Target


@dataclass
class Location:
    """What a re-run showed. arrays: both sides' values by name, such as `tap_found`.

    num_hits: how often the planted fault acted, in all runs that ended.
    """

    divergence: Divergence
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    num_hits: int = 0


class Locator:
    """Looks for the first difference of the first scenario that fails, and keeps it as a bundle.

    `divergence`: what was found. `notices`: why nothing was, and what else is to be told. A search
    that fails changes no verdict.
    """

    def __init__(
        self,
        request: CompareRequest,
        target: Target,
        backend: str,
        device: torch.device,
        files: CompareFiles,
        environment: Environment,
    ) -> None:
        self._request, self._target, self._device = request, target, device
        self._options = replace(request.options, device=str(device), backend=backend)
        self._files, self._environment = files, environment
        self.divergence: Divergence | None = None
        self.notices: list[Notice] = []

    def locate(
        self,
        result: ScenarioResult,
        plan: ScenarioPlan,
        pairs: Sequence[Pair],
        tokens: Sequence[Sequence[int]],
        drafts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Run the accused pair of a failed scenario again and write the bundle.

        tokens: what fed the arms, one list a step; empty where each fed itself.
        """
        case = make_case(self._request, self._options, result, plan, pairs, tokens, drafts)
        if case is None:
            return
        if case.accusation.arm == PLAN:
            self.tell(
                "divergence",
                f"the plan of {plan.scenario} is broken (C19) before any arm leaves its twin: no "
                "two arms were run again.",
            )
            return
        try:
            found = locate(case, self._target, self._device)
        except Exception as error:  # whatever a broken engine does: the verdict stands
            self.tell(
                "divergence",
                f"the first difference of {plan.scenario} was not found: "
                f"the run of {case.accusation.arm} alone broke off with {error!r}.",
            )
            return
        self.divergence = found.divergence
        try:
            bundle = make_bundle(case, found.divergence, self._environment)
            path = self._files.add_files(DIRECTORY, bundle_files(bundle, found.arrays))
        except Exception as error:  # a full disk, or no memory for both sides' arrays
            self.tell(
                "divergence",
                f"{plan.scenario} has no bundle to replay: {str(error) or type(error).__name__}",
            )
        else:
            self.divergence = replace(found.divergence, bundle=str(path))

    def tell(self, setting: str, message: str) -> None:
        """Add a notice to the run."""
        self.notices.append(Notice(setting=setting, message=message))


@dataclass
class _Rerun:
    """A trial of the two arms that has ended, what its probe saw, and what it is accused of.

    num_hits: how often the planted fault acted in it.
    """

    result: ScenarioResult
    probe: Probe
    accusation: Accusation | None
    num_hits: int


def make_case(
    request: CompareRequest,
    options: EngineOptions,
    result: ScenarioResult,
    plan: ScenarioPlan,
    pairs: Sequence[Pair],
    tokens: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]] = (),
) -> Case | None:
    """What to run again after a failed scenario; None where no step is accused of anything.

    options: with device and backend resolved.
    """
    accusation = first_accusation(result, pairs)
    if accusation is None:
        return None
    # A timed run can be the only one to go wrong, and not the first of them; each runs over the
    # whole scenario.
    end = plan.steps[-1].index
    timed = (accusation.contract == "C14" and accusation.tensor == "sampled") or (
        accusation.contract == "C0" and len(tokens) > end  # every step was judged before it raised
    )
    last = end if timed else min(accusation.last_step, end)
    accusation = replace(accusation, last_step=min(accusation.last_step, end))
    cut = _first_steps(plan, last)
    return Case(
        options=options,
        base=request.base,
        candidate=request.candidate,
        accusation=accusation,
        plan=cut,
        plan_findings=plan_findings(cut),
        tokens=tuple(tuple(each) for each in tokens[: last + 1]),
        drafts=tuple(tuple(each) for each in drafts[: last + 1]),
        feed=request.feed,
        checks=request.checks,
        repetitions=request.num_repetitions if timed else 0,
        fault=request.inject or "",
    )


def _first_steps(plan: ScenarioPlan, last: int) -> ScenarioPlan:
    steps = tuple(step for step in plan.steps if step.index <= last)
    return replace(plan, steps=steps, is_cut_short=len(steps) < len(plan.steps))


def locate(case: Case, target: Target, device: torch.device) -> Location:
    """Run the accused pair up to the step, with taps; without them where taps hide it.

    So, too, where engines with taps cannot be captured (taps change the layout of a graph's pool,
    and what a broken pool does then is no longer what is looked for), or where taps need the memory
    that was left. Raises what building and running engines without taps can raise.
    """
    num_hits, is_shown = 0, False
    try:
        rerun = _run(case, target, device, taps=True)
        num_hits, is_shown = rerun.num_hits, _fails(rerun, case)
    except (MeasuredFailure, NoMemory):
        pass
    reproduced = "with taps"
    if not is_shown:
        rerun = _run(case, target, device, taps=False)
        num_hits += rerun.num_hits
        reproduced = "without taps" if _fails(rerun, case) else "no"
    return _location(case, rerun, reproduced, num_hits)


def pair_ladder(case: Case) -> Ladder:
    """The ladder of a comparison, cut down to the accused arm and its twin."""
    whole, accusation = build_ladder(case.base, case.candidate), case.accusation
    names = (accusation.twin, accusation.arm)
    return Ladder(
        arms=tuple(spec for spec in whole.arms if spec.label in names),
        pairs=tuple(p for p in whole.pairs if (p.twin, p.arm) == names),
        base=accusation.twin or accusation.arm,
        candidate=accusation.arm,
    )


def _run(case: Case, target: Target, device: torch.device, *, taps: bool) -> _Rerun:
    """The whole trial of the two arms, with every check that the first one had.

    With taps it raises what failed in a capture: that may be the taps' doing.
    """
    fault = fault_named(case.fault, case.options) if case.fault else None
    builder = StandBuilder(target, pair_ladder(case), case.options, str(device), taps)
    build = partial(builder.stand_for, case.plan)
    with planted_stand(fault, build, target.api) as (stand, site):
        if taps:
            stand.check()
        probe = _probe(case, stand)
        trial = Trial(
            case.plan,
            stand,
            make_clock(device),
            dtype=case.options.dtype,
            teacher_forced=case.feed == "teacher-forced",
            repetitions=case.repetitions,
            async_device=stand.is_async,
            checks=case.checks,
            tokens=case.tokens or None,
            drafts=case.drafts or None,
            watcher=probe,
        )
        result = trial.run()
    return _Rerun(result, probe, first_accusation(result, stand.pairs), site.num_hits)


def _probe(case: Case, stand: Stand) -> Probe:
    return Probe(
        case.accusation,
        {setup.name: setup for setup in stand.setups},
        case.options.dtype,
        lambda: {name: arm.taps() for name, arm in stand.arms.items()},
    )


def _fails(rerun: _Rerun, case: Case) -> bool:
    """Whether the judge found something again; under capture drift a tap alone is enough."""
    if rerun.result.outcome is Outcome.FAIL:
        return True
    return case.accusation.kind == "capture" and rerun.probe.tap is not None


def _location(case: Case, rerun: _Rerun, reproduced: str, num_hits: int) -> Location:
    probe, accusation = rerun.probe, rerun.accusation or case.accusation
    divergence = Divergence(
        scenario=case.plan.scenario, accusation=accusation, reproduced=reproduced, fault=case.fault
    )
    metadata = probe.metadata or _told_by_result(rerun.result, accusation)
    if reproduced == "no":
        divergence = replace(divergence, judged=_accused(accusation))
    else:
        divergence = replace(
            divergence,
            metadata=None if metadata is None else metadata.difference,
            tap=None if probe.tap is None else probe.tap.difference,
            judged=_judged(rerun),
            kv=probe.kv.first,
            broke_off=_broke_off(rerun.result),
        )
    first = divergence.first
    at = accusation.step if first is None else first.step
    divergence = replace(
        divergence,
        plan=next((step for step in case.plan.steps if step.index == at), None),
        ran_as=_ran_as(probe, probe.arm, at),
        twin_ran_as="" if probe.twin is None else _ran_as(probe, probe.twin, at),
    )
    return Location(divergence, {} if reproduced == "no" else probe.arrays, num_hits)


def _told_by_result(result: ScenarioResult, accusation: Accusation) -> TapFinding | None:
    """A broken contract that no step's record shows: at capture, or in a step that broke off."""
    for found in result.violations:
        if found.arm == accusation.arm and found.contract in METADATA:
            return metadata_difference(found, None, None)
    return None


def _judged(rerun: _Rerun) -> TensorDifference | None:
    """The output that left its twin in this run, else what this run is accused of.

    Never what an earlier run was accused of: None where a tap alone showed the difference.
    """
    if rerun.probe.output is not None:
        return rerun.probe.output.difference
    return None if rerun.accusation is None else _accused(rerun.accusation)


def _broke_off(result: ScenarioResult) -> str:
    """What the engine raised, by which arm and in which step; "" where it did not."""
    for found in result.violations:
        if found.contract == EngineError.contract:
            return f"{found.arm}, step {found.step}: {found.message}"
    return ""


def _accused(accusation: Accusation) -> TensorDifference:
    """The judge's finding as it stands."""
    return TensorDifference(
        step=accusation.step,
        rank=accusation.rank,
        layer=accusation.layer,
        op="",
        tensor=accusation.tensor,
        against=accusation.twin or "plan",
        message=accusation.message,
    )


def _ran_as(probe: Probe, setup: ArmSetup, step: int) -> str:
    label = probe.descriptors.get((setup.name, step), "")
    if label == "NONE":
        return "eager"
    return f"eager, padded to {label}" if label and setup.padded_like is not None else label
