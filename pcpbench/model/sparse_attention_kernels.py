"""Triton twins of the CPU kernels in sparse_attention.py.

Same inputs; the same candidates bit for bit, attention within rounding. No host synchronisation.
Imported only when a CUDA tensor arrives, or by the test that runs it under Triton's interpreter.
"""

# Device code: its arguments are pointers and device scalars, which have no Python type.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pcpbench.model.attention_kernels import _block, _num_visible
from pcpbench.model.sparse_attention import MAX_SCORE


@triton.jit
def _index_topk_kernel(
    q, weights, cache, table, starts, seq_lens, local_lens, out,
    num_rows, max_blocks, num_heads,
    q_stride_t, q_stride_h, weights_stride, table_stride, topk,
    width: tl.constexpr, block_size: tl.constexpr, max_score: tl.constexpr,
    SHARDED: tl.constexpr, dcp_size: tl.constexpr, dcp_rank: tl.constexpr,
    interleave: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row, visible = _num_visible(
        token, starts, seq_lens, local_lens, num_rows,
        SHARDED, dcp_size, dcp_rank, interleave, BLOCK_R,
    )  # fmt: skip
    visible = tl.minimum(visible, max_blocks * block_size)
    lane, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    inside = column < width
    best = tl.full([BLOCK_K], -1, tl.int64)
    for first in range(0, visible, BLOCK_K):
        key = first + lane
        seen = key < visible
        # Masked loads: what a token does not see is never read.
        block = tl.load(table + row * table_stride + key // block_size, mask=seen, other=0)
        slot = block.to(tl.int64) * block_size + key % block_size
        at = cache + slot[:, None] * width + column[None, :]
        keys = tl.load(at, mask=seen[:, None] & inside[None, :], other=0.0).to(tl.float32)
        score = tl.zeros([BLOCK_K], tl.float32)
        for head in range(0, num_heads):
            q_at = q + token.to(tl.int64) * q_stride_t + head * q_stride_h
            query = tl.load(q_at + column, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weights + token * weights_stride + head).to(tl.float32)
            # Sums of whole numbers, exact in any order; a tensor core would round its inputs.
            product = tl.sum(keys * query[None, :], 1)
            score += weight * tl.where(product > 0, product, 0.0)
        # A score that is not a number compares as false, and becomes 0 as on a CPU.
        score = tl.where(score > 0, tl.minimum(score, max_score * 1.0), 0.0)
        lap = (key // interleave).to(tl.int64) * (dcp_size * interleave)
        position = lap + dcp_rank * interleave + key % interleave
        found = (score.to(tl.int64) << 32) | position
        found = tl.where(seen, found, -1)
        # The best of two lists of BLOCK_K are the first half of both, sorted.
        both = tl.sort(tl.reshape(tl.join(best, found), [2 * BLOCK_K]), descending=True)
        halves = tl.reshape(both, [2, BLOCK_K])
        is_first = tl.arange(0, 2)[:, None] == 0
        best = tl.sum(tl.where(is_first, halves, 0), 0)
    tl.store(out + token.to(tl.int64) * topk + lane, best, mask=lane < topk)


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
    """See `sparse_attention.index_topk`; one program a token, blocks of K keys sorted in."""
    num_tokens, num_heads, width = q.shape
    if not num_tokens:
        return
    num_rows, max_blocks = block_table.shape
    sharded = dcp_local_seq_lens is not None
    _index_topk_kernel[(num_tokens,)](
        q, weights, index_cache, block_table, query_start_loc, seq_lens,
        dcp_local_seq_lens if sharded else seq_lens, out,
        num_rows, max_blocks, num_heads,
        q.stride(0), q.stride(1), weights.stride(0), block_table.stride(0), out.shape[1],
        width, index_cache.shape[1], MAX_SCORE,
        sharded, dcp_size, dcp_rank, cp_interleave,
        BLOCK_R=_block(num_rows, 1), BLOCK_E=_block(width), BLOCK_K=_block(out.shape[1]),
    )  # fmt: skip


@triton.jit
def _sparse_mla_attention_kernel(
    q, cache, slots, out, lse, num_heads, num_slots, scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, slots_stride,
    rank_c: tl.constexpr, rope: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    chan, pos = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    head_in, chan_in, pos_in = head < num_heads, chan < rank_c, pos < rope
    q_at = q + token.to(tl.int64) * q_stride_t + head[:, None] * q_stride_h
    q_c = tl.load(q_at + chan[None, :], mask=head_in[:, None] & chan_in[None, :], other=0.0)
    q_p = tl.load(q_at + rank_c + pos[None, :], mask=head_in[:, None] & pos_in[None, :], other=0.0)

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    for first in range(0, num_slots, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + token * slots_stride + place, mask=place < num_slots, other=-1)
        seen = slot >= 0
        k_at = cache + slot.to(tl.int64)[:, None] * (rank_c + rope)
        k_c = tl.load(k_at + chan[None, :], mask=seen[:, None] & chan_in[None, :], other=0.0)
        k_p = tl.load(k_at + rank_c + pos[None, :], mask=seen[:, None] & pos_in[None, :], other=0.0)
        score = tl.dot(q_c, tl.trans(k_c), input_precision="ieee")
        score = tl.dot(q_p, tl.trans(k_p), acc=score, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        # A block may hold no key at all: its largest score is -inf, and -inf less -inf is NaN.
        high = tl.maximum(top, tl.max(score, 1))
        base = tl.where(high == float("-inf"), 0.0, high)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(k_c.dtype), k_c, acc=acc, input_precision="ieee")
        top = high

    # Not `total == 0`: a NaN that the token does see must stay one.
    empty = top == float("-inf")
    value = acc / tl.where(empty, 1.0, total)[:, None]
    value = tl.where(empty[:, None], 0.0, value)
    summed = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
    out_at = out + token.to(tl.int64) * out_stride_t + head[:, None] * out_stride_h
    tl.store(out_at + chan[None, :], value, mask=head_in[:, None] & chan_in[None, :])
    tl.store(lse + token.to(tl.int64) * num_heads + head, summed, mask=head_in)


def sparse_mla_attention(
    q: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: float,
    kv_lora_rank: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """See `sparse_attention.sparse_mla_attention`; one program a token and block of heads."""
    num_tokens, num_heads, width = q.shape
    if not num_tokens:
        return
    block_h = min(_block(num_heads), 32)
    _sparse_mla_attention_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        q, kv_cache, slots, out, lse, num_heads, slots.shape[1], scale,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), slots.stride(0),
        kv_lora_rank, width - kv_lora_rank,
        BLOCK_H=block_h, BLOCK_C=_block(kv_lora_rank), BLOCK_P=_block(width - kv_lora_rank),
        BLOCK_N=64 if kv_lora_rank <= 128 else 16 if q.dtype == torch.float32 else 32,
    )  # fmt: skip
