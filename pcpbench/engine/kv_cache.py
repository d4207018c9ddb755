"""The paged latent KV cache of one rank (SPEC 9). Owns memory; knows no request.

Block 0 is the null block: padding rows point at it and no request ever owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NULL_BLOCK_ID = 0


def allocate_kv_caches(
    num_layers: int,
    num_blocks: int,
    block_size: int | Sequence[int],
    latent_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """One zeroed cache a layer, [num_blocks, block_size, latent_dim].

    latent_dim = kv_lora_rank + rope dimensions. block_size counts slots on this rank, one number
    for all layers or one for each; under DCP a block stands for block_size x dcp positions.
    """
    sizes = [block_size] * num_layers if isinstance(block_size, int) else block_size
    return [
        torch.zeros((num_blocks, size, latent_dim), dtype=dtype, device=device) for size in sizes
    ]
