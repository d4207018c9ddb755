"""A hand-made worker for the model's tests: plain loops, nothing of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pcpbench.device.collectives import InProcessGroup, run_lockstep
from pcpbench.model.context import AttentionMetadata, ExpertParallel, ForwardContext
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
    """All ranks of a world over one small decoder; block k of request q is scattered on purpose.

    KV groups have equal tables: each layer has a cache of its own.
    """

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
        all2all_backend: str | None = None,
    ) -> None:
        self.world, self.interleave, self.block_size = world or World(), interleave, block_size
        world = self.world
        self.models = [
            MLADecoder(
                shape,
                dtype,
                torch.device("cpu"),
                seed,
                world.tp_size,
                tp_rank,
                ep_size=world.size if all2all_backend else 1,
            )
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
                ]
                + [
                    torch.full((*cache_shape[:2], shape.index_head_dim), fill, dtype=dtype)
                    for _ in range(shape.num_hidden_layers if shape.is_sparse else 0)
                ],
                kv_groups=shape.layer_groups,
            )
            for rank in range(world.size)
        ]
        if all2all_backend:
            for context in self.contexts:
                everyone = InProcessGroup(tuple(range(world.size)), context.rank)
                context.ep = ExpertParallel(everyone, all2all_backend)
        self.num_groups = len(shape.kv_groups)
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
                block_tables=(table,) * self.num_groups,
                slot_mappings=torch.tensor([slots] * self.num_groups, dtype=torch.int64),
            )
            context.is_padding = torch.arange(size) >= len(spots[rank])
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


@dataclass
class AttentionCase:
    """Arguments of mla_attention up to `out` and `lse`, and what they must become, in float64."""

    args: tuple[Any, ...]
    out: Tensor
    lse: Tensor

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """Fresh results full of NaN, so that whatever is not written shows."""
        q = self.args[0]
        return (
            torch.full(self.out.shape, math.nan, dtype=q.dtype),
            torch.full(self.lse.shape, math.nan),
        )


@pytest.fixture(scope="session")
def make_case():
    return attention_case


def attention_case(
    rows: list[tuple[int, int]],
    *,
    dcp: tuple[int, int, int] = (1, 0, 1),
    heads: int = 4,
    rank: int = 32,
    rope: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    extra_tokens: int = 0,
    extra_rows: int = 0,
    seed: int = 0,
    window: int = 0,
) -> AttentionCase:
    """rows: (seq_len, query tokens). All that must not be read is NaN or far out of range: with a
    window, keys that no query of the row sees, and the table columns that hold nothing else.

    The expectation walks over tokens and positions, one by one.
    """
    generator = torch.Generator().manual_seed(seed)
    d, r, i = dcp
    width, scale = rank + rope, 0.2
    local = [num_owned(length, d, r, i) for length, _ in rows]
    per_row = max(1, max(-(-n // block_size) for n in local))
    shuffle = torch.Generator().manual_seed(seed + 1)  # shards need the same keys, not the same ids
    ids = torch.randperm(len(rows) * per_row, generator=shuffle).view(len(rows), per_row) + 1
    cache = torch.full((len(rows) * per_row + 1, block_size, width), math.nan, dtype=dtype)
    table = torch.full((len(rows) + extra_rows, per_row + 1), 2**30, dtype=torch.int32)
    num_tokens = sum(n for _, n in rows)
    q = torch.full((num_tokens + extra_tokens, heads, width), math.nan, dtype=dtype)
    # Drawn row by row, so that padding does not change what the real rows hold.
    out = torch.zeros(num_tokens + extra_tokens, heads, rank, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64)
    starts = [0]
    for row, (length, n) in enumerate(rows):
        keys = torch.randn(length, width, generator=generator).to(dtype)
        mine = [p for p in range(length) if owned(p, d, r, i)]
        used = -(-len(mine) // block_size)
        table[row, :used] = ids[row, :used].int()
        oldest = max(0, length - n + 1 - window) if window else 0
        unseen = sum(p < oldest for p in mine)
        table[row, : unseen // block_size] = 2**30
        for index, position in list(enumerate(mine))[unseen:]:
            cache[ids[row, index // block_size], index % block_size] = keys[position]
        queries = torch.randn(n, heads, width, generator=generator).to(dtype)
        q[starts[-1] : starts[-1] + n] = queries
        for j in range(n):
            at = length - n + j
            seen = keys[[p for p in mine if p <= at and (not window or p > at - window)]].double()
            if len(seen):
                scores = queries[j].double() @ seen.T * scale
                out[starts[-1] + j] = scores.softmax(-1) @ seen[:, :rank]
                lse[starts[-1] + j] = scores.logsumexp(-1)
        starts.append(starts[-1] + n)
    lens = [length for length, _ in rows] + [0] * extra_rows
    args = (
        q,
        cache,
        table,
        torch.tensor(starts + starts[-1:] * extra_rows, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(local + [0] * extra_rows, dtype=torch.int32) if d > 1 else None,
        scale,
        rank,
        d,
        r,
        i,
        window,
    )
    return AttentionCase(args, out, lse)


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
