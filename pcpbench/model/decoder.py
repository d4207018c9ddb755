"""A seeded decoder with multi-head latent attention (SPEC 9).

Owns the forward pass of one rank: its layers and their order. It holds weights only: the state of a
step lives in the ForwardContext, so ranks with the same tp_rank can share a module. Knows no
request, no block id and no graph.

Shape letters: T tokens of this rank, N tokens that are sampled from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcpbench.errors import UsageError
from pcpbench.model.context import ForwardContext
from pcpbench.model.layers import RMSNorm, RotaryEmbedding, WeightSource
from pcpbench.model.mla import MLAAttention
from pcpbench.model.mlp import GatedMLP, row_parallel
from pcpbench.model.presets import ModelShape
from pcpbench.model.sparse_mla import SparseMLAAttention

# Logits that are far from flat: rounding then changes no token.
_LOGIT_GAIN = 3.0


class DecoderLayer(nn.Module):
    """Attention and an MLP, each behind a norm and on a residual."""

    def __init__(self, shape: ModelShape, layer: int, source: WeightSource) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.layer = layer
        norms = [source.draw(hidden, mean=1.0, std=0.1) for _ in range(2)]
        self.input_norm, self.post_norm = (RMSNorm(w, eps, source.device) for w in norms)
        kind = SparseMLAAttention if shape.is_sparse else MLAAttention
        self.attention = kind(shape, layer, source)
        self.mlp = GatedMLP(shape, source)

    async def forward(
        self,
        x: Tensor,
        input_ids: Tensor,
        turns: Tensor,
        out: Tensor,
        lse: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """x: [T, hidden], left as it was; the layer's output hidden state [T, hidden]."""
        normed = self.input_norm(x)
        context.tap(self.layer, "input_norm.hidden", normed)
        values = await self.attention(normed, input_ids, turns, out, lse, context)
        del normed  # as early as without a name: a graph's pool counts what is held
        x = await row_parallel(x, values, self.attention.w_o, context.tp)
        context.tap(self.layer, "o_proj.hidden", x)
        normed = self.post_norm(x)
        context.tap(self.layer, "post_norm.hidden", normed)
        x = await self.mlp(x, normed, context)
        context.tap(self.layer, "mlp.hidden", x)
        return x


class MLADecoder(nn.Module):
    """The whole decoder of one TP rank.

    shape, dtype, device, seed: what to build. max_model_len: rows of the rotary table, the shape's
    own limit by default. Raises UsageError for a tp_size that does not divide heads and MLP.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        tp_size: int = 1,
        tp_rank: int = 0,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        shape.check_tp(tp_size)
        limit = shape.max_position_embeddings
        if max_model_len is not None and not 1 <= max_model_len <= limit:
            raise UsageError(
                f"max_model_len is {max_model_len}: {shape.name} has positions for 1 to {limit}."
            )
        self.shape, self.dtype, self.tp_size = shape, dtype, tp_size
        source = WeightSource(seed, dtype, torch.device(device), tp_size, tp_rank)
        self.rotary = RotaryEmbedding(
            shape.qk_rope_head_dim, max_model_len or limit, shape.rope_theta, source.device
        )
        self.embedding = source.place(source.draw(shape.vocab_size, shape.hidden_size, std=1.0))
        self.layers = nn.ModuleList(
            DecoderLayer(shape, layer, source) for layer in range(shape.num_hidden_layers)
        )
        norm = source.draw(shape.hidden_size, mean=1.0, std=0.1)
        self.norm = RMSNorm(norm, shape.rms_norm_eps, source.device)
        std = _LOGIT_GAIN * shape.hidden_size**-0.5
        self.lm_head = source.factor(source.draw(shape.hidden_size, shape.vocab_size, std=std))

    async def forward(
        self, input_ids: Tensor, positions: Tensor, context: ForwardContext
    ) -> Tensor:
        """Normed hidden states [T, hidden] of this rank's tokens.

        input_ids: int32 [T]. positions: int64 [T], below the rotary table's length.

        context.taps is handed what model/taps.py lists.
        """
        x = self.embedding.index_select(0, input_ids)
        context.tap(-1, "embed.hidden", x)
        turns = self.rotary.turns(positions)
        # All layers use the same two results of attention: each is read before the next is made.
        num_heads = self.shape.num_attention_heads // self.tp_size
        out = x.new_empty((x.shape[0], num_heads, self.shape.kv_lora_rank))
        lse = x.new_empty((x.shape[0], num_heads * context.dcp.size), dtype=torch.float32)
        for layer in self.layers:
            x = await layer(x, input_ids, turns, out, lse, context)
        hidden: Tensor = self.norm(x)
        context.tap(len(self.layers), "norm.hidden", hidden)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [N, hidden] as `forward` returned them; logits float32 [N, vocab]."""
        return torch.mm(hidden, self.lm_head).float()
