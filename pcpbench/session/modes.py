"""`pcpbench modes`: one task run in NONE and in three graph modes, side by side.

Owns the run of one request from options to exit code: all modes under the judge, then timed in
turn, then every token that a mode sampled differently from NONE traced to a cause.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from msgspec.structs import replace

from pcpbench.checks.mode_rows import mode_row, speed_of
from pcpbench.checks.token_trace import Logits, TokenAt, differences, generations, trace
from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import make_clock, one_thread
from pcpbench.device.environment import environment_of
from pcpbench.errors import MeasuredFailure, NoMemory
from pcpbench.faults.fault import Fault
from pcpbench.modes_request import ModesRequest
from pcpbench.modes_results import ModeRow, ModesResult, TokenTrace
from pcpbench.plan import ScenarioPlan
from pcpbench.records import Notice, StepRecord
from pcpbench.report.console import make_console
from pcpbench.report.json_out import print_text
from pcpbench.report.modes_files import ModesFiles, modes_json
from pcpbench.report.modes_view import print_modes, print_modes_verdict
from pcpbench.report.progress import Progress, make_progress
from pcpbench.request import FEEDS
from pcpbench.results import Outcome, ScenarioResult
from pcpbench.session.inject import fault_named, planted_stand, why_no_pass
from pcpbench.session.ladder import MODES, build_modes_ladder, padded_label
from pcpbench.session.planning import plan_scenario
from pcpbench.session.settings import idle_settings, settings_of
from pcpbench.session.stand import Stand, StandBuilder
from pcpbench.session.timing import NUM_RECORD_PASSES
from pcpbench.session.trial import Trial
from pcpbench.targets.builtin import BuiltinTarget
from pcpbench.targets.protocol import Arm

NONE = "NONE"


def run_modes(request: ModesRequest) -> int:
    """Run the task in all modes, print the table and return the exit code."""
    start = time.perf_counter()
    request.check()
    device = resolve_device(request.options.device)
    backend = resolve_backend(request.options.backend, device)
    target = BuiltinTarget(device, backend)
    fault = fault_named(request.inject, request.options) if request.inject else None
    plan = plan_task(request)
    builder = StandBuilder(target, build_modes_ladder(), request.options, str(device))
    builder.check(plan)
    settings = {
        **settings_of(request.options, device=str(device), backend=backend.name),
        "num_prompts": request.num_prompts,
        "prompt_len": request.prompt_len,
        "output_len": request.output_len,
        "feed": request.feed,
        "repetitions": request.repetitions,
        "check": request.checks,
        **({"inject": fault.name} if fault is not None else {}),
    }
    with one_thread(device):
        environment = environment_of(device)
        with ModesFiles(request.out, settings=settings, environment=environment) as files:
            run = TaskRun(request, plan, builder, device)
            with make_progress() as progress:
                run.run(fault, progress)
            result = ModesResult(
                outcome=run.outcome,
                reasons=tuple(run.reasons),
                rows=tuple(run.rows),
                traces=tuple(run.traces),
                num_steps=len(run.plan.steps),
                settings=settings,
                environment=environment,
                notices=(*idle_settings(request.options), *builder.notices, *run.notices),
                wall_s=time.perf_counter() - start,
                run_dir=str(files.path),
            )
            files.finish(result)
    if request.json:
        print_text(modes_json(result))
        print_modes_verdict(result, make_console(sys.stderr))
    else:
        print_modes(result, make_console())
    return result.outcome.exit_code


def plan_task(request: ModesRequest) -> ScenarioPlan:
    """The steps of the task run."""
    return plan_scenario(request.scenario, request.options)


class TaskRun:
    """One plan on all modes; afterwards its attributes hold what came of it."""

    def __init__(
        self, request: ModesRequest, plan: ScenarioPlan, builder: StandBuilder, device: torch.device
    ) -> None:
        self._request, self.plan, self._builder = request, plan, builder
        self._device, self._dtype = device, request.options.dtype
        self._forced = request.feed == FEEDS[0]
        self.outcome = Outcome.NOT_COMPARED
        self.reasons: list[str] = ["the run did not end"]
        self.rows: list[ModeRow] = []
        self.traces: list[TokenTrace] = []
        self.notices: list[Notice] = []

    def run(self, fault: Fault | None, progress: Progress) -> None:
        """Judge, time and trace."""
        progress.say(f"capturing for {len(self.plan.steps)} steps")
        build = partial(self._builder.stand_for, self.plan)
        with planted_stand(fault, build) as (stand, site):
            if fault is not None:  # a fault of the scheduler shows in a plan made with it
                self.plan = plan_task(self._request)
            progress.start(self.plan.scenario, self._num_units(stand))
            trial = Trial(
                self.plan,
                stand,
                make_clock(self._device),
                dtype=self._dtype,
                teacher_forced=self._forced,
                repetitions=self._request.repetitions,
                async_device=stand.is_async,
                checks=self._request.checks,
                on_step=progress.advance,
                timed=tuple(MODES.values()),
            )
            judged = trial.run()
            self._tell(trial, judged, stand)
        self.notices += judged.notices
        if fault is not None and self.outcome is Outcome.PASS:
            why = why_no_pass(fault, site.num_hits, self._request.checks)
            if why:
                self.outcome, self.reasons = Outcome.NOT_COMPARED, [why]
                self.rows = [replace(row, speed=None) for row in self.rows]

    def _tell(self, trial: Trial, judged: ScenarioResult, stand: Stand) -> None:
        """Rows of all modes, the traces behind them, and the outcome over both.

        Raises NoMemory where a token could not be traced and nothing else failed.
        """
        by_arm: dict[str, list[StepRecord]] = {arm: [] for arm in stand.arms}
        for record in trial.records:
            by_arm[record.arm].append(record)
        tokens = {arm: generations(self.plan, by_arm[arm]) for arm in MODES.values()}
        none = tokens[MODES[NONE]]
        untraced: NoMemory | None = None
        for mode, arm in MODES.items():
            pairs = differences(none, tokens[arm], only_first=not self._forced)
            try:
                traces = self._trace(mode, arm, pairs, by_arm, stand)
            except NoMemory as error:
                traces, untraced = [], error
            self.traces += traces
            row = mode_row(mode, arm, self.plan, by_arm[arm], none, tokens[arm], traces)
            self.rows.append(row)
        self.outcome, self.reasons = self._verdict(judged)
        if untraced is not None:
            if self.outcome is not Outcome.FAIL:
                raise untraced
            message = f"not every differing token was traced: {untraced}"
            self.notices.append(Notice(setting="memory", message=message))
        if self.outcome is Outcome.PASS and trial.timings:
            speeds = partial(speed_of, self.plan, trial.timings, base=MODES[NONE])
            self.rows = [
                replace(
                    row,
                    speed=speeds(
                        arm=row.arm, num_tokens=row.num_tokens, async_device=stand.is_async
                    ),
                )
                for row in self.rows
            ]

    def _verdict(self, judged: ScenarioResult) -> tuple[Outcome, list[str]]:
        """A contract broken, a token not explained, or one that may not differ at all, fails."""
        reasons = list(judged.reasons)
        failed = judged.outcome is Outcome.FAIL
        unexplained = [each for each in self.traces if not each.explained]
        if unexplained:
            reasons.append(
                f"{len(unexplained)} of {len(self.traces)} differing tokens not explained by "
                f"padding drift, first {_place(unexplained[0])}: {unexplained[0].why}"
            )
        if self._forced and self._dtype == "float32" and self.traces:
            reasons.append(
                f"{len(self.traces)} tokens differ from NONE though all arms were fed the same "
                f"tokens in float32, first {_place(self.traces[0])}"
            )
        if failed or unexplained or (self._forced and self._dtype == "float32" and self.traces):
            return Outcome.FAIL, reasons
        return judged.outcome, reasons

    def _trace(
        self,
        mode: str,
        arm: str,
        pairs: Sequence[tuple[TokenAt, TokenAt]],
        by_arm: Mapping[str, Sequence[StepRecord]],
        stand: Stand,
    ) -> list[TokenTrace]:
        if not pairs:
            return []
        steps = {pair[0].step for pair in pairs}
        none = {record.step: record for record in by_arm[MODES[NONE]]}
        own = {record.step: record for record in by_arm[arm]}
        padded = self._padded(stand.arms[padded_label(arm)], none, steps, by_arm)
        return [
            trace(
                mode,
                theirs,
                ours,
                self._dtype,
                none=_row(none[theirs.step], theirs.row),
                own=_row(own[ours.step], ours.row),
                padded=_row(padded.get(theirs.step), theirs.row),
            )
            for theirs, ours in pairs
        ]

    def _padded(
        self,
        twin: Arm,
        none: Mapping[int, StepRecord],
        steps: set[int],
        by_arm: Mapping[str, Sequence[StepRecord]],
    ) -> dict[int, StepRecord]:
        """Records of the padded eager twin over NONE's tokens, at some steps.

        Teacher-forced it has them already. Else it runs the plan again, fed NONE's tokens and
        drafts, up to the last of the steps; a run that breaks off leaves what it had.
        """
        if self._forced:
            return {record.step: record for record in by_arm[twin.label]}
        found: dict[int, StepRecord] = {}
        try:
            twin.start(self.plan)
            for step in self.plan.steps:
                if step.index > max(steps):
                    break
                fed = none[step.index]
                drafts = None if fed.draft_tokens is None else fed.draft_tokens.tolist()
                twin.execute(step, fed.sampled.tolist() if step.scheduled else None, drafts)
                if step.index in steps:
                    found[step.index] = twin.record(step, self.plan.scenario)
        except MeasuredFailure as failure:
            message = f"{twin.label} could not be fed NONE's tokens: {failure}"
            self.notices.append(Notice(setting="trace", message=message))
        return found

    def _num_units(self, stand: Stand) -> int:
        repetitions = self._request.repetitions
        timed = len(MODES) * (repetitions + NUM_RECORD_PASSES) if repetitions else 0
        return len(self.plan.steps) * (len(stand.arms) + timed)


def _row(record: StepRecord | None, row: int) -> Logits | None:
    return None if record is None or row >= len(record.logits) else record.logits[row]


def _place(found: TokenTrace) -> str:
    return f"in {found.mode}, {found.request} token {found.token_index} (step {found.step})"
