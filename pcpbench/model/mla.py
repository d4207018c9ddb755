"""Multi-head latent attention of one layer in absorbed form (SPEC 9).

Owns the projections, the meetings of ranks around the paged cache, and the merge over a DCP group.
Knows no request, no block id and no graph; under PIECEWISE it merely asks for a break.

Shape letters: T tokens of this rank, N = T * pcp gathered tokens, H heads of this rank,
r = kv_lora_rank, p = rotary part, D = r + p.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from pcpbench.dcp import merge_attn_states
from pcpbench.device.collectives import graph_break
from pcpbench.device.turns import hand_over
from pcpbench.model.attention import (
    kv_cache_read,
    kv_cache_write,
    mla_attention,
    rescale_partial,
)
from pcpbench.model.context import AttentionMetadata, ForwardContext
from pcpbench.model.indexer import Indexer, IndexInputs
from pcpbench.model.layers import RMSNorm, RotaryEmbedding, WeightSource
from pcpbench.model.presets import ModelShape

QUERY_GAIN: Final = 2.5
"""Attention that looks at few keys: a stale key or a wrong position then changes tokens."""


class MLAAttention(nn.Module):
    """Latent attention of one layer: fused projection, absorbed queries, paged cache, output.

    `w_qkv` [hidden, H*p + p + H*nope + r]: columns are the rotary parts of all heads' queries and
    of the key (rotated in one go), the queries without position, and the latent.
    `w_uk` [H, nope, r] and `w_uv` [H, r, v] carry queries into and values out of latent space.
    """

    def __init__(self, shape: ModelShape, layer: int, source: WeightSource) -> None:
        super().__init__()
        self.shape, self.layer, self.kv_group = shape, layer, shape.group_of(layer)
        self.num_heads = shape.num_attention_heads // source.tp_size
        rank, rope, nope = shape.kv_lora_rank, shape.qk_rope_head_dim, shape.qk_nope_head_dim
        heads, hidden, v_dim = shape.num_attention_heads, shape.hidden_size, shape.v_head_dim
        std = hidden**-0.5
        q_proj = source.draw(hidden, heads, nope + rope, std=std * QUERY_GAIN)
        kv_a = source.draw(hidden, rank + rope, std=std)
        norm = source.draw(rank, mean=1.0, std=0.1)
        w_uk = source.draw(heads, nope, rank, std=rank**-0.5)
        w_uv = source.draw(heads, rank, v_dim, std=rank**-0.5)
        w_o = source.draw(heads * v_dim, hidden, std=(heads * v_dim) ** -0.5)
        q_nope, q_rope = source.share(q_proj, 1).split_with_sizes([nope, rope], -1)
        latent, k_rope = kv_a.split_with_sizes([rank, rope], -1)
        fused = torch.cat((q_rope.flatten(1), k_rope, q_nope.flatten(1), latent), 1)
        self.w_qkv = source.factor(fused)
        self.w_uk = source.factor(source.share(w_uk, 0))
        self.w_uv = source.factor(source.share(w_uv, 0))
        self.w_o = source.factor(source.share(w_o, 0))
        self.kv_norm = RMSNorm(norm, shape.rms_norm_eps, source.device)
        self.indexer: Indexer | None = None
        self.columns = [self.num_heads * rope + rope, self.num_heads * nope, rank]

    def project(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, hidden]. Absorbed queries [T, H, D] and this rank's latent KV [T, D]."""
        num_tokens, heads = x.shape[0], self.num_heads
        rotary, q_nope, latent = torch.mm(x, self.w_qkv).split_with_sizes(self.columns, -1)
        rotary = rotary.view(num_tokens, heads + 1, self.shape.qk_rope_head_dim)
        rotary = RotaryEmbedding.rotate(rotary, turns)
        q_nope = q_nope.view(num_tokens, heads, self.shape.qk_nope_head_dim).transpose(0, 1)
        absorbed = torch.bmm(q_nope, self.w_uk).transpose(0, 1)
        q = torch.cat((absorbed, rotary[:, :-1]), -1)
        return q, torch.cat((self.kv_norm(latent), rotary[:, -1]), -1)

    async def attend(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor,
        context: ForwardContext,
        index: IndexInputs | None = None,
    ) -> None:
        """Gather and write KV, then fill out [T, H, r]; reads the metadata when it runs.

        index: of the step's tokens, where an indexer chooses keys. Without metadata (a dummy run)
        out becomes zeros and nothing else happens.
        """
        metadata = context.metadata
        if metadata is None:
            out.zero_()
            return
        gathered = await self.write_keys(kv, index, metadata, context)
        if context.takes_turns:
            # A token may see KV that lies in another rank's other microbatch: all of it is written
            # before any of it is read, wherever the cut falls.
            await hand_over(context.rank)
        await self.attend_keys(q, index, gathered, out, lse, context)

    async def write_keys(
        self,
        kv: Tensor,
        index: IndexInputs | None,
        metadata: AttentionMetadata,
        context: ForwardContext,
    ) -> tuple[Tensor, ...]:
        """Gather the step's latents over PCP, write this rank's; [N, D] of all, in a tuple."""
        gathered = await context.pcp.all_gather(kv)
        context.tap(self.layer, "pcp_all_gather.latent", gathered)
        self._write(gathered, self.layer, "kv_cache", metadata, context)
        return (gathered,)

    def _write(
        self,
        gathered: Tensor,
        entry: int,
        name: str,
        metadata: AttentionMetadata,
        context: ForwardContext,
    ) -> None:
        """Write gathered tokens into one entry of kv_caches, through its layer's slots."""
        slots, cache = metadata.slot_mappings[context.kv_group(entry)], context.kv_caches[entry]
        kv_cache_write(gathered, slots, cache)
        if context.taps is not None:
            context.tap(self.layer, f"kv_cache_write.{name}", kv_cache_read(slots, cache))

    async def attend_keys(
        self,
        q: Tensor,
        index: IndexInputs | None,
        gathered: tuple[Tensor, ...],
        out: Tensor,
        lse: Tensor,
        context: ForwardContext,
    ) -> None:
        """Fill out [T, H, r] from what the caches hold. gathered: what `write_keys` returned."""
        metadata = context.metadata
        assert metadata is not None
        if self.kv_group.dcp_size(context.dcp.size) == 1:
            # Without DCP, or all keys are here: no gather of queries, no merge.
            own = lse.view(-1)[: q.shape[0] * q.shape[1]].view(q.shape[:2])
            self._local(q, out, own, metadata, context)
            return
        q = await context.dcp.all_gather(q, dim=1)
        partial = lse.new_empty((*lse.shape, out.shape[-1]))
        self._local(q, partial, lse, metadata, context)
        await self._merge(partial, lse, out, context)
        context.tap(self.layer, "dcp_merge.out", out)

    async def _merge(
        self, partial: Tensor, lse: Tensor, out: Tensor, context: ForwardContext
    ) -> None:
        """Merge the DCP ranks' partial attention (SPEC 9); this rank's heads go to out [T, H, r].

        partial: float32 [T, G, r], lse: [T, G], of the G heads of all ranks.
        """
        dcp = context.dcp
        if context.dcp_backend == "a2a":
            sent = torch.cat((partial, lse.unsqueeze(-1)), -1)
            parts = await dcp.all_to_all(sent, dim=1)
            merged, _ = merge_attn_states(parts[..., :-1], parts[..., -1])
            out.copy_(merged)
            return
        lses = (await dcp.all_gather(lse)).view(dcp.size, *lse.shape)
        partial = rescale_partial(partial, lse, lses)
        out.copy_(await dcp.reduce_scatter(partial, dim=1))

    def _local(
        self,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        metadata: AttentionMetadata,
        context: ForwardContext,
    ) -> None:
        dcp_size = self.kv_group.dcp_size(context.dcp.size)
        mla_attention(
            q,
            context.kv_caches[self.layer],
            metadata.block_tables[context.kv_group(self.layer)],
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.dcp_local_seq_lens if dcp_size > 1 else None,
            self.shape.softmax_scale,
            self.shape.kv_lora_rank,
            dcp_size,
            context.dcp.rank if dcp_size > 1 else 0,
            context.cp_interleave,
            self.kv_group.sliding_window,
            out,
            lse,
        )
        context.tap(self.layer, "mla_attention.lse", lse)
        context.tap(self.layer, "mla_attention.out", out)

    async def forward(
        self,
        x: Tensor,
        input_ids: Tensor,
        turns: Tensor,
        out: Tensor,
        lse: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """x: [T, hidden]; heads' values [T, H * v], still to be projected by `w_o`."""
        q, kv = self.project(x, turns)
        context.tap(self.layer, "qkv_proj.q", q)
        context.tap(self.layer, "qkv_proj.latent", kv)
        index = None if self.indexer is None else self.indexer(input_ids)
        if context.breaks:
            # Run between captured segments, now and at each replay: q, kv, out and lse stay where
            # they are, the metadata is whatever the context holds by then.
            await graph_break(context.rank, lambda: self.attend(q, kv, out, lse, context, index))
        else:
            await self.attend(q, kv, out, lse, context, index)
        values = torch.bmm(out.transpose(0, 1), self.w_uv)
        return values.transpose(0, 1).flatten(1)
