"""Watches an engine run one step: when each phase of it began and ended, and on which rank.

Owns which calls of an engine are phases. Nothing of it is there while nobody watches: for a `with`
block the engine is handed stand-ins for its workers, its dispatcher and its graphs that time the
calls which pass through them. All ranks of a process run one after the other, in lockstep from
collective to collective, so a rank's forward pass is as many phases as it had turns. A replay, and
each launch in it, holds all ranks at once and is nobody's own.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, cast

from pcpbench.capture import GraphManager
from pcpbench.device.collectives import Meeting
from pcpbench.device.graph import Graph
from pcpbench.engine.dispatcher import BatchCounts, Decision, Dispatcher
from pcpbench.engine.draft_runner import DraftRunner, Proposal
from pcpbench.engine.engine import Engine
from pcpbench.engine.worker import Worker
from pcpbench.modes import BatchExecutionDescriptor

CALLS: Final = ("update_states", "prepare_inputs", "prepare_attention", "post_update")
ROUTINES: Final = ("forward", "sample")
"""Methods of a worker that are phases: plain calls, and coroutines that wait for other ranks."""


class Stretch(NamedTuple):
    """One phase. start, end: as the clock told them. rank: None for all ranks at once."""

    name: str
    rank: int | None
    start: float
    end: float


class PhaseWatch:
    """Use as a context manager around steps; afterwards `stretches` has their phases in order.

    now: seconds on a monotonic clock.
    """

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self._engine, self.now = engine, now
        self.stretches: list[Stretch] = []

    def __enter__(self) -> Self:
        engine = self._engine
        self._kept = (engine.workers, engine.dispatcher, engine.graphs, engine.drafts)
        workers = [_WatchedWorker(worker, self) for worker in engine.workers]
        engine.workers = cast("list[Worker]", workers)
        engine.dispatcher = cast(Dispatcher, _WatchedDispatcher(engine.dispatcher, self))
        if engine.graphs is not None:
            engine.graphs = cast(GraphManager, _WatchedGraphs(engine.graphs, self))
        if engine.drafts is not None:
            engine.drafts = cast(DraftRunner, _WatchedDrafts(engine.drafts, self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        engine = self._engine
        engine.workers, engine.dispatcher, engine.graphs, engine.drafts = self._kept

    def timed(self, name: str, rank: int | None, call: Callable[[], Any]) -> Any:
        """Call, and keep when it began and ended, also where it raises."""
        start = self.now()
        try:
            return call()
        finally:
            self.stretches.append(Stretch(name, rank, start, self.now()))


class _StandIn:
    """Passes everything on to what it stands for."""

    def __init__(self, inner: Any, watch: PhaseWatch) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_watch", watch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)


class _WatchedWorker(_StandIn):
    def __getattr__(self, name: str) -> Any:
        value, watch, rank = getattr(self._inner, name), self._watch, self._inner.rank
        if name in CALLS:
            return lambda *args: watch.timed(name, rank, lambda: value(*args))
        if name in ROUTINES:
            return lambda *args, **named: _Turns(name, rank, value(*args, **named), watch)
        return value


class _Turns:
    """A rank's coroutine: each turn, up to the collective where it waits, is one phase."""

    def __init__(
        self, name: str, rank: int, routine: Coroutine[Meeting, Any, Any], watch: PhaseWatch
    ) -> None:
        self._name, self._rank, self._routine, self._watch = name, rank, routine, watch

    def send(self, value: Any) -> Meeting:
        return cast(
            Meeting, self._watch.timed(self._name, self._rank, lambda: self._routine.send(value))
        )

    def close(self) -> None:
        self._routine.close()


class _WatchedDispatcher(_StandIn):
    """The engine asks once for each rank, in rank order (and once for all of them when idle)."""

    def decide(self, counts: BatchCounts) -> Decision:
        decision: Decision = self._watch.timed("dispatch", None, lambda: self._inner.decide(counts))
        return decision


class _WatchedGraphs(_StandIn):
    def replay(self, descriptor: BatchExecutionDescriptor) -> None:
        def launch(graph: Graph) -> None:
            self._watch.timed("launch", None, graph.replay)

        self._watch.timed("replay", None, lambda: self._inner.replay(descriptor, launch))


class _WatchedDrafts(_StandIn):
    """The draft model behind a step: all its passes on all ranks are one phase."""

    def propose(self, *args: Any) -> Proposal:
        found: Proposal = self._watch.timed("draft", None, lambda: self._inner.propose(*args))
        return found
