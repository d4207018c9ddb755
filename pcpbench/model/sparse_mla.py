"""Sparse multi-head latent attention of one layer: an indexer chooses the keys (SPEC 3, 9).

Owns the two ways from tokens to chosen keys. Where all ranks of a DCP group hold the same tokens,
queries go to the shards: each rank offers its best candidates, the best of all are chosen, and
each attends to those that it owns. Where ranks hold other tokens of the same prefills (PCP with
DCP), keys come to the queries: every rank gathers the keys of all prefills of the step. Knows no
request, no block id and no graph.

Shape letters: as in mla.py; K = index_topk, E = width of an index head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pcpbench.model.attention import kv_cache_read
from pcpbench.model.context import AttentionMetadata, ForwardContext, PrefillKeys
from pcpbench.model.indexer import Indexer, IndexInputs
from pcpbench.model.layers import WeightSource
from pcpbench.model.mla import MLAAttention
from pcpbench.model.presets import ModelShape
from pcpbench.model.sparse_attention import (
    index_topk,
    localize,
    merge_candidates,
    positions_of,
    sparse_mla_attention,
)


class _Keys(NamedTuple):
    """Paged keys and where rows find theirs; see `attention.mla_attention` for shapes.

    dcp: (size, rank, interleave) of the shard that this is.
    """

    latent: Tensor
    index_keys: Tensor
    table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    local_seq_lens: Tensor | None
    dcp: tuple[int, int, int]


class SparseMLAAttention(MLAAttention):
    """MLAAttention whose tokens attend to the index_topk keys that score best.

    The index cache of a layer is the one behind all latent caches: kv_caches[layer + layers].
    """

    def __init__(self, shape: ModelShape, layer: int, source: WeightSource) -> None:
        super().__init__(shape, layer, source)
        self.indexer = Indexer(shape, layer, source)

    async def write_keys(
        self,
        kv: Tensor,
        index: IndexInputs | None,
        metadata: AttentionMetadata,
        context: ForwardContext,
    ) -> tuple[Tensor, ...]:
        """Latents as in MLAAttention, then index keys likewise: [N, D] and [N, E] of all ranks."""
        assert index is not None
        latents = await super().write_keys(kv, index, metadata, context)
        keys = await context.pcp.all_gather(index.key)
        context.tap(self.layer, "pcp_all_gather.index_key", keys)
        self._write(keys, self._index_entry, "index_cache", metadata, context)
        return (*latents, keys)

    async def attend_keys(
        self,
        q: Tensor,
        index: IndexInputs | None,
        gathered: tuple[Tensor, ...],
        out: Tensor,
        lse: Tensor,
        context: ForwardContext,
    ) -> None:
        """Choose keys for each token, then fill out [T, H, r] from those."""
        metadata = context.metadata
        assert metadata is not None
        assert index is not None
        prefill, taps = metadata.prefill, _WholeTaps(self.layer, context, q.shape[0])
        count = q.shape[0] if prefill is None else prefill.num_tokens
        if prefill is None or prefill.has_decodes:
            taps.keep(
                *await self._attend_shards(
                    q[:count], index.tokens(0, count), out[:count], lse[:count], context
                )
            )
        if prefill is not None:
            keys = await self._gathered_keys(metadata, prefill, gathered, context)
            chosen = self._choose(index.tokens(count, len(q)), keys)
            positions = self._leave_positions(chosen, count, context)
            own = lse.new_empty((len(q) - count, self.num_heads))
            self._attend(q[count:], positions, keys, out[count:], own)
            taps.positions.append(positions)
        taps.put(out)

    @property
    def _index_entry(self) -> int:
        """Which of the context's kv_caches holds this layer's index keys."""
        return self.layer + self.shape.num_hidden_layers

    def _sharded_keys(self, metadata: AttentionMetadata, context: ForwardContext) -> _Keys:
        """The caches as they are, for the rows whose tokens all ranks of the DCP group hold."""
        local, prefill = metadata.dcp_local_seq_lens, metadata.prefill
        num_rows = metadata.seq_lens.shape[0] if prefill is None else prefill.num_rows
        return _Keys(
            latent=context.kv_caches[self.layer],
            index_keys=context.kv_caches[self._index_entry],
            table=metadata.block_tables[context.kv_group(self.layer)][:num_rows],
            query_start_loc=metadata.query_start_loc[: num_rows + 1],
            seq_lens=metadata.seq_lens[:num_rows],
            local_seq_lens=None if local is None else local[:num_rows],
            dcp=(context.dcp.size, context.dcp.rank, context.cp_interleave),
        )

    async def _gathered_keys(
        self,
        metadata: AttentionMetadata,
        prefill: PrefillKeys,
        gathered: tuple[Tensor, ...],
        context: ForwardContext,
    ) -> _Keys:
        """All keys of the step's prefills, in pages of one; rows behind those of decodes.

        gathered: what PCP just gathered, which is all there is without context.
        """
        latent, key = gathered
        if prefill.slots is not None:
            slots = prefill.slots[context.kv_group(self.layer)]
            latent, key = [
                await context.dcp.all_gather(kv_cache_read(slots, context.kv_caches[entry]))
                for entry in (self.layer, self._index_entry)
            ]
        starts = metadata.query_start_loc[prefill.num_rows :] - prefill.num_tokens
        return _Keys(
            latent=latent.index_select(0, prefill.index).unsqueeze(1),
            index_keys=key.index_select(0, prefill.index).unsqueeze(1),
            table=prefill.table,
            query_start_loc=starts,
            seq_lens=metadata.seq_lens[prefill.num_rows :],
            local_seq_lens=None,
            dcp=(1, 0, 1),
        )

    async def _attend_shards(
        self, q: Tensor, index: IndexInputs, out: Tensor, lse: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fill out [T, H, r] for tokens that all ranks of the DCP group hold.

        Returns the chosen positions, this rank's partial outputs and their lse.
        """
        assert context.metadata is not None
        keys = self._sharded_keys(context.metadata, context)
        candidates = self._choose(index, keys)
        if context.dcp.size > 1:
            candidates = await context.dcp.all_gather(candidates, dim=1)
            candidates = merge_candidates(candidates, self.shape.index_topk)
        positions = self._leave_positions(candidates, 0, context)
        if context.dcp.size == 1:
            self._attend(q, positions, keys, out, lse)
            return positions, out, lse
        q = await context.dcp.all_gather(q, dim=1)
        partial = lse.new_empty((*lse.shape, out.shape[-1]))
        self._attend(q, positions, keys, partial, lse)
        await self._merge(partial, lse, out, context)
        return positions, partial, lse

    def _choose(self, index: IndexInputs, keys: _Keys) -> Tensor:
        """This rank's candidates of each token, int64 [T, K]."""
        shape = (index.q.shape[0], self.shape.index_topk)
        candidates = torch.empty(shape, dtype=torch.int64, device=index.q.device)
        index_topk(
            index.q,
            index.weights,
            keys.index_keys,
            keys.table,
            keys.query_start_loc,
            keys.seq_lens,
            keys.local_seq_lens,
            *keys.dcp,
            candidates,
        )
        return candidates

    def _leave_positions(self, candidates: Tensor, first: int, context: ForwardContext) -> Tensor:
        """The chosen positions, int32 [T, K], left where they can be looked at afterwards."""
        positions = positions_of(candidates)
        if context.selected is None:
            return positions.int()
        return context.selected[self.layer, first : first + len(positions)].copy_(positions)

    def _attend(self, q: Tensor, positions: Tensor, keys: _Keys, out: Tensor, lse: Tensor) -> None:
        """Attention on those of the chosen keys that this rank holds."""
        slots = localize(
            positions, keys.table, keys.query_start_loc, keys.latent.shape[1], *keys.dcp
        )
        scale, rank = self.shape.softmax_scale, self.shape.kv_lora_rank
        sparse_mla_attention(q, keys.latent, slots, scale, rank, out, lse)


class _WholeTaps:
    """Taps of a layer whose tokens may have gone two ways: tokens of the second way are zeros where
    a result is one rank's share alone, as they have no such share."""

    def __init__(self, layer: int, context: ForwardContext, num_tokens: int) -> None:
        self._layer, self._context, self._num_tokens = layer, context, num_tokens
        self.positions: list[Tensor] = []
        self._partial: tuple[Tensor, ...] = ()

    def keep(self, positions: Tensor, partial: Tensor, lse: Tensor) -> None:
        """Results of the tokens that went to the shards."""
        if self._context.taps is not None:
            self.positions.append(positions)
            self._partial = lse, partial

    def put(self, out: Tensor) -> None:
        """Hand on what was kept; out: [T, H, r], merged."""
        if self._context.taps is None:
            return
        context, layer = self._context, self._layer
        context.tap(layer, "index_topk.positions", torch.cat(self.positions))
        for name, part in zip(("lse", "out"), self._partial, strict=False):
            whole = part.new_zeros((self._num_tokens, *part.shape[1:]))
            whole[: len(part)].copy_(part)
            context.tap(layer, f"mla_attention.{name}", whole)
        if context.dcp.size > 1:
            context.tap(layer, "dcp_merge.out", out)
