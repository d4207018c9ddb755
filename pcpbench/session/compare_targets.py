"""`pcpbench compare builtin vllm`: the same global batches through both targets, step by step.

Owns the order of a step: a teacher samples, vLLM's runner prepares and dispatches the step, and the
built-in engine prepares it for the descriptor that vLLM chose, so that a known difference of the
dispatch does not hide the rest. Its own choice is compared beside it.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pcpbench.checks.partition_compare import Tally
from pcpbench.checks.partition_known import may_lack
from pcpbench.checks.partition_steps import StepJudge, with_parts, with_rows
from pcpbench.checks.setup import ArmSetup
from pcpbench.config import EngineConfig
from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.environment import environment_of
from pcpbench.model.presets import model_shape
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.partition_results import ORACLE, PartCount, PartitionResult
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import Environment, Notice
from pcpbench.report.console import make_console
from pcpbench.report.json_out import print_text
from pcpbench.report.partition_files import PartitionFiles, partition_json
from pcpbench.report.partition_view import print_partition, print_partition_verdict
from pcpbench.report.progress import Progress, make_progress
from pcpbench.results import Outcome
from pcpbench.scenarios.loader import choose_scenarios
from pcpbench.session.planning import plan_for
from pcpbench.session.settings import chosen_settings, idle_settings, settings_of, target_settings
from pcpbench.session.what_stands import complain, told_of, write_end
from pcpbench.targets.builtin import BuiltinTarget
from pcpbench.targets.host_rows import host_rows
from pcpbench.targets_request import MODE, TargetsRequest

COMMAND = "compare-targets"


def run_compare_targets(request: TargetsRequest) -> int:
    """Compare all scenarios, print the report and return the exit code."""
    request.check()
    device = resolve_device(request.options.device)
    backend = resolve_backend(request.options.backend, device)
    from pcpbench.targets.vllm.target import VllmTarget  # raises where vLLM is missing

    vllm, builtin = VllmTarget(device, backend), BuiltinTarget(device, backend)
    scenarios = choose_scenarios(request.scenario_names)
    plans = [plan_for(vllm, scenario, request.options) for scenario in scenarios]
    for plan in plans:
        vllm.check(_config(request, plan, str(device)))
    stored = {
        **settings_of(request.options, device=str(device), backend=backend.name),
        **target_settings(vllm),
        "cudagraph_mode": MODE.name.lower(),
        "scenarios": [plan.scenario for plan in plans],
    }
    environment = environment_of(device)
    ended: PartitionResult | None = None
    try:
        with PartitionFiles(
            COMMAND, request.out, settings=stored, environment=environment
        ) as files:
            run = _Run(request, (builtin, vllm), plans, stored, environment, files)
            run.go_through()
            ended = run.result()
            write_end(partial(files.finish, ended), ended.outcome)
    except Exception as error:
        complain(error, None if ended is None else ended.outcome)
    assert ended is not None
    try:
        if request.json:
            print_text(partition_json(ended))
            print_partition_verdict(ended, make_console(sys.stderr))
        else:
            print_partition(ended, make_console())
    except Exception as error:
        complain(error, ended.outcome)
    return ended.outcome.exit_code


class _Run:
    """All scenarios, one after the other: what is done, what was broken off, and why."""

    def __init__(
        self,
        request: TargetsRequest,
        targets: tuple[BuiltinTarget, BuiltinTarget],
        plans: list[ScenarioPlan],
        settings: dict[str, Any],
        environment: Environment,
        files: PartitionFiles,
    ) -> None:
        self._request, self._targets, self._plans = request, targets, plans
        self._settings, self._environment, self._files = settings, environment, files
        self._started_at = time.monotonic()
        self._done: list[PartCount] = []
        self._unfinished: list[PartCount] = []
        self._num_idle, self._broken_off = 0, ""

    def go_through(self) -> None:
        """Compare every scenario; each is in the files as soon as it has ended.

        A difference that was seen stands, whatever keeps the rest from being looked at; raises it
        where there is none.
        """
        try:
            with make_progress() as progress:
                for plan in self._plans:
                    self._compare(plan, progress)
        except Exception as error:
            if self.result().outcome is Outcome.FAIL:
                self._broken_off = f"it was broken off: {told_of(error)}"
                return
            self._files.write_tables(self.result())
            raise
        except BaseException:
            self._files.write_tables(self.result())
            raise

    def _compare(self, plan: ScenarioPlan, progress: Progress) -> None:
        config = _config(self._request, plan, self._environment.device)
        pair = _Pair(*self._targets, config, plan, self._request)
        try:
            pair.run(progress)
        except Exception:
            if pair.found.num_different:
                self._unfinished.append(pair.found)
                self._num_idle += pair.num_idle
            raise
        self._done.append(pair.found)
        self._num_idle += pair.num_idle
        self._files.add_part(self._done[-1])
        self._files.write_tables(self.result())

    def result(self) -> PartitionResult:
        """What the run came to so far."""
        request, told = (
            self._request,
            "steps without tokens have no batch to cut and were not compared",
        )
        idle, broken = self._num_idle, self._broken_off
        return PartitionResult(
            command=COMMAND,
            makers=(ORACLE, *(target.name for target in self._targets)),
            parts=tuple(self._done),
            unfinished=tuple(self._unfinished),
            num_parts=len(self._plans),
            settings=self._settings,
            environment=self._environment,
            notices=(
                *chosen_settings(request.options),
                *idle_settings(request.options),
                *((Notice(setting="idle steps", message=f"{idle} {told}."),) if idle else ()),
                *((Notice(setting="run", message=broken),) if broken else ()),
            ),
            wall_s=time.monotonic() - self._started_at,
            run_dir=str(self._files.path),
            what="steps",
        )


def _config(request: TargetsRequest, plan: ScenarioPlan, device: str) -> EngineConfig:
    return request.options.engine_config(
        MODE,
        device=device,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        block_size=plan.block_sizes[0] // request.options.dcp,
        num_blocks=plan.num_blocks,
    )


class _Pair:
    """Both targets on one scenario, and a built-in engine that samples for both."""

    def __init__(
        self,
        builtin: BuiltinTarget,
        vllm: BuiltinTarget,
        config: EngineConfig,
        plan: ScenarioPlan,
        request: TargetsRequest,
    ) -> None:
        from pcpbench.targets.vllm.cuts import Cutter

        change = msgspec.structs.replace
        eager = change(config.compilation_config, cudagraph_mode=CUDAGraphMode.NONE)
        cut = change(config.parallel_config, enable_dbo=True)
        self.plan, self.num_idle = plan, 0
        self._teacher = builtin.build(
            "teacher", change(config, compilation_config=eager), replays=False
        )
        self._ours = builtin.build("builtin", change(config, parallel_config=cut), replays=False)
        self._theirs = vllm.build("vllm", config, replays=False)
        self._follow = self._ours.follow()
        self._cutter = Cutter(self._theirs)
        shape, world = model_shape(request.options.preset), config.parallel_config.world
        sizes = config.cache_config.block_sizes(len(shape.kv_groups))
        columns = [
            math.ceil(plan.max_model_len / group.span(size, world.dcp_size))
            for group, size in zip(shape.kv_groups, sizes, strict=True)
        ]
        setup = ArmSetup(
            name="builtin",
            world=world,
            interleave=config.parallel_config.cp_kv_cache_interleave_size,
            mode=MODE,
            candidates=tuple(d for d in self._ours.candidates if d.num_ubatches == 1),
            sharded_groups=tuple(group.dcp_sharded for group in shape.kv_groups),
        )
        self._judge = StepJudge(plan, setup, columns)
        self._tally = Tally(plan.scenario, self._judge.explain, may_lack)
        self._started_at = time.monotonic()

    @property
    def found(self) -> PartCount:
        """What was compared so far."""
        return self._tally.result({}, time.monotonic() - self._started_at)

    def run(self, progress: Progress) -> None:
        """Every step of the scenario."""
        progress.start(self.plan.scenario, len(self.plan.steps))
        for arm in (self._teacher, self._ours, self._theirs):
            arm.start(self.plan)
        for step in self.plan.steps:
            self._step(step)
            progress.advance()

    def _step(self, step: StepPlan) -> None:
        teacher, ours, theirs = self._teacher, self._ours, self._theirs
        teacher.execute(step)
        tokens, drafts = teacher.sampled(), teacher.drafts()
        theirs.execute(step, tokens, drafts or None)
        their_record = theirs.record(step, self.plan.scenario)
        ran_as = their_record.descriptor
        self._follow.told = _cut(ran_as, their_record.ranks[0].num_tokens_after_padding)
        ours.execute(step, tokens, drafts or None)
        self._judge.advance(step, np.array(drafts, dtype=np.int64))
        if not step.scheduled:
            self.num_idle += 1
            return
        expected = self._judge.expect(ran_as)
        own = self._follow.own
        our_record = ours.record(step, self.plan.scenario)
        made = with_rows(self._judge.outputs(our_record, own.label), host_rows(ours))
        found = with_rows(self._judge.outputs(their_record, ran_as.label), host_rows(theirs))
        label = f"{self.plan.scenario} step {step.index} ({ran_as.label})"
        self._tally.compare(
            label,
            self.plan.scenario,
            {ORACLE: expected, "builtin": made, "vllm": with_parts(found, self._cutter.parts())},
        )
        self._judge.take(teacher.record(step, self.plan.scenario))


def _cut(descriptor: BatchExecutionDescriptor, num_tokens: int) -> BatchExecutionDescriptor:
    """The descriptor in two microbatches, where there are two tokens for them."""
    return replace(descriptor, num_ubatches=2) if num_tokens > 1 else descriptor
