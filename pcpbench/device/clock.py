"""Time: the host clock, and the kernel floor of a stretch of code (SPEC 13).

Owns how launch overhead is measured. On a CPU operations run synchronously, so a step's wall time
is kernel time plus everything Python and the dispatcher do around it. The kernel floor is the time
of the same kernels on the same buffers and nothing else: the operations of one run are recorded as
they reach the dispatcher, and issued again back to back whenever the floor is asked for: right
after a timed step, so that both meet the machine at the same speed. What as many operations cost
without doing any work is timed beside them and subtracted, because a launch is not kernel time. On
an accelerator the floor is the device's busy time as its profiler reports it. Knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from pcpbench.device.host_graph.torch_private import QuietDispatchMode

NUM_FLOOR_RUNS = 3
MAX_KEPT_BYTES = 32 << 20
"""Most bytes of a run's intermediate results for its kernels to be kept and issued again later."""


class Kernels(Protocol):
    """The kernels of one run of a stretch of code."""

    def seconds(self) -> float:
        """What they take, measured now where they can be issued again."""


@dataclass(frozen=True)
class MeasuredKernels:
    """Kernels that were measured once and are gone."""

    once_s: float

    def seconds(self) -> float:
        """What they took."""
        return self.once_s


class Clock(Protocol):
    """What times a step."""

    def now(self) -> float:
        """Seconds on a monotonic clock."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def kernels(self, fn: Callable[[], None]) -> Kernels:
        """Run `fn` once, under the instrument, and return its kernels."""


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class _CallRecorder(QuietDispatchMode):
    """Keeps every operation of a run with its arguments, and what mutated storages held before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.num_bytes = 0
        """Bytes of the run's intermediate results, which kept arguments may hold alive."""

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
        result = func(*args, **kwargs)
        if not (func._schema.is_mutable or func.is_view):
            self.num_bytes += sum(x.nbytes for x in tree_leaves(result) if hasattr(x, "nbytes"))
        return result

    def _keep_mutated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in self._before:
                        copy = storage.clone()  # type: ignore[no-untyped-call]
                        self._before[storage.data_ptr()] = (storage, copy)

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


class HostKernels:
    """The operations of one run on a CPU, ready to be issued again on the same buffers."""

    def __init__(
        self, recorder: _CallRecorder, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._recorder, self._now = recorder, now

    def seconds(self) -> float:
        """The least seconds of a few more issues, less the least of as many bare calls beside them.

        The least of each on its own: what interrupts the bare calls must not count as less kernel
        time. Every storage that the operations write holds afterwards what it held at the call.
        """
        held, calls = self._recorder.mutated(), self._recorder.calls
        issued, bare = [], []
        with torch.inference_mode():
            for _ in range(NUM_FLOOR_RUNS):
                self._recorder.rewind()
                issued.append(_seconds_of(calls, self._now))
                bare.append(_bare_seconds(len(calls), self._now))
        for storage, before in held:
            storage.copy_(before)
        return min(issued) - min(bare)


class HostClock:
    """Times steps on a CPU.

    Method error: operations differ in how they are called (one tensor or several, with or without
    keyword arguments) by some tenths of a microsecond, so the floor of n operations is known to
    about n x 0.5 us; the difference between two floors of the same operations is far better. And
    the floor's kernels find their data and code in the caches, as those of a step between other
    work do not: what a cold cache costs counts as launch overhead.
    """

    def now(self) -> float:
        """Seconds on a monotonic clock."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def kernels(self, fn: Callable[[], None]) -> Kernels:
        """Run `fn` once and keep its operations; where they hold too much memory, time them now."""
        with _CallRecorder() as recorder:
            fn()
        kernels = HostKernels(recorder, self.now)
        if recorder.num_bytes > MAX_KEPT_BYTES:
            return MeasuredKernels(kernels.seconds())
        return kernels


class AcceleratorClock:
    """Times steps on an accelerator: host time, and device busy time from the profiler."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Seconds on the host's monotonic clock."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.accelerator.synchronize(self._device)

    def kernels(self, fn: Callable[[], None]) -> Kernels:
        """Run `fn` once under the profiler, which tells how long device kernels were busy."""
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
        return MeasuredKernels(1e-6 * _covered(spans))


def make_clock(device: torch.device) -> Clock:
    """The clock for a device."""
    return HostClock() if device.type == "cpu" else AcceleratorClock(device)


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


def _seconds_of(calls: list[Call], now: Callable[[], float]) -> float:
    start = now()
    for func, args, kwargs in calls:
        func(*args, **kwargs)
    return now() - start


def _bare_seconds(num_calls: int, now: Callable[[], float]) -> float:
    """Seconds of so many operations on tensors without elements, issued as a floor's are."""
    left, right, out = torch.empty(0), torch.empty(0), torch.empty(0)
    call = (torch.ops.aten.add.out, (left, right), {"out": out})
    return _seconds_of([call] * num_calls, now)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: [0, 2], [1, 3], [5, 6] cover 4."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
