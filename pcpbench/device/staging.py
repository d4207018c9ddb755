"""Host arrays on their way to the device. Owns the staging memory; knows nothing of what it holds.

What arrives on the device never shares memory with an array that numpy goes on using, on a CPU
neither: what the host writes for the next step must not show in this step's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A device copy of a host array that shares no memory with it."""
    if device.type == "cpu":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).to(device)


class HostStaging:
    """Sends several int arrays to the device as int32 in one copy.

    On a device with pinned memory the host side is a ring of two buffers, so that the host can fill
    one while the copy of the other is under way; one is filled only after its last copy has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hosts = [torch.empty(0, dtype=torch.int32)] * 2
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(self, pieces: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """int32 device copies of the arrays [n], in order; they live as long as they are held."""
        sizes = [len(piece) for piece in pieces]
        if self._device.type != "cuda":
            packed = np.concatenate(pieces, dtype=np.int32, casting="same_kind")
            sent = torch.from_numpy(packed)
            if self._device.type != "cpu":
                sent = sent.to(self._device)
        else:
            sent = self._send_pinned(pieces, sum(sizes))
        return torch.split_with_sizes(sent, sizes)

    def _send_pinned(self, pieces: Sequence[NDArray[Any]], total: int) -> Tensor:
        turn, self._turn = self._turn, 1 - self._turn
        event = self._events[turn]
        if event is not None:
            event.synchronize()
        if self._hosts[turn].shape[0] < total:
            self._hosts[turn] = torch.empty(2 * total, dtype=torch.int32, pin_memory=True)
        host = self._hosts[turn][:total]
        np.concatenate(pieces, out=host.numpy(), casting="same_kind")
        sent = host.to(self._device, non_blocking=True)
        self._events[turn] = torch.cuda.current_stream(self._device).record_event()
        return sent
