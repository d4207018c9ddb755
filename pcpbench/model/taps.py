"""Tap points: the named places of a forward pass whose results can be kept for a comparison.

Owns the list of points in the order in which a forward pass meets them, and the shape of each. Who
keeps the values is the engine's matter (engine/taps.py); without anyone nothing is computed here.

Shape letters: T tokens of this rank, N = T * pcp gathered tokens, H heads of this rank,
G = H * dcp heads gathered over the DCP group, r = kv_lora_rank, D = r + rotary part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pcpbench.model.presets import ModelShape


class Taps(Protocol):
    """Keeps copies of intermediate results."""

    def put(self, layer: int, name: str, value: Tensor) -> None:
        """Keep a copy of `value` [rows, ...]; what is kept must survive a captured graph."""


@dataclass(frozen=True)
class TapPoint:
    """One place, met once in a forward pass.

    layer: -1 before the first layer, num_hidden_layers after the last. name: `op.tensor`.
    width: the tensor's shape without its rows. is_gathered: rows are all PCP ranks' tokens, not
    this rank's. per_head: the first axis after the rows is this TP rank's heads. is_partial:
    holds what this rank's share of the keys gives, before the merge. dtype: None for the model's.
    """

    layer: int
    name: str
    width: tuple[int, ...]
    is_gathered: bool = False
    per_head: bool = False
    is_partial: bool = False
    dtype: torch.dtype | None = None


def tap_points(shape: ModelShape, tp_size: int, dcp_size: int) -> list[TapPoint]:
    """Every tap point of a decoder on one rank, in the order of the forward pass."""
    points = [TapPoint(-1, "embed.hidden", (shape.hidden_size,))]
    for layer in range(shape.num_hidden_layers):
        group_size = shape.group_of(layer).dcp_size(dcp_size)
        points += _layer_points(layer, shape, shape.num_attention_heads // tp_size, group_size)
    points.append(TapPoint(shape.num_hidden_layers, "norm.hidden", (shape.hidden_size,)))
    return points


def _layer_points(layer: int, shape: ModelShape, heads: int, dcp_size: int) -> list[TapPoint]:
    hidden, latent, rank = (shape.hidden_size,), (shape.latent_dim,), shape.kv_lora_rank
    sharded, gathered = dcp_size > 1, heads * dcp_size
    wide = torch.float32
    points = [
        TapPoint(layer, "input_norm.hidden", hidden),
        TapPoint(layer, "qkv_proj.q", (heads, shape.latent_dim), per_head=True),
        TapPoint(layer, "qkv_proj.latent", latent),
        TapPoint(layer, "pcp_all_gather.latent", latent, is_gathered=True),
        TapPoint(layer, "kv_cache_write.kv_cache", latent, is_gathered=True, is_partial=sharded),
    ]
    if shape.is_sparse:
        points += _index_points(layer, shape, sharded)
    points += [
        TapPoint(layer, "mla_attention.lse", (gathered,), False, True, sharded, wide),
        TapPoint(
            layer,
            "mla_attention.out",
            (gathered, rank),
            per_head=True,
            is_partial=sharded,
            dtype=wide if sharded else None,
        ),
    ]
    if sharded:
        points.append(TapPoint(layer, "dcp_merge.out", (heads, rank), per_head=True))
    points += [TapPoint(layer, name, hidden) for name in ("o_proj.hidden", "post_norm.hidden")]
    if layer in shape.moe_layers:
        points.append(TapPoint(layer, "router.logits", (shape.n_routed_experts,), dtype=wide))
        points.append(TapPoint(layer, "experts.hidden", hidden, dtype=wide))
    return [*points, TapPoint(layer, "mlp.hidden", hidden)]


def _index_points(layer: int, shape: ModelShape, sharded: bool) -> list[TapPoint]:
    """positions: those that each token attends to, as float32, which holds them exactly."""
    key = (shape.index_head_dim,)
    return [
        TapPoint(layer, "pcp_all_gather.index_key", key, is_gathered=True),
        TapPoint(layer, "kv_cache_write.index_cache", key, is_gathered=True, is_partial=sharded),
        TapPoint(layer, "index_topk.positions", (shape.index_topk,), dtype=torch.float32),
    ]
