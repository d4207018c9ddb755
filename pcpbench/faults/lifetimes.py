"""Faults that only other replays show: results that do not last (K31), leftovers (K32)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench.capture import GraphManager
from pcpbench.engine import engine as engine_module
from pcpbench.engine.engine import Engine
from pcpbench.engine.sampled import Sampled
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import DCP, PCP, shipped
from pcpbench.faults.fault import Site

Forward = Callable[..., Coroutine[Any, Any, Tensor]]
Sample = Callable[..., Coroutine[Any, Any, Sampled]]

EDGES: Final = replace(PCP, scenario="s2-capture-edges", checks="full")
SHARDED: Final = replace(DCP, scenario="s2-capture-edges", checks="full")
SMALL: Final = replace(EDGES, capture_sizes="1,2,4,8")
SPLIT_ROWS: Final = 16


def tokens_in_output_buffer(site: Site) -> None:
    """Sampled tokens are handed out in the buffer that replays leave their result in."""

    async def faulty(sample: Sample, self: Worker, *args: Any) -> Sampled:
        sampled = await sample(self, *args)
        room = self.hidden_states.view(torch.int64).flatten()[: len(sampled.tokens)]
        site.hit()
        return replace(sampled, tokens=room.copy_(sampled.tokens))

    site.wrap(Worker, "sample", faulty)


def tokens_in_one_buffer(site: Site) -> None:
    """Sampled tokens are handed out in a buffer that the next step samples into."""
    rings: dict[int, Tensor] = {}

    async def faulty(sample: Sample, self: Worker, *args: Any) -> Sampled:
        sampled = await sample(self, *args)
        room = rings.setdefault(id(self), torch.zeros(64, dtype=torch.int64, device=self.device))[
            : len(sampled.tokens)
        ]
        site.hit()
        return replace(sampled, tokens=room.copy_(sampled.tokens))

    site.wrap(Worker, "sample", faulty)


class _PoolMemory:
    """Memory that each worker takes from its graphs' pool during the first capture of its engine.

    It goes back to the pool when that capture ends, and the worker keeps on using it.
    """

    def __init__(self, site: Site, rows: int, columns: Callable[[Worker], int]) -> None:
        self._rows, self._columns = rows, columns
        self._capturing = False
        self._spare: list[Tensor] = []
        self._held: list[tuple[Worker, Tensor]] = []
        self._dangling: dict[int, tuple[Worker, Tensor]] = {}
        site.wrap(GraphManager, "_capture_segments", self._capture)

    def of(self, worker: Worker) -> Tensor | None:
        """[rows, columns] in the model's dtype; None before the first capture."""
        held = [tensor for holder, tensor in self._held if holder is worker]
        return held[0] if held else self._dangling.get(id(worker), (None, None))[1]

    def take(self, worker: Worker) -> None:
        """Called at the beginning of a forward pass: takes memory in the first capture.

        The first rank takes it for all, before any intermediate: no op of this graph had it.
        """
        if not self._capturing:
            return
        if not self._spare:
            shape = (self._rows, self._columns(worker))
            for _ in range(worker.config.parallel_config.world.size):
                fresh = torch.empty(shape, dtype=worker.model.dtype, device=worker.device)
                self._spare.append(fresh)
        self._held.append((worker, self._spare.pop()))

    def _capture(self, capture: Callable[..., Any], manager: GraphManager, *args: Any) -> Any:
        self._capturing = not manager.captured
        try:
            segments = capture(manager, *args)
        finally:
            self._capturing = False
        for worker, tensor in self._held:
            block_at = getattr(manager.pool, "block_at", None)  # the host's pools only
            if block_at is not None:
                memory = torch.from_numpy(block_at(tensor.data_ptr()).memory)
                alias = memory.view(tensor.dtype).view(tensor.shape)
                self._dangling[id(worker)] = (worker, alias)
        self._held.clear()
        return segments


def logits_in_graph_pool(site: Site) -> None:
    """Logits are handed out in memory that a capture gave back to the graphs' pool."""
    memory = _PoolMemory(site, 16, lambda worker: worker.model.shape.vocab_size)

    async def forward(original: Forward, self: Worker, **kw: Any) -> Tensor:
        memory.take(self)
        return await original(self, **kw)

    async def sample(original: Sample, self: Worker, *args: Any) -> Sampled:
        sampled, room = await original(self, *args), memory.of(self)
        if room is None or len(sampled.logits) > len(room):
            return sampled
        site.hit()
        return replace(sampled, logits=room[: len(sampled.logits)].copy_(sampled.logits))

    site.wrap(Worker, "forward", forward)
    site.wrap(Worker, "sample", sample)


def plan_in_graph_pool(site: Site) -> None:
    """A graph reads a scale that each step prepares in memory given back to the graphs' pool."""
    memory = _PoolMemory(site, 1, lambda worker: 1)

    async def forward(original: Forward, self: Worker, *, into_buffer: bool) -> Tensor:
        memory.take(self)
        hidden = await original(self, into_buffer=False)
        largest = self.config.compilation_config.cudagraph_capture_sizes[-1]
        scale = memory.of(self)
        if into_buffer and scale is not None and len(hidden) == largest:
            hidden = hidden * scale
        return self.hidden_states[: len(hidden)].copy_(hidden) if into_buffer else hidden

    def prepare(original: Callable[..., None], self: Worker, *args: Any) -> None:
        original(self, *args)
        scale = memory.of(self)
        if scale is not None:
            scale.fill_(1.0)
            site.hit()

    site.wrap(Worker, "forward", forward)
    site.wrap(Worker, "prepare_attention", prepare)


def workspace_left_dirty(site: Site) -> None:
    """Large decode batches leave a workspace set that smaller ones count on finding zero.

    It is zeroed where a scenario starts, and no later.
    """
    spaces: dict[int, Tensor] = {}

    def register(
        original: Callable[..., None], book: Any, workers: Iterable[Worker], shards: Any
    ) -> None:
        original(book, workers, shards)
        for worker in workers:
            space = torch.zeros(1, dtype=worker.model.dtype, device=worker.device)
            spaces[id(worker)] = space
            book.register(f"rank{worker.rank}.workspace", lambda space=space: space)

    def start(original: Callable[..., None], self: Engine, *args: Any) -> None:
        original(self, *args)
        for worker in self.workers:
            spaces[id(worker)].zero_()

    async def forward(original: Forward, self: Worker, *, into_buffer: bool) -> Tensor:
        hidden, space = await original(self, into_buffer=False), spaces[id(self)]
        hidden = hidden + space
        batch = self.local_batch
        assert batch is not None
        # The split path is that of a PCP rank; the one-rank reference has none.
        is_decode = not batch.has_prefill and self.pcp_manager is not None
        if is_decode and batch.num_reqs_after_padding >= SPLIT_ROWS:
            space.fill_(1.0)
            site.hit()
        return self.hidden_states[: len(hidden)].copy_(hidden) if into_buffer else hidden

    site.wrap(engine_module, "register_buffers", register)
    site.wrap(Engine, "start", start)
    site.wrap(Worker, "forward", forward)


FAULTS: Final = (
    shipped("K31", "tokens-in-output-buffer", "Sampled tokens are handed out in the buffer that "
            "replays leave their result in.", tokens_in_output_buffer, "C14", setting=EDGES),
    shipped("K31", "tokens-in-one-buffer", "Sampled tokens are handed out in a buffer that the "
            "next step samples into.", tokens_in_one_buffer, "C14", setting=SHARDED),
    shipped("K31", "logits-in-graph-pool", "Logits are handed out in memory that a capture gave "
            "back to the graphs' pool.", logits_in_graph_pool, "C14", setting=SHARDED,
            at_capture=True),
    shipped("K32", "plan-in-graph-pool", "A graph reads a scale that each step prepares in memory "
            "given back to the graphs' pool.", plan_in_graph_pool, "C14", setting=SMALL,
            at_capture=True),
    shipped("K32", "workspace-left-dirty", "Large decode batches leave a workspace set that "
            "smaller ones count on finding zero.", workspace_left_dirty, "C14", setting=EDGES,
            at_capture=True),
)  # fmt: skip
