"""Device kernels of paged latent attention, as ops that a recorder sees as one call each.

Owns `pcpbench::kv_cache_write` and `pcpbench::mla_attention`: schema, wrapper, CPU twin, and the
hand-over to the Triton twins in attention_kernels.py. Knows no model, no group and no graph.

`_LIBRARY` is the one module state here: torch keeps an op registered for as long as its Library
object lives, and a process can register an op only once.

The CPU twins read lengths, tables and slots on the host. They are what a device does inside a
kernel, below the dispatcher, where control flow may depend on data; a graph replays them as one
call that reads whatever its buffers hold by then.

Shape letters: T tokens, H heads, R rows (requests), D = kv_lora_rank + rotary part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.integer[Any]]

_LIBRARY = torch.library.Library("pcpbench", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    "kv_cache_write(Tensor kv, Tensor slot_mapping, Tensor(a!) kv_cache) -> ()",
    "mla_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor query_start_loc, "
    "Tensor seq_lens, Tensor? dcp_local_seq_lens, float scale, int kv_lora_rank, int dcp_size, "
    "int dcp_rank, int cp_interleave, Tensor(a!) out, Tensor(b!) lse) -> ()",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


def kv_cache_write(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    """Write each token's latent KV into its slot; a token whose slot is -1 (PAD) is not written.

    kv: [N, D]. slot_mapping: int64 [N], slot = block_id * block_size + offset.
    kv_cache: [num_blocks, block_size, D], contiguous. Two tokens with one slot: either may win.
    Raises ValueError when kv and slot_mapping differ in length.
    """
    torch.ops.pcpbench.kv_cache_write.default(kv, slot_mapping, kv_cache)


def mla_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    dcp_local_seq_lens: Tensor | None,
    scale: float,
    kv_lora_rank: int,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Causal attention of absorbed queries over the paged latent cache (SPEC 7, 9).

    q: [T, H, D]. kv_cache: [num_blocks, block_size, D]. block_table: int32 [R, max_blocks].
    query_start_loc: int32 [R+1]. seq_lens: int32 [R], global, through the row's last query token.
    dcp_local_seq_lens: int32 [R], None without DCP. out: [T, H, kv_lora_rank], its dtype is the
    result's. lse: float32 [T, H], natural logarithm of the sum of exponentials of the scores.

    Query token j of a row with n query tokens stands at global position seq_len - n + j and sees
    the keys up to and with its own. Under DCP it sees those of them that this rank owns. Local
    index order is position order, so what it sees is a prefix of the row's local keys, of length

        dcp_local_seq_lens[row] - (owned positions among the query tokens after j)

    Worked example, dcp 2, interleave 2, rank 1 (owns positions 2, 3, 6, 7, ...): seq_len 7, n = 3.
    The row's local length is 3 (positions 2, 3, 6). Token 2 (position 6) sees 3 keys, token 1
    (position 5) sees 3 - 1 = 2, as 6 comes after it; token 0 (position 4) also sees 2.

    Tokens that see nothing and tokens past query_start_loc[R] get out = 0 and lse = -inf; rows
    without tokens are skipped. Nothing but a token's own visible keys can reach its result:
    unread slots, the null block and table columns past a row's last block may hold anything
    (contract C16). A local length beyond the table is cut to what the table can name.
    """
    torch.ops.pcpbench.mla_attention.default(
        q,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        dcp_local_seq_lens,
        scale,
        kv_lora_rank,
        dcp_size,
        dcp_rank,
        cp_interleave,
        out,
        lse,
    )


def rescale_partial(out: Tensor, lse: Tensor, lses: Tensor) -> Tensor:
    """One rank's partial output, weighted by its share of the softmax over all ranks.

    out: [T, H, r] and lse: [T, H] of this rank. lses: [N, T, H] of all ranks. The sum of the
    results over ranks is the attention over all keys (SPEC 9, `ag_rs`). A rank whose share is
    empty (lse -inf) contributes zeros, also where every share is empty.
    """
    weight = (lse - torch.logsumexp(lses, 0)).exp_()
    # -inf minus -inf is NaN, but only where this share is empty; a NaN of the data stays one.
    weight.masked_fill_(lse == -torch.inf, 0.0)
    return out * weight.unsqueeze(-1)


def _check_slots(kv: Tensor, slot_mapping: Tensor) -> None:
    if kv.shape[0] != slot_mapping.shape[0]:
        raise ValueError(
            f"kv_cache_write got {kv.shape[0]} tokens and {slot_mapping.shape[0]} slots: "
            "the slot mapping must be the gathered one, one slot for each gathered token."
        )


def _kv_cache_write_cpu(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    _check_slots(kv, slot_mapping)
    slots = slot_mapping.numpy()
    written = slots >= 0
    if not written.all():
        (tokens,) = written.nonzero()
        kv = kv.index_select(0, torch.from_numpy(tokens))
        slot_mapping = torch.from_numpy(slots[tokens])
    kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, slot_mapping, kv)


def _mla_attention_cpu(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    dcp_local_seq_lens: Tensor | None,
    scale: float,
    kv_lora_rank: int,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    starts = query_start_loc.numpy()
    query_lens = starts[1:] - starts[:-1]
    table = block_table.numpy()
    lengths = seq_lens.numpy()
    local = lengths if dcp_local_seq_lens is None else dcp_local_seq_lens.numpy()
    local = np.minimum(local, table.shape[1] * kv_cache.shape[1])
    (rows,) = ((query_lens > 0) & (local > 0)).nonzero()
    if int(query_lens[rows].sum()) != q.shape[0]:
        out.zero_()
        lse.fill_(-torch.inf)
    # Rows of one query length are computed together, whatever padding stands around them: the
    # same real rows make the same calls and so the same bits.
    for num_queries in _distinct(query_lens[rows]):
        group = rows[query_lens[rows] == num_queries]
        visible = local[group, None]
        if num_queries > 1:
            behind = _owned_behind(lengths[group], num_queries, dcp_size, dcp_rank, cp_interleave)
            visible = np.maximum(visible - behind, 0)
        keys = _gather_keys(kv_cache, table[group], local[group])
        _attend_group(q, keys, starts[group], visible, scale, kv_lora_rank, out, lse)


def _distinct(query_lens: IntArray) -> list[int]:
    """The values that occur, in rising order; np.unique costs a decode batch more than this."""
    return sorted(set(query_lens.tolist()))


def _owned_behind(
    seq_lens: IntArray, num_queries: int, dcp_size: int, dcp_rank: int, cp_interleave: int
) -> IntArray:
    """How many positions after each query token this rank owns: [rows, num_queries]."""
    upto = seq_lens[:, None] - np.arange(num_queries - 1, -1, -1)
    period = dcp_size * cp_interleave
    share = np.clip(upto % period - dcp_rank * cp_interleave, 0, cp_interleave)
    owned = upto // period * cp_interleave + share
    behind: IntArray = owned[:, -1:] - owned
    return behind


def _gather_keys(kv_cache: Tensor, table: IntArray, lengths: IntArray) -> Tensor:
    """The local keys of each row, [rows, longest, D] in float32; rows' tails repeat their last key.

    Repeating a key that the row reads anyway keeps slots and table columns that it must not read
    out of the arithmetic: a zero weight times a NaN would be a NaN.
    """
    block_size, width = kv_cache.shape[1:]
    index = np.minimum(np.arange(int(lengths.max())), lengths[:, None] - 1)
    blocks = table[np.arange(len(table))[:, None], index // block_size].astype(np.int64)
    slots = torch.from_numpy((blocks * block_size + index % block_size).reshape(-1))
    keys = kv_cache.view(-1, width).index_select(0, slots)
    return keys.float().view(len(table), -1, width)


def _attend_group(
    q: Tensor,
    keys: Tensor,
    starts: IntArray,
    visible: IntArray,
    scale: float,
    kv_lora_rank: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of rows with equally many query tokens; visible: keys seen, [rows, queries]."""
    (num_rows, num_queries), num_heads = visible.shape, q.shape[1]
    num_tokens = num_rows * num_queries
    first = int(starts[0])
    tokens = None
    if int(starts[-1]) - first == num_tokens - num_queries:  # one run: views, no copies
        queries = q[first : first + num_tokens].float()
    else:
        tokens = torch.from_numpy((starts[:, None] + np.arange(num_queries)).reshape(-1))
        queries = q.index_select(0, tokens).float()
    queries = queries.reshape(num_rows, num_queries * num_heads, -1)
    mask = _mask(visible, keys.shape[1], num_heads)
    values, sums = _softmax_values(queries, keys, mask, scale, kv_lora_rank)
    if num_queries > 1 and bool(values.isnan().any()):
        values, sums = _without_unseen(queries, keys, visible, mask, scale, kv_lora_rank)
    values = values.view(num_tokens, num_heads, kv_lora_rank)
    sums = sums.view(num_tokens, num_heads)
    blind = torch.from_numpy(visible.reshape(-1) == 0) if visible.min() == 0 else None
    if blind is not None:
        values[blind], sums[blind] = 0.0, -torch.inf
    if tokens is None:
        out[first : first + num_tokens].copy_(values)
        lse[first : first + num_tokens].copy_(sums)
    else:
        out.index_copy_(0, tokens, values.to(out.dtype))
        lse.index_copy_(0, tokens, sums)


def _mask(visible: IntArray, num_keys: int, num_heads: int) -> Tensor:
    """0 where a query sees a key, else -inf: [rows, 1 or queries x heads, num_keys].

    A query that sees nothing is given everything, to stay finite; its result is overwritten.
    """
    seen = np.arange(num_keys) < np.where(visible == 0, num_keys, visible)[:, :, None]
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))
    if visible.shape[1] > 1:
        mask = np.repeat(mask, num_heads, axis=1)
    return torch.from_numpy(mask)


def _softmax_values(
    queries: Tensor, keys: Tensor, mask: Tensor, scale: float, kv_lora_rank: int
) -> tuple[Tensor, Tensor]:
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)
    weights = scores.softmax(-1)
    # The largest weight is exp(largest score - lse), which gives the lse without another pass.
    sums = scores.amax(-1).sub_(weights.amax(-1).log_())
    return weights.bmm(keys[:, :, :kv_lora_rank]), sums


def _without_unseen(
    queries: Tensor,
    keys: Tensor,
    visible: IntArray,
    mask: Tensor,
    scale: float,
    kv_lora_rank: int,
) -> tuple[Tensor, Tensor]:
    """The same calls on finite keys; then NaN where a query does see a key that is not finite.

    An earlier query token must not inherit the NaN of a later one's key through a zero weight.
    """
    finite = keys.isfinite()
    cleaned = torch.where(finite, keys, 0.0)
    values, sums = _softmax_values(queries, cleaned, mask, scale, kv_lora_rank)
    num_bad = (~finite.all(-1)).long().cumsum(-1)
    last = torch.from_numpy(np.maximum(visible.astype(np.int64) - 1, 0))
    touched = num_bad.gather(1, last) > 0
    touched = touched.repeat_interleave(queries.shape[1] // visible.shape[1], 1)
    return values.masked_fill(touched.unsqueeze(-1), torch.nan), sums.masked_fill(
        touched, torch.nan
    )


def _kv_cache_write_cuda(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    from pcpbench.model import attention_kernels  # triton only where there is a device

    _check_slots(kv, slot_mapping)
    attention_kernels.kv_cache_write(kv, slot_mapping, kv_cache)


def _mla_attention_cuda(*args: Any) -> None:
    from pcpbench.model import attention_kernels

    attention_kernels.mla_attention(*args)


_KERNELS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    ("kv_cache_write", "CPU", _kv_cache_write_cpu),
    ("mla_attention", "CPU", _mla_attention_cpu),
    ("kv_cache_write", "CUDA", _kv_cache_write_cuda),
    ("mla_attention", "CUDA", _mla_attention_cuda),
)
for _name, _device, _kernel in _KERNELS:
    _LIBRARY.impl(_name, _kernel, _device)  # type: ignore[no-untyped-call]
