"""A hand-made worker for the model's tests: plain loops, nothing of the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pcpbench.device.collectives import InProcessGroup, run_lockstep
from pcpbench.model.context import AttentionMetadata, ForwardContext
from pcpbench.model.decoder import MLADecoder
from pcpbench.model.presets import TINY, ModelShape
from pcpbench.world import World

Segment = tuple[int, int, int]  # request, first position, number of tokens

SHAPE = replace(TINY, max_position_embeddings=256)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def owned(position: int, dcp_size: int, dcp_rank: int, interleave: int) -> bool:
    return position // interleave % dcp_size == dcp_rank


def num_owned(length: int, dcp_size: int, dcp_rank: int, interleave: int) -> int:
    return sum(owned(p, dcp_size, dcp_rank, interleave) for p in range(length))


class Stand:
    """All ranks of a world over one small decoder; block k of request q is scattered on purpose."""

    def __init__(
        self,
        world: World | None = None,
        *,
        interleave: int = 1,
        block_size: int = 16,
        num_blocks: int = 65,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        shape: ModelShape = SHAPE,
        fill: float = 0.0,
    ) -> None:
        self.world, self.interleave, self.block_size = world or World(), interleave, block_size
        world = self.world
        self.models = [
            MLADecoder(shape, dtype, torch.device("cpu"), seed, world.tp_size, tp_rank)
            for tp_rank in range(world.tp_size)
        ]
        cache_shape = (num_blocks, block_size, shape.latent_dim)
        self.contexts = [
            ForwardContext(
                rank=rank,
                pcp=InProcessGroup(_member(world.pcp_groups(), rank), rank, []),
                tp=InProcessGroup(_member(world.tp_groups(), rank), rank),
                dcp=InProcessGroup(_member(world.dcp_groups(), rank), rank),
                cp_interleave=interleave,
                kv_caches=[
                    torch.full(cache_shape, fill, dtype=dtype)
                    for _ in range(shape.num_hidden_layers)
                ],
            )
            for rank in range(world.size)
        ]
        scattered = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        self.blocks = scattered.view(-1, 8).tolist()  # request -> its blocks

    def slot(self, rank: int, request: int, position: int) -> int:
        """The slot of a position on a rank, -1 where another rank owns it."""
        size, i = self.world.dcp_size, self.interleave
        if not owned(position, size, self.world.dcp_rank(rank), i):
            return -1
        local = position // (size * i) * i + position % i
        block = self.blocks[request][local // self.block_size]
        return block * self.block_size + local % self.block_size

    def prepare(
        self,
        tokens: list[list[int]],
        segments: list[list[Segment]],
        extra_tokens: int = 0,
        extra_rows: int = 0,
        garbage: int = 0,
    ) -> list[tuple[Tensor, Tensor]]:
        """Set every rank's metadata; each rank's (input_ids, positions).

        segments: each rank's rows. extra_*: padding. garbage: what table columns past a row's last
        block and padded table rows hold.
        """
        size = max(sum(n for _, _, n in rows) for rows in segments) + extra_tokens
        spots = [
            [(q, p) for q, first, n in rows for p in range(first, first + n)] for rows in segments
        ]
        inputs = []
        for rank, context in enumerate(self.contexts):
            rows, pad = segments[rank], size - len(spots[rank])
            slots = []
            for peer in context.pcp.ranks:
                mine = [self.slot(rank, q, p) for q, p in spots[peer]]
                slots += mine + [-1] * (size - len(mine))
            starts = [0]
            for _, _, n in rows:
                starts.append(starts[-1] + n)
            starts += starts[-1:] * extra_rows
            lens = [first + n for _, first, n in rows]
            d, r = self.world.dcp_size, self.world.dcp_rank(rank)
            local = [num_owned(length, d, r, self.interleave) for length in lens]
            table = torch.full((len(rows) + extra_rows, 8), garbage, dtype=torch.int32)
            for row, (q, _, _) in enumerate(rows):
                used = -(-local[row] // self.block_size)
                table[row, :used] = torch.tensor(self.blocks[q][:used], dtype=torch.int32)
            context.metadata = AttentionMetadata(
                query_start_loc=torch.tensor(starts, dtype=torch.int32),
                seq_lens=torch.tensor(lens + [0] * extra_rows, dtype=torch.int32),
                dcp_local_seq_lens=torch.tensor(local + [0] * extra_rows, dtype=torch.int32)
                if d > 1
                else None,
                block_tables=(table,),
                slot_mappings=torch.tensor([slots], dtype=torch.int64),
            )
            ids = [tokens[q][p] for q, p in spots[rank]] + [0] * pad
            positions = [p for _, p in spots[rank]] + [0] * pad
            inputs.append(
                (torch.tensor(ids, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64))
            )
        return inputs

    def run(self, inputs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Each rank's hidden states, padding included."""
        return run_lockstep(
            [
                self.models[self.world.tp_rank(context.rank)](*given, context)
                for context, given in zip(self.contexts, inputs, strict=True)
            ]
        )

    def step(self, tokens: list[list[int]], rows: list[Segment], **padding: int) -> Tensor:
        """All ranks run the same rows; hidden states of rank 0, padding included."""
        return self.run(self.prepare(tokens, [rows] * self.world.size, **padding))[0]


def _member(groups: list[list[int]], rank: int) -> tuple[int, ...]:
    return next(tuple(group) for group in groups if rank in group)


@pytest.fixture
def make_stand() -> type[Stand]:
    return Stand


@pytest.fixture
def tokens() -> list[list[int]]:
    """Four requests' token ids, 128 each."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, SHAPE.vocab_size, (4, 128), generator=generator).tolist()
