from types import SimpleNamespace

import pytest
import torch

from pcpbench.device.address_book import AddressBook, storage_address
from pcpbench.device.address_recorder import AddressRecorder
from pcpbench.device.host_graph import HostGraphBackend


def capture(owner, book, fn):
    backend = HostGraphBackend()
    pool = backend.new_pool()
    graph, _ = backend.capture(fn, pool)
    return graph, book.bake("g", [graph], pool)


@pytest.fixture
def owner():
    return SimpleNamespace(source=torch.ones(4), target=torch.zeros(4), weight=torch.ones(4))


@pytest.fixture
def book(owner):
    book = AddressBook()
    for name in ("source", "target", "weight"):
        book.register(name, lambda name=name: getattr(owner, name))
    return book


def test_every_storage_is_named_with_what_is_done_to_it(owner, book):
    _, uses = capture(owner, book, lambda: owner.target.copy_(owner.source * owner.weight))
    by_name = {use.name: use for use in uses}
    assert set(by_name) == {"source", "target", "weight"}
    assert by_name["source"].reads
    assert not by_name["source"].writes
    assert by_name["target"].writes
    assert book.changes("g") == ()


def test_a_tensor_nobody_registered_has_no_name(owner, book):
    stray = torch.ones(4)
    _, uses = capture(owner, book, lambda: owner.target.copy_(owner.source * stray))
    unowned = [use for use in uses if use.name is None]
    assert [use.address for use in unowned] == [storage_address(stray)]
    assert "mul" in unowned[0].op


def test_a_rebound_attribute_and_moved_memory_are_both_found(owner, book):
    capture(owner, book, lambda: owner.target.copy_(owner.source * owner.weight))
    captured = storage_address(owner.source)
    owner.source = owner.source.clone()
    owner.weight.data = torch.ones(4)
    changes = {change.name: change for change in book.changes("g")}
    assert set(changes) == {"source", "weight"}
    assert changes["source"].captured_address == captured
    assert changes["source"].current_address == storage_address(owner.source)
    assert changes["source"].graph == "g"


def test_another_view_of_the_same_memory_is_found(owner, book):
    memory = torch.arange(8.0)
    owner.source = memory[:4]
    capture(owner, book, lambda: owner.target.copy_(owner.source))
    owner.source = memory[:2]
    assert book.changes("g") == (), "it begins where it did"
    owner.source = memory[4:]
    (moved,) = book.changes("g")
    assert moved.name == "source"
    assert moved.current_address - moved.captured_address == 16


def test_a_name_is_taken_once(owner, book):
    with pytest.raises(ValueError, match="'source' is registered twice"):
        book.register("source", lambda: owner.source)


def test_the_recorder_of_device_graphs_sees_the_same_storages(owner):
    with torch.inference_mode(), AddressRecorder() as recorder:
        product = owner.source * owner.weight
        owner.target[1:].copy_((product + 1)[1:])
    found = {use.address: use for use in recorder.externals}
    assert set(found) == {storage_address(getattr(owner, n)) for n in vars(owner)}
    assert found[storage_address(owner.target)].writes
    assert not found[storage_address(owner.source)].writes
    assert (
        found[storage_address(owner.source)].source.split(":")[0].endswith("test_address_book.py")
    )


def test_scratch_is_what_was_registered_as_such(owner, book):
    assert book.scratch() == []
    book.register("space", lambda: owner.space, scratch=True)
    owner.space = torch.ones(2)
    assert [tensor.data_ptr() for tensor in book.scratch()] == [owner.space.data_ptr()]


WRITES = {
    "copy_": lambda t, s: t.copy_(s),
    "add_": lambda t, s: t.add_(s),
    "out": lambda t, s: torch.add(s, 1, out=t),
    "index_put_": lambda t, s: t.index_put_((torch.tensor([0, 2]),), s[:2]),
    "index_put_ that adds": lambda t, s: t.index_put_((torch.tensor([0, 2]),), s[:2], True),
    "scatter_": lambda t, s: t.scatter_(0, torch.tensor([1, 0]), s[:2]),
    "scatter_ that adds": lambda t, s: t.scatter_(0, torch.tensor([1, 0]), s[:2], reduce="add"),
    "swap of two": lambda t, s: s.copy_(t + 1),
}
READS_TARGET = {"add_", "index_put_ that adds", "scatter_ that adds", "swap of two"}


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
@pytest.mark.parametrize("name", WRITES)
def test_both_backends_tell_alike_what_is_read(owner, name):
    """A graph that adds to a buffer depends on what it holds; one that copies over it does not."""
    backend, recorder = HostGraphBackend(), AddressRecorder()
    with torch.inference_mode():
        graph, _ = backend.capture(
            lambda: WRITES[name](owner.target, owner.source), backend.new_pool()
        )
        with recorder:
            WRITES[name](owner.target, owner.source)
    addresses = [storage_address(owner.target), storage_address(owner.source)]
    told = [
        [
            (use.reads, use.writes)
            for address in addresses
            for use in externals
            if use.address == address
        ]
        for externals in (graph.externals, recorder.externals)
    ]
    assert told[0] == told[1]
    assert told[0][0][0] == (name in READS_TARGET)
