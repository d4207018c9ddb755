"""What a captured graph bakes, shares, touches and leaves alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pcpbench.device.graph import Graph, GraphBackend, GraphPool
from pcpbench.device.host_graph import HostGraphBackend, torch_private
from pcpbench.device.host_graph.binding import fastest_call
from pcpbench.device.host_graph.schema import SchemaBook
from pcpbench.errors import CaptureError, UsageError


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def backend() -> HostGraphBackend:
    return HostGraphBackend()


def test_it_is_what_the_protocols_say(backend: HostGraphBackend) -> None:
    as_backend: GraphBackend = backend
    pool: GraphPool = as_backend.new_pool()
    graph: Graph
    graph, out = as_backend.capture(lambda: torch.ones(3) + torch.arange(3), pool)
    assert as_backend.name == "host"
    assert pool.owns(out.data_ptr())
    assert pool.num_bytes > 0
    assert graph.num_ops == 1


def test_capture_writes_nothing_outside(backend: HostGraphBackend) -> None:
    x, cache, out = torch.rand(4), torch.rand(8), torch.rand(4)
    before = x.clone(), cache.clone(), out.clone()

    def step() -> torch.Tensor:
        x.add_(1)
        cache[2:6].copy_(x)
        torch.mul(x, 2, out=out)
        cache.view(2, 4)[0].zero_()
        return out

    graph, result = backend.capture(step, backend.new_pool())
    assert result is out
    for tensor, held in zip((x, cache, out), before, strict=True):
        assert torch.equal(tensor, held)
    graph.replay()
    assert torch.equal(x, before[0] + 1)
    assert torch.equal(out, (before[0] + 1) * 2)


@pytest.mark.parametrize("plain", [False, True])
def test_repeats_that_the_graph_itself_writes_mean_nothing_at_capture(plain: bool) -> None:
    backend = HostGraphBackend(plain=plain)
    rows, repeats = torch.arange(12.0).view(3, 4), torch.zeros(3, dtype=torch.int32)
    lens = torch.tensor([0, 3, 1], dtype=torch.int32)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        repeats.copy_(lens)
        which = torch.repeat_interleave(repeats, output_size=4)
        return which, rows.repeat_interleave(repeats, dim=0, output_size=4)

    graph, (which, spread) = backend.capture(step, backend.new_pool())
    assert repeats.tolist() == [0, 0, 0]
    assert which.dtype is torch.int32
    for counts in ([0, 3, 1], [2, 0, 2]):
        lens.copy_(torch.tensor(counts))
        graph.replay()
        wanted = [row for row, count in enumerate(counts) for _ in range(count)]
        assert which.tolist() == wanted
        assert torch.equal(spread, rows[wanted])


def test_capture_leaves_random_generators_alone(backend: HostGraphBackend) -> None:
    own = torch.Generator().manual_seed(3)
    states = torch.get_rng_state(), own.get_state()
    backend.capture(lambda: torch.rand(3) + torch.rand(3, generator=own), backend.new_pool())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(own.get_state(), states[1])


def test_externals_in_order_of_first_use(backend: HostGraphBackend) -> None:
    w, x, out = torch.rand(6, 6), torch.rand(4, 6), torch.rand(4, 6)
    unused = torch.rand(3)

    def step() -> None:
        unused.view(3, 1)
        hidden = x[1:3] @ w
        out[:2].copy_(hidden)
        x.copy_(hidden[:1])

    graph, _ = backend.capture(step, backend.new_pool())
    first, second, third = graph.externals
    assert [use.address for use in graph.externals] == [each.data_ptr() for each in (x, w, out)]
    assert (first.reads, first.writes) == (True, True)
    assert (second.reads, second.writes) == (True, False)
    assert (third.reads, third.writes) == (False, True)
    assert first.shape == (2, 6)
    assert first.num_bytes == 4 * 6 * 4
    assert first.dtype == "float32"
    assert first.op == "aten.mm.default"
    assert third.op == "aten.copy_.default"
    line = step.__code__.co_firstlineno + 2
    assert first.source.endswith(f"test_host_graph.py:{line}")


def test_pool_tensors_of_an_earlier_capture_are_not_external(backend: HostGraphBackend) -> None:
    x, pool = torch.rand(4), backend.new_pool()
    first, middle = backend.capture(lambda: x * 2, pool)
    second, out = backend.capture(lambda: middle + 1, pool)
    assert second.externals == ()
    assert pool.owns(middle.data_ptr())
    x.fill_(5)
    first.replay()
    second.replay()
    assert out.tolist() == [11.0] * 4
    elsewhere, _ = backend.capture(lambda: middle + 1, backend.new_pool())
    assert [use.address for use in elsewhere.externals] == [middle.data_ptr()]


def test_hoisted_constants_belong_to_the_pool_and_the_graph(backend: HostGraphBackend) -> None:
    x, pool = torch.zeros(4), backend.new_pool()
    seen: list[int] = []

    def step() -> torch.Tensor:
        steps = torch.arange(4)
        seen.append(steps.data_ptr())
        return x + steps

    graph, out = backend.capture(step, pool)
    assert pool.owns(seen[0])
    assert graph.num_ops == 1
    assert [use.address for use in graph.externals] == [x.data_ptr()]
    others = [backend.capture(lambda: torch.rand(4) * 2, pool) for _ in range(3)]
    for other, _ in others:
        other.replay()
    pool.poison()
    graph.replay()
    assert out.tolist() == [0, 1, 2, 3]
    del graph, out
    assert not pool.owns(seen[0])


def test_poison_reaches_what_an_earlier_graph_left_only_if_asked(
    backend: HostGraphBackend,
) -> None:
    """Intermediates that somebody still holds are not free, and yet no replay may count on them."""
    x, pool = torch.ones(4), backend.new_pool()
    first, left = backend.capture(lambda: x * 2, pool)
    first.replay()
    second, out = backend.capture(lambda: left + torch.arange(4), pool)
    pool.poison()
    second.replay()
    assert out.tolist() == [2, 3, 4, 5]
    pool.poison(used=True)
    second.replay()
    assert torch.isnan(out).all()
    first.replay()
    second.replay()
    assert out.tolist() == [2, 3, 4, 5], "constants are left alone"


def test_constant_that_escapes_or_is_written_is_made_anew(backend: HostGraphBackend) -> None:
    kept: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        kept.append(torch.arange(3))
        total = torch.zeros(3)
        total += kept[-1]
        return total

    graph, total = backend.capture(step, backend.new_pool())
    kept[0].fill_(7)
    for _ in range(2):
        graph.replay()
        assert total.tolist() == [0, 1, 2]
        assert kept[0].tolist() == [0, 1, 2]


def test_dead_block_goes_to_the_next_capture_and_a_live_one_does_not(
    backend: HostGraphBackend,
) -> None:
    x, pool = torch.rand(64), backend.new_pool()
    first, out_first = backend.capture(lambda: x + 1, pool)
    second, out_second = backend.capture(lambda: x + 2, pool)
    assert out_first.data_ptr() != out_second.data_ptr()
    place = out_first.data_ptr()
    for graph in (first, second, first, second):
        graph.replay()
    assert torch.equal(out_first, x + 1)
    assert torch.equal(out_second, x + 2)
    del out_first
    third, out_third = backend.capture(lambda: x + 3, pool)
    assert out_third.data_ptr() == place
    third.replay()
    assert torch.equal(out_third, x + 3)
    first.replay()
    assert torch.equal(out_third, x + 1), "the earlier graph still writes its old block"


def test_views_keep_a_block_and_intermediates_share(backend: HostGraphBackend) -> None:
    x, pool = torch.rand(1 << 16), backend.new_pool()

    def step() -> torch.Tensor:
        held = x
        for _ in range(20):
            held = held * 2 - 1
        return held[3:5]

    _, out = backend.capture(step, pool)
    assert pool.num_bytes < 6 * x.nbytes
    free = pool.num_bytes_free
    del out
    assert pool.num_bytes_free > free


def test_output_outlives_graph_and_pool(backend: HostGraphBackend) -> None:
    x = torch.ones(1000)
    graph, out = backend.capture(lambda: x * 3, backend.new_pool())
    graph.replay()
    del graph
    gc.collect()
    assert out.tolist() == [3.0] * 1000


def test_graph_keeps_outside_storages_alive(backend: HostGraphBackend) -> None:
    inputs = [torch.full((1000,), 2.0)]
    graph, out = backend.capture(lambda: inputs[0] * 3, backend.new_pool())
    inputs.clear()
    gc.collect()
    torch.full((1000,), 9.0)
    graph.replay()
    assert out.tolist() == [6.0] * 1000


def test_two_graphs_alternate_on_one_pool(backend: HostGraphBackend) -> None:
    x, w, pool = torch.zeros(8, 16), torch.rand(16, 16), backend.new_pool()

    def step(rows: int) -> torch.Tensor:
        return F.silu(x[:rows] @ w).softmax(-1) + torch.arange(16)

    graphs = {rows: backend.capture(lambda rows=rows: step(rows), pool) for rows in (8, 1, 3)}
    for turn, rows in enumerate([8, 1, 3, 1, 8, 3]):
        x.copy_(torch.rand(8, 16) * turn)
        graph, out = graphs[rows]
        graph.replay()
        assert torch.equal(out, step(rows))


def test_recapture_is_deterministic(backend: HostGraphBackend) -> None:
    x, pool = torch.rand(4, 4), backend.new_pool()

    def step() -> torch.Tensor:
        x.mul_(2)
        return (x @ x).relu() + torch.arange(4)

    places = []
    for _ in range(3):
        graph, out = backend.capture(step, pool)
        places.append((graph.listing, graph.externals, out.data_ptr()))
        del graph, out
    assert places[0] == places[1] == places[2]
    num_bytes = pool.num_bytes
    backend.capture(step, pool)
    assert pool.num_bytes == num_bytes


def test_failed_capture_leaves_the_pool_usable(backend: HostGraphBackend) -> None:
    x, pool = torch.rand(4), backend.new_pool()
    graph, out = backend.capture(lambda: x + 1, pool)
    free = pool.num_bytes_free
    with pytest.raises(CaptureError):
        backend.capture(lambda: (x * 2 + torch.arange(4)).tolist(), pool)
    with pytest.raises(RuntimeError, match="size"):
        backend.capture(lambda: x * 2 + torch.ones(3), pool)
    gc.collect()
    assert pool.num_bytes_free == free
    again, out_again = backend.capture(lambda: x + 2, pool)
    graph.replay()
    again.replay()
    assert torch.equal(out, x + 1)
    assert torch.equal(out_again, x + 2)


def test_host_scalars_and_python_are_baked(backend: HostGraphBackend) -> None:
    x, by, calls = torch.ones(4), 3, []

    def step() -> torch.Tensor:
        calls.append(1)
        return x * by + torch.tensor(by) if by < 10 else x

    graph, out = backend.capture(step, backend.new_pool())
    by = 50
    graph.replay()
    assert out.tolist() == [6.0] * 4
    assert len(calls) == 1


def test_replay_reads_what_the_addresses_hold_now(backend: HostGraphBackend) -> None:
    x = torch.ones(4)
    graph, out = backend.capture(lambda: x + 1, backend.new_pool())
    x.data = torch.full((4,), 9.0)
    graph.replay()
    assert out.tolist() == [2.0] * 4, "a rebound tensor is not followed"


class _Timer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


library = torch.library.Library("pcpbench_host_graph_modes", "DEF")
library.define("rows(Tensor x, Tensor(a!) out, Tensor(b!) lse) -> ()")
bodies: list[int] = []
threads: list[int] = []


def _rows(x: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    bodies.append(len(x.tolist()))
    threads.append(torch.get_num_threads())
    out.copy_(x * 2)
    lse.copy_(x.exp().sum(-1).log())


library.impl("rows", _rows, "CPU")


@pytest.mark.parametrize("plain", [False, True])
def test_a_mode_around_replay_sees_every_kernel(plain: bool) -> None:
    backend = HostGraphBackend(plain=plain)
    x, w, lse = torch.rand(4, 4), torch.rand(4, 4), torch.zeros(4)

    def step() -> torch.Tensor:
        out = torch.empty(4, 4)
        hidden = F.layer_norm(F.linear(x, w).softmax(-1), (4,))
        torch.ops.pcpbench_host_graph_modes.rows(hidden, out, lse)
        return out + 1

    graph, out = backend.capture(step, backend.new_pool())
    timer = _Timer()
    x.copy_(torch.rand(4, 4))
    with timer:
        graph.replay()
    assert torch.equal(out, step())
    assert len(timer.seen) >= graph.num_ops
    for kernel in ("mm", "_softmax", "native_layer_norm", "rows", "add"):
        assert any(name.split(".")[1] == kernel for name in timer.seen), timer.seen


def test_kernel_body_is_neither_traced_nor_run_at_capture(backend: HostGraphBackend) -> None:
    x, out, lse = torch.rand(4, 4), torch.rand(4, 4), torch.rand(4)
    before = out.clone(), lse.clone()
    bodies.clear()
    graph, _ = backend.capture(
        lambda: torch.ops.pcpbench_host_graph_modes.rows(x, out, lse), backend.new_pool()
    )
    assert bodies == []
    assert graph.num_ops == 1
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    assert [(use.reads, use.writes) for use in graph.externals] == [
        (True, False),
        (True, True),
        (True, True),
    ]
    graph.replay()
    assert bodies == [4]
    assert torch.equal(out, x * 2)


def test_kernel_output_in_the_pool_is_finite_while_capturing(backend: HostGraphBackend) -> None:
    x, table = torch.rand(4, 4), torch.rand(3, 2)

    def step() -> torch.Tensor:
        out, lse = torch.empty(4, 4), torch.empty(4)
        torch.ops.pcpbench_host_graph_modes.rows(x, out, lse)
        return table[(out.argmax(-1) % 3)] + lse[:, None].long()

    backend.capture(step, backend.new_pool())


def test_kernel_sees_no_modes_of_the_capture_when_a_mode_is_around(
    backend: HostGraphBackend,
) -> None:
    x, out, lse = torch.rand(4, 4), torch.zeros(4, 4), torch.zeros(4)
    graph, _ = backend.capture(
        lambda: torch.ops.pcpbench_host_graph_modes.rows(x, out, lse), backend.new_pool()
    )
    timer = _Timer()
    with timer:
        graph.replay()
    assert timer.seen[0] == "pcpbench_host_graph_modes.rows.default"
    assert torch.equal(lse, x.exp().sum(-1).log())


def test_another_thread_count_is_set_back(backend: HostGraphBackend) -> None:
    x, out, lse = torch.rand(4, 4), torch.zeros(4, 4), torch.zeros(4)
    graph, _ = backend.capture(
        lambda: torch.ops.pcpbench_host_graph_modes.rows(x, out, lse), backend.new_pool()
    )
    torch.set_num_threads(2)
    graph.replay()
    assert threads[-1] == 1, "kernels run under the count of the capture"
    assert torch.get_num_threads() == 2


def test_a_spelling_that_reaches_another_op_is_not_taken(
    backend: HostGraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = [torch.sub, lambda a, b, out: torch.add(b, a, out=out), torch.add]
    monkeypatch.setattr(torch_private, "builtin_spellings", lambda name: tried)
    a, b, out = torch.rand(3), torch.rand(3), torch.zeros(3)
    facts = SchemaBook().facts(torch.ops.aten.add.out)
    assert fastest_call(facts, (a, b), {"out": out}).fn is torch.add
    assert not out.any(), "a probe runs nothing"


def test_error_at_replay_names_op_and_line(backend: HostGraphBackend) -> None:
    table, ids = torch.rand(3, 2), torch.zeros(2, dtype=torch.int64)
    graph, _ = backend.capture(lambda: F.embedding(ids, table), backend.new_pool())
    ids.fill_(7)
    with pytest.raises(IndexError) as caught:
        graph.replay()
    assert "aten.embedding.default" in caught.value.__notes__[0]
    assert "test_host_graph.py:" in caught.value.__notes__[0]
    ids.fill_(1)
    graph.replay()


def test_foreign_pool_and_nested_capture_are_refused(backend: HostGraphBackend) -> None:
    class OtherPool:
        num_bytes = 0

        def owns(self, address: int) -> bool:
            return False

    with pytest.raises(UsageError, match="OtherPool"):
        backend.capture(lambda: None, OtherPool())
    pool = backend.new_pool()
    with pytest.raises(CaptureError, match="inside another capture"):
        backend.capture(lambda: backend.capture(lambda: None, pool), pool)
    backend.capture(lambda: torch.ones(1), pool)


def test_gradients_do_not_follow_a_replay(backend: HostGraphBackend) -> None:
    with torch.inference_mode(False):
        w = torch.nn.Parameter(torch.rand(4, 4))
        x = torch.rand(2, 4)
        graph, out = backend.capture(lambda: F.linear(x, w).relu_(), backend.new_pool())
        assert not out.requires_grad
        graph.replay()
        assert torch.equal(out, F.linear(x, w).relu())


def _decoder(rows: int, width: int, heads: int) -> tuple[Any, dict[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source) * shape[-1] ** -0.5

    layers = [
        (weight(width, 3 * width), weight(width, width), weight(width, 4 * width),
         weight(4 * width, width)) for _ in range(2)
    ]  # fmt: skip
    table, norm = weight(50, width), torch.rand(width, generator=source)
    held = {
        "ids": torch.zeros(rows, dtype=torch.int64),
        "slots": torch.zeros(rows, dtype=torch.int64),
        "lens": torch.ones(rows, dtype=torch.int64),
        "cache": torch.zeros(2, 2, rows, 32, width),
        "logits": torch.zeros(rows, 50),
    }

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache, at = held["cache"][layer], held["slots"]
        cache[0].view(-1, width).index_copy_(0, at, k)
        cache[1].view(-1, width).index_copy_(0, at, v)
        keys = cache.view(2, rows, 32, heads, -1).transpose(2, 3)
        scores = q.view(rows, heads, 1, -1) @ keys[0].transpose(-1, -2)
        hidden = torch.arange(32)[None, :] >= held["lens"][:, None]
        scores = (scores * (width // heads) ** -0.5).masked_fill(hidden[:, None, None], -1e30)
        return (torch.softmax(scores, -1) @ keys[1]).reshape(rows, width)

    def step() -> torch.Tensor:
        x = F.embedding(held["ids"], table)
        for layer, (qkv, merge, up, down) in enumerate(layers):
            x = x + attend(layer, *(normed(x) @ qkv).chunk(3, -1)) @ merge
            x = x + F.silu(normed(x) @ up) @ down
        held["logits"].copy_(normed(x) @ table.t())
        return held["logits"].argmax(-1)

    return step, held


@pytest.mark.parametrize("plain", [False, True])
def test_small_decoder_has_eagers_bits_over_twenty_steps(plain: bool) -> None:
    rows = 3
    eager_step, eager = _decoder(rows, 32, 4)
    graph_step, ours = _decoder(rows, 32, 4)
    backend = HostGraphBackend(plain=plain)
    pool = backend.new_pool()
    graph, tokens = backend.capture(graph_step, pool)
    assert not ours["cache"].any(), "capture wrote the cache"
    for at in range(20):
        for held in (eager, ours):
            held["slots"].copy_(torch.arange(rows) * 32 + at)
            held["lens"].fill_(at + 1)
        pool.poison()
        graph.replay()
        expected = eager_step()
        assert torch.equal(tokens, expected)
        for name in ("logits", "cache"):
            assert torch.equal(ours[name], eager[name])
        eager["ids"].copy_(expected)
        ours["ids"].copy_(tokens)


def _shares(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Eager refuses an in-place op between two views of one storage that are laid out apart."""
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


_STEPS = {
    "add": lambda t, x: t + x,
    "scale": lambda t, x: t * 0.5,
    "shift": lambda t, x: t - 2,
    "matmul": lambda t, x: t @ x,
    "transpose": lambda t, x: t.t(),
    "tanh": lambda t, x: torch.tanh(t),
    "softmax": lambda t, x: t.softmax(-1),
    "in place": lambda t, x: t + 1 if _shares(t, x) else t.mul_(x),
    "row in place": lambda t, x: (t[1].add_(1), t)[1],
    "write input": lambda t, x: (x[0].copy_(t[2] + 0), t)[1],
    "accumulate": lambda t, x: x.add_(t.clamp(-1, 1)),
    "constant": lambda t, x: t + torch.arange(4),
    "cat": lambda t, x: torch.cat([t[2:], x[:2]]),
    "sort": lambda t, x: t.sort(-1).values,
    "mean": lambda t, x: t - t.mean(0),
    "bf16": lambda t, x: t.bfloat16().float(),
    "reverse": lambda t, x: t.flip(0),
    "pick": lambda t, x: t[x[0].argsort()],
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=12), st.booleans())
def test_random_chains_have_eagers_bits(names: list[str], inference: bool) -> None:
    def chain(x: torch.Tensor) -> list[torch.Tensor]:
        every = [x + 1]
        for name in names:
            every.append(_STEPS[name](every[-1], x))
        return every[-2:]

    backend = HostGraphBackend()
    with torch.inference_mode(inference), torch.no_grad():
        ours, theirs = torch.zeros(4, 4), torch.zeros(4, 4)
        pool = backend.new_pool()
        graph, out = backend.capture(lambda: chain(ours), pool)
        assert not ours.any()
        for seed in range(3):
            torch.manual_seed(seed)
            ours.copy_(torch.randn(4, 4))
            theirs.copy_(ours)
            pool.poison()
            graph.replay()
            for left, right in zip([*out, ours], [*chain(theirs), theirs], strict=True):
                assert torch.equal(left.nan_to_num(7), right.nan_to_num(7))
