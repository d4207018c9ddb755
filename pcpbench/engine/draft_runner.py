"""The draft model on all ranks of an engine: its graphs, and the passes behind each step (SPEC 10).

Owns which pass runs as what, the order of passes and what they propose. A pass of the draft model
has graphs of its own: the first one those of the target's FULL decode shapes, as it runs on the
same batch; later ones a FULL graph of one token a request for each capture size. Both share the
target's pool. What a pass reads is draft_model.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pcpbench.capture import GraphManager, Routine
from pcpbench.config import EngineConfig
from pcpbench.device.address_book import AddressBook
from pcpbench.device.collectives import run_lockstep
from pcpbench.device.graph import GraphBackend, GraphPool
from pcpbench.engine.buffers import INPUT_BUFFER_FIELDS
from pcpbench.engine.dispatcher import BatchCounts, Dispatcher, build_candidates
from pcpbench.engine.draft_model import DraftPass, DraftWorker
from pcpbench.engine.dummy_run import stage_dummy_batch
from pcpbench.engine.worker import Worker
from pcpbench.model.decoder import MLADecoder
from pcpbench.model.mtp import MTPModule
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.records import AddressChange
from pcpbench.results import AddressUse, CapturedGraph

FIRST: Final = "draft first "
NEXT: Final = "draft next "
"""Prefixes of the labels of its graphs."""


@dataclass(frozen=True)
class RankedPass:
    """One pass on all ranks: what it ran as, graphs launched, what each rank read and made.

    moved: buffers of its graph that were not where it was captured, before it or after it.
    """

    descriptor: BatchExecutionDescriptor
    num_replays: int
    ranks: tuple[DraftPass, ...]
    drafted: tuple[Tensor, ...] = ()
    moved: tuple[AddressChange, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """What the draft model made of one step, still on the device.

    passes: in order; empty where they were not kept. tokens: one int64 [n, k] a rank. logits:
    float32 [k, n, vocab], those of the first rank. rows: one int64 [n] a rank, the token of the
    global batch that each request was drafted from.
    """

    passes: tuple[RankedPass, ...] = ()
    tokens: tuple[Tensor, ...] = ()
    logits: Tensor | None = None
    rows: tuple[Tensor, ...] = ()

    @property
    def moved(self) -> tuple[AddressChange, ...]:
        """Buffers that any of the passes that were kept did not find where it was captured."""
        return tuple(dict.fromkeys(change for one in self.passes for change in one.moved))


@dataclass
class _Stage:
    """Stages dummy batches of one kind of pass: what a graph manager asks of an engine."""

    ranks: Sequence[DraftWorker]
    stage: Callable[[DraftWorker, BatchExecutionDescriptor], None]

    def prepare_inputs_to_capture(self, descriptor: BatchExecutionDescriptor) -> list[Routine]:
        for rank in self.ranks:
            self.stage(rank, descriptor)
        return [_forward_only(rank) for rank in self.ranks]


@dataclass
class _Graphs:
    """The graphs of one kind of pass. manager: None for an eager engine."""

    stage: _Stage
    descriptors: tuple[BatchExecutionDescriptor, ...]
    manager: GraphManager | None = field(default=None)


class DraftRunner:
    """Proposes `num_steps` drafts for every request of a step, one pass a draft.

    workers: the engine's, to which the draft model's caches are added. shards: the target's weights
    by TP rank. target_descriptors: shapes that the target model runs as. keeps_passes: whether
    proposals say what their passes read.
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: Sequence[Worker],
        shards: Sequence[MLADecoder],
        target_descriptors: Sequence[BatchExecutionDescriptor],
    ) -> None:
        self.num_steps, self.keeps_passes = config.num_speculative_tokens, True
        world, seed = config.parallel_config.world, config.model_config.seed
        self.modules = [MTPModule(shard, seed, rank) for rank, shard in enumerate(shards)]
        self.ranks = [
            DraftWorker(worker, self.modules[world.tp_rank(worker.rank)], self.num_steps)
            for worker in workers
        ]
        full = CUDAGraphMode.FULL
        first = tuple(d for d in target_descriptors if d.cg_mode is full)
        following = decode_descriptors(config) if self.num_steps > 1 else ()
        self._mode = config.compilation_config.cudagraph_mode
        self.dispatcher = Dispatcher(self._mode, following)
        self.first = _Graphs(_Stage(self.ranks, _stage_first_dummy), first)
        self.next = _Graphs(_Stage(self.ranks, _stage_next_dummy), following)

    def register(self, book: AddressBook) -> None:
        """Name its persistent tensors `rank0.draft.…` and its weights `tp0.draft.…`."""
        for rank in self.ranks:
            prefix = f"rank{rank.worker.rank}.draft."
            for name in INPUT_BUFFER_FIELDS:
                book.register(prefix + name, partial(_input, rank, name))
            for name in rank.persistent_buffers():
                book.register(prefix + name, partial(_persistent, rank, name))
            for name in rank.scratch_buffers():
                book.register(prefix + name, partial(_scratch, rank, name), scratch=True)
        for tp_rank, module in enumerate(self.modules):
            for name in dict(module.state_dict(keep_vars=True)):
                book.register(f"tp{tp_rank}.draft.{name}", partial(_weight, module, name))

    def use_graphs(self, backend: GraphBackend, book: AddressBook, pool: GraphPool) -> None:
        """Have passes captured and replayed, in the target's pool."""
        self.first.manager = GraphManager(backend, book, pool, FIRST)
        self.next.manager = GraphManager(backend, book, pool, NEXT)

    @property
    def num_shapes(self) -> int:
        """Shapes of its passes that can be captured."""
        return len(self.first.descriptors) + len(self.next.descriptors)

    @property
    def captured(self) -> tuple[CapturedGraph, ...]:
        """Graphs captured so far."""
        managers = (kind.manager for kind in (self.first, self.next))
        return tuple(graph for one in managers if one is not None for graph in one.captured)

    @property
    def addresses(self) -> tuple[AddressUse, ...]:
        """What those graphs read and write."""
        managers = (kind.manager for kind in (self.first, self.next))
        return tuple(use for one in managers if one is not None for use in one.addresses)

    def capture(self, on_captured: Callable[[CapturedGraph], None] | None = None) -> None:
        """Capture every shape of both kinds of pass; nothing to do for an eager engine."""
        for kind in (self.first, self.next):
            if kind.manager is not None:
                kind.manager.capture(kind.stage, kind.descriptors, on_captured)

    def propose(self, descriptor: BatchExecutionDescriptor, hidden: Sequence[Tensor]) -> Proposal:
        """Draft behind the step that the workers have just run and advanced by.

        descriptor: what the target model ran as. hidden: one [tokens after padding, hidden] a rank,
        its result before ranks are put together again.
        """
        for rank, own in zip(self.ranks, hidden, strict=True):
            rank.choose_rows()
            rank.stage_first(own)
        drafted, one = self._run(self.first, descriptor)
        passes = [one]
        states = run_lockstep(
            [rank.restore(own) for rank, own in zip(self.ranks, drafted, strict=True)]
        )
        tokens, logits = self._guess(states)
        proposed, all_logits = [tokens], [logits]
        num_reqs = len(tokens[0])
        chosen = self.dispatcher.decide(BatchCounts(num_reqs, num_reqs, 1, False, 1)).descriptor
        for number in range(1, self.num_steps):
            for rank, drafts, state in zip(self.ranks, tokens, states, strict=True):
                if number == 1:
                    rank.stage_second(chosen)
                else:
                    rank.advance()
                rank.stage_next(drafts, state)
            drafted, one = self._run(self.next, chosen)
            passes.append(one)
            states = [own[:num_reqs].clone() for own in drafted]
            tokens, logits = self._guess(states)
            proposed.append(tokens)
            all_logits.append(logits)
        return Proposal(
            passes=tuple(passes) if self.keeps_passes else (),
            tokens=tuple(torch.stack(own, dim=1) for own in zip(*proposed, strict=True)),
            logits=torch.stack(all_logits),
            rows=tuple(rank.draft_rows for rank in self.ranks),
        )

    def idle(self, descriptor: BatchExecutionDescriptor) -> Proposal:
        """The passes of an idle step, one of each kind, on dummy batches; nothing is proposed.

        descriptor: what the target's dummy step ran as, on whose staged batch the first one runs.
        """
        for rank in self.ranks:
            rank.stage_first(rank.hidden_states, is_dummy=True)
        _, one = self._run(self.first, descriptor)
        passes = [one]
        if self.num_steps > 1:
            chosen = self.dispatcher.decide(BatchCounts(1, 1, 1, False, 1)).descriptor
            for rank in self.ranks:
                _stage_next_dummy(rank, chosen)
            _, one = self._run(self.next, chosen)
            passes.append(one)
        return Proposal(passes=tuple(passes) if self.keeps_passes else ())

    def replay_idle(self, label: str, before: Callable[[], None]) -> bool:
        """Replay one of its graphs as a dummy run; False for a label that is none of its own."""
        for kind in (self.first, self.next):
            for descriptor in kind.descriptors:
                if kind.manager is not None and kind.manager.label(descriptor) == label:
                    for rank in self.ranks:
                        kind.stage.stage(rank, descriptor)
                    before()
                    kind.manager.replay(descriptor)
                    return True
        return False

    def _run(
        self, kind: _Graphs, descriptor: BatchExecutionDescriptor
    ) -> tuple[list[Tensor], RankedPass]:
        """Run the staged pass on all ranks; each one's result [T, hidden], and what was read."""
        kept = tuple(rank.kept() for rank in self.ranks) if self.keeps_passes else ()
        moved: tuple[AddressChange, ...] = ()
        if descriptor.cg_mode is not CUDAGraphMode.FULL or kind.manager is None:
            drafted = run_lockstep([rank.forward(into_buffer=False) for rank in self.ranks])
            num_replays = 0
        else:
            before, moved = kind.manager.num_replays, self._moved(kind.manager, descriptor)
            kind.manager.replay(descriptor)
            drafted = [rank.drafted_states[: descriptor.num_tokens] for rank in self.ranks]
            num_replays = kind.manager.num_replays - before
            moved += self._moved(kind.manager, descriptor)
        made = tuple(own.clone() for own in drafted) if self.keeps_passes else ()
        return drafted, RankedPass(descriptor, num_replays, kept, made, moved)

    def _guess(self, states: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Each rank's tokens, int64 [n], and the first rank's logits."""
        logits = [
            rank.model.compute_logits(state) for rank, state in zip(self.ranks, states, strict=True)
        ]
        return [own.argmax(-1) for own in logits], logits[0]

    def _moved(
        self, manager: GraphManager, descriptor: BatchExecutionDescriptor
    ) -> tuple[AddressChange, ...]:
        """Buffers of the graph of this pass that are not where it was captured."""
        if not self.keeps_passes:
            return ()
        return manager.address_book.changes(manager.label(descriptor))


def decode_descriptors(config: EngineConfig) -> tuple[BatchExecutionDescriptor, ...]:
    """Shapes of a one-token pass: a FULL one for each capture size that is a number of requests.

    With sizes 4, 8, 16, 32 and 64 and 16 requests those of 4, 8 and 16; none without FULL graphs
    for decodes.
    """
    mode, scheduler = config.compilation_config.cudagraph_mode, config.scheduler_config
    if mode.decode_mode() is not CUDAGraphMode.FULL:
        return ()
    found = build_candidates(
        CUDAGraphMode.FULL_DECODE_ONLY,
        config.compilation_config.cudagraph_capture_sizes,
        decode_query_len=1,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
    )
    return found.descriptors


def _stage_first_dummy(rank: DraftWorker, descriptor: BatchExecutionDescriptor) -> None:
    stage_dummy_batch(rank.worker, descriptor)
    rank.stage_first(rank.hidden_states, is_dummy=True)


def _stage_next_dummy(rank: DraftWorker, descriptor: BatchExecutionDescriptor) -> None:
    rank.stage_dummy(descriptor)


async def _forward_only(rank: DraftWorker) -> None:
    await rank.forward(into_buffer=True)


def _input(rank: DraftWorker, name: str) -> Tensor:
    tensor: Tensor = getattr(rank.input_buffers, name)
    return tensor


def _persistent(rank: DraftWorker, name: str) -> Tensor:
    return rank.persistent_buffers()[name]


def _scratch(rank: DraftWorker, name: str) -> Tensor:
    return rank.scratch_buffers()[name]


def _weight(module: MTPModule, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), leaf)
    return tensor
