"""`pcpbench compare`: every scenario on its stand, judged, timed, written as soon as it is done.

Owns the run of one request from options to exit code. All input is checked before a file is made.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch

from pcpbench.checks.poison import POISONS
from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import Clock, make_clock, one_thread
from pcpbench.device.environment import environment_of
from pcpbench.faults.fault import Fault
from pcpbench.plan import ScenarioPlan
from pcpbench.report.compare_files import CompareFiles
from pcpbench.report.compare_view import print_compare, print_verdict
from pcpbench.report.console import make_console
from pcpbench.report.json_out import print_json
from pcpbench.report.progress import Progress, make_progress
from pcpbench.request import CompareRequest
from pcpbench.results import CompareResult, Outcome, ScenarioResult, overall
from pcpbench.scenarios.loader import choose_scenarios
from pcpbench.session.baseline_runs import after_compare, check_baselines
from pcpbench.session.divergence import Locator
from pcpbench.session.engine_run import run_engine_compare
from pcpbench.session.inject import fault_named, planted_stand, without_bill
from pcpbench.session.ladder import build_ladder
from pcpbench.session.planning import plan_for
from pcpbench.session.settings import (
    chosen_settings,
    idle_settings,
    known_differences,
    settings_of,
    target_settings,
)
from pcpbench.session.stand import Stand, StandBuilder
from pcpbench.session.timing import NUM_RECORD_PASSES
from pcpbench.session.tracing import MAX_TRACED_STEPS
from pcpbench.session.trial import Trial
from pcpbench.session.what_stands import complain, notice_of, write_end
from pcpbench.targets.choice import make_target
from pcpbench.targets.protocol import Target


def run_compare(request: CompareRequest) -> int:
    """Run the comparison, print its report and return the exit code."""
    start = time.perf_counter()
    request.check()
    if request.options.target == "engine":
        return run_engine_compare(request.engine_request)
    device = resolve_device(request.options.device)
    backend = resolve_backend(request.options.backend, device)
    target = make_target(request.options.target, device, backend)
    check_baselines(request)
    plans = plan_scenarios(request, target)
    ladder = build_ladder(request.base, request.candidate)
    fault = fault_named(request.inject, request.options) if request.inject else None
    builder = StandBuilder(target, ladder, request.options, str(device))
    for plan in plans:
        builder.check(plan)
    settings = {
        **settings_of(request.options, device=str(device), backend=backend.name),
        **target_settings(target),
        "feed": request.feed,
        "repetitions": request.num_repetitions,
        "check": request.checks,
        **({"inject": fault.name} if fault is not None else {}),
    }
    result: CompareResult | None = None
    try:
        with one_thread(device):
            environment = environment_of(device)
            with CompareFiles(
                request.out,
                base=ladder.base,
                candidate=ladder.candidate,
                settings=settings,
                environment=environment,
                async_device=device.type != "cpu",
            ) as files:
                locator = Locator(request, target, backend.name, device, files, environment)
                scenarios = _run_scenarios(
                    request, target, plans, builder, files, device, fault, locator
                )
                outcome, reasons = overall(scenarios)
                result = CompareResult(
                    base=ladder.base,
                    candidate=ladder.candidate,
                    outcome=outcome,
                    reasons=reasons,
                    scenarios=scenarios,
                    settings=settings,
                    environment=environment,
                    notices=(
                        *chosen_settings(request.options),
                        *idle_settings(request.options),
                        *known_differences(target.traits, request.options),
                        *builder.notices,
                        *locator.notices,
                    ),
                    divergence=locator.divergence,
                    wall_s=time.perf_counter() - start,
                    run_dir=str(files.path),
                )
                write_end(partial(files.finish, result), outcome)
    except Exception as error:
        complain(error, None if result is None else result.outcome)
    assert result is not None
    try:
        if request.json:
            print_json(result)
            print_verdict(result, make_console(sys.stderr))
        else:
            print_compare(result, make_console())
        return after_compare(request, result, plans)
    except Exception as error:
        complain(error, result.outcome)
        return result.outcome.exit_code


def plan_scenarios(request: CompareRequest, target: Target) -> list[ScenarioPlan]:
    """The plans of all scenarios asked for; raises ScenarioError or UsageError for bad ones."""
    return [
        plan_for(target, scenario, request.options)
        for scenario in choose_scenarios(request.scenario_names)
    ]


def _run_scenarios(
    request: CompareRequest,
    target: Target,
    plans: list[ScenarioPlan],
    builder: StandBuilder,
    files: CompareFiles,
    device: torch.device,
    fault: Fault | None,
    locator: Locator,
) -> tuple[ScenarioResult, ...]:
    clock = make_clock(device)
    results: list[ScenarioResult] = []
    scenarios = choose_scenarios(request.scenario_names)
    with make_progress() as progress:
        try:
            for scenario, plan in zip(scenarios, plans, strict=True):
                if fault is not None:
                    builder.forget()  # what the last scenario's fault has touched
                build = partial(builder.stand_for, plan)
                with planted_stand(fault, build, target.api) as (stand, site):
                    if fault is not None:  # it may be one of the scheduler
                        plan = plan_for(target, scenario, request.options)
                    progress.start(plan.scenario, _num_units(plan, stand, request))
                    trial = _trial(request, plan, stand, clock, progress)
                    result = without_bill(trial.run(), fault, site.num_hits, request.checks)
                    # Before files are written and a fault is taken out, which can raise.
                    results.append(result)
                    _add(files, result, plan, trial)
                if fault is not None and not site.num_hits and result.outcome is Outcome.FAIL:
                    never = f"{fault.name} never acted in {plan.scenario}"
                    locator.tell("inject", f"{never}: what failed there is not its doing.")
                progress.say(f"{plan.scenario}: {result.outcome.value} ({result.wall_s:.1f} s)")
                if result.outcome is Outcome.FAIL and locator.divergence is None:
                    progress.say(f"{plan.scenario}: looking for the first difference")
                    locator.locate(result, plan, stand.pairs, trial.tokens, trial.drafts)
        except Exception as error:  # what was seen before stands
            if not any(result.outcome is Outcome.FAIL for result in results):
                raise
            ended = f"the run ended after {len(results)} of {len(plans)} scenarios"
            locator.notices.append(notice_of(error, ended))
    return tuple(results)


def _add(files: CompareFiles, result: ScenarioResult, plan: ScenarioPlan, trial: Trial) -> None:
    files.add_scenario(
        result,
        plan,
        trial.records,
        trial.timings,
        trial.step_drifts,
        trial.step_audits,
        samples=trial.samples,
        place_drifts=trial.place_drifts,
        phases=trial.phases,
    )


def _trial(
    request: CompareRequest, plan: ScenarioPlan, stand: Stand, clock: Clock, progress: Progress
) -> Trial:
    return Trial(
        plan,
        stand,
        clock,
        dtype=request.options.dtype,
        teacher_forced=request.feed == "teacher-forced",
        repetitions=request.num_repetitions,
        async_device=stand.is_async,
        checks=request.checks,
        on_step=progress.advance,
        traces=True,
    )


def _num_units(plan: ScenarioPlan, stand: Stand, request: CompareRequest) -> int:
    """Steps of all passes: each arm once under the judge, some poisoned; two timed and watched."""
    repetitions = request.num_repetitions
    passes = (repetitions + NUM_RECORD_PASSES) * len(plan.steps)
    timed = 2 * (passes + min(len(plan.steps), MAX_TRACED_STEPS)) if repetitions else 0
    poisoned = len(stand.poisoned) * len(POISONS) if request.checks == "full" else 0
    return len(plan.steps) * (len(stand.arms) + poisoned) + timed
