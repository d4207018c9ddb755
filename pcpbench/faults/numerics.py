"""Faults where padding reaches real numbers (K07), and the noise floor that is no fault (K30).

Injected before capture, so that graphs hold them: a replay then agrees with its padded twin.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pcpbench.engine.input_batch import InputBuffers
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import PADDING_DRIFT, PARTITION_DRIFT, Site
from pcpbench.model.context import ForwardContext
from pcpbench.model.decoder import DecoderLayer
from pcpbench.model.layers import RMSNorm
from pcpbench.model.mla import MLAAttention

EDGES: Final = replace(PCP, scenario="s2-capture-edges")
ONE_SIZE: Final = replace(PCP, scenario="s2-capture-edges", capture_sizes="16")


def amax_over_padding(site: Site) -> None:
    """Activations are quantised by one scale for all rows, padding among them."""

    def faulty(project: Callable[..., Any], self: MLAAttention, x: Tensor, turns: Tensor) -> Any:
        site.hit()
        scale = x.abs().amax() / 127
        return project(self, (x / scale).round() * scale, turns)

    site.wrap(MLAAttention, "project", faulty)


def mean_over_padding(site: Site) -> None:
    """A mean over all rows, padding among them, is taken off every row."""

    def faulty(project: Callable[..., Any], self: MLAAttention, x: Tensor, turns: Tensor) -> Any:
        site.hit()
        return project(self, x - 0.1 * x.mean(0), turns)

    site.wrap(MLAAttention, "project", faulty)


def unwritten_padding(site: Site) -> None:
    """Padding rows hold NaN, and a sum over all rows carries it to the real ones."""

    async def faulty(
        forward: Callable[..., Coroutine[Any, Any, Tensor]],
        self: DecoderLayer,
        x: Tensor,
        *rest: Any,
    ) -> Tensor:
        context: ForwardContext = rest[-1]
        if context.metadata is not None:
            site.hit()
            end = context.metadata.query_start_loc[-1:]
            is_padding = torch.arange(x.shape[0], device=x.device) >= end
            x = x.masked_fill(is_padding.unsqueeze(1), torch.nan)
            x = x + 0.0 * x.sum(0)
        return await forward(self, x, *rest)

    site.wrap(DecoderLayer, "forward", faulty)


def stale_padding_tokens(site: Site) -> None:
    """Token ids and positions of padding keep what the last step left."""

    def faulty(pad: Callable[..., None], self: InputBuffers, *sizes: int) -> None:
        tail = slice(sizes[2], sizes[3])
        stale = self.input_ids[tail].clone(), self.positions[tail].clone()
        pad(self, *sizes)
        self.input_ids[tail].copy_(stale[0])
        self.positions[tail].copy_(stale[1])
        if stale[0].any() or stale[1].any():
            site.hit()

    site.wrap(InputBuffers, "pad", faulty)


def padding_not_flagged(site: Site) -> None:
    """Padding tokens are not marked as such."""

    def faulty(pad: Callable[..., None], self: InputBuffers, *sizes: int) -> None:
        pad(self, *sizes)
        self.is_padding[sizes[2] : sizes[3]].fill_(False)
        if sizes[2] < sizes[3]:
            site.hit()

    site.wrap(InputBuffers, "pad", faulty)


def another_kernel(site: Site) -> None:
    """Batches of a multiple of four rows are normed in another order of rounding."""

    def faulty(forward: Callable[..., Tensor], self: RMSNorm, x: Tensor) -> Tensor:
        if x.shape[0] % 4:
            return forward(self, x)
        site.hit()
        square = x.double().square().sum(-1, keepdim=True) + self.floor.double().square()
        return (x.double() / square.sqrt()).float().mul_(self.scaled_weight).to(x.dtype)

    site.wrap(RMSNorm, "forward", faulty)


def nothing(site: Site) -> None:
    """Change nothing: the setting's single capture size is the difference."""
    site.hit()


FAULTS: Final = (
    shipped("K07", "amax-over-padding", "Activations are quantised by a maximum that includes "
            "padding rows.", amax_over_padding, PADDING_DRIFT, "C16", setting=EDGES,
            at_capture=True),
    shipped("K07", "mean-over-padding", "A mean over all rows, padding included, is taken off the "
            "real ones.", mean_over_padding, PADDING_DRIFT, "C16", setting=EDGES,
            at_capture=True),
    shipped("K07", "unwritten-padding-summed", "NaN in padding rows reaches real ones through a "
            "sum over rows.", unwritten_padding, PADDING_DRIFT, PARTITION_DRIFT, setting=EDGES,
            at_capture=True),
    shipped("K07", "stale-padding-tokens", "Padding tokens keep the ids and positions of the last "
            "step.", stale_padding_tokens, "C3", setting=EDGES),
    shipped("K07", "padding-not-flagged", "Padding tokens are not flagged as padding.",
            padding_not_flagged, "C3", setting=EDGES),
    shipped("K30", "another-kernel-for-padded-size", "Not a fault: some batch sizes round in "
            "another order, padded or not.", another_kernel, setting=EDGES, at_capture=True),
    shipped("K30", "one-large-capture-size", "Not a fault: every decode is padded to 16 rows, and "
            "GEMMs of another size round differently.", nothing, setting=ONE_SIZE),
)  # fmt: skip
