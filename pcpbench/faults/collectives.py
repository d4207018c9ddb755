"""Faults of collectives: what a rank calls depends on what it alone holds (K25)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench.device.collectives import InProcessGroup
from pcpbench.engine.sampled import Sampled
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import DCP, PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.faults.passes import changed_metadata
from pcpbench.model.mla import MLAAttention

UNEVEN: Final = replace(PCP, scenario="s14-uneven-ranks")
IDLE_RANK: Final = replace(PCP, scenario="s3-idle-and-reuse")
SHORT: Final = replace(DCP, scenario="s2-capture-edges")

Attend = Callable[..., Coroutine[Any, Any, None]]


def idle_rank_skips_gather(site: Site) -> None:
    """A rank without tokens leaves attention out, its gather included."""

    async def faulty(
        forward: Callable[..., Coroutine[Any, Any, Tensor]], self: Worker, **kw: Any
    ) -> Tensor:
        assert self.local_batch is not None
        if self.local_batch.num_tokens:
            return await forward(self, **kw)
        site.hit()
        with changed_metadata(self, lambda _: None):
            return await forward(self, **kw)

    site.wrap(Worker, "forward", faulty)


def gather_of_real_rows(site: Site) -> None:
    """Each rank gathers the hidden states of its real tokens only."""

    async def faulty(
        sample: Callable[..., Coroutine[Any, Any, Sampled]], self: Worker, hidden: Tensor, plan: Any
    ) -> Sampled:
        assert self.local_batch is not None
        num_tokens = self.local_batch.num_tokens
        if num_tokens < hidden.shape[0]:
            site.hit()
        return await sample(self, hidden[:num_tokens], plan)

    site.wrap(Worker, "sample", faulty)


def _attend(site: Site, skips: Callable[[MLAAttention, Any], bool]) -> None:
    async def faulty(attend: Attend, self: MLAAttention, *args: Any) -> None:
        out, context = args[2], args[4]
        if context.metadata is None or not skips(self, context):
            return await attend(self, *args)
        site.hit()
        out.zero_()
        return None

    site.wrap(MLAAttention, "attend", faulty)


def layer_skipped_on_one_rank(site: Site) -> None:
    """Rank 1 leaves out the attention of the second layer."""
    _attend(site, lambda self, context: context.rank == 1 and self.layer == 1)


def empty_share_skips_attention(site: Site) -> None:
    """A rank whose share of all rows is empty leaves out attention and its gathers."""

    def skips(_: MLAAttention, context: Any) -> bool:
        lengths = context.metadata.dcp_local_seq_lens
        return lengths is not None and not lengths.any()

    _attend(site, skips)


def wider_on_one_rank(site: Site) -> None:
    """Rank 1 gathers in float64 what the others gather in float32."""

    async def faulty(
        gather: Callable[..., Coroutine[Any, Any, Tensor]],
        self: InProcessGroup,
        tensor: Tensor,
        dim: int = 0,
    ) -> Tensor:
        sent = tensor
        if self.global_rank == 1 and self.size > 1:
            site.hit()
            sent = tensor.to(torch.float64)
        return (await gather(self, sent, dim)).to(tensor.dtype)

    site.wrap(InProcessGroup, "all_gather", faulty)


FAULTS: Final = (
    shipped("K25", "idle-rank-skips-gather", "A PCP rank without tokens skips the gather of KV.",
            idle_rank_skips_gather, "C11", setting=IDLE_RANK, max_dcp=1),
    shipped("K25", "gather-of-real-rows", "Ranks gather their real rows only, which differ in "
            "number.", gather_of_real_rows, "C11", setting=UNEVEN, max_dcp=1),
    shipped("K25", "layer-skipped-on-one-rank", "One rank skips the attention of one layer.",
            layer_skipped_on_one_rank, "C11"),
    shipped("K25", "empty-share-skips-attention", "A DCP rank whose share is empty skips attention "
            "and its collectives.", empty_share_skips_attention, "C11", setting=SHORT),
    shipped("K25", "wider-gather-on-one-rank", "One rank gathers float64 where the others gather "
            "float32.", wider_on_one_rank, "C11"),
)  # fmt: skip
