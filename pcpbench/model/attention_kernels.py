"""Triton twins of the CPU kernels in attention.py. The one module of the model that needs triton.

Same inputs, same results within rounding; no host synchronisation, so a graph can capture the
launches: grids depend on shapes alone, and loops run to lengths that are read on the device.
Imported only when a CUDA tensor arrives, or by the test that runs it under Triton's interpreter.
"""

# Device code: its arguments are pointers and device scalars, which have no Python type.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_MIN_DOT = 16  # tl.dot wants at least this much of every dimension


def _block(size: int, least: int = _MIN_DOT) -> int:
    return max(int(triton.next_power_of_2(size)), least)


@triton.jit
def _kv_cache_write_kernel(
    kv, slots, cache, kv_stride, width: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < width
        row = tl.load(kv + token * kv_stride + column, mask=inside)
        tl.store(cache + slot * width + column, row, mask=inside)


def kv_cache_write(kv: Tensor, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    """See `attention.kv_cache_write`; one program a token."""
    num_tokens, width = kv.shape
    if num_tokens:
        _kv_cache_write_kernel[(num_tokens,)](
            kv, slot_mapping, kv_cache, kv.stride(0), width, BLOCK=_block(width)
        )


@triton.jit
def _owned(length, dcp_size: tl.constexpr, dcp_rank: tl.constexpr, interleave: tl.constexpr):
    """Positions below `length` that a DCP rank owns (SPEC 7)."""
    period: tl.constexpr = dcp_size * interleave
    rest = length % period - dcp_rank * interleave
    return length // period * interleave + tl.minimum(tl.maximum(rest, 0), interleave)


@triton.jit
def _num_visible(
    token, starts, seq_lens, local_lens, num_rows,
    SHARDED: tl.constexpr, dcp_size: tl.constexpr, dcp_rank: tl.constexpr,
    interleave: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The row of a token and how many local keys it sees; 0 for a token behind the last row."""
    index = tl.arange(0, BLOCK_R)
    ends = tl.load(starts + 1 + index, mask=index < num_rows, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    visible = 0
    if row < num_rows:
        behind = tl.load(starts + row + 1) - 1 - token  # query tokens after this one
        length = tl.load(seq_lens + row)
        if SHARDED:
            upto = _owned(length - behind, dcp_size, dcp_rank, interleave)
            later = _owned(length, dcp_size, dcp_rank, interleave) - upto
            visible = tl.load(local_lens + row) - later
        else:
            visible = length - behind
    return row, visible


@triton.jit
def _num_unseen(
    token, row, starts, seq_lens, num_rows,
    SHARDED: tl.constexpr, dcp_size: tl.constexpr, dcp_rank: tl.constexpr,
    interleave: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """How many local keys of its row lie before a token's window; 0 without one."""
    unseen = 0
    if row < num_rows:
        upto = tl.load(seq_lens + row) - (tl.load(starts + row + 1) - 1 - token)
        if WINDOW > 0:
            unseen = tl.maximum(upto - WINDOW, 0)
            if SHARDED:
                unseen = _owned(unseen, dcp_size, dcp_rank, interleave)
    return unseen


@triton.jit
def _mla_attention_kernel(
    q, cache, table, starts, seq_lens, local_lens, out, lse,
    num_rows, max_blocks, num_heads, scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride,
    rank_c: tl.constexpr, rope: tl.constexpr, block_size: tl.constexpr,
    SHARDED: tl.constexpr, dcp_size: tl.constexpr, dcp_rank: tl.constexpr,
    interleave: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row, visible = _num_visible(
        token, starts, seq_lens, local_lens, num_rows,
        SHARDED, dcp_size, dcp_rank, interleave, BLOCK_R,
    )  # fmt: skip
    before = _num_unseen(
        token, row, starts, seq_lens, num_rows,
        SHARDED, dcp_size, dcp_rank, interleave, WINDOW,
    )  # fmt: skip
    visible = tl.minimum(visible, max_blocks * block_size)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    chan, pos = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    head_in, chan_in, pos_in = head < num_heads, chan < rank_c, pos < rope
    q_at = q + token.to(tl.int64) * q_stride_t + head[:, None] * q_stride_h
    q_c = tl.load(q_at + chan[None, :], mask=head_in[:, None] & chan_in[None, :], other=0.0)
    q_p = tl.load(q_at + rank_c + pos[None, :], mask=head_in[:, None] & pos_in[None, :], other=0.0)

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for first in range(before, visible, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        seen = key < visible
        # Masked loads: what a token does not see is never read, so its NaN cannot arrive.
        block = tl.load(table + row * table_stride + key // block_size, mask=seen, other=0)
        slot = block.to(tl.int64) * block_size + key % block_size
        k_at = cache + slot[:, None] * (rank_c + rope)
        k_c = tl.load(k_at + chan[None, :], mask=seen[:, None] & chan_in[None, :], other=0.0)
        k_p = tl.load(k_at + rank_c + pos[None, :], mask=seen[:, None] & pos_in[None, :], other=0.0)
        score = tl.dot(q_c, tl.trans(k_c), input_precision="ieee")
        score = tl.dot(q_p, tl.trans(k_p), acc=score, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        # Every block holds a key that is seen, so `high` is finite from the first block on.
        high = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - high[:, None])
        shrink = tl.exp(top - high)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(k_c.dtype), k_c, acc=acc, input_precision="ieee")
        top = high

    empty = visible <= before
    value = acc / tl.where(empty, 1.0, total)[:, None]
    summed = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
    out_at = out + token.to(tl.int64) * out_stride_t + head[:, None] * out_stride_h
    tl.store(out_at + chan[None, :], value, mask=head_in[:, None] & chan_in[None, :])
    tl.store(lse + token.to(tl.int64) * num_heads + head, summed, mask=head_in)


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
    """See `attention.mla_attention`; one program a token and block of heads, online softmax."""
    num_tokens, num_heads, width = q.shape
    if not num_tokens:
        return
    block_h = min(_block(num_heads), 32)
    grid = (num_tokens, triton.cdiv(num_heads, block_h))
    num_rows, max_blocks = block_table.shape
    sizes: dict[str, Any] = {
        "BLOCK_R": _block(num_rows, 1),
        "BLOCK_H": block_h,
        "BLOCK_C": _block(kv_lora_rank),
        "BLOCK_P": _block(width - kv_lora_rank),
        # Wide latents fill the registers: fewer keys at a time.
        "BLOCK_N": 64 if kv_lora_rank <= 128 else 16 if q.dtype == torch.float32 else 32,
    }
    sharded = dcp_local_seq_lens is not None
    _mla_attention_kernel[grid](
        q, kv_cache, block_table, query_start_loc, seq_lens,
        dcp_local_seq_lens if sharded else seq_lens, out, lse,
        num_rows, max_blocks, num_heads, scale,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), block_table.stride(0),
        kv_lora_rank, width - kv_lora_rank, kv_cache.shape[1],
        sharded, dcp_size, dcp_rank, cp_interleave, sliding_window, **sizes,
    )  # fmt: skip
