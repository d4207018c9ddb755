"""Tap buffers of one rank: persistent memory that the forward pass copies its results into.

Owns the memory, its names for the address book, and reading a step's share of it back. A copy into
such a buffer is an operation like any other, so that a captured graph makes it in each replay.
Nothing of this exists in an engine that was built without taps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pcpbench.model.presets import ModelShape
from pcpbench.model.taps import TapPoint, tap_points
from pcpbench.records import TapRecord

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TapBuffers:
    """Keeps the latest value of every tap point.

    max_num_tokens: the most rows of a rank-local step; gathered points hold pcp_size times that.
    Memory that a step did not write has all its bits set, which no computation leaves.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        tp_size: int,
        dcp_size: int,
        pcp_size: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.points = tap_points(shape, tp_size, dcp_size)
        self.pcp_size = pcp_size
        self.buffers: dict[tuple[int, str], Tensor] = {}
        for point in self.points:
            rows = max_num_tokens * (pcp_size if point.is_gathered else 1)
            self.buffers[point.layer, point.name] = torch.empty(
                (rows, *point.width), dtype=point.dtype or dtype, device=device
            )
        self.clear()

    def put(self, layer: int, name: str, value: Tensor) -> None:
        """Copy `value` to the front of its buffer; raises KeyError for a point that is none."""
        self.buffers[layer, name][: value.shape[0]].copy_(value)

    def clear(self) -> None:
        """Mark everything as not written."""
        for buffer in self.buffers.values():
            buffer.view(_BITS[buffer.element_size()]).fill_(-1)

    def named(self) -> dict[str, Tensor]:
        """The buffers by name, such as `tap.0.mla_attention.out`, for the address book."""
        return {f"tap.{layer}.{name}": buffer for (layer, name), buffer in self.buffers.items()}

    def records(self, rank: int, num_tokens: int) -> Iterator[TapRecord]:
        """Host copies of the points that the last step wrote, in the order of the forward pass.

        num_tokens: this rank's tokens of that step, after padding.
        """
        for order, point in enumerate(self.points):
            rows = num_tokens * (self.pcp_size if point.is_gathered else 1)
            kept = self.buffers[point.layer, point.name][:rows]
            if not rows or bool((kept.view(_BITS[kept.element_size()]) == -1).all()):
                continue
            yield _record(point, order, rank, _host(kept))


class PartTaps:
    """Taps of one microbatch: what it puts goes where its tokens lie in the whole batch.

    first_token: its first token in that batch, of num_tokens after padding.
    """

    def __init__(self, whole: TapBuffers, first_token: int, num_tokens: int) -> None:
        self._whole, self._first, self._total = whole, first_token, num_tokens
        self._gathered = {(p.layer, p.name) for p in whole.points if p.is_gathered}

    def put(self, layer: int, name: str, value: Tensor) -> None:
        """Copy `value`, gathered rows into each PCP rank's share, as the whole batch's would lie.

        Two ranks of 4 tokens, the second half: its 4 gathered rows go to 2, 3, 6 and 7.
        """
        shares = self._whole.pcp_size if (layer, name) in self._gathered else 1
        width = value.shape[1:]
        rows = self._whole.buffers[layer, name][: self._total * shares]
        mine = value.view(shares, -1, *width)
        last = self._first + mine.shape[1]
        rows.view(shares, self._total, *width)[:, self._first : last].copy_(mine)


def _record(point: TapPoint, order: int, rank: int, values: NDArray[np.generic]) -> TapRecord:
    op, _, tensor = point.name.partition(".")
    return TapRecord(
        rank=rank,
        layer=point.layer,
        op=op,
        tensor=tensor,
        values=values,
        order=order,
        is_gathered=point.is_gathered,
        per_head=point.per_head,
        is_partial=point.is_partial,
    )


def _host(tensor: Tensor) -> NDArray[np.generic]:
    """A host copy; bfloat16, which numpy lacks, as the uint16 of its bits."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view("uint16").copy()
    return tensor.cpu().numpy().copy()
