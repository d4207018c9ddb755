"""How rows come to their experts and back: the routing rule, and two ways over the world (EP).

Owns who is routed where, the exchanges, and that a padding row is never part of it. Knows no
weights' origin, no request and no graph; every shape follows from the number of rows alone.

Shape letters: T rows of this rank, W world ranks, C = ceil(T / tp) rows that one rank routes, E
experts of the model, e = E / W experts of this rank, k experts of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pcpbench.device.collectives import Group
from pcpbench.model.context import ForwardContext
from pcpbench.model.experts import moe_experts


@dataclass(frozen=True)
class ExpertShard:
    """The experts that a rank computes in one layer: w_gate_up, w_down as in `moe_experts`."""

    layer: int
    top_k: int
    first_expert: int
    w_gate_up: Tensor
    w_down: Tensor

    @property
    def num_experts(self) -> int:
        """Experts of this rank, e."""
        return self.w_down.shape[0]


class Rows(NamedTuple):
    """Rows to route: x [N, hidden], logits float32 [N, E], is_padding bool [N]."""

    x: Tensor
    logits: Tensor
    is_padding: Tensor


def route(logits: Tensor, is_padding: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The k experts of each row: (ids int32 [N, k], weights float32 [N, k]).

    logits: float32 [N, E], E > k. is_padding: bool [N]; such a row gets ids -1 and weights 0.

    A weight is tanh(score - best score left out). It vanishes where the expert ties with the next
    one, so that the layer's output is continuous in its input: whether rounding tips a choice makes
    no difference that is larger than the rounding. Scores 3.0, 2.5, 1.0, 0.2 with k = 2 give
    experts 0 and 1 with weights tanh(2.0) and tanh(1.5).
    """
    best = torch.topk(logits, top_k + 1, dim=-1)
    weights = torch.tanh(best.values[:, :top_k] - best.values[:, top_k:])
    padding = is_padding.unsqueeze(1)
    ids = best.indices[:, :top_k].to(torch.int32).masked_fill_(padding, -1)
    return ids, weights.masked_fill_(padding, 0.0)


async def run_experts(shard: ExpertShard, rows: Rows, context: ForwardContext) -> Tensor:
    """The routed experts' sum of each of T rows, float32 [T, hidden]; zero for padding.

    Without expert parallelism each rank routes its own rows, and TP ranks add what their shares of
    the experts' inner width give. With it TP ranks, which hold the same rows, route a part of them
    each: otherwise a row would be computed, and added, once for each of them.
    """
    tp, parallel = context.tp, context.ep
    if parallel is None:
        return await tp.all_reduce(_local(shard, rows, context))
    mine = Rows(*(_tp_part(tp, part, fill) for part, fill in zip(rows, (0, 0, True), strict=True)))
    way = _all_to_all if parallel.all2all_backend == "all_to_all" else _all_gather
    part = await way(shard, mine, context, parallel.group)
    return (await tp.all_gather(part))[: rows.x.shape[0]]


def _tp_part(tp: Group, rows: Tensor, fill: float) -> Tensor:
    """This TP rank's C rows. The last rank's may run past the end: those are made up of `fill`.

    5 rows over 2 ranks: rows 0, 1, 2 and rows 3, 4 and one more.
    """
    if tp.size == 1:
        return rows
    count = -(-rows.shape[0] // tp.size)
    missing = count * tp.size - rows.shape[0]
    if missing:
        rows = torch.cat((rows, rows.new_full((missing, *rows.shape[1:]), fill)))
    return rows[tp.rank * count : (tp.rank + 1) * count]


def _local(shard: ExpertShard, rows: Rows, context: ForwardContext) -> Tensor:
    ids, weights = route(rows.logits, rows.is_padding, shard.top_k)
    return _compute(shard, rows.x, ids, weights, ids, context)


async def _all_gather(
    shard: ExpertShard, rows: Rows, context: ForwardContext, group: Group
) -> Tensor:
    """`allgather_reducescatter`: every rank sees all rows and computes what its experts give.

    The gathered rows hold the padding of every rank, at the end of each rank's C: only the gathered
    mask says where. 2 ranks of 3 rows, 1 and 2 of them real: the mask is 0 1 1 0 0 1.
    """
    x = await group.all_gather(rows.x)
    logits = await group.all_gather(rows.logits)
    ids, weights = route(logits, await gather_padding(group, rows.is_padding), shard.top_k)
    return await group.reduce_scatter(_compute(shard, x, ids, weights, ids, context))


async def gather_padding(group: Group, is_padding: Tensor) -> Tensor:
    """The padding flags of all ranks' rows, bool [W * C], in the order of the gathered rows."""
    return await group.all_gather(is_padding)


async def _all_to_all(
    shard: ExpertShard, rows: Rows, context: ForwardContext, group: Group
) -> Tensor:
    """`all_to_all`: each row goes to the ranks that hold its experts, and their sums come back.

    Every rank has room for C rows from every other one, which is what it can get at most, so that
    shapes do not depend on what is routed. Room that stays empty has experts -1.
    """
    (num_rows, hidden), num_ranks = rows.x.shape, group.size
    ids, weights = route(rows.logits, rows.is_padding, shard.top_k)
    places = send_places(ids, num_ranks, shard.num_experts)
    ranks = torch.arange(num_ranks, device=ids.device).view(1, -1, 1)
    ids_to = torch.where(_owners(ids, shard.num_experts) == ranks, ids.unsqueeze(1), -1)
    each = (num_rows, num_ranks, -1)
    sent = (
        _scatter(rows.x.unsqueeze(1).expand(each), places, 0.0),
        _scatter(ids_to, places, -1),
        _scatter(weights.unsqueeze(1).expand(each), places, 0.0),
    )
    x, ids_in, weights_in = [(await group.all_to_all(part)).flatten(0, 1) for part in sent]
    back = await group.all_to_all(_compute(shard, x, ids_in, weights_in, ids, context))
    back = back.flatten(0, 1)
    back = torch.cat((back, back.new_zeros((1, hidden))))  # what was not sent adds nothing
    return back.index_select(0, places).view(num_rows, num_ranks, hidden).sum(1)


def _owners(ids: Tensor, num_local: int) -> Tensor:
    """The rank that holds each expert, [C, 1, k]; -1 for none."""
    return ids.div(num_local, rounding_mode="floor").unsqueeze(1)


def send_places(ids: Tensor, num_ranks: int, num_local: int) -> Tensor:
    """Where each row goes in what a rank sends, int64 [C * W], row after row.

    ids: int32 [C, k]. To rank w a row goes at w * C + n, where n rows before it go there, too; at
    W * C, beyond the end, if w has none of its experts. 2 ranks of 4 experts and rows with experts
    [0, 5], [-1, -1] and [6, 7] give 0 and 3, then 6 and 6, then 6 and 4.
    """
    num_rows = ids.shape[0]
    ranks = torch.arange(num_ranks, device=ids.device)
    goes = (_owners(ids, num_local) == ranks.view(1, -1, 1)).any(-1)  # [C, W]
    places = goes.cumsum(0).sub_(1).add_(ranks * num_rows)
    return places.masked_fill_(goes.logical_not(), num_ranks * num_rows).view(-1)


def _scatter(values: Tensor, places: Tensor, fill: float) -> Tensor:
    """values [C, W, n] at their places in [W * C, n]; `fill` where nothing is sent."""
    num_places, width = places.shape[0], values.shape[-1]
    out = values.new_full((num_places + 1, width), fill)
    # What goes nowhere, padding among it, meets in the one place that is cut off.
    out.index_copy_(0, places, values.reshape(num_places, width))
    return out[:num_places]


def _compute(
    shard: ExpertShard,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    routed: Tensor,
    context: ForwardContext,
) -> Tensor:
    """This rank's part of each row's sum; routed: the choices that this rank made, for the log."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    num_rows = torch.empty(shard.num_experts, dtype=torch.int32, device=x.device)
    args = (shard.w_gate_up, shard.w_down, shard.first_expert, out, num_rows)
    moe_experts(x, ids, weights, *args)
    if context.routing is not None:
        context.routing.put(shard.layer, routed, num_rows)
    return out
