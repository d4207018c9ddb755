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

from collections.abc import Callable, Sequence
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
    "int dcp_rank, int cp_interleave, int sliding_window, Tensor(a!) out, Tensor(b!) lse) -> ()",
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


def kv_cache_read(slot_mapping: Tensor, kv_cache: Tensor) -> Tensor:
    """What the slots of a mapping hold, [N, D]; zeros where the slot is -1 (PAD). For taps only."""
    rows = kv_cache.view(-1, kv_cache.shape[-1]).index_select(0, slot_mapping.clamp(min=0))
    return rows.masked_fill_((slot_mapping < 0).unsqueeze(1), 0.0)


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
    sliding_window: int,
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

    sliding_window: how many positions a query sees, its own among them; 0 for all. A query at 40
    with a window of 24 sees 17 .. 40; under DCP, those of them that this rank owns. Table columns
    before the window of a row's first query are not read.

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
        sliding_window,
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
    sliding_window: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    local = lengths if dcp_local_seq_lens is None else dcp_local_seq_lens.tolist()
    capacity = block_table.shape[1] * kv_cache.shape[1]
    dcp = (dcp_size, dcp_rank, cp_interleave)
    # Rows of one query length are computed together, whatever padding stands around them: the
    # same real rows make the same calls and so the same bits.
    groups: dict[int, list[int]] = {}
    firsts = [0] * len(local)
    for row, num_keys in enumerate(local):
        num_queries = starts[row + 1] - starts[row]
        if sliding_window and num_queries > 0:
            firsts[row] = int(_num_owned(_unseen(lengths[row] - num_queries, sliding_window), *dcp))
        if num_queries > 0 and min(num_keys, capacity) > firsts[row]:
            groups.setdefault(num_queries, []).append(row)
    if sum(num_queries * len(rows) for num_queries, rows in groups.items()) != q.shape[0]:
        out.zero_()
        lse.fill_(-torch.inf)
    for num_queries, rows in groups.items():
        first = [firsts[row] for row in rows]
        num_keys = [min(local[row], capacity) - firsts[row] for row in rows]
        before, visible = None, np.array(num_keys)[:, None]
        if num_queries > 1:
            ends = np.array([lengths[row] for row in rows])[:, None]
            visible = np.maximum(visible - _owned_behind(ends, num_queries, *dcp), 0)
            if sliding_window:
                places = ends - np.arange(num_queries, 0, -1)
                before = _num_owned(_unseen(places, sliding_window), *dcp)
                before -= np.array(first)[:, None]
                visible = np.where(visible > before, visible, 0)
                before = np.where(visible, before, 0)
        table = block_table.numpy()[_run(rows, 1)]
        keys = _gather_keys(kv_cache, table, num_keys, first)
        tokens = _run([starts[row] for row in rows], num_queries)
        _attend_group(q, keys, tokens, before, visible, scale, kv_lora_rank, out, lse)


def _run(starts: list[int], length: int) -> slice | IntArray:
    """The indices start, ..., start + length - 1 of each start; a slice where that is one run."""
    first, last = starts[0], starts[-1] + length
    if last - first == len(starts) * length:
        return slice(first, last)
    return (np.array(starts)[:, None] + np.arange(length)).reshape(-1)


def _owned_behind(
    seq_lens: IntArray, num_queries: int, dcp_size: int, dcp_rank: int, cp_interleave: int
) -> IntArray:
    """How many positions after each query token this rank owns; seq_lens [rows, 1]."""
    upto = seq_lens - np.arange(num_queries - 1, -1, -1)
    owned = _num_owned(upto, dcp_size, dcp_rank, cp_interleave)
    behind: IntArray = owned[:, -1:] - owned
    return behind


def _num_owned(upto: Any, dcp_size: int, dcp_rank: int, cp_interleave: int) -> IntArray:
    """How many of the first `upto` positions this rank owns; a number or an array of them."""
    period = dcp_size * cp_interleave
    share = np.clip(upto % period - dcp_rank * cp_interleave, 0, cp_interleave)
    owned: IntArray = upto // period * cp_interleave + share
    return owned


def _unseen(position: Any, sliding_window: int) -> Any:
    """How many positions a query at `position` does not see: 17 at 40 with a window of 24."""
    return np.maximum(position + 1 - sliding_window, 0)


def _gather_keys(
    kv_cache: Tensor, table: IntArray, num_keys: list[int], first: Sequence[int] = ()
) -> Tensor:
    """The local keys of each row, [rows, longest, D] in float32.

    num_keys: one count a row. first: index of each row's first key; of all, 0 by default. Shorter
    rows repeat their first key at the end. That keeps slots and table columns which a row must not
    read out of the arithmetic: a zero weight times a NaN would be a NaN.
    """
    block_size, width = kv_cache.shape[1:]
    longest = max(num_keys)
    if any(first):
        index = np.array(first)[:, None] + np.arange(longest)
        columns = np.minimum(index // block_size, table.shape[1] - 1)
        slots = np.take_along_axis(table, columns, 1) * block_size + index % block_size
    else:
        blocks = table[:, : -(-longest // block_size), None] * block_size
        slots = (blocks + np.arange(block_size)).reshape(len(table), -1)[:, :longest]
    if min(num_keys) != longest:
        seen = np.arange(longest) < np.array(num_keys)[:, None]
        slots = np.where(seen, slots, slots[:, :1])
    flat = torch.from_numpy(slots.reshape(-1))
    keys = kv_cache.view(-1, width).index_select(0, flat)
    return keys.float().view(len(table), longest, width)


def _attend_group(
    q: Tensor,
    keys: Tensor,
    tokens: slice | IntArray,
    before: IntArray | None,
    visible: IntArray,
    scale: float,
    kv_lora_rank: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attention of rows with equally many query tokens; it sees keys [before, visible).

    before, visible: [rows, queries], both 0 for a query that sees nothing; before is None where all
    see from the first key on. tokens: where the rows' tokens lie in q, out and lse; a slice spares
    three copies.
    """
    (num_rows, num_queries), (_, num_heads, width) = visible.shape, q.shape
    index = tokens if isinstance(tokens, slice) else torch.from_numpy(tokens)
    queries = q[index].float().view(num_rows, num_queries * num_heads, width)
    hidden = _hidden(before, visible, keys.shape[1], num_heads)
    values, sums = _softmax_values(queries, keys, hidden, scale, kv_lora_rank)
    if num_queries > 1 and bool(values.isnan().any()):
        values, sums = _without_unseen(queries, keys, before, visible, hidden, scale, kv_lora_rank)
    values = values.view(-1, num_heads, kv_lora_rank)
    sums = sums.view(-1, num_heads)
    if num_queries > 1 and not visible.all():  # some token sees nothing
        blind = torch.from_numpy(visible.reshape(-1) == 0)
        values[blind], sums[blind] = 0.0, -torch.inf
    out[index] = values.to(out.dtype)
    lse[index] = sums


def _hidden(
    before: IntArray | None, visible: IntArray, num_keys: int, num_heads: int
) -> Tensor | None:
    """True where a query must not see a key: [rows, 1 or queries x heads, num_keys].

    None when all see all. A query that sees nothing is given everything, to stay finite; its
    result is overwritten.
    """
    hidden = np.arange(num_keys) >= np.where(visible, visible, num_keys)[:, :, None]
    if before is not None:
        hidden |= np.arange(num_keys) < before[:, :, None]
    if not hidden.any():
        return None
    if visible.shape[1] > 1:
        hidden = np.repeat(hidden, num_heads, axis=1)
    return torch.from_numpy(hidden)


def _softmax_values(
    queries: Tensor, keys: Tensor, hidden: Tensor | None, scale: float, kv_lora_rank: int
) -> tuple[Tensor, Tensor]:
    """Values [rows, queries x heads, kv_lora_rank] and the scores' logsumexp."""
    scores = queries.bmm(keys.transpose(1, 2)).mul_(scale)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1)
    # The largest weight is exp(largest score - logsumexp): cheaper than a logsumexp of its own.
    sums = scores.amax(-1).sub_(weights.amax(-1).log_())
    return weights.bmm(keys[:, :, :kv_lora_rank]), sums


def _without_unseen(
    queries: Tensor,
    keys: Tensor,
    before: IntArray | None,
    visible: IntArray,
    hidden: Tensor | None,
    scale: float,
    kv_lora_rank: int,
) -> tuple[Tensor, Tensor]:
    """The same calls on finite keys; then NaN where a query does see a key that is not finite.

    A query token must not inherit the NaN of another one's key through a zero weight.
    """
    finite = keys.isfinite()
    cleaned = torch.where(finite, keys, 0.0)
    values, sums = _softmax_values(queries, cleaned, hidden, scale, kv_lora_rank)
    num_bad = (~finite.all(-1)).long().cumsum(-1)
    last = torch.from_numpy(np.maximum(visible - 1, 0))
    seen_bad = num_bad.gather(1, last)
    if before is not None:
        seen_bad -= torch.nn.functional.pad(num_bad, (1, 0)).gather(1, torch.from_numpy(before))
    touched = seen_bad > 0
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
