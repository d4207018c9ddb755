"""Time: the host clock, and the kernel floor of a stretch of code (SPEC 13).

Owns how launch overhead is measured. On a CPU operations run synchronously, so a step's wall time
is kernel time plus everything Python and the dispatcher do around it. The kernel floor is measured
in a run of its own: a dispatch mode times every operation that reaches it. What an operation costs
without doing any work (the call itself, measured on this machine at start) is subtracted, because a
launch is not kernel time. On an accelerator the floor is the device's busy time as its profiler
reports it. Knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Clock(Protocol):
    """What times a step."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def kernel_floor(self, fn: Callable[[], None]) -> float:
        """Run `fn` once and return the seconds that its kernels took."""


class _OpTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the time spent inside dispatched operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self.num_ops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every operation a wrapper that is of use only under torch.compile."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter()
        result = func(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        self.num_ops += 1
        return result


class HostClock:
    """Times steps on a CPU.

    call_s: what one operation costs that has no elements to work on, timed as the floor times it.
    Method error: operations differ in how they are called (one tensor or several, with or without
    keyword arguments), by a few tenths of a microsecond each, so the floor of n operations is known
    to about n x 0.3 us; a difference between two floors of the same operations is far better.
    """

    def __init__(self) -> None:
        self.call_s = _empty_call_s()

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def kernel_floor(self, fn: Callable[[], None]) -> float:
        """Run `fn` once; seconds inside its operations beyond the bare cost of calling them."""
        with _OpTimer() as timer:
            fn()
        seconds: float = timer.seconds - timer.num_ops * self.call_s
        return max(0.0, seconds)


class AcceleratorClock:
    """Times steps on an accelerator: host time, and device busy time from the profiler."""

    def now(self) -> float:
        """Seconds on the host's monotonic clock."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait for all streams of the current device."""
        torch.accelerator.synchronize()

    def kernel_floor(self, fn: Callable[[], None]) -> float:
        """Run `fn` once under the profiler; seconds that device kernels were busy."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            fn()
            self.synchronize()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events() or []
            if event.device_type.name != "CPU"
        ]
        return 1e-6 * _covered(spans)


def make_clock(device: torch.device) -> Clock:
    """The clock for a device."""
    return HostClock() if device.type == "cpu" else AcceleratorClock()


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Run on one intra-op thread on a CPU.

    A second thread beside a busy neighbour can turn a step of 0.4 ms into one of 300 ms.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _empty_call_s(num_rounds: int = 400) -> float:
    """Median seconds of one timed operation on tensors without elements."""
    left, right, out = torch.empty(0), torch.empty(0), torch.empty(0)
    samples: list[float] = []
    with _OpTimer() as timer, torch.inference_mode():
        for _ in range(num_rounds):
            before = timer.seconds
            torch.add(left, right, out=out)
            samples.append(timer.seconds - before)
    samples.sort()
    return samples[len(samples) // 2]


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: [0, 2], [1, 3], [5, 6] cover 4."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
