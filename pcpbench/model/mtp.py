"""A seeded multi-token-prediction module: one decoder layer that drafts (SPEC 10).

Owns the layer, what joins it to the target model and the order of its forward pass. Embedding,
rotary table and output head are the target's own. Like the decoder it holds weights only: its KV
cache and a pass's metadata come with the ForwardContext. Knows no request and no graph.

Shape letters: T tokens of this rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from pcpbench.model.context import ForwardContext
from pcpbench.model.decoder import DecoderLayer, MLADecoder
from pcpbench.model.layers import RMSNorm, WeightSource
from pcpbench.model.presets import ModelShape

_SEED_STEP: Final = 7919  # a stream of its own: other weights than the target's first layer


def draft_shape(target: ModelShape) -> ModelShape:
    """The module's shape: one layer of the target's attention, with a dense MLP."""
    return replace(
        target,
        name=f"{target.name} draft",
        num_hidden_layers=1,
        n_routed_experts=0,
        num_experts_per_tok=0,
        n_shared_experts=0,
        moe_intermediate_size=0,
        first_k_dense_replace=0,
    )


class MTPModule(nn.Module):
    """The draft model of one TP rank.

    From the target's hidden state of position p and the token at p + 1 it makes a hidden state from
    which the token at p + 2 is guessed. `proj` [2 * hidden, hidden] joins the two, each normed.
    """

    def __init__(self, target: MLADecoder, seed: int, tp_rank: int) -> None:
        super().__init__()
        self.shape = shape = draft_shape(target.shape)
        # In a list: a submodule's weights would be listed as this module's own.
        self._target = [target]
        device = target.embedding.device
        seed = (seed + _SEED_STEP) % 2**63
        source = WeightSource(seed, target.dtype, device, target.tp_size, tp_rank)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        norms = [source.draw(hidden, mean=1.0, std=0.1) for _ in range(3)]
        self.embedding_norm, self.hidden_norm, self.norm = (
            RMSNorm(weight, eps, device) for weight in norms
        )
        joined = source.draw(2 * hidden, hidden, std=(2 * hidden) ** -0.5)
        self.proj = source.factor(joined)
        self.layer = DecoderLayer(shape, 0, source, ep_size=1)

    @property
    def target(self) -> MLADecoder:
        """The model that it drafts for."""
        return self._target[0]

    async def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, context: ForwardContext
    ) -> Tensor:
        """Normed hidden states [T, hidden], to guess from and to feed to the next pass.

        input_ids: int32 [T], the token behind each position. positions: int64 [T]. hidden: [T,
        hidden], of the target model or of the pass before.
        """
        target = self.target
        embedded = self.embedding_norm(target.embedding.index_select(0, input_ids))
        x = torch.mm(self.join(embedded, self.hidden_norm(hidden)), self.proj)
        turns = target.rotary.turns(positions)
        heads = self.shape.num_attention_heads // target.tp_size
        out = x.new_empty((x.shape[0], heads, self.shape.kv_lora_rank))
        lse = x.new_empty((x.shape[0], heads * context.dcp.size), dtype=torch.float32)
        x = await self.layer(x, input_ids, turns, out, lse, context)
        drafted: Tensor = self.norm(x)
        return drafted

    @staticmethod
    def join(embedded: Tensor, hidden: Tensor) -> Tensor:
        """What `proj` takes, [T, 2 * hidden]: the embedding first. Both are normed."""
        return torch.cat((embedded, hidden), -1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] as `forward` returned them; logits float32 [rows, vocab]."""
        return self.target.compute_logits(hidden)
