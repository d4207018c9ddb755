"""All local ranks of one arm: builds them, drives a step in lockstep, captures and replays.

Owns what a step runs as and the order of its phases over the ranks. Checks nothing: what a step
left behind is handed out as records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pcpbench.capture import GraphManager, Routine
from pcpbench.config import EngineConfig
from pcpbench.device.address_book import AddressBook
from pcpbench.device.collectives import run_lockstep
from pcpbench.device.graph import GraphBackend
from pcpbench.engine.buffers import register_buffers
from pcpbench.engine.dispatcher import (
    BatchCounts,
    Candidates,
    Decision,
    Dispatcher,
    build_candidates,
)
from pcpbench.engine.draft_runner import DraftRunner, Proposal
from pcpbench.engine.dummy_run import stage_dummy_batch
from pcpbench.engine.groups import RankGroups, in_process_groups
from pcpbench.engine.kept_inputs import KeptInputs
from pcpbench.engine.microbatch import add_cut_twins
from pcpbench.engine.sampled import Sampled
from pcpbench.engine.verification import planned_drafts
from pcpbench.engine.worker import Worker
from pcpbench.errors import CannotMeasure, DispatchMismatch
from pcpbench.model.decoder import MLADecoder
from pcpbench.model.presets import model_shape
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.pcp_manager import PCPManager
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import AddressChange
from pcpbench.results import CapturedGraph


@dataclass
class StepOutput:
    """What a step computed, still on the device.

    How long its tensors hold is told in targets/protocol.py. sampled: one entry a local rank.
    tokens: what was written back (sampled, or forced).
    counts: what each rank handed to dispatch. num_replays: graphs launched.
    drafts: the step's draft tokens, request after request. accepted: one entry a local rank, how
    many of them each request that samples accepted; both empty for a step without drafts.
    proposal: what the draft model made of the step, None without one. moved: buffers of its graph
    that were not where it was captured when the forward pass began.
    """

    decision: Decision
    counts: tuple[BatchCounts, ...]
    sampled: tuple[Sampled, ...]
    tokens: Tensor | None
    num_replays: int = 0
    idle: bool = False
    drafts: tuple[int, ...] = ()
    accepted: tuple[Tensor, ...] = ()
    proposal: Proposal | None = None
    moved: tuple[AddressChange, ...] = ()


class Engine:
    """One arm's engine: every local rank, its dispatcher and, where it replays, its graphs.

    backend: None for an eager engine. An eager engine whose configuration names a graph mode pads
    every batch exactly to the descriptor that a graph would have been used for (`eager_padded`).
    taps: keep every intermediate result (engine/taps.py), in captured graphs too.
    before_forward: called in every step that computes, between preparation and forward pass.
    keeps_evidence: whether steps note, at that place, which buffers of their graph have moved.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        backend: GraphBackend | None,
        taps: bool = False,
    ) -> None:
        config.check()
        PCPManager.validate_config(config)
        self.config, self.device = config, device
        parallel, model = config.parallel_config, config.model_config
        self.shape = model_shape(model.preset)
        self.candidates = self._make_candidates()
        mode = config.compilation_config.cudagraph_mode
        self.dispatcher = Dispatcher(mode, self.candidates.descriptors)
        dtype = getattr(torch, model.dtype)
        shards = [
            MLADecoder(
                self.shape,
                dtype=dtype,
                device=device,
                seed=model.seed,
                tp_size=parallel.tensor_parallel_size,
                tp_rank=tp_rank,
                max_model_len=model.max_model_len,
                ep_size=parallel.world.size if parallel.enable_expert_parallel else 1,
            )
            for tp_rank in range(parallel.tensor_parallel_size)
        ]
        world = parallel.world
        self.workers = [
            self._make_worker(groups, shards[world.tp_rank(groups.rank)])
            for groups in in_process_groups(world)
        ]
        if taps:
            for worker in self.workers:
                worker.add_taps()
        self.drafts: DraftRunner | None = None
        if config.has_draft_model:
            self.drafts = DraftRunner(config, self.workers, shards, self.candidates.descriptors)
        self.address_book = AddressBook()
        register_buffers(self.address_book, self.workers, shards)
        if self.drafts is not None:
            self.drafts.register(self.address_book)
        self.graphs = None if backend is None else GraphManager(backend, self.address_book)
        if self.drafts is not None and self.graphs is not None and backend is not None:
            self.drafts.use_graphs(backend, self.address_book, self.graphs.pool)
        self._local_hidden: list[Tensor] = []
        self._tokens: dict[str, list[int]] = {}
        self.before_forward: Callable[[], None] | None = None
        self.keeps_evidence = True

    def _make_candidates(self) -> Candidates:
        """Descriptors that dispatch may choose from, in the order of capture."""
        config = self.config
        compilation, scheduler = config.compilation_config, config.scheduler_config
        candidates = build_candidates(
            compilation.cudagraph_mode,
            compilation.cudagraph_capture_sizes,
            decode_query_len=config.decode_query_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_batched_tokens,
            dynamic_drafts=config.has_dynamic_drafts,
        )
        descriptors = add_cut_twins(candidates.descriptors, config.parallel_config)
        return replace(candidates, descriptors=descriptors)

    def _make_worker(self, groups: RankGroups, model: MLADecoder) -> Worker:
        """One rank."""
        most = self.config.scheduler_config.max_num_batched_tokens
        return Worker(self.config, groups, model, self.device, most)

    def _stage(self, worker: Worker, descriptor: BatchExecutionDescriptor) -> None:
        """Stage a dummy batch of a captured shape on one rank."""
        stage_dummy_batch(worker, descriptor)

    @torch.inference_mode()
    def capture(self, on_captured: Callable[[CapturedGraph], None] | None = None) -> None:
        """Capture every candidate descriptor; nothing to do for an eager engine."""
        if self.graphs is not None:
            self.graphs.capture(self, self.candidates.descriptors, on_captured)
        if self.drafts is not None:
            self.drafts.capture(on_captured)

    def prepare_inputs_to_capture(self, descriptor: BatchExecutionDescriptor) -> list[Routine]:
        """Stage a fresh dummy batch on every rank; one forward coroutine each."""
        for worker in self.workers:
            self._stage(worker, descriptor)
            worker.context.breaks = descriptor.cg_mode is CUDAGraphMode.PIECEWISE
        return [_forward_only(worker) for worker in self.workers]

    def start(self, plan: ScenarioPlan) -> None:
        """Begin a scenario (again): no requests, caches zeroed, tables left as they are."""
        if plan.max_model_len > self.config.model_config.max_model_len:
            raise CannotMeasure("the plan was made for longer sequences than the engine holds")
        self._tokens.clear()
        for worker in self.workers:
            for req_id in list(worker.request_state.req_id_to_index):
                worker.request_state.remove_request(req_id)
            for cache in worker.kv_caches:
                cache.zero_()

    @torch.inference_mode()
    def execute(
        self,
        plan: StepPlan,
        forced: Sequence[int] | None = None,
        drafts: Sequence[int] | None = None,
    ) -> StepOutput:
        """Run one step on all local ranks.

        forced: tokens to feed on in place of the sampled ones, one for each row of logits, in the
        plan's order (teacher forcing). drafts: the step's draft tokens, request after request;
        where the plan has drafts and none are given, the engine finds those that make the planned
        acceptance come true for itself. Raises DispatchMismatch and CollectiveMismatch.
        """
        tokens = self._admit(plan)
        for worker in self.workers:
            worker.update_states(plan, tokens)
        if not plan.scheduled:
            return self._idle_step()
        if not plan.num_draft_tokens:
            return self._advance(plan, self._run(plan), forced)
        output = self._find_drafts(plan) if drafts is None else self._run(plan, tuple(drafts))
        return self._advance(plan, output, forced)

    def _run(self, plan: StepPlan, drafts: tuple[int, ...] = ()) -> StepOutput:
        """Prepare the step, run it and sample; requests do not advance."""
        replays_before = self.num_replays
        for worker in self.workers:
            worker.groups.log.clear()
            if drafts:
                worker.set_drafts(plan, drafts)
        counts = tuple(worker.prepare_inputs(plan) for worker in self.workers)
        decision = self._decide(counts)
        for worker in self.workers:
            worker.prepare_attention(decision.descriptor)
            if worker.taps is not None:
                worker.taps.clear()
        if self.before_forward is not None:
            self.before_forward()
        moved = self.moved_buffers(decision.descriptor) if self.keeps_evidence else ()
        sampled = tuple(self._compute(decision.descriptor, plan))
        num_replays = self.num_replays - replays_before
        return StepOutput(decision, counts, sampled, None, num_replays, drafts=drafts, moved=moved)

    def _advance(
        self, plan: StepPlan, output: StepOutput, forced: Sequence[int] | None
    ) -> StepOutput:
        """Feed on the sampled or the forced tokens."""
        fed = output.sampled[0].tokens
        if forced is not None:
            fed = torch.tensor(list(forced), dtype=fed.dtype, device=self.device)
        accepted = [
            worker.post_update(plan, own.tokens if forced is None else fed)
            for worker, own in zip(self.workers, output.sampled, strict=True)
        ]
        known = tuple(count for count in accepted if count is not None)
        return self._propose(replace(output, tokens=fed, accepted=known))

    def _propose(self, output: StepOutput) -> StepOutput:
        """Have the draft model draft behind a step that the requests have advanced by."""
        if self.drafts is None:
            return output
        hidden = self._local_hidden
        return replace(output, proposal=self.drafts.propose(output.decision.descriptor, hidden))

    def _find_drafts(self, plan: StepPlan) -> StepOutput:
        """Run a step until its drafts are those that the plan's acceptance asks for.

        What is sampled behind a token depends on no later one, so each run settles at least one
        more draft, and the run that changes none is the step itself.
        """
        drafts = (0,) * plan.num_draft_tokens
        output = self._run(plan, drafts)
        for _ in range(self.config.decode_query_len):
            targets = output.sampled[0].tokens.tolist()
            drafts = tuple(planned_drafts(plan.scheduled, targets, self.shape.vocab_size))
            if drafts == output.drafts:
                break
            output = self._run(plan, drafts)
        return output  # that drafts are as planned is the judge's to say

    @torch.inference_mode()
    def compute_again(self, output: StepOutput, plan: StepPlan) -> StepOutput:
        """Run the forward pass and sampling of the step just executed a second time.

        On what its buffers hold; requests do not advance. For a step that computed something. The
        draft model drafts again, too.
        """
        sampled = tuple(self._compute(output.decision.descriptor, plan))
        return self._propose(replace(output, sampled=sampled))

    @torch.inference_mode()
    def replay_idle(
        self, labels: Sequence[str], before_each: Callable[[], None] = lambda: None
    ) -> tuple[str, ...]:
        """Replay captured graphs as dummy runs, in this order, and say which.

        The inputs of the step just executed are put back afterwards, so that `compute_again` runs
        on them. before_each: called before each replay. Labels without a graph are left out.
        """
        known = {descriptor.label: descriptor for descriptor in self.candidates.descriptors}
        replayed: list[str] = []
        if self.graphs is None:
            return ()
        kept = [KeptInputs(worker) for worker in self.workers]
        for label in labels:
            if label in known:
                for worker in self.workers:
                    self._stage(worker, known[label])
                before_each()
                self.graphs.replay(known[label])
            elif self.drafts is None or not self.drafts.replay_idle(label, before_each):
                continue
            replayed.append(label)
        for inputs in kept:
            inputs.put_back()
        return tuple(replayed)

    def _compute(self, descriptor: BatchExecutionDescriptor, plan: StepPlan) -> list[Sampled]:
        hidden = self._forward(descriptor)
        if self.drafts is not None:
            self._local_hidden = hidden
        return run_lockstep(
            [worker.sample(part, plan) for worker, part in zip(self.workers, hidden, strict=True)]
        )

    @property
    def num_replays(self) -> int:
        """Graphs launched since this engine was built."""
        return 0 if self.graphs is None else self.graphs.num_replays

    def moved_buffers(self, descriptor: BatchExecutionDescriptor) -> tuple[AddressChange, ...]:
        """Buffers of the graph of this descriptor that are not where it was captured."""
        if self.graphs is None or descriptor.cg_mode is CUDAGraphMode.NONE:
            return ()
        return self.address_book.changes(descriptor.label)

    def _decide(self, counts: tuple[BatchCounts, ...]) -> Decision:
        decisions = [self.dispatcher.decide(count) for count in counts]
        if any(decision.descriptor != decisions[0].descriptor for decision in decisions):
            chosen = ", ".join(
                f"rank {worker.rank} chose {decision.descriptor.label} for {count.num_reqs} rows "
                f"and {count.num_tokens} tokens"
                for worker, decision, count in zip(self.workers, decisions, counts, strict=True)
            )
            raise DispatchMismatch(f"ranks chose different descriptors: {chosen}")
        return decisions[0]

    def _forward(self, descriptor: BatchExecutionDescriptor) -> list[Tensor]:
        """Replay where a graph is asked for and there is one to replay, else run eagerly."""
        if descriptor.cg_mode is CUDAGraphMode.NONE or self.graphs is None:
            for worker in self.workers:
                worker.context.breaks = False
            return run_lockstep([worker.forward(into_buffer=False) for worker in self.workers])
        self.graphs.replay(descriptor)
        return [worker.hidden_states[: descriptor.num_tokens] for worker in self.workers]

    def _idle_step(self) -> StepOutput:
        """A dummy step: the smallest captured decode shape, or one eager query, no attention."""
        length = self.config.decode_query_len
        counts = BatchCounts(1, length, length, has_prefill=False, max_query_len=length)
        decision = self.dispatcher.decide(counts)
        for worker in self.workers:
            worker.groups.log.clear()
            self._stage(worker, decision.descriptor)
        return self._run_idle(decision, (counts,) * len(self.workers))

    def _run_idle(self, decision: Decision, counts: tuple[BatchCounts, ...]) -> StepOutput:
        """Run what was staged; nothing is sampled."""
        replays_before = self.num_replays
        moved = self.moved_buffers(decision.descriptor) if self.keeps_evidence else ()
        self._forward(decision.descriptor)
        num_replays = self.num_replays - replays_before
        output = StepOutput(decision, counts, (), None, num_replays, idle=True, moved=moved)
        if self.drafts is None:
            return output
        return replace(output, proposal=self.drafts.idle(decision.descriptor))

    def _admit(self, plan: StepPlan) -> dict[str, list[int]]:
        """Tokens of every request that enters with this step, earlier outputs included."""
        state = self.workers[0].request_state
        for req_id in plan.preempted_req_ids:
            self._tokens[req_id] = state.known_tokens(req_id)
        tokens = {}
        for request in plan.new_requests:
            known = list(request.prompt_token_ids)
            if request.num_generated:
                known = self._tokens.pop(request.req_id)
            tokens[request.req_id] = known[: len(request.prompt_token_ids) + request.num_generated]
        return tokens


async def _forward_only(worker: Worker) -> None:
    await worker.forward(into_buffer=True)
