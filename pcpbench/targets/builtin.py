"""The built-in target: pcpbench's own engine on the stand. Owns the adapting, no logic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pcpbench.config import EngineConfig
from pcpbench.device.graph import GraphBackend
from pcpbench.device.memory import memory_errors
from pcpbench.engine.dispatcher import FollowingDispatcher
from pcpbench.engine.engine import Engine, StepOutput
from pcpbench.engine.phases import PhaseWatch
from pcpbench.engine.poison import churn_memory, poison_engine, poison_padding, wipe_slots
from pcpbench.engine.recorder import record_step
from pcpbench.errors import UsageError
from pcpbench.model.dense import dense_draft_logits, dense_logits, index_tables
from pcpbench.model.presets import MODEL_SHAPES, ModelShape, model_shape
from pcpbench.modes import BatchExecutionDescriptor
from pcpbench.pcp_manager import PCPManager
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import IndexTables, Notice, StepRecord, TapRecord
from pcpbench.results import AddressUse, CapturedGraph
from pcpbench.targets.engine_errors import (
    engine_errors,
    errors_of_telling,
    through_the_engine,
)
from pcpbench.traits import NO_TRAITS, Traits


class BuiltinArm:
    """One Engine as an arm; see protocol.Arm."""

    def __init__(self, label: str, engine: Engine, traits: Traits = NO_TRAITS) -> None:
        self.label = label
        self.engine = engine
        self.traits = traits
        self._output: StepOutput | None = None
        self._previous: StepOutput | None = None

    @property
    def candidates(self) -> tuple[BatchExecutionDescriptor, ...]:
        """Descriptors that dispatch may choose from."""
        return self.engine.candidates.descriptors

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Capture sizes that could not be used as asked."""
        return self.engine.candidates.notices

    @property
    def captured(self) -> tuple[CapturedGraph, ...]:
        """Graphs captured so far."""
        return () if self.engine.graphs is None else tuple(self.engine.graphs.captured)

    @property
    def addresses(self) -> tuple[AddressUse, ...]:
        """What those graphs read and write, the draft model's too."""
        drafts = () if self.engine.drafts is None else self.engine.drafts.addresses
        return () if self.engine.graphs is None else (*self.engine.graphs.addresses, *drafts)

    @property
    def draft_captured(self) -> tuple[CapturedGraph, ...]:
        """Graphs of the draft model's passes."""
        return () if self.engine.drafts is None else self.engine.drafts.captured

    @property
    def num_draft_graphs(self) -> int:
        """Shapes of the draft model's passes that can be captured."""
        return 0 if self.engine.drafts is None else self.engine.drafts.num_shapes

    @property
    def num_draft_caches(self) -> int:
        """Caches at the end of each rank's that are the draft model's."""
        return 0 if self.engine.drafts is None else len(self.engine.drafts.ranks[0].kv_caches)

    def keep_evidence(self, keep: bool) -> None:
        """Have steps keep what only a judge looks at, or not."""
        self.engine.keeps_evidence = keep
        if self.engine.drafts is not None:
            self.engine.drafts.keeps_passes = keep

    @property
    def pool_bytes(self) -> int:
        """Bytes of the graphs' shared pool."""
        return 0 if self.engine.graphs is None else self.engine.graphs.pool.num_bytes

    def capture(self, on_captured: Callable[[CapturedGraph], None] | None = None) -> None:
        """Capture every candidate, if the arm replays."""
        told = None if on_captured is None else through_the_engine(on_captured)
        with errors_of_telling(), engine_errors():
            self.engine.capture(told)

    def follow(self) -> FollowingDispatcher:
        """Have the engine run its steps as it is told from here on; returns whom to tell."""
        known = self.engine.dispatcher
        following = FollowingDispatcher(known.mode, known.descriptors)
        self.engine.dispatcher = following
        return following

    def start(self, plan: ScenarioPlan) -> None:
        """Begin a scenario (again)."""
        self._output = self._previous = None
        with engine_errors():
            self.engine.start(plan)

    def execute(
        self,
        step: StepPlan,
        forced: Sequence[int] | None = None,
        drafts: Sequence[int] | None = None,
    ) -> None:
        """Run one step."""
        self._previous = self._output
        try:
            with engine_errors():
                self._output = self.engine.execute(step, forced, drafts)
        finally:
            self.engine.before_forward = None

    def execute_watched(
        self,
        step: StepPlan,
        forced: Sequence[int] | None,
        drafts: Sequence[int] | None,
        now: Callable[[], float],
    ) -> tuple[tuple[str, int | None, float, float], ...]:
        """Run one step and tell its phases."""
        with PhaseWatch(self.engine, now) as watch:
            self.execute(step, forced, drafts)
        return tuple(watch.stretches)

    def sampled(self) -> list[int]:
        """Tokens that the last step sampled, one for each row of logits, in the plan's order."""
        output = self._last()
        if not output.sampled:
            return []
        tokens: list[int] = output.sampled[0].tokens.tolist()
        return tokens

    def drafts(self) -> list[int]:
        """Draft tokens of the last step, request after request."""
        return list(self._last().drafts)

    def record(self, step: StepPlan, scenario: str) -> StepRecord:
        """Host copies of what the last step left behind, with the buffers that have moved."""
        with engine_errors():
            return record_step(self.engine, self._last(), step, arm=self.label, scenario=scenario)

    def taps(self) -> tuple[TapRecord, ...]:
        """Intermediate results of the last step, rank after rank; nothing without taps."""
        if self._last().idle:
            return ()
        return tuple(
            record
            for worker in self.engine.workers
            if worker.taps is not None and worker.local_batch is not None
            for record in worker.taps.records(
                worker.rank, worker.local_batch.num_tokens_after_padding
            )
        )

    def kv_caches(self) -> list[list[NDArray[Any]]]:
        """Caches of every rank and layer.

        float32 and float16 as they are, without a copy on a CPU; bfloat16 (which numpy lacks) as
        the uint16 of its bits.
        """
        return [[_as_numpy(cache) for cache in worker.kv_caches] for worker in self.engine.workers]

    @property
    def kv_groups(self) -> tuple[int, ...]:
        """The KV group of each cache of a rank; empty where all are in group 0."""
        return self.engine.shape.layer_groups

    @property
    def num_layers(self) -> int:
        """Caches of latents on each rank."""
        return self.engine.shape.num_hidden_layers

    def index_tables(self) -> IndexTables | None:
        """How the model chooses keys; None for a dense one."""
        return index_tables(self.engine.workers[0].model)

    def block_tables(self) -> list[list[NDArray[Any]]]:
        """Global block tables of every rank and KV group, without a copy on a CPU."""
        return [
            [table.cpu().numpy() for table in worker.block_tables.block_tables]
            for worker in self.engine.workers
        ]

    def dense_logits(
        self, token_ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]] | None:
        """Logits of whole sequences without cache or metadata; None where TP splits the weights."""
        model = self.engine.workers[0].model
        if model.tp_size > 1:
            return None
        return [part.cpu().numpy() for part in dense_logits(model, token_ids, positions)]

    def dense_draft_logits(
        self, token_ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]] | None:
        """The same of the draft model's first pass; None also where none runs."""
        if self.engine.drafts is None or self.engine.drafts.modules[0].target.tp_size > 1:
            return None
        found = dense_draft_logits(self.engine.drafts.modules[0], token_ids, positions)
        return [part.cpu().numpy() for part in found]

    def run_again(self, step: StepPlan, scenario: str) -> StepRecord | None:
        """Run the last step once more; None where it computed nothing."""
        output = self._last()
        if output.idle:
            return None
        with engine_errors():
            again = self.engine.compute_again(output, step)
            return record_step(self.engine, again, step, arm=self.label, scenario=scenario)

    def previous_outputs(self) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """(sampled, logits) of each rank of the step before the last one, read now."""
        sampled = () if self._previous is None else self._previous.sampled
        return [(part.tokens.cpu().numpy(), part.logits.float().cpu().numpy()) for part in sampled]

    def churn_memory(self) -> None:
        """Allocate and free memory filled with NaN."""
        churn_memory(self.engine.device)

    def replay_idle(self, graphs: Sequence[str]) -> tuple[str, ...]:
        """Replay captured graphs as dummy runs, memory being allocated and freed before each."""
        with engine_errors():
            return self.engine.replay_idle(graphs, self.churn_memory)

    def wipe(self, slots: Sequence[Sequence[NDArray[np.integer[Any]]]]) -> None:
        """Zero KV slots."""
        wipe_slots(self.engine, slots)

    def poison(self, unread: Sequence[Sequence[NDArray[np.bool_]]], kind: str) -> None:
        """Fill what the next step may not read."""
        poison_engine(self.engine, unread, kind)
        self.engine.before_forward = partial(poison_padding, self.engine)

    def _last(self) -> StepOutput:
        if self._output is None:
            raise RuntimeError("no step has been run yet")
        return self._output


class BuiltinTarget:
    """Builds engines on one device."""

    name = "builtin"
    version = ""
    traits = NO_TRAITS
    api: Any = None

    def __init__(self, device: torch.device, backend: GraphBackend) -> None:
        self._device, self._backend = device, backend

    def arrange(self, plan: ScenarioPlan, query_len: int) -> ScenarioPlan:
        """The plan as it is: its order is the engine's own."""
        return plan

    def check(self, config: EngineConfig) -> None:
        """Raise UsageError for settings that the engine refuses."""
        config.check()
        PCPManager.validate_config(config)
        shape = model_shape(config.model_config.preset)
        parallel = config.parallel_config
        shape.check_tp(parallel.tensor_parallel_size)
        if parallel.enable_expert_parallel:
            shape.check_ep(parallel.world.size)
        _check_length(shape, config.model_config.max_model_len)

    def build(
        self, label: str, config: EngineConfig, *, replays: bool, taps: bool = False
    ) -> BuiltinArm:
        """An engine under these settings; `replays` decides whether it captures graphs."""
        with memory_errors():
            engine = Engine(config, self._device, self._backend if replays else None, taps)
        return BuiltinArm(label, engine)


def _check_length(shape: ModelShape, longest: int) -> None:
    limit = shape.max_position_embeddings
    if longest <= limit:
        return
    longer = [
        name
        for name, other in MODEL_SHAPES.items()
        if other.max_position_embeddings >= longest and other.is_sparse == shape.is_sparse
    ]
    raise UsageError(
        f"max_model_len is {longest}, and --model {shape.name} has positions for 1 to {limit}: set "
        f"max_model_len in the scenario's limits to {limit} at most"
        + (f", or use --model {' or '.join(longer)}." if longer else ".")
    )


def _as_numpy(cache: torch.Tensor) -> NDArray[Any]:
    if cache.dtype is torch.bfloat16:
        cache = cache.view(torch.int16)
        return cache.cpu().numpy().view("uint16")
    array: NDArray[Any] = cache.cpu().numpy()
    return array
