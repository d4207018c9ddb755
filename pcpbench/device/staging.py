"""Host arrays on their way to the device. Owns the staging memory; knows nothing of what it holds.

A staged array is written with numpy and sent with one copy. The device side is never the host side,
on a CPU neither: what numpy writes for the next step must not show in this step's tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A device copy of a host array that shares no memory with it."""
    if device.type == "cpu":
        return torch.from_numpy(array).clone()
    return torch.from_numpy(array).to(device)


class HostStaging:
    """A fixed device buffer with host memory beside it that is filled anew each step.

    On a device with pinned memory the host side is a ring of two, so that the host can fill one
    while the copy of the other may still be under way; a slot is written only after its last copy
    has ended.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        num_slots = 2 if self._pinned else 1
        self._hosts = [
            torch.empty(num_elements, dtype=dtype, pin_memory=self._pinned)
            for _ in range(num_slots)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._events: list[torch.cuda.Event | None] = [None] * num_slots
        self._slot = 0
        self._device = torch.empty(num_elements, dtype=dtype, device=device)

    @property
    def num_elements(self) -> int:
        """Elements that can be staged at once."""
        return self._device.shape[0]

    def array(self) -> NDArray[Any]:
        """The host array to fill before the next `push`."""
        event = self._events[self._slot]
        if event is not None:
            event.synchronize()
        return self._arrays[self._slot]

    def push(self, num_elements: int) -> Tensor:
        """Send the first elements of `array()`; returns the device's copy, valid until the next."""
        device = self._device[:num_elements]
        device.copy_(self._hosts[self._slot][:num_elements], non_blocking=self._pinned)
        if self._pinned:
            self._events[self._slot] = torch.cuda.current_stream(device.device).record_event()
            self._slot = 1 - self._slot
        return device
