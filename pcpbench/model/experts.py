"""The routed experts of an MoE layer as one op that a recorder sees as one call.

Owns `pcpbench::moe_experts`: schema, wrapper, CPU twin, and the hand-over to the Triton twin in
experts_kernels.py. Knows no router, no group and no graph.

The CPU twin reads the chosen experts on the host, below the dispatcher, as attention.py does with
lengths: how many rows an expert gets is data, and a graph replays the op as one call of fixed
shapes.

`_LIBRARY` is module state for the reason told in attention.py.

Shape letters: N rows, k experts of a row, E experts of this rank, i their inner width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_LIBRARY = torch.library.Library("pcpbench", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "moe_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, "
    "int first_expert, Tensor(a!) out, Tensor(b!) num_rows) -> ()"
)


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
    """What this rank's experts make of their rows: the sum over them of weight * expert(row).

    x: [N, hidden]. topk_ids: int32 [N, k], each row's experts by their number in the whole model,
    -1 for none. topk_weights: float32 [N, k]. w_gate_up: [E, hidden, 2 * i] and w_down:
    [E, i, hidden] of the experts first_expert, ..., first_expert + E - 1. out: float32 [N, hidden],
    zero where a row has none of these experts. num_rows: int32 [E], how many rows each computed.

    A row that no expert of this rank has is not read: it may hold NaN (contract C16). The sum of a
    row adds its experts in ascending order. The CPU twin multiplies all rows of an expert at once,
    so that the last bits of a row's result may depend on how many rows share its expert; padding is
    never among them, so the same real rows give the same bits whatever padding stands around them.

    Three rows with experts [4, 1], [-1, -1] and [5, 4] on the rank with experts 4 and 5: expert 4
    computes rows 0 and 2, expert 5 row 2, num_rows is [2, 1], and row 1 of out is zero.
    """
    torch.ops.pcpbench.moe_experts.default(
        x, topk_ids, topk_weights, w_gate_up, w_down, first_expert, out, num_rows
    )


def _moe_experts_cpu(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    first_expert: int,
    out: Tensor,
    num_rows: Tensor,
) -> None:
    num_experts = w_gate_up.shape[0]
    local = topk_ids.numpy().reshape(-1) - first_expert
    (pairs,) = ((local >= 0) & (local < num_experts)).nonzero()
    experts = local[pairs]
    pairs = pairs[experts.argsort(kind="stable")]
    counts = np.bincount(experts, minlength=num_experts)
    num_rows.copy_(torch.from_numpy(counts))
    out.zero_()
    if not len(pairs):
        return
    rows = torch.from_numpy(pairs // topk_ids.shape[1])
    packed = x.index_select(0, rows)
    gate_up = x.new_empty((len(pairs), w_gate_up.shape[2]))
    values = torch.empty_like(packed)
    spans = [(e, end - counts[e], end) for e, end in enumerate(counts.cumsum()) if counts[e]]
    for expert, first, last in spans:
        torch.mm(packed[first:last], w_gate_up[expert], out=gate_up[first:last])
    gate, up = gate_up.chunk(2, -1)
    inner = F.silu(gate).mul_(up)
    for expert, first, last in spans:
        torch.mm(inner[first:last], w_down[expert], out=values[first:last])
    weights = topk_weights.reshape(-1, 1).index_select(0, torch.from_numpy(pairs))
    out.index_add_(0, rows, values.float().mul_(weights))


def _moe_experts_cuda(*args: Any) -> None:
    from pcpbench.model import experts_kernels  # triton only where there is a device

    experts_kernels.moe_experts(*args)


_LIBRARY.impl("moe_experts", _moe_experts_cpu, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("moe_experts", _moe_experts_cuda, "CUDA")  # type: ignore[no-untyped-call]
