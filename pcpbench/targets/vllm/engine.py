"""The lockstep engine over workers of vLLM's state.

Owns what differs from the built-in engine: whose workers they are, whose candidates, and that the
dispatch of a step has been made by vLLM's runner before the engine asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from pcpbench.config import EngineConfig
from pcpbench.device.collectives import run_lockstep
from pcpbench.device.graph import GraphBackend
from pcpbench.engine.dispatcher import BatchCounts, Candidates, Decision, Dispatcher, covers
from pcpbench.engine.engine import Engine, StepOutput
from pcpbench.engine.groups import RankGroups
from pcpbench.engine.worker import Worker
from pcpbench.model.decoder import MLADecoder
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.results import CapturedGraph
from pcpbench.targets.vllm.api import VllmApi
from pcpbench.targets.vllm.runner import RankRunner
from pcpbench.targets.vllm.worker import VllmCounts, VllmWorker
from pcpbench.world import World

GLOBAL_COUNT = (
    "the request count handed to dispatch is that of the whole batch, the token count a rank's"
)


class VllmDispatcher(Dispatcher):
    """Tells what vLLM's graph manager chose, and why that is no FULL graph."""

    def __init__(
        self,
        mode: CUDAGraphMode,
        descriptors: tuple[BatchExecutionDescriptor, ...],
        world: World,
    ) -> None:
        super().__init__(mode, descriptors)
        self._world = world

    def decide(self, counts: BatchCounts) -> Decision:
        """What was chosen for these counts, with a reason in pcpbench's words for a miss."""
        chosen = cast(VllmCounts, counts).chosen
        if chosen is None:
            raise RuntimeError("vLLM's runner has made no dispatch for these counts")
        return Decision(chosen, self._miss_reason(counts, chosen))

    def _miss_reason(self, counts: BatchCounts, chosen: BatchExecutionDescriptor) -> str:
        reason = super()._miss_reason(counts, chosen)
        if reason and not counts.has_prefill and self._has_one_for(counts):
            return GLOBAL_COUNT
        return reason

    def _has_one_for(self, counts: BatchCounts) -> bool:
        """Whether a FULL graph would have served the rows that a rank really has."""
        rows = counts.num_reqs
        if self._world.shard_decode_requests:
            rows = -(-rows // self._world.pcp_size)
        return rows != counts.num_reqs and any(
            covers(d, rows, counts.num_tokens, counts.uniform_token_count, counts.max_query_len)
            for d in self.descriptors
            if d.cg_mode is CUDAGraphMode.FULL
        )


class VllmEngine(Engine):
    """One arm's engine: every local rank on vLLM's state; see Engine."""

    def __init__(
        self,
        api: VllmApi,
        config: EngineConfig,
        device: torch.device,
        backend: GraphBackend | None,
        taps: bool = False,
    ) -> None:
        self._api = api
        super().__init__(config, device, backend, taps)
        mode = config.compilation_config.cudagraph_mode
        world = config.parallel_config.world
        self.dispatcher = VllmDispatcher(mode, self.candidates.descriptors, world)

    @torch.inference_mode()
    def capture(self, on_captured: Callable[[CapturedGraph], None] | None = None) -> None:
        """Capture every candidate, each PIECEWISE one after an eager run with its attention.

        vLLM's warm-up is such a run; the graph manager's leaves out what lies between segments.
        """
        for descriptor in self.candidates.descriptors if self.graphs is not None else ():
            if descriptor.cg_mode is CUDAGraphMode.PIECEWISE:
                for worker in self.workers:
                    self._stage(worker, descriptor)
                    worker.context.breaks = False
                run_lockstep([worker.forward(into_buffer=False) for worker in self.workers])
        super().capture(on_captured)

    def _make_candidates(self) -> Candidates:
        """vLLM's own; pcpbench's notices of sizes that cannot be used as asked."""
        notices = super()._make_candidates().notices
        shape = self.shape
        first = RankRunner(
            self._api, self.config, 0, self.device, shape.vocab_size, shape.kv_groups
        )
        found = tuple(self._api.our_descriptor(d) for d in first.descriptors())
        return Candidates(found, notices)

    def _make_worker(self, groups: RankGroups, model: MLADecoder) -> Worker:
        most = self.config.scheduler_config.max_num_batched_tokens
        return VllmWorker(self._api, self.config, groups, model, self.device, most)

    def _stage(self, worker: Worker, descriptor: BatchExecutionDescriptor) -> None:
        cast(VllmWorker, worker).stage_dummy(descriptor)

    def _idle_step(self) -> StepOutput:
        """A dummy step as vLLM runs it: dispatched and staged by its own runner."""
        for worker in self.workers:
            worker.groups.log.clear()
        counts = tuple(cast(VllmWorker, worker).stage_idle() for worker in self.workers)
        return self._run_idle(self._decide(counts), counts)
