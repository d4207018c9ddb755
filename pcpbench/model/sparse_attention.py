"""Device kernels of sparse latent attention: which keys a token attends to, and attention on those.

Owns `pcpbench::index_topk` and `pcpbench::sparse_mla_attention` (schema, wrapper, CPU twin, and the
hand-over to the Triton twins in sparse_attention_kernels.py) and what lies between them: merging
the ranks' candidates, and the slots of the chosen positions. Knows no model, group and no graph.

A candidate is one int64, score * 2^32 + position, and -1 where there is none. Scores are whole
numbers, so candidates have one order, without ties and whatever the order of summation: the larger
score first, then the later position. Choosing from gathered candidates is choosing among all keys.

Shape letters: T tokens, H heads, I index heads, K = topk, R rows, D = kv_lora_rank + rotary part,
E = index head's width.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pcpbench.model import attention
from pcpbench.records import BoolArray, IntArray

MAX_SCORE: Final = 2**30
"""Scores are cut to this, so that a candidate fits in 63 bits whatever an index cache holds."""

NO_KEY: Final = -1

_POSITION_BITS: Final = 32
_POSITION_MASK: Final = 2**_POSITION_BITS - 1

_LIBRARY = torch.library.Library("pcpbench", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    "index_topk(Tensor q, Tensor weights, Tensor index_cache, Tensor block_table, "
    "Tensor query_start_loc, Tensor seq_lens, Tensor? dcp_local_seq_lens, int dcp_size, "
    "int dcp_rank, int cp_interleave, Tensor(a!) out) -> ()",
    "sparse_mla_attention(Tensor q, Tensor kv_cache, Tensor slots, float scale, int kv_lora_rank, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


def index_topk(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    dcp_local_seq_lens: Tensor | None,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    out: Tensor,
) -> None:
    """The best candidates among the keys that each token sees on this rank (SPEC 7, 9).

    q: [T, I, E]. weights: [T, I], not negative. index_cache: [num_blocks, block_size, E]. The
    metadata is that of `attention.mla_attention`, and so is what a token sees. out: int64 [T, K],
    candidates in falling order, -1 behind the last.

    The score of a key is the sum over index heads of weight * max(0, query . key), cut to
    MAX_SCORE. With one head of weight 1 and products 5, -2 and 5 at positions 0, 1 and 2, K = 2
    gives positions 2 and 0. Nothing but a token's own visible keys can reach its candidates; tokens
    that see nothing and tokens past query_start_loc[R] get -1.
    """
    torch.ops.pcpbench.index_topk.default(
        q,
        weights,
        index_cache,
        block_table,
        query_start_loc,
        seq_lens,
        dcp_local_seq_lens,
        dcp_size,
        dcp_rank,
        cp_interleave,
        out,
    )


def sparse_mla_attention(
    q: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    kv_lora_rank: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of absorbed queries over chosen slots of the paged latent cache (SPEC 9).

    q: [T, H, D]. kv_cache: [num_blocks, block_size, D]. slots: int32 [T, K], -1 for none, anywhere
    in a row. out: [T, H, kv_lora_rank], its dtype is the result's. lse: float32 [T, H], natural.
    A token without slots gets out = 0 and lse = -inf. Slots that are not named may hold anything.
    """
    torch.ops.pcpbench.sparse_mla_attention.default(
        q, kv_cache, slots, scale, kv_lora_rank, out, lse
    )


def merge_candidates(gathered: Tensor, topk: int) -> Tensor:
    """The best of all ranks' candidates, int64 [T, topk], from gathered ones [T, at least topk]."""
    return gathered.topk(topk, 1).values


def positions_of(candidates: Tensor) -> Tensor:
    """Positions of candidates, int64, -1 for none."""
    return torch.where(candidates < 0, candidates, candidates.bitwise_and(_POSITION_MASK))


def localize(
    positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
) -> Tensor:
    """Slots on this rank of the positions that each token attends to, int32 [T, K] (SPEC 7, 9).

    positions: int32 [T, K], -1 for none. block_table: int32 [R, max_blocks]. query_start_loc: int32
    [R+1], which tells each token's row. A position of another rank becomes -1, as none does.

    Worked example: block_size 4, dcp 2, interleave 2, rank 1 (owns 2, 3, 6, 7, 10, ...), a row with
    the table [5, 9]. Position 11 is its local key 11 // 4 * 2 + 11 % 2 = 5: block 5 // 4 = 1, which
    is 9, offset 1, slot 37. Position 12 belongs to rank 0.
    """
    num_rows, num_columns = block_table.shape
    if not num_rows:
        return torch.full_like(positions, NO_KEY)
    tokens = torch.arange(
        positions.shape[0], dtype=query_start_loc.dtype, device=query_start_loc.device
    )
    rows = torch.searchsorted(query_start_loc[1:], tokens, right=True).clamp_(max=num_rows - 1)
    known = positions.clamp(min=0)
    local = known
    mine = positions >= 0
    if dcp_size > 1:
        owners = known.div(cp_interleave, rounding_mode="floor").remainder_(dcp_size)
        mine.logical_and_(owners == dcp_rank)
        laps = known.div(dcp_size * cp_interleave, rounding_mode="floor")
        local = laps.mul_(cp_interleave).add_(known.remainder(cp_interleave))
    columns = local.div(block_size, rounding_mode="floor").clamp_(max=num_columns - 1)
    blocks = block_table[rows.unsqueeze(1), columns]
    slots = blocks.mul_(block_size).add_(local.remainder(block_size))
    return slots.masked_fill_(mine.logical_not_(), NO_KEY)


def _index_topk_cpu(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    dcp_local_seq_lens: Tensor | None,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    out: Tensor,
) -> None:
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    local = lengths if dcp_local_seq_lens is None else dcp_local_seq_lens.tolist()
    capacity = block_table.shape[1] * index_cache.shape[1]
    groups: dict[int, list[int]] = {}
    for row, num_keys in enumerate(local):
        num_queries = starts[row + 1] - starts[row]
        if num_queries > 0 and num_keys > 0:
            groups.setdefault(num_queries, []).append(row)
    out.fill_(NO_KEY)
    for num_queries, rows in groups.items():
        num_keys = [min(local[row], capacity) for row in rows]
        visible = np.array(num_keys)[:, None]
        if num_queries > 1:
            ends = np.array([lengths[row] for row in rows])[:, None]
            behind = attention._owned_behind(ends, num_queries, dcp_size, dcp_rank, cp_interleave)
            visible = np.maximum(visible - behind, 0)
        table = block_table.numpy()[rows]
        keys = attention._gather_keys(index_cache, table, num_keys)
        tokens = torch.from_numpy(
            (np.array([starts[row] for row in rows])[:, None] + np.arange(num_queries)).reshape(-1)
        )
        positions = _positions(keys.shape[1], dcp_size, dcp_rank, cp_interleave)
        best = _best(q[tokens], weights[tokens], keys, visible, positions, out.shape[1])
        out[tokens, : best.shape[1]] = best


def _positions(num_keys: int, dcp_size: int, dcp_rank: int, cp_interleave: int) -> Tensor:
    """Global position of each local key in order, int64 [num_keys]."""
    local = np.arange(num_keys, dtype=np.int64)
    laps = local // cp_interleave * (dcp_size * cp_interleave)
    return torch.from_numpy(laps + dcp_rank * cp_interleave + local % cp_interleave)


def _best(
    q: Tensor, weights: Tensor, keys: Tensor, visible: IntArray, positions: Tensor, topk: int
) -> Tensor:
    """Candidates of rows with equally many queries, [rows x queries, at most topk].

    q: [rows x queries, I, E]. keys: [rows, num_keys, E]. visible: keys seen, [rows, queries].
    """
    (num_rows, num_queries), num_keys = visible.shape, keys.shape[1]
    num_heads, width = q.shape[1:]
    queries = q.float().view(num_rows, num_queries * num_heads, width)
    products = queries.bmm(keys.transpose(1, 2)).relu_()
    products = products.view(num_rows * num_queries, num_heads, num_keys)
    scores = products.mul_(weights.float().unsqueeze(-1)).sum(1)
    whole = scores.nan_to_num_(0.0).clamp_(max=MAX_SCORE).long()
    candidates = whole.bitwise_left_shift_(_POSITION_BITS).bitwise_or_(positions)
    seen = torch.from_numpy(visible.reshape(-1, 1))
    candidates.masked_fill_(torch.arange(num_keys) >= seen, NO_KEY)
    return candidates.topk(min(topk, num_keys), 1).values


def _sparse_mla_attention_cpu(
    q: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    kv_lora_rank: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    named = slots.numpy()
    is_key = named >= 0
    tokens = np.flatnonzero(is_key.any(axis=1))
    if len(tokens) < len(named):
        out.zero_()
        lse.fill_(-torch.inf)
    if not len(tokens):
        return
    is_key = is_key[tokens]
    filled = _without_gaps(named[tokens], is_key)
    width = kv_cache.shape[-1]
    keys = kv_cache.view(-1, width).index_select(0, torch.from_numpy(filled.reshape(-1)))
    keys = keys.float().view(len(tokens), -1, width)
    index = torch.from_numpy(tokens)
    hidden = None if is_key.all() else torch.from_numpy(~is_key).unsqueeze(1)
    queries = q.index_select(0, index).float()
    values, sums = attention._softmax_values(queries, keys, hidden, scale, kv_lora_rank)
    out[index] = values.to(out.dtype)
    lse[index] = sums


def _without_gaps(named: IntArray, is_key: BoolArray) -> IntArray:
    """Slots [tokens, K] of which each names a key: what is none repeats the token's first key.

    A slot that must not be read stays out of the arithmetic, where a zero weight times a NaN would
    be a NaN.
    """
    first = named[np.arange(len(named)), is_key.argmax(axis=1)]
    filled: IntArray = np.where(is_key, named, first[:, None])
    return filled


def _index_topk_cuda(*args: Any) -> None:
    from pcpbench.model import sparse_attention_kernels  # triton only where there is a device

    sparse_attention_kernels.index_topk(*args)


def _sparse_mla_attention_cuda(*args: Any) -> None:
    from pcpbench.model import sparse_attention_kernels

    sparse_attention_kernels.sparse_mla_attention(*args)


for _name, _device, _kernel in (
    ("index_topk", "CPU", _index_topk_cpu),
    ("sparse_mla_attention", "CPU", _sparse_mla_attention_cpu),
    ("index_topk", "CUDA", _index_topk_cuda),
    ("sparse_mla_attention", "CUDA", _sparse_mla_attention_cuda),
):
    _LIBRARY.impl(_name, _kernel, _device)  # type: ignore[no-untyped-call]
