"""Triton twin of the CPU kernel in experts.py.

Each row is computed on its own, so that no row's result depends on the rows around it. Grids
depend on shapes alone: a graph can capture the launches, and which experts a row has is read on the
device. Imported only when a CUDA tensor arrives, or by the test that runs it under Triton's
interpreter.
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

_MAX_BLOCK = 64


def _block(size: int) -> int:
    return min(int(triton.next_power_of_2(size)), _MAX_BLOCK)


@triton.jit
def _gate_up_kernel(
    x, ids, weight, inner, first_expert, num_experts, top_k, hidden_size, inner_size,
    x_stride, w_stride_e, w_stride_h, w_stride_i,
    BLOCK_H: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """inner[pair] = silu(x @ gate) * (x @ up) of one row and one of its experts."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair) - first_expert
    if (expert >= 0) & (expert < num_experts):
        column = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
        inside = column < inner_size
        gate = tl.zeros([BLOCK_I], tl.float32)
        up = tl.zeros([BLOCK_I], tl.float32)
        w_at = weight + expert.to(tl.int64) * w_stride_e
        for start in range(0, hidden_size, BLOCK_H):
            place = start + tl.arange(0, BLOCK_H)
            real = place < hidden_size
            row = tl.load(x + pair // top_k * x_stride + place, mask=real, other=0.0)
            row = row.to(tl.float32)[:, None]
            at = w_at + place[:, None] * w_stride_h + column[None, :] * w_stride_i
            both = real[:, None] & inside[None, :]
            gate += tl.sum(row * tl.load(at, mask=both, other=0.0).to(tl.float32), 0)
            at += inner_size * w_stride_i
            up += tl.sum(row * tl.load(at, mask=both, other=0.0).to(tl.float32), 0)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(inner + pair * inner_size + column, value, mask=inside)


@triton.jit
def _down_kernel(
    inner, ids, topk_weights, weight, out, first_expert, num_experts, hidden_size, inner_size,
    out_stride, w_stride_e, w_stride_i, w_stride_h,
    TOP_K: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[row]: the weighted sum over the row's experts; zero where it has none of them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = column < hidden_size
    total = tl.zeros([BLOCK_H], tl.float32)
    for choice in range(TOP_K):
        pair = row * TOP_K + choice
        expert = tl.load(ids + pair) - first_expert
        if (expert >= 0) & (expert < num_experts):
            value = tl.zeros([BLOCK_H], tl.float32)
            w_at = weight + expert.to(tl.int64) * w_stride_e
            for start in range(0, inner_size, BLOCK_I):
                place = start + tl.arange(0, BLOCK_I)
                real = place < inner_size
                part = tl.load(inner + pair * inner_size + place, mask=real, other=0.0)
                at = w_at + place[:, None] * w_stride_i + column[None, :] * w_stride_h
                both = real[:, None] & inside[None, :]
                factor = tl.load(at, mask=both, other=0.0).to(tl.float32)
                value += tl.sum(part.to(tl.float32)[:, None] * factor, 0)
            total += value * tl.load(topk_weights + pair)
    tl.store(out + row * out_stride + column, total, mask=inside)


@triton.jit
def _num_rows_kernel(ids, num_rows, first_expert, num_pairs, BLOCK: tl.constexpr):
    """How many pairs name one expert of this rank."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + place, mask=place < num_pairs, other=-1)
        found += (chosen == expert + first_expert).to(tl.int32)
    tl.store(num_rows + expert, tl.sum(found, 0))


def moe_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    first_expert: int,
    out: Tensor,
    num_rows: Tensor,
) -> None:
    """See `experts.moe_experts`; one program a row, expert and block of columns."""
    (rows, hidden), top_k = x.shape, topk_ids.shape[1]
    num_experts, inner_size = w_down.shape[:2]
    _num_rows_kernel[(num_experts,)](
        topk_ids, num_rows, first_expert, topk_ids.numel(), BLOCK=_MAX_BLOCK
    )
    if not rows:
        return
    inner = torch.empty((rows * top_k, inner_size), dtype=x.dtype, device=x.device)
    sizes = {"BLOCK_H": _block(hidden), "BLOCK_I": _block(inner_size)}
    _gate_up_kernel[(rows * top_k, triton.cdiv(inner_size, sizes["BLOCK_I"]))](
        x, topk_ids, w_gate_up, inner, first_expert, num_experts, top_k, hidden, inner_size,
        x.stride(0), w_gate_up.stride(0), w_gate_up.stride(1), w_gate_up.stride(2), **sizes,
    )  # fmt: skip
    _down_kernel[(rows, triton.cdiv(hidden, sizes["BLOCK_H"]))](
        inner, topk_ids, topk_weights, w_down, out, first_expert, num_experts, hidden, inner_size,
        out.stride(0), w_down.stride(0), w_down.stride(1), w_down.stride(2), TOP_K=top_k, **sizes,
    )  # fmt: skip
