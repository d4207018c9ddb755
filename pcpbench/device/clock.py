"""Time: the host clock, and the kernel floor of a stretch of code (SPEC 13).

Owns how launch overhead is measured. On a CPU operations run synchronously, so a step's wall time
is kernel time plus everything Python and the dispatcher do around it. The kernel floor is the time
of the same kernels on the same buffers and nothing else: the operations of one run are recorded as
they reach the dispatcher, then issued again back to back a few times. What an operation costs
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

from pcpbench.device.host_graph.torch_private import QuietDispatchMode

NUM_FLOOR_RUNS = 5


class Clock(Protocol):
    """What times a step."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def kernel_floor(self, fn: Callable[[], None]) -> float:
        """Run `fn` once and return the seconds that its kernels took."""


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class _CallRecorder(QuietDispatchMode):
    """Keeps every operation of a run with its arguments, and what mutated storages held before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._keep_mutated(func, args, kwargs)
        self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    def _keep_mutated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    copy = storage.clone()  # type: ignore[no-untyped-call]
                    self._before.setdefault(storage.data_ptr(), (storage, copy))

    def mutated(self) -> list[tuple[torch.UntypedStorage, torch.UntypedStorage]]:
        """Every storage that was written to, with a copy of what it holds now."""
        return [
            (storage, storage.clone())  # type: ignore[no-untyped-call]
            for storage, _ in self._before.values()
        ]

    def rewind(self) -> None:
        """Put back what the run's mutated storages held before it."""
        for storage, before in self._before.values():
            storage.copy_(before)


class HostClock:
    """Times steps on a CPU.

    call_s: what one operation costs that has no elements to work on, issued as the floor issues it.
    Method error: operations differ in how they are called (one tensor or several, with or without
    keyword arguments) by some tenths of a microsecond, so the floor of n operations is known to
    about n x 0.5 us; the difference between two floors of the same operations is far better. And
    the floor's kernels find their data and code in the caches, as those of a step between other
    work do not: what a cold cache costs counts as launch overhead.
    """

    def __init__(self) -> None:
        self.call_s = _empty_call_s()

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def kernel_floor(self, fn: Callable[[], None]) -> float:
        """Run `fn` once; the least seconds its operations take again, less the bare calls.

        Whatever `fn` wrote holds afterwards what it held after that one run.
        """
        with _CallRecorder() as recorder:
            fn()
        after = recorder.mutated()
        with torch.inference_mode():
            seconds = min(self._issue(recorder) for _ in range(NUM_FLOOR_RUNS))
        for storage, held in after:
            storage.copy_(held)
        return max(0.0, seconds - len(recorder.calls) * self.call_s)

    def _issue(self, recorder: _CallRecorder) -> float:
        recorder.rewind()
        return _seconds_of(recorder.calls)


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


def _seconds_of(calls: list[Call]) -> float:
    start = time.perf_counter()
    for func, args, kwargs in calls:
        func(*args, **kwargs)
    return time.perf_counter() - start


def _empty_call_s(num_calls: int = 200, num_rounds: int = 20) -> float:
    """Least seconds of one operation on tensors without elements, issued as a floor is."""
    left, right, out = torch.empty(0), torch.empty(0), torch.empty(0)
    calls: list[Call] = [(torch.ops.aten.add.out, (left, right), {"out": out})] * num_calls
    with torch.inference_mode():
        return min(_seconds_of(calls) for _ in range(num_rounds)) / num_calls


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: [0, 2], [1, 3], [5, 6] cover 4."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
