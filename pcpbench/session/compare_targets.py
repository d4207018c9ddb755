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

import msgspec
import numpy as np

from pcpbench.checks.partition_compare import Tally
from pcpbench.checks.partition_known import may_lack
from pcpbench.checks.partition_steps import StepJudge, with_parts, with_rows
from pcpbench.checks.setup import ArmSetup
from pcpbench.config import EngineConfig
from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.environment import environment_of
from pcpbench.errors import CannotMeasure
from pcpbench.model.presets import model_shape
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.partition_results import ORACLE, PartCount, PartitionResult
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import Notice
from pcpbench.report.console import make_console
from pcpbench.report.json_out import print_text
from pcpbench.report.partition_files import PartitionFiles, partition_json
from pcpbench.report.partition_view import print_partition, print_partition_verdict
from pcpbench.report.progress import Progress, make_progress
from pcpbench.results import Outcome
from pcpbench.scenarios.loader import choose_scenarios
from pcpbench.session.planning import plan_for
from pcpbench.session.settings import chosen_settings, idle_settings, settings_of, target_settings
from pcpbench.targets.builtin import BuiltinTarget
from pcpbench.targets.host_rows import host_rows
from pcpbench.targets_request import MODE, TargetsRequest

COMMAND = "compare-targets"


def run_compare_targets(request: TargetsRequest) -> int:
    """Compare all scenarios, print the report and return the exit code."""
    start = time.monotonic()
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
    done: list[PartCount] = []
    idle, broken_off = 0, ""
    with PartitionFiles(COMMAND, request.out, settings=stored, environment=environment) as files:

        def result() -> PartitionResult:
            told = f"{idle} steps without tokens have no batch to cut and were not compared."
            return PartitionResult(
                command=COMMAND,
                makers=(ORACLE, builtin.name, vllm.name),
                parts=tuple(done),
                num_parts=len(plans),
                settings=stored,
                environment=environment,
                notices=(
                    *chosen_settings(request.options),
                    *idle_settings(request.options),
                    *((Notice(setting="idle steps", message=told),) if idle else ()),
                    *((Notice(setting="run", message=broken_off),) if broken_off else ()),
                ),
                wall_s=time.monotonic() - start,
                run_dir=str(files.path),
                what="steps",
            )

        try:
            with make_progress() as progress:
                for plan in plans:
                    config = _config(request, plan, str(device))
                    pair = _Pair(builtin, vllm, config, plan, request)
                    try:
                        pair.run(progress)
                    except CannotMeasure:
                        if pair.found.num_different:
                            done.append(pair.found)
                        raise
                    done.append(pair.found)
                    idle += pair.num_idle
                    files.add_part(done[-1])
                    files.write_tables(result())
        except BaseException as error:
            files.write_tables(result())
            # A difference that was seen stands, whatever kept the rest from being looked at.
            if not isinstance(error, CannotMeasure) or result().outcome is not Outcome.FAIL:
                raise
            broken_off = f"it was broken off: {error}"
        ended = result()
        files.finish(ended)
    if request.json:
        print_text(partition_json(ended))
        print_partition_verdict(ended, make_console(sys.stderr))
    else:
        print_partition(ended, make_console())
    return ended.outcome.exit_code


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
