"""A replay has eager's bits: op by op, over changing inputs, in both modes, fast and plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from pcpbench.device.host_graph import HostGraphBackend

ROWS, COLS = 4, 6


class Buffers:
    """Persistent tensors of one arm; two of them filled from one seed hold the same bits."""

    def __init__(self) -> None:
        self.x = torch.zeros(ROWS, COLS)
        self.y = torch.zeros(ROWS, COLS)
        self.w = torch.zeros(COLS, COLS)
        self.v = torch.zeros(COLS)
        self.h = torch.zeros(ROWS, COLS, dtype=torch.bfloat16)
        self.f16 = torch.zeros(ROWS, COLS, dtype=torch.float16)
        self.d = torch.zeros(ROWS, COLS, dtype=torch.float64)
        self.q = torch.zeros(2, 3, 5, 8)
        self.k = torch.zeros(2, 3, 5, 8)
        self.table = torch.zeros(10, COLS)
        self.rows = torch.zeros(ROWS, dtype=torch.int64)
        self.slots = torch.zeros(ROWS, dtype=torch.int64)
        self.i32 = torch.zeros(ROWS, COLS, dtype=torch.int32)
        self.mask = torch.zeros(ROWS, COLS, dtype=torch.bool)
        self.out = torch.zeros(ROWS, COLS)

    def fill(self, seed: int) -> None:
        """New contents for every buffer."""
        source = torch.Generator().manual_seed(seed)
        for name, tensor in vars(self).items():
            if name == "rows":
                tensor.copy_(torch.randint(0, ROWS, tensor.shape, generator=source))
            elif name == "slots":
                tensor.copy_(torch.randperm(10, generator=source)[:ROWS])
            elif tensor.dtype == torch.bool:
                tensor.copy_(torch.rand(tensor.shape, generator=source) > 0.5)
            elif not tensor.dtype.is_floating_point:
                tensor.copy_(torch.randint(-9, 9, tensor.shape, generator=source))
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=source))


_library = torch.library.Library("pcpbench_host_graph_test", "DEF")
_library.define("scaled_rows(Tensor x, Tensor rows, float by, Tensor(a!) out) -> ()")
_library.define("ragged_sum(Tensor x, Tensor rows, Tensor(a!) out) -> ()")
_library.define("twice(Tensor x) -> Tensor")
_library.define("count(Tensor(a!) seen, Tensor x) -> Tensor")


def _scaled_rows(x: torch.Tensor, rows: torch.Tensor, by: float, out: torch.Tensor) -> None:
    out.copy_(x[rows] * by)


def _ragged_sum(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    for at, row in enumerate(rows.tolist()):
        out[at].copy_(x[: row + 1].sum(0) if x[row, 0].item() > 0 else x[row])


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + float(x.sum(0).tolist()[0] > 0)


def _count(seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    seen.add_(1)
    return x + seen.sum()


for _name, _body in [
    ("scaled_rows", _scaled_rows),
    ("ragged_sum", _ragged_sum),
    ("twice", _twice),
    ("count", _count),
]:
    _library.impl(_name, _body, "CPU")
kernels = torch.ops.pcpbench_host_graph_test


def _in_place_on_view(b: Buffers) -> Any:
    t = b.x + 1
    t[:, 1:3].mul_(3)
    t.t()[0].add_(b.y[:, 0])
    return t


def _in_place_on_input(b: Buffers) -> Any:
    b.out.add_(b.x)
    b.out[1].sub_(b.v)
    return b.out * 2


def _chain_of_views(b: Buffers) -> Any:
    return (b.x.view(2, 2, COLS).transpose(0, 1).reshape(ROWS, COLS)[1:, ::2] + 1).contiguous()


def _constant_written(b: Buffers) -> Any:
    t = torch.arange(COLS, dtype=torch.float32)
    u = t + b.v
    t.add_(b.v)
    return u, t


def _zeros_accumulate(b: Buffers) -> Any:
    acc = torch.zeros(ROWS, COLS)
    acc.index_add_(0, b.rows, b.x)
    acc += b.y
    return acc


def _kv_write(b: Buffers) -> Any:
    b.table.index_copy_(0, b.slots, b.x)
    return b.table[b.rows] + 0


def _index_put(b: Buffers) -> Any:
    b.table[b.slots] = b.y
    t = b.table.clone()
    t.index_put_((b.rows,), b.x, accumulate=True)
    return t


def _rms_norm(b: Buffers) -> Any:
    h = b.h.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return h.to(b.h.dtype) * b.v.bfloat16()


def _rope(b: Buffers) -> Any:
    angle = torch.outer(b.rows.float(), 1.0 / 100 ** (torch.arange(3) / 3))
    left, right = b.x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _masked_attention(b: Buffers) -> Any:
    scores = torch.einsum("bhqd,bhkd->bhqk", b.q, b.k) * 8**-0.5
    keep = torch.arange(5)[None, :] <= torch.arange(5)[:, None]
    return torch.softmax(scores.masked_fill(~keep, float("-inf")), -1) @ b.k


def _custom_out(b: Buffers) -> Any:
    t = torch.empty(ROWS, COLS)
    kernels.scaled_rows(b.x + 1, b.rows, 0.5, t)
    return t * 2


def _custom_external(b: Buffers) -> Any:
    kernels.scaled_rows(b.x, b.rows, 2.0, b.out)
    return b.out + 1


def _custom_with_tolist(b: Buffers) -> Any:
    t = torch.empty(ROWS, COLS)
    kernels.ragged_sum(b.x, b.rows, t)
    return t.sum(-1)


def _custom_mixed(b: Buffers) -> Any:
    return kernels.count(b.v, b.x) + 1


def _out_argument(b: Buffers) -> Any:
    t = torch.empty(ROWS, COLS)
    torch.mul(b.x, b.y, out=t)
    torch.add(b.x, t, alpha=2, out=b.out)
    return t


def _foreach(b: Buffers) -> Any:
    torch._foreach_add_([b.out, b.v], 1.5)
    return torch._foreach_mul([b.x, b.w], 2.0)


def _host_values(b: Buffers) -> Any:
    return b.x + torch.tensor([1.0, 2, 3, 4, 5, 6]), b.rows + torch.tensor(7)


def _shared_storage(b: Buffers) -> Any:
    t = torch.empty(2, ROWS, COLS)
    t[0].copy_(b.x)
    t[1] = t[0] * 2
    return t.flip(0)


def _metadata_in_place(b: Buffers) -> Any:
    t = (b.x + 1).t_().unsqueeze_(0)
    t.squeeze_(0)
    return t * 2


def _dead_then_reused(b: Buffers) -> Any:
    t = b.x
    for _ in range(6):
        t = torch.tanh(t + b.y)
        t = t - t.mean(0)
    return t


CASES: dict[str, Callable[[Buffers], Any]] = {
    "add": lambda b: b.x + b.y,
    "add alpha": lambda b: torch.add(b.x, b.y, alpha=3),
    "add number": lambda b: (b.x + 0.1, b.x - 3, b.i32 + 5, 2 - b.x),
    "mul number": lambda b: (b.x * 0.3, b.d * 0.1, b.i32 * 3, b.i32 * 0.5),
    "div number": lambda b: (b.x / 3, b.d / 7, b.i32 / 3, b.i32 // 4, b.i32 % 3),
    "mul by 0-dim": lambda b: b.x * b.v[0],
    "number bf16": lambda b: (b.h * 0.1, b.h + 0.3, b.f16 / 3),
    "broadcast": lambda b: b.x * b.v + b.y[:, :1],
    "promotion": lambda b: (b.x + b.h, b.i32 + b.x, b.rows + b.v[0]),
    "pow": lambda b: (b.x.pow(2), b.x.abs() ** 0.5),
    "unary": lambda b: (b.x.exp(), b.x.sigmoid(), torch.rsqrt(b.x.abs()), -b.x, b.x.abs().log()),
    "activations": lambda b: (F.relu(b.x), F.silu(b.x), F.gelu(b.x), F.gelu(b.h)),
    "clamp": lambda b: (b.x.clamp(-0.5, 0.5), b.rows.clamp(min=1), torch.maximum(b.x, b.y)),
    "compare": lambda b: (b.x > 0, b.x >= b.y, b.rows == 2, ~b.mask, b.mask & (b.x > 0)),
    "where": lambda b: (torch.where(b.mask, b.x, b.y), torch.where(b.x > 0, b.x, 0.0)),
    "masked_fill": lambda b: (b.x.masked_fill(b.mask, -1.0), b.h.masked_fill(b.mask, 0.0)),
    "mm": lambda b: b.x @ b.w,
    "mm bf16": lambda b: b.h @ b.w.bfloat16(),
    "mv": lambda b: b.x @ b.v,
    "linear": lambda b: F.linear(b.x, b.w, b.v),
    "linear f16": lambda b: F.linear(b.f16, b.w.half()),
    "bmm": lambda b: torch.bmm(b.q[0], b.k[0].transpose(1, 2)),
    "baddbmm": lambda b: torch.baddbmm(b.q[0, :, :, :5], b.q[0], b.k[0].transpose(1, 2), beta=0.5),
    "einsum": lambda b: torch.einsum("bhqd,bhkd->bqk", b.q, b.k),
    "sdpa": lambda b: F.scaled_dot_product_attention(b.q, b.k, b.k, is_causal=True),
    "sdpa mask": lambda b: F.scaled_dot_product_attention(b.q, b.k, b.q, b.q[..., :5] > 0),
    "masked attention": _masked_attention,
    "softmax": lambda b: (b.x.softmax(-1), b.x.log_softmax(0), b.h.softmax(-1)),
    "softmax float": lambda b: torch.softmax(b.h, -1, dtype=torch.float32),
    "logsumexp": lambda b: torch.logsumexp(b.x, -1),
    "layer_norm": lambda b: F.layer_norm(b.x, (COLS,), b.v, b.v),
    "fused rms_norm": lambda b: F.rms_norm(b.x, (COLS,), b.v),
    "rms_norm by hand": _rms_norm,
    "rope": _rope,
    "sum": lambda b: (b.x.sum(), b.x.sum(-1), b.x.sum(0, keepdim=True), b.h.sum(-1)),
    "mean var": lambda b: (b.x.mean(), b.x.mean(-1), b.x.var(-1), torch.var_mean(b.x, -1)),
    "amax argmax": lambda b: (b.x.amax(-1), b.x.argmax(-1), b.x.max(-1), b.mask.any(-1)),
    "cumsum": lambda b: (b.x.cumsum(0), b.rows.cumsum(0), b.i32.cumsum(1)),
    "topk": lambda b: b.x.topk(3, -1),
    "sort": lambda b: (b.x.sort(-1), b.rows.argsort(stable=True)),
    "cat stack": lambda b: (torch.cat([b.x, b.y], 1), torch.stack([b.x, b.y]), F.pad(b.x, (1, 2))),
    "split": lambda b: [part * 2 for part in b.x.split([1, 2, 3], -1)],
    "unbind": lambda b: [row + 1 for row in b.x.unbind(0)],
    "views": _chain_of_views,
    "expand": lambda b: b.v.expand(ROWS, COLS) * b.x,
    "flip roll": lambda b: (b.x.flip(0), b.x.roll(1, 0), b.x.tril(), b.x.triu(1)),
    "repeat": lambda b: (b.x.repeat(2, 1), b.x.repeat_interleave(3, 0)),
    "embedding": lambda b: (F.embedding(b.rows, b.table), F.embedding(b.rows.view(2, 2), b.table)),
    "gather": lambda b: (b.x.gather(0, b.rows[None, :, None].expand(1, 4, 6)[0]), b.x[b.rows]),
    "index_select": lambda b: (b.table.index_select(0, b.rows), b.table[b.rows, 1:3]),
    "index two": lambda b: b.table[b.rows, b.rows],
    "scatter": lambda b: torch.zeros(ROWS, 10).scatter(1, b.slots[:, None], 1.0),
    "scatter_add": lambda b: torch.zeros(10).scatter_add(0, b.rows, b.x[:, 0]),
    "searchsorted": lambda b: torch.searchsorted(b.v.sort().values, b.x),
    "casts": lambda b: (b.x.bfloat16(), b.h.float(), b.x.half().float(), b.rows.float(), b.x.int()),
    "cast then write": lambda b: b.out.copy_(b.h).add_(b.f16),
    "zeros full": lambda b: (torch.zeros(3) + b.v[:3], torch.full((4, 1), 2.5) * b.x),
    "like": lambda b: (torch.zeros_like(b.x) + b.x, torch.ones_like(b.h) * b.h, b.x.new_ones(6)),
    "arange": lambda b: (torch.arange(COLS) * b.v, torch.arange(3)),
    "host values": _host_values,
    "constant written": _constant_written,
    "zeros accumulate": _zeros_accumulate,
    "zeros accumulate within": lambda b: _zeros_accumulate(b) * 2,
    "in place on view": _in_place_on_view,
    "in place on input": _in_place_on_input,
    "in place number": lambda b: b.out.mul_(0.1).add_(2).div_(3).clamp_(min=-0.5),
    "in place number bf16": lambda b: b.h.mul_(0.1).add_(0.3).div_(0.7),
    "kv write": _kv_write,
    "index_put": _index_put,
    "index_fill": lambda b: (b.x.index_fill(0, b.rows, 3.0), b.out.index_fill_(0, b.rows, 1.0)),
    "setitem mask number": lambda b: b.out.__setitem__(b.mask, 0.5),
    "out argument": _out_argument,
    "foreach": _foreach,
    "shared storage": _shared_storage,
    "metadata in place": _metadata_in_place,
    "dead then reused": _dead_then_reused,
    "empty tensors": lambda b: (torch.cat([b.x[:0], b.x]), b.x[:0].sum(-1), b.x[:0].sum()),
    "complex": lambda b: torch.view_as_real(torch.view_as_complex(b.x.view(4, 3, 2)) * 1j),
    "random": lambda b: (torch.rand(3) + b.v[0], torch.randn_like(b.x), F.dropout(b.x, 0.5)),
    "random in place": lambda b: b.out.normal_().add_(torch.empty(6).uniform_()),
    "integer bits": lambda b: (b.i32 & 3, b.i32 ^ b.i32.flip(0), b.rows << 2, b.i32.to(torch.int8)),
    "one result unused": lambda b: b.x.max(-1).values + b.x.topk(2, -1).values[:, 0],
    "custom op": _custom_out,
    "custom op external": _custom_external,
    "custom op tolist": _custom_with_tolist,
    "custom op result": lambda b: kernels.twice(b.x) + 1,
    "custom op mixed": _custom_mixed,
}

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(left: Any, right: Any) -> bool:
    left, right = tree_leaves(left), tree_leaves(right)
    return len(left) == len(right) and all(
        (a is None and b is None)
        or (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and torch.equal(_bytes(a), _bytes(b))
        )
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    ("plain", "mode"), [(False, "no_grad"), (False, "inference"), (True, "inference")]
)
@pytest.mark.parametrize("name", CASES)
def test_replay_has_eagers_bits(name: str, mode: str, plain: bool) -> None:
    fn, ours, theirs = CASES[name], Buffers(), Buffers()
    backend = HostGraphBackend(plain=plain)
    pool = backend.new_pool()
    ours.fill(0)
    before = Buffers()
    before.fill(0)
    random_state = torch.get_rng_state()
    with MODES[mode]():
        graph, result = backend.capture(lambda: fn(ours), pool)
    assert same_bits(list(vars(ours).values()), list(vars(before).values())), "capture wrote"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert graph.num_ops > 0
    for step in range(1, 4):
        ours.fill(step)
        theirs.fill(step)
        pool.poison()
        for replay_mode in MODES.values():
            torch.manual_seed(step)
            with replay_mode():
                graph.replay()
            torch.manual_seed(step)
            with torch.no_grad():
                expected = fn(theirs)
            assert same_bits(result, expected)
            assert same_bits(list(vars(ours).values()), list(vars(theirs).values()))
