"""The gated SiLU MLP of a decoder layer, and projections whose inner dimension TP divides."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcpbench.device.collectives import Group
from pcpbench.model.context import ForwardContext
from pcpbench.model.layers import WeightSource
from pcpbench.model.presets import ModelShape


class GatedMLP(nn.Module):
    """silu(x @ gate) * (x @ up) @ down on one TP rank's share of the inner dimension.

    `w_gate_up` [hidden, 2 * inner / tp], `w_down` [inner / tp, hidden]. inner: the shape's
    intermediate_size by default.
    """

    def __init__(self, shape: ModelShape, source: WeightSource, inner: int | None = None) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, inner or shape.intermediate_size
        gate = source.share(source.draw(hidden, inner, std=hidden**-0.5), 1)
        up = source.share(source.draw(hidden, inner, std=hidden**-0.5), 1)
        self.w_gate_up = source.factor(torch.cat((gate, up), 1))
        self.w_down = source.factor(source.share(source.draw(inner, hidden, std=inner**-0.5), 0))

    async def forward(self, residual: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
        """residual + MLP(x), both [T, hidden], in memory of its own."""
        gate, up = torch.mm(x, self.w_gate_up).chunk(2, -1)
        return await row_parallel(residual, F.silu(gate).mul_(up), self.w_down, context.tp)


async def row_parallel(residual: Tensor, x: Tensor, weight: Tensor, tp: Group) -> Tensor:
    """residual + x @ weight, where each TP rank holds a part of the inner dimension."""
    if tp.size == 1:
        return torch.addmm(residual, x, weight)
    return (await tp.all_reduce(torch.mm(x, weight))).add_(residual)
