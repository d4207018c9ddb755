"""The seeded decoder as its formulas have it: whole sequences, no cache, no ranks (contract C18).

Owns a second, slow computation of the same function. It takes weights from the decoder's modules
and nothing else: no cache, no metadata, no kernel, and keys and values expanded for each head where
the engine keeps the latent and absorbs. Norms, rotary positions and masks are formed anew. All
arithmetic is float32; weights of a 16-bit type are widened.

Shape letters: T tokens of all sequences, L of one, H heads, r = kv_lora_rank, p = rotary part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pcpbench.model.decoder import DecoderLayer, MLADecoder
from pcpbench.model.indexer import Indexer
from pcpbench.model.layers import RMSNorm
from pcpbench.model.mla import MLAAttention
from pcpbench.model.moe import MoE
from pcpbench.model.mtp import MTPModule
from pcpbench.model.presets import SLIDING, ModelShape
from pcpbench.records import IndexTable, IndexTables

MAX_SCORES: Final = 2**24
"""Attention scores formed at once; longer sequences take their queries in pieces."""

Chosen = Callable[[int, int], Tensor]
"""bool [end - start, L] of (start, end): which keys the queries of these positions attend to."""


@torch.inference_mode()
def dense_logits(
    model: MLADecoder, token_ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Logits of some positions of whole sequences, each seeing itself and all before it.

    token_ids: sequences, each from position 0 on. positions: which of each to return logits of.
    One float32 [len(positions), vocab] a sequence. Raises ValueError for a model that holds one TP
    rank's share of the weights.
    """
    if model.tp_size > 1:
        raise ValueError(f"the model holds 1 of {model.tp_size} shares of the weights: use tp 1")
    x = _decoder(model, token_ids)
    return _logits(_norm(x, model.norm, model.shape), model, token_ids, positions)


@torch.inference_mode()
def dense_draft_logits(
    module: MTPModule, token_ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Logits of a draft model's first pass behind some positions of whole sequences.

    token_ids: sequences, each from position 0 on, that end with the token behind the last position.
    positions: which of each to return logits of. One float32 [len(positions), vocab] a sequence.
    Raises ValueError as `dense_logits` does.
    """
    model, shape = module.target, module.shape
    if model.tp_size > 1:
        raise ValueError(f"the model holds 1 of {model.tp_size} shares of the weights: use tp 1")
    heads, behind = [tokens[:-1] for tokens in token_ids], [tokens[1:] for tokens in token_ids]
    hidden = _norm(_decoder(model, heads), model.norm, model.shape)
    joined = (
        _norm(_embedded(model, behind), module.embedding_norm, shape),
        _norm(hidden, module.hidden_norm, shape),
    )
    x = torch.cat(joined, -1) @ module.proj.float()
    x = _layer(x, module.layer, shape, _places(behind, x.device, shape), behind)
    return _logits(_norm(x, module.norm, shape), model, behind, positions)


def _decoder(model: MLADecoder, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """Hidden states of all layers, not yet normed, [T, hidden]."""
    x = _embedded(model, token_ids)
    angles = _places(token_ids, x.device, model.shape)
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        x = _layer(x, layer, model.shape, angles, token_ids)
    return x


def _embedded(model: MLADecoder, token_ids: Sequence[Sequence[int]]) -> Tensor:
    flat = [token for tokens in token_ids for token in tokens]
    index = torch.tensor(flat, dtype=torch.int64, device=model.embedding.device)
    return model.embedding[index].float()


def _places(token_ids: Sequence[Sequence[int]], device: torch.device, shape: ModelShape) -> Tensor:
    """The angles of sequences that all begin at position 0; see `_angles`."""
    places = [torch.arange(len(tokens), dtype=torch.float64) for tokens in token_ids]
    return _angles(torch.cat(places).to(device), shape)


def _layer(
    x: Tensor,
    layer: DecoderLayer,
    shape: ModelShape,
    angles: Tensor,
    token_ids: Sequence[Sequence[int]],
) -> Tensor:
    """x: [T, hidden]; token_ids: those that indexers look up, one a row of x."""
    normed = _norm(x, layer.input_norm, shape)
    chosen = _chosen(layer.attention, token_ids, shape, x.device)
    lengths = [len(tokens) for tokens in token_ids]
    x = x + _attention(normed, layer.attention, shape, angles, lengths, chosen)
    normed = _norm(x, layer.post_norm, shape)
    if isinstance(layer.mlp, MoE):
        return x + _experts(normed, layer.mlp, shape)
    return x + _gated(normed, layer.mlp.w_gate_up, layer.mlp.w_down)


def _logits(
    hidden: Tensor,
    model: MLADecoder,
    token_ids: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Of normed hidden states [T, hidden] the logits of some positions of each sequence."""
    lengths = [len(tokens) for tokens in token_ids]
    asked = [
        part[torch.tensor(wanted, dtype=torch.int64, device=hidden.device)]
        for part, wanted in zip(hidden.split_with_sizes(lengths), positions, strict=True)
    ]
    logits = torch.cat(asked) @ model.lm_head.float()
    return list(logits.split_with_sizes([len(wanted) for wanted in positions]))


def index_tables(model: MLADecoder) -> IndexTables | None:
    """What the layers' indexers score keys by (contract C20); None for a dense model."""
    layers = []
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        indexer = layer.attention.indexer
        if indexer is None:
            return None
        tables = {name: getattr(indexer, name) for name in ("query", "key", "weights")}
        wide = {name: table.double().cpu().numpy() for name, table in tables.items()}
        layers.append(IndexTable(**wide))
    return IndexTables(topk=model.shape.index_topk, layers=tuple(layers))


def _gated(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """silu(x @ gate) * (x @ up) @ down, [T, hidden]."""
    gate, up = (x @ w_gate_up.float()).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ w_down.float()


def _experts(x: Tensor, moe: MoE, shape: ModelShape) -> Tensor:
    """x: [T, hidden], normed; shared experts and routed ones, [T, hidden].

    Every expert computes every token. Its weight is how far its score lies above the best score
    that is left out, through tanh: nothing for those left out, without choosing any.
    """
    scores = x @ moe.w_router.float()
    left_out = scores.sort(-1, descending=True).values[:, shape.num_experts_per_tok, None]
    weights = (scores - left_out).relu().tanh()
    total = torch.zeros_like(x)
    for expert, weight in enumerate(weights.unbind(1)):
        total += weight[:, None] * _gated(x, moe.w_gate_up[expert], moe.w_down[expert])
    if moe.shared is not None:
        total += _gated(x, moe.shared.w_gate_up, moe.shared.w_down)
    return total


def _norm(x: Tensor, norm: RMSNorm, shape: ModelShape) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; the module keeps weight * sqrt(n)."""
    weight = norm.scaled_weight.float() / math.sqrt(x.shape[-1])
    return x * (x.square().mean(-1, keepdim=True) + shape.rms_norm_eps).rsqrt() * weight


def _angles(places: Tensor, shape: ModelShape) -> Tensor:
    """float64 [T, 1, p / 2]: how far each pair of the rotary part is turned."""
    half = shape.qk_rope_head_dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=places.device) / half
    return (places[:, None] / shape.rope_theta**steps).unsqueeze(1)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x: [T, heads, p]; neighbours (even, odd) are turned as a point in the plane."""
    cos, sin = angles.cos().float(), angles.sin().float()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def _chosen(
    attention: MLAAttention,
    token_ids: Sequence[Sequence[int]],
    shape: ModelShape,
    device: torch.device,
) -> list[Chosen | None]:
    """Which keys each token of a sequence attends to; None for all that it sees.

    Those index_topk of its own and earlier keys whose score is largest, the later of two alike.
    """
    if attention.indexer is None:
        return [None] * len(token_ids)
    return [partial(_best, attention.indexer, tokens, shape, device) for tokens in token_ids]


def _best(
    tables: Indexer,
    tokens: Sequence[int],
    shape: ModelShape,
    device: torch.device,
    start: int,
    end: int,
) -> Tensor:
    """bool [end - start, L]: the keys of the queries of these positions, see `_chosen`.

    A piece has the bits of the whole: every sum is one of whole numbers that float64 holds.
    """
    ids = torch.tensor(list(tokens), dtype=torch.int64, device=device)
    rows = ids[start:end]
    query, key = tables.query[rows].double(), tables.key[ids].double()
    score = torch.zeros(len(rows), len(ids), dtype=torch.float64, device=device)
    for head in range(shape.index_n_heads):
        product = (query[:, head] @ key.T).clamp_(min=0)
        score += product.mul_(tables.weights[rows, head].double()[:, None])
    # Two scores that differ do so by 1 at least: a part of 1 decides between those that do not.
    places = torch.arange(len(ids), dtype=torch.float64, device=device)
    score += places / (len(ids) + 1)
    score.masked_fill_(places > places[start:end, None], -1.0)
    best = score.topk(min(shape.index_topk, len(ids)), 1).values[:, -1:]
    return score >= best


def _attention(
    x: Tensor,
    attention: MLAAttention,
    shape: ModelShape,
    angles: Tensor,
    lengths: list[int],
    chosen: list[Chosen | None],
) -> Tensor:
    """x: [T, hidden], normed; the layer's addition to the residual [T, hidden].

    chosen: of each sequence, see `_chosen`.
    """
    heads, rank = shape.num_attention_heads, shape.kv_lora_rank
    rope, nope = shape.qk_rope_head_dim, shape.qk_nope_head_dim
    q_rope, k_rope, q_nope, latent = (x @ attention.w_qkv.float()).split_with_sizes(
        [heads * rope, rope, heads * nope, rank], -1
    )
    latent = _norm(latent, attention.kv_norm, shape)
    q = torch.cat((q_nope.reshape(-1, heads, nope),
                   _rotate(q_rope.reshape(-1, heads, rope), angles)), -1)  # fmt: skip
    k_nope = torch.einsum("tr,hnr->thn", latent, attention.w_uk.float())
    k_rope = _rotate(k_rope.unsqueeze(1), angles).expand(-1, heads, -1)
    k = torch.cat((k_nope, k_rope), -1)
    v = torch.einsum("tr,hrv->thv", latent, attention.w_uv.float())
    parts = [part.split_with_sizes(lengths) for part in (q, k, v)]
    is_sliding = bool(shape.layer_types) and shape.layer_types[attention.layer] == SLIDING
    window = shape.sliding_window if is_sliding else 0
    sequences = zip(*parts, chosen, strict=True)
    values = torch.cat([_causal(*sequence, window=window) for sequence in sequences])
    return values.flatten(1) @ attention.w_o.float()


def _causal(q: Tensor, k: Tensor, v: Tensor, chosen: Chosen | None, *, window: int) -> Tensor:
    """q, k: [L, H, nope + p], v: [L, H, v_head_dim]; values [L, H, v_head_dim] of one sequence.

    chosen: the keys that each query attends to besides seeing them; None for all.
    window: how many positions each sees, its own among them; 0 for all.
    """
    length, heads, width = q.shape
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    piece = max(1, MAX_SCORES // (heads * length))
    values = []
    for start in range(0, length, piece):
        end = min(start + piece, length)
        scores = q[:, start:end] @ k[:, :end].mT / math.sqrt(width)
        ahead = torch.ones((end - start, end), dtype=torch.bool, device=q.device).triu(start + 1)
        if window:
            ahead |= torch.ones_like(ahead).tril(start - window)
        if chosen is not None:
            ahead |= ~chosen(start, end)[:, :end]
        values.append(scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v[:, :end])
    return torch.cat(values, 1).transpose(0, 1)
