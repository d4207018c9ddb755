"""The paged latent KV cache of one rank (SPEC 9). Owns memory; knows no request.

Block 0 is the null block: padding rows point at it and no request ever owns it.
"""

from __future__ import annotations

import torch
from torch import Tensor

NULL_BLOCK_ID = 0


def allocate_kv_caches(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    latent_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """One zeroed cache a layer, [num_blocks, block_size, latent_dim].

    latent_dim = kv_lora_rank + rope dimensions. block_size counts slots on this rank; under DCP a
    block stands for block_size x dcp positions.
    """
    shape = (num_blocks, block_size, latent_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
