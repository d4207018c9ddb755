"""A host clock that stands still while this thread waits for a CPU that others have.

Owns the reading of the scheduler's own account of that wait (Linux: /proc/thread-self/schedstat).
On a shared machine a step of 2 ms is put aside for 4, 8 or 20 ms whenever a neighbour gets the CPU;
that says nothing of the step. What the thread itself does, and what it sleeps or blocks for, counts
in full: a change that makes a step wait for a lock is seen. What a neighbour costs by sharing
caches, memory or a core's second thread stays in the time, too; so does what a hypervisor takes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import torch

from pcpbench.device.clock import Clock, HostClock, make_clock

_ACCOUNT: Final = Path("/proc/thread-self/schedstat")
_MAX_BYTES: Final = 96


class OwnTimeClock(HostClock):
    """Seconds of `time.perf_counter` less those that the thread was ready and did not run.

    For the thread that makes it. Reading it takes a few microseconds.
    """

    def __init__(self) -> None:
        self._account = os.open(_ACCOUNT, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self._account)

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        before = self._waited_ns()
        while True:
            wall = time.perf_counter()
            waited = self._waited_ns()
            if waited == before:  # else the thread was put aside between the two readings
                return wall - 1e-9 * waited
            before = waited

    def _waited_ns(self) -> int:
        return int(os.pread(self._account, _MAX_BYTES, 0).split()[1])


def has_account() -> bool:
    """Whether the kernel keeps the account for this thread."""
    try:
        return len(_ACCOUNT.read_text(encoding="ascii").split()) == 3
    except OSError:
        return False


def clock_name(device: torch.device) -> str:
    """`own` where the gate's clock leaves out waiting for a CPU, `wall` where it cannot."""
    return "own" if device.type == "cpu" and has_account() else "wall"


def make_own_clock(device: torch.device) -> Clock:
    """The best clock for times on a machine that others use too."""
    return OwnTimeClock() if clock_name(device) == "own" else make_clock(device)
