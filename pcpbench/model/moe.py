"""A mixture-of-experts layer: router, shared experts, and the routed experts with their weights.

Owns who holds which expert. The routing rule and how rows come to their experts are
expert_dispatch.py's. Knows no request and no graph.

Shape letters: T tokens of this rank, E experts of the model, e of this rank, k of a token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from pcpbench.model.context import ForwardContext
from pcpbench.model.expert_dispatch import ExpertShard, Rows, run_experts
from pcpbench.model.layers import WeightSource
from pcpbench.model.mlp import GatedMLP
from pcpbench.model.presets import ModelShape

ROUTER_GAIN: Final = 1.0
"""Scores of about the scale of their inputs: an error of these becomes one of weights as it is."""


class MoE(nn.Module):
    """k of E gated SiLU experts for each token, beside the shared experts that see all of them.

    `w_router` float32 [hidden, E]. `w_gate_up` [experts, hidden, 2 * inner], `w_down`
    [experts, inner, hidden]: without expert parallelism all E, of which TP divides the inner
    width i; with it whole experts, the e of each world rank that this module serves. Ranks with
    one tp_rank share a module, so these are pcp_size times e, PCP rank after PCP rank.

    ep_size: world ranks that the experts are dealt out to; 1 without expert parallelism.
    """

    def __init__(
        self, shape: ModelShape, layer: int, source: WeightSource, ep_size: int = 1
    ) -> None:
        super().__init__()
        self.layer, self.top_k, self.ep_size = layer, shape.num_experts_per_tok, ep_size
        count, hidden, inner = (
            shape.n_routed_experts,
            shape.hidden_size,
            shape.moe_intermediate_size,
        )
        self.num_local = count // ep_size
        router = source.draw(hidden, count, std=ROUTER_GAIN * hidden**-0.5)
        self.w_router = nn.Parameter(router.to(source.device), requires_grad=False)
        gate = self._share(source.draw(count, hidden, inner, std=hidden**-0.5), 2, source)
        up = self._share(source.draw(count, hidden, inner, std=hidden**-0.5), 2, source)
        down = self._share(source.draw(count, inner, hidden, std=inner**-0.5), 1, source)
        self.w_gate_up = source.factor(torch.cat((gate, up), 2))
        self.w_down = source.factor(down)
        self.shared: GatedMLP | None = None
        if shape.n_shared_experts:
            self.shared = GatedMLP(shape, source, shape.n_shared_experts * inner)

    def _share(self, full: Tensor, inner_dim: int, source: WeightSource) -> Tensor:
        """What the ranks of one tp_rank hold of a weight [E, ...].

        8 experts over 2 x 2 ranks are dealt out in twos, world rank after world rank: tp_rank 1
        has world ranks 1 and 3, and so experts 2, 3, 6 and 7.
        """
        if self.ep_size == 1:
            return source.share(full, inner_dim)
        by_rank = full.view(-1, source.tp_size, self.num_local, *full.shape[1:])
        return by_rank[:, source.tp_rank].flatten(0, 1)

    async def forward(self, residual: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
        """residual + shared experts + routed experts of x, [T, hidden], in memory of its own.

        A token that `context.is_padding` flags is routed to no expert: its routed part is zero.
        """
        logits = torch.mm(x.float(), self.w_router)
        context.tap(self.layer, "router.logits", logits)
        is_padding = context.is_padding
        if is_padding is None:
            is_padding = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        rows = Rows(x, logits, is_padding)
        routed = await run_experts(self._shard(context), rows, context)
        if context.taps is not None:
            # With the residual: a sum of small weights alone has no scale to judge its error by.
            context.tap(self.layer, "experts.hidden", residual + routed)
        if self.shared is None:
            return torch.add(residual, routed).to(x.dtype)
        out: Tensor = await self.shared(residual, x, context)
        return out.add_(routed)

    def _shard(self, context: ForwardContext) -> ExpertShard:
        """The experts of the rank whose pass this is."""
        place = context.pcp.rank * self.num_local if context.ep is not None else 0
        own = slice(place, place + self.num_local)
        return ExpertShard(
            layer=self.layer,
            top_k=self.top_k,
            first_expert=0 if context.ep is None else context.ep.group.rank * self.num_local,
            w_gate_up=self.w_gate_up[own],
            w_down=self.w_down[own],
        )
