"""The clock that leaves out waiting for a CPU, and nothing else."""

import os
import subprocess
import sys
import time

import pytest
import torch

from pcpbench.device import own_time
from pcpbench.device.clock import HostClock
from pcpbench.device.own_time import OwnTimeClock, clock_name, has_account, make_own_clock

CPU = torch.device("cpu")
needs_account = pytest.mark.skipif(
    not has_account(), reason="this kernel keeps no account of waiting threads: run on Linux"
)


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@needs_account
def test_sleeping_and_computing_count_in_full():
    clock = OwnTimeClock()
    start = clock.now()
    time.sleep(0.03)
    slept = clock.now()
    spin(0.02)
    done = clock.now()
    assert slept - start >= 0.03
    assert done - slept >= 0.02


@needs_account
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this platform")
def test_waiting_for_a_neighbour_on_the_same_core_does_not_count():
    cores = os.sched_getaffinity(0)
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(neighbour.pid, {min(cores)})
        os.sched_setaffinity(0, {min(cores)})
        time.sleep(0.1)
        clock = OwnTimeClock()
        start, began, worked = clock.now(), time.perf_counter(), time.thread_time()
        while time.perf_counter() - began < 0.3:
            pass
        own, wall = clock.now() - start, time.perf_counter() - began
        worked = time.thread_time() - worked
    finally:
        os.sched_setaffinity(0, cores)
        neighbour.kill()
        neighbour.wait()
    assert worked < 0.9 * wall  # the neighbour did have the core
    assert own == pytest.approx(worked, abs=0.02)


@needs_account
def test_it_never_goes_back():
    clock = OwnTimeClock()
    times = [clock.now() for _ in range(5000)]
    assert times == sorted(times)


def test_elsewhere_it_is_the_wall_clock(monkeypatch, tmp_path):
    monkeypatch.setattr(own_time, "_ACCOUNT", tmp_path / "none")
    assert clock_name(CPU) == "wall"
    assert type(make_own_clock(CPU)) is HostClock
    assert clock_name(torch.device("cuda")) == "wall"
