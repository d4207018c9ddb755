"""The graph manager against a backend that only notes what it is asked."""

import pytest
import torch

from pcpbench.capture import GraphManager
from pcpbench.device.address_book import AddressBook
from pcpbench.device.collectives import graph_break
from pcpbench.device.host_graph import HostGraphBackend
from pcpbench.errors import CaptureError
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode

FULL = BatchExecutionDescriptor(CUDAGraphMode.FULL, 2, 2, 1)
PIECEWISE = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 2, None)


class Engine:
    """Two ranks that double a buffer, break (PIECEWISE), and add one."""

    def __init__(self):
        self.source = [torch.ones(2), torch.full((2,), 10.0)]
        self.target = [torch.zeros(2), torch.zeros(2)]
        self.staged, self.eager_calls = [], []

    def prepare_inputs_to_capture(self, descriptor):
        self.staged.append(descriptor)
        return [self._forward(rank, descriptor) for rank in range(2)]

    async def _eager(self, rank, doubled):
        self.eager_calls.append(rank)
        doubled.mul_(3)

    async def _forward(self, rank, descriptor):
        doubled = self.source[rank] * 2
        if descriptor.cg_mode is CUDAGraphMode.PIECEWISE:
            await graph_break(rank, lambda: self._eager(rank, doubled))
        self.target[rank].copy_(doubled + 1)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def manager(engine):
    book = AddressBook()
    for rank in range(2):
        book.register(f"source{rank}", lambda rank=rank: engine.source[rank])
        book.register(f"target{rank}", lambda rank=rank: engine.target[rank])
    return GraphManager(HostGraphBackend(), book)


def test_each_descriptor_is_warmed_up_and_captured_on_inputs_of_its_own(engine, manager):
    seen = []
    manager.capture(engine, [PIECEWISE, FULL], seen.append)
    assert engine.staged == [PIECEWISE, PIECEWISE, FULL, FULL]
    assert engine.eager_calls == [], "attention between segments is skipped in dummy runs"
    assert [graph.descriptor for graph in seen] == [PIECEWISE.label, FULL.label]
    assert [(g.num_segments, g.eager_breaks) for g in seen] == [(2, 1), (1, 0)]
    assert all(use.name is not None for use in manager.addresses)


def test_one_full_graph_holds_all_ranks(engine, manager):
    manager.capture(engine, [FULL])
    engine.source[1].fill_(20.0)
    manager.replay(FULL)
    assert [t.tolist() for t in engine.target] == [[3.0, 3.0], [41.0, 41.0]]
    assert manager.num_replays == 1


def test_segments_are_replayed_around_the_eager_work_of_all_ranks(engine, manager):
    manager.capture(engine, [PIECEWISE])
    engine.source[0].fill_(5.0)
    manager.replay(PIECEWISE)
    assert engine.eager_calls == [0, 1]
    assert [t.tolist() for t in engine.target] == [[31.0, 31.0], [61.0, 61.0]]
    assert manager.num_replays == 2


def test_a_failed_capture_is_raised_and_leaves_nothing_to_replay(engine, manager):
    async def faulty(rank):
        engine.target[rank].fill_(float(engine.source[rank].sum().item()))

    engine.prepare_inputs_to_capture = lambda descriptor: [faulty(0), faulty(1)]
    with pytest.raises(CaptureError, match=r"test_capture\.py"):
        manager.capture(engine, [FULL])
    assert not manager.has(FULL)
