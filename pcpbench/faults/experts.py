"""Faults of MoE layers: padding that is routed, rows that go astray, sums that are not whose.

They belong to several classes. Those in the model's code are there from before the capture, so that
eager and replayed arms compute the same wrong thing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench.device.collectives import Group, InProcessGroup
from pcpbench.engine import engine
from pcpbench.engine.microbatch import Microbatches
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import shipped
from pcpbench.faults.fault import PARTITION_DRIFT, Setting, Site
from pcpbench.model import expert_dispatch, moe
from pcpbench.model.context import ForwardContext

EP: Final = Setting(
    model="tiny-moe",
    expert_parallel=True,
    all2all_backend="allgather_reducescatter",
    scenario="moe-padded-ranks",
)
EXCHANGE: Final = replace(EP, all2all_backend="all_to_all")
EP_CUT: Final = replace(EP, microbatch=True, scenario="s16-microbatch-cut")

Route = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
RunExperts = Callable[..., Coroutine[Any, Any, Tensor]]


def _route(
    site: Site, faulty: Callable[[Route, Tensor, Tensor, int], tuple[Tensor, Tensor]]
) -> None:
    def counted(route: Route, *args: Any) -> tuple[Tensor, Tensor]:
        site.hit()
        return faulty(route, *args)

    site.wrap(expert_dispatch, "route", counted)


def padding_routed(site: Site) -> None:
    """The mask is not applied: padding rows go to the experts that their zeros score best."""
    _route(site, lambda route, logits, mask, k: route(logits, torch.zeros_like(mask), k))


def padding_weightless(site: Site) -> None:
    """Padding rows are sent to expert 0 and up with weight 0, where they should not be sent."""

    def faulty(route: Route, logits: Tensor, mask: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids, weights = route(logits, mask, k)
        spare = torch.arange(k, dtype=ids.dtype, device=ids.device)
        return torch.where(mask.unsqueeze(1), spare, ids), weights

    _route(site, faulty)


def weights_of_next_row(site: Site) -> None:
    """Each row's experts are weighted as those of the row before it."""

    def faulty(route: Route, *args: Any) -> tuple[Tensor, Tensor]:
        ids, weights = route(*args)
        return ids, weights.roll(1, 0)

    _route(site, faulty)


def weights_without_margin(site: Site) -> None:
    """A weight is the score itself, not how far it lies above the best one left out."""

    def faulty(route: Route, logits: Tensor, mask: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids, _ = route(logits, mask, k)
        weights = torch.topk(logits, k, dim=-1).values.tanh()
        return ids, weights.masked_fill(mask.unsqueeze(1), 0.0)

    _route(site, faulty)


def mask_of_own_rows(site: Site) -> None:
    """Gathered rows are masked with the rank's own flags, repeated for each rank."""

    async def faulty(_: Any, group: Group, is_padding: Tensor) -> Tensor:
        site.hit()
        return is_padding.repeat(group.size)

    site.wrap(expert_dispatch, "gather_padding", faulty)


def mask_shifted_by_a_rank(site: Site) -> None:
    """Gathered rows are masked with the flags of the rank before."""

    async def faulty(
        gather: Callable[..., Coroutine[Any, Any, Tensor]], group: Group, is_padding: Tensor
    ) -> Tensor:
        site.hit()
        return (await gather(group, is_padding)).roll(is_padding.shape[0], 0)

    site.wrap(expert_dispatch, "gather_padding", faulty)


def mask_recreated(site: Site) -> None:
    """Padding flags are written to new memory after capture; graphs read the old."""
    for worker in site.workers(site.replaying):
        site.set(worker.local_buffers, "is_padding", worker.local_buffers.is_padding.clone())
        site.hit()


def experts_of_next_rank(site: Site) -> None:
    """A rank takes its experts for those of the next rank, by number."""

    def faulty(run: Callable[..., None], *args: Any) -> None:
        x, ids, weights, w_gate_up, w_down, first, *results = args
        count = w_gate_up.shape[0]
        site.hit()
        run(x, ids, weights, w_gate_up, w_down, (first + count) % (2 * count), *results)

    site.wrap(expert_dispatch, "moe_experts", faulty)


def summed_over_tp(site: Site) -> None:
    """TP ranks add their whole results where each holds the same."""

    async def faulty(run: RunExperts, shard: Any, rows: Any, context: ForwardContext) -> Tensor:
        out = await run(shard, rows, context)
        if context.tp.size > 1:
            site.hit()
        return out * context.tp.size

    site.wrap(moe, "run_experts", faulty)


def answers_in_reverse(site: Site) -> None:
    """What an exchange brings is read from the last rank to the first."""

    async def faulty(
        exchange: Callable[..., Coroutine[Any, Any, Tensor]], self: InProcessGroup, *args: Any
    ) -> Tensor:
        site.hit()
        return (await exchange(self, *args)).flip(0)

    site.wrap(InProcessGroup, "all_to_all", faulty)


def half_the_room(site: Site) -> None:
    """A rank sends another at most half its rows; those beyond are dropped."""

    def faulty(place: Callable[..., Tensor], ids: Tensor, num_ranks: int, count: int) -> Tensor:
        places = place(ids, num_ranks, count)
        room = ids.shape[0]
        site.hit()
        return places.masked_fill(places % room >= -(-room // 2), room * num_ranks)

    site.wrap(expert_dispatch, "send_places", faulty)


def mask_of_first_half(site: Site) -> None:
    """Both microbatches take their padding flags from the front of the batch."""

    def faulty(
        forward: RunExperts, self: Microbatches, model: Any, part: Any, *args: Any
    ) -> Coroutine[Any, Any, Tensor]:
        first = self.parts[0].batch.is_padding
        count = part.batch.is_padding.shape[0]
        if count <= first.shape[0]:
            site.hit()
            part = replace(part, batch=replace(part.batch, is_padding=first[:count]))
        return forward(self, model, part, *args)

    site.wrap(Microbatches, "_forward_one", faulty)


def _skipped(site: Site, skips: Callable[[ForwardContext], bool]) -> None:
    async def faulty(run: RunExperts, shard: Any, rows: Any, context: ForwardContext) -> Tensor:
        if not skips(context):
            return await run(shard, rows, context)
        site.hit()
        return torch.zeros_like(rows.x, dtype=torch.float32)

    site.wrap(moe, "run_experts", faulty)


def idle_rank_skips_experts(site: Site) -> None:
    """A rank without tokens leaves the experts out, and with them the exchange with others."""
    idle: set[int] = set()

    def forward(run: RunExperts, self: Worker, **kw: Any) -> Coroutine[Any, Any, Tensor]:
        assert self.local_batch is not None
        (idle.discard if self.local_batch.num_tokens else idle.add)(id(self.context))
        return run(self, **kw)

    site.wrap(Worker, "forward", forward)
    _skipped(site, lambda context: id(context) in idle)


def left_out_at_capture(site: Site) -> None:
    """A dummy batch has nothing to route, so its experts are left out; graphs never have them."""
    dummies: set[int] = set()

    def stage(run: Callable[..., Any], worker: Worker, *args: Any) -> Any:
        dummies.add(id(worker.context))
        return run(worker, *args)

    def prepare(run: Callable[..., Any], self: Worker, *args: Any) -> Any:
        dummies.discard(id(self.context))
        return run(self, *args)

    site.wrap(engine, "stage_dummy_batch", stage)
    site.wrap(Worker, "prepare_inputs", prepare)
    _skipped(site, lambda context: id(context) in dummies)


FAULTS: Final = (
    shipped("K07", "moe-padding-routed", "Padding rows are routed like tokens.", padding_routed,
            "C21", setting=EP, at_capture=True),
    shipped("K07", "moe-padding-with-weight-zero", "Padding rows are computed by experts, with "
            "weight 0.", padding_weightless, "C21", setting=EXCHANGE, at_capture=True),
    shipped("K09", "moe-mask-of-own-rows", "Gathered rows are masked with the rank's own padding.",
            mask_of_own_rows, "C21", setting=EP, at_capture=True),
    shipped("K26", "moe-mask-shifted-by-a-rank", "Gathered rows are masked with the padding of the "
            "rank before.", mask_shifted_by_a_rank, "C21", setting=EP, at_capture=True),
    shipped("K10", "moe-mask-recreated", "Padding flags are in new memory after the capture; "
            "graphs mask with the old.", mask_recreated, "C8", "C13", "C21", setting=EP),
    shipped("K26", "moe-experts-of-next-rank", "A rank takes its experts for those of the next "
            "rank.", experts_of_next_rank, "C21", PARTITION_DRIFT, setting=EP, at_capture=True),
    shipped("K26", "moe-exchange-reversed", "What an exchange brings is read in reverse rank "
            "order.", answers_in_reverse, "C21", PARTITION_DRIFT, setting=EXCHANGE,
            at_capture=True),
    shipped("K09", "moe-half-the-room", "A rank sends at most half its rows to another and drops "
            "the rest.", half_the_room, "C21", setting=EXCHANGE, at_capture=True),
    shipped("K26", "moe-summed-over-tp", "TP ranks add results that each of them has whole.",
            summed_over_tp, PARTITION_DRIFT, setting=replace(EP, tp=2), at_capture=True, min_tp=2),
    shipped("K33", "moe-weights-of-next-row", "Experts are weighted as those of another row.",
            weights_of_next_row, "C18", PARTITION_DRIFT, setting=EP, at_capture=True),
    shipped("K33", "moe-weights-without-margin", "An expert's weight is its score, not its lead "
            "over the first one left out.", weights_without_margin, "C18", setting=EP,
            at_capture=True),
    shipped("K27", "ubatch-moe-mask-of-first-half", "Both microbatches mask with the padding of "
            "the first.", mask_of_first_half, "C21", setting=EP_CUT, at_capture=True),
    shipped("K25", "moe-idle-rank-skips-experts", "A rank without tokens skips the experts and "
            "their collectives.", idle_rank_skips_experts, "C11",
            setting=replace(EP, scenario="s14-uneven-ranks")),
    shipped("K16", "moe-left-out-at-capture", "Experts are left out for a batch of padding, and so "
            "are missing in what was captured on one.", left_out_at_capture, "C13", "C21",
            setting=EP, at_capture=True),
)  # fmt: skip
