"""The kernel floor on a clock that only moves when told: no test here depends on real time."""

import pytest
import torch

from pcpbench.device import clock as clock_module
from pcpbench.device.clock import (
    HostClock,
    HostKernels,
    MeasuredKernels,
    _covered,
    one_thread,
)

_library = torch.library.Library("pcpbench_clock_test", "DEF")
_library.define("work(Tensor x) -> Tensor")


class FakeTime:
    """Seconds that pass only in `spend`."""

    def __init__(self):
        self.seconds = 0.0
        self.seconds_of_work = 5.0

    def perf_counter(self):
        return self.seconds

    def spend(self, seconds):
        self.seconds += seconds


FAKE = FakeTime()


def _work(x):
    FAKE.spend(FAKE.seconds_of_work)
    return x.clone()


_library.impl("work", _work, "CompositeExplicitAutograd")


@pytest.fixture
def host_clock(monkeypatch):
    monkeypatch.setattr(clock_module, "time", FAKE)
    return HostClock()


def test_time_in_kernels_is_floor_and_time_in_python_is_not(host_clock):
    x = torch.ones(3)

    def step():
        FAKE.spend(100.0)
        torch.ops.pcpbench_clock_test.work(x)
        FAKE.spend(100.0)
        torch.ops.pcpbench_clock_test.work(x)

    assert host_clock.kernels(step).seconds() == 10.0


def test_the_bare_cost_of_a_call_is_no_kernel_time(host_clock, monkeypatch):
    x = torch.ones(3)
    kernels = host_clock.kernels(lambda: torch.ops.pcpbench_clock_test.work(x))
    for bare_s, floor_s in ((2.0, 3.0), (50.0, -45.0)):
        monkeypatch.setattr(
            clock_module, "_bare_seconds", lambda num, now, bare_s=bare_s: num * bare_s
        )
        assert kernels.seconds() == floor_s


def test_an_interruption_of_the_bare_calls_is_no_kernel_time(host_clock, monkeypatch):
    x = torch.ones(3)
    kernels = host_clock.kernels(lambda: torch.ops.pcpbench_clock_test.work(x))
    bare_s = iter([0.5, 400.0, 0.5])
    monkeypatch.setattr(clock_module, "_bare_seconds", lambda num, now: next(bare_s))
    assert kernels.seconds() == 4.5


def test_a_floor_is_taken_when_it_is_asked_for(host_clock, monkeypatch):
    """A machine that slows down does so for a step and for its floor."""
    x = torch.ones(3)
    kernels = host_clock.kernels(lambda: torch.ops.pcpbench_clock_test.work(x))
    monkeypatch.setattr(FAKE, "seconds_of_work", 8.0)
    assert kernels.seconds() == 8.0


def test_kernels_that_would_keep_much_memory_are_measured_at_once(host_clock, monkeypatch):
    big = torch.ones(1000)
    monkeypatch.setattr(clock_module, "MAX_KEPT_BYTES", 7999)

    def work(x, times=1):
        for _ in range(times):
            x = torch.ops.pcpbench_clock_test.work(x)

    # Memory that was there before does not count, nor do views.
    assert isinstance(host_clock.kernels(lambda: work(big.view(10, 100))), HostKernels)
    assert host_clock.kernels(lambda: work(big, 2)) == MeasuredKernels(10.0)


def test_a_replay_is_floored_like_an_eager_step(host_clock):
    """A graph's kernels reach the instrument one by one, or a replay would have no kernel time."""
    from pcpbench.device.host_graph import HostGraphBackend

    x, out = torch.ones(3), torch.zeros(3)
    backend = HostGraphBackend()
    graph, _ = backend.capture(
        lambda: out.copy_(torch.ops.pcpbench_clock_test.work(x) + 1), backend.new_pool()
    )
    assert host_clock.kernels(graph.replay).seconds() == 5.0
    assert out.tolist() == [2.0] * 3


def test_a_floor_leaves_everything_as_one_run_leaves_it(host_clock):
    """The kernels are issued again and again; cursors must not run away, nor indices go astray."""
    cursor, table, out = torch.zeros(2, dtype=torch.int64), torch.arange(10.0), torch.zeros(2)

    def step():
        index = cursor + 2
        index.mul_(3)  # an index that is changed in place, and used after
        torch.index_select(table, 0, index, out=out)
        cursor.add_(1)

    with torch.inference_mode():
        host_clock.kernels(step).seconds()
    assert cursor.tolist() == [1, 1]
    assert out.tolist() == [6.0, 6.0]


def test_overlapping_kernels_count_once():
    assert _covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0
    assert _covered([(1.0, 5.0), (2.0, 3.0)]) == 4.0
    assert _covered([]) == 0.0


def test_one_thread_is_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(torch.device("cpu")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
