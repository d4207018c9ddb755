"""Parts of the decoder that no rank has to wait for: norm, rotary positions, seeded weights.

Owns how weights are drawn: in float32, on the CPU, for the whole model, then cut to one TP rank's
share and cast. So every tp size and dtype computes (up to rounding) the same function of a seed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class WeightSource:
    """Draws full weights in a fixed order and hands out one TP rank's share of each.

    Every rank draws everything, so that a rank's share does not depend on how many ranks there are.
    """

    def __init__(
        self, seed: int, dtype: torch.dtype, device: torch.device, tp_size: int, tp_rank: int
    ) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.dtype, self.device = dtype, device
        self.tp_size, self.tp_rank = tp_size, tp_rank

    def draw(self, *shape: int, std: float, mean: float = 0.0) -> Tensor:
        """Normal numbers, float32 on the CPU, whole."""
        return torch.randn(shape, generator=self.generator).mul_(std).add_(mean)

    def share(self, full: Tensor, dim: int) -> Tensor:
        """This TP rank's even part of a full weight along `dim`."""
        return full.chunk(self.tp_size, dim)[self.tp_rank]

    def place(self, weight: Tensor) -> nn.Parameter:
        """A parameter in the model's dtype on its device, in memory of its own."""
        data = torch.empty(weight.shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(data.copy_(weight), requires_grad=False)

    def factor(self, weight: Tensor) -> nn.Parameter:
        """A weight [..., inputs, outputs] to multiply with; each output's inputs lie side by side.

        CPU kernels of 16-bit types are up to 50 times slower over the other layout.
        """
        cast = weight.to(self.dtype)  # a cast and a transpose in one copy would be slow
        return nn.Parameter(self.place(cast.mT).mT, requires_grad=False)


class RMSNorm(nn.Module):
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension, in four ops.

    sqrt(sum(x^2) + n * eps) is the hypotenuse of the vector's norm and sqrt(n * eps), formed in
    float32; the remaining factor sqrt(n) is kept in `scaled_weight` (float32).
    """

    def __init__(self, weight: Tensor, eps: float, device: torch.device) -> None:
        super().__init__()
        size = weight.numel()
        scaled = (weight * math.sqrt(size)).to(device)
        self.scaled_weight = nn.Parameter(scaled, requires_grad=False)
        self.floor: Tensor
        self.register_buffer("floor", torch.full((1,), math.sqrt(size * eps), device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., n]; the result has x's dtype."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, norm.hypot_(self.floor)).mul_(self.scaled_weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary positions on neighbouring pairs, one complex multiplication for all heads.

    `table`: float32 [max_positions, dim / 2, 2], cosine and sine of position * theta^(-2i / dim).
    """

    def __init__(self, dim: int, max_positions: int, theta: float, device: torch.device) -> None:
        super().__init__()
        inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), inverse)
        table = torch.stack((angles.cos(), angles.sin()), -1).float()
        self.table: Tensor
        self.register_buffer("table", table.to(device))

    def turns(self, positions: Tensor) -> Tensor:
        """Unit complex numbers of each token, complex64 [T, 1, dim / 2]; the same in all layers."""
        return torch.view_as_complex(self.table.index_select(0, positions)).unsqueeze(1)

    @staticmethod
    def rotate(x: Tensor, turns: Tensor) -> Tensor:
        """x: [T, H, dim] with dense pairs; the result is contiguous and has x's dtype."""
        pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
