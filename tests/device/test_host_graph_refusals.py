"""What depends on data read by the host is refused, by name and by line."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pcpbench.device.host_graph import HostGraphBackend
from pcpbench.device.host_graph.schema import tensors_in
from pcpbench.errors import CaptureError

x = torch.rand(4, 6)
row = torch.rand(6)
HERE = x.device  # what an engine names, be it `cpu` here
ids = torch.tensor([1, 2, 0])
mask = x > 0.5
weight = torch.rand(4, 4)

HOST_VALUE = "value to the host"
DATA_SHAPE = "shape of its result depends"
HOST_SOURCE = "made in the host's memory"
METADATA = "memory or shape in place"
LAYOUT = "plain dense CPU tensors"
LOCAL = "aten._local_scalar_dense.default"

REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "item": (lambda: x[0, 0].item(), "torch.Tensor.item", HOST_VALUE),
    "bool": (lambda: 1 if x[0, 0] > 0 else 2, LOCAL, HOST_VALUE),
    "int": (lambda: int(ids[0]), LOCAL, HOST_VALUE),
    "float": (lambda: float(x[0, 0]), LOCAL, HOST_VALUE),
    "list index": (lambda: [1, 2, 3][ids[0]], "torch.Tensor.__index__", HOST_VALUE),
    "range": (lambda: range(ids[0]), "torch.Tensor.__index__", HOST_VALUE),
    "format": (lambda: f"{x[0, 0]:.2f}", "torch.Tensor.__format__", HOST_VALUE),
    "repr": (lambda: repr(x), "torch.Tensor.__repr__", HOST_VALUE),
    "contains": (lambda: 3 in ids, "torch.Tensor.__contains__", HOST_VALUE),
    "slice by tensor": (lambda: x[: ids[0]], LOCAL, HOST_VALUE),
    "one_hot": (lambda: F.one_hot(ids), "torch.nn.functional.one_hot", HOST_VALUE),
    "equal": (lambda: torch.equal(x, x), "aten.equal.default", HOST_VALUE),
    "allclose": (lambda: torch.allclose(x, x), "aten.allclose.default", HOST_VALUE),
    "tolist": (lambda: x.tolist(), "torch.Tensor.tolist", HOST_VALUE),
    "numpy": (lambda: x.numpy(), "torch.Tensor.numpy", HOST_VALUE),
    "asarray": (lambda: np.asarray(x), "torch.Tensor.__array__", HOST_VALUE),
    "dlpack": (lambda: np.from_dlpack(x), "torch.Tensor.__dlpack__", HOST_VALUE),
    "cpu": (lambda: x.cpu(), "torch.Tensor.cpu", HOST_VALUE),
    "deepcopy": (lambda: copy.deepcopy(x), "torch.Tensor.__deepcopy__", "on the host"),
    "tensor_split": (lambda: torch.tensor_split(x, ids), "torch.tensor_split", HOST_VALUE),
    "inv": (lambda: torch.linalg.inv(weight), "aten._linalg_check_errors", HOST_VALUE),
    "nonzero": (lambda: x.nonzero(), "aten.nonzero.default", DATA_SHAPE),
    "where": (lambda: torch.where(mask), "aten.nonzero.default", DATA_SHAPE),
    "masked index": (lambda: x[mask], "aten.index.Tensor", DATA_SHAPE),
    "masked put": (lambda: x.index_put((mask,), x[0]), "aten.index_put.default", DATA_SHAPE),
    "masked set": (lambda: x.__setitem__(mask, x[0]), "aten.index_put_.default", DATA_SHAPE),
    "masked_select": (lambda: x.masked_select(mask), "aten.masked_select.default", DATA_SHAPE),
    "unique": (lambda: ids.unique(), "aten._unique2.default", DATA_SHAPE),
    "unique rows": (lambda: x.unique(dim=0), "aten.unique_dim.default", DATA_SHAPE),
    "bincount": (lambda: torch.bincount(ids), "aten.bincount.default", DATA_SHAPE),
    "repeat": (lambda: ids.repeat_interleave(ids), "aten.repeat_interleave.Tensor", DATA_SHAPE),
    "accumulate": (
        lambda: x.index_put((mask,), torch.tensor(1.0), accumulate=True),
        "aten.index_put.default",
        DATA_SHAPE,
    ),
    "mask beside an index": (
        lambda: x.index_put((mask[:, 0], ids[:1]), torch.tensor(0.0)),
        "aten.index_put.default",
        DATA_SHAPE,
    ),
    "mask and a device value": (
        lambda: x.index_put((mask,), x[0, 0]),
        "aten.index_put.default",
        DATA_SHAPE,
    ),
    "mask and a changed number": (
        lambda: x.index_put((mask,), torch.tensor(0.0).add_(x[0, 0])),
        "aten.index_put.default",
        DATA_SHAPE,
    ),
    "fill by a device value": (
        lambda: x.masked_fill(mask, x[0, 0]),
        "aten.masked_fill.Tensor",
        HOST_VALUE,
    ),
    "fill of rows": (
        lambda: x.clone().index_fill_(0, ids, x[0, 0]),
        "aten.index_fill_.int_Tensor",
        HOST_VALUE,
    ),
    "steps between": (
        lambda: torch.linspace(x[0, 0], 1.0, 4),
        "aten.linspace.Tensor_Scalar",
        HOST_VALUE,
    ),
    "normal": (lambda: torch.normal(x, x), "aten.normal.Tensor_Tensor", HOST_VALUE),
    "a number by index": (
        lambda: x.__setitem__(ids, 1.0),
        "aten.index_put_.default (through torch.Tensor.__setitem__)",
        HOST_SOURCE,
    ),
    "a number by columns": (
        lambda: x.__setitem__((slice(None), ids), -torch.inf),
        "aten.index_put_.default",
        HOST_SOURCE,
    ),
    "a number, functional": (
        lambda: x.index_put((ids,), torch.tensor(1.0)),
        "aten.index_put.default",
        HOST_SOURCE,
    ),
    "a number, added": (
        lambda: x.index_put_((ids,), torch.tensor(1.0), accumulate=True),
        "aten.index_put_.default",
        HOST_SOURCE,
    ),
    "a number in one place": (lambda: row.__setitem__(0, 0), "aten.copy_.default", HOST_SOURCE),
    "a constant copied": (
        lambda: row[0].copy_(torch.tensor(1.0)),
        "aten.copy_.default",
        HOST_SOURCE,
    ),
    "zeros of the host copied": (
        lambda: x.clone().copy_(torch.zeros(6) + 1.0),
        "aten.copy_.default",
        HOST_SOURCE,
    ),
    "fill by zeros made on the device": (
        lambda: x.masked_fill(mask, torch.zeros((), device=HERE)),
        "aten.masked_fill.Tensor",
        "give it a Python number, or use torch.where",
    ),
    "fill by a number made on the device": (
        lambda: x.masked_fill(mask, torch.full((), 0.0, device=HERE)),
        "aten.masked_fill.Tensor",
        HOST_VALUE,
    ),
    "fill by a scalar made on the device": (
        lambda: x.masked_fill(mask, torch.scalar_tensor(0.0, device=HERE)),
        "aten.masked_fill.Tensor",
        HOST_VALUE,
    ),
    "fill by the like of a tensor": (
        lambda: x.masked_fill(mask, x.new_zeros(())),
        "aten.masked_fill.Tensor",
        HOST_VALUE,
    ),
    "fill by a new number": (
        lambda: x.masked_fill(mask, x.new_tensor(0.0)),
        "aten.masked_fill.Tensor",
        HOST_VALUE,
    ),
    "fill by a number moved there": (
        lambda: x.masked_fill(mask, torch.tensor(0).to(HERE, torch.float32)),
        "aten.masked_fill.Tensor",
        HOST_VALUE,
    ),
    "fill where a device is the default": (
        lambda: _on_default_device(lambda: x.masked_fill(mask, torch.zeros(()))),
        "aten.masked_fill.Tensor",
        HOST_VALUE,
    ),
    "mask and a number of the device": (
        lambda: x.index_put((mask,), torch.zeros((), device=HERE)),
        "aten.index_put.default",
        DATA_SHAPE,
    ),
    "normal of the host": (
        lambda: torch.normal(0.0, torch.ones(3)),
        "aten.normal.float_Tensor",
        HOST_VALUE,
    ),
    "isin": (lambda: torch.isin(row[:2], x), "aten.isin.Tensor_Tensor", "drops duplicates"),
    "isin of a number": (lambda: torch.isin(3, x), "aten.isin.Scalar_Tensor", "drops duplicates"),
    "isin into": (
        lambda: torch.isin(x, torch.cat([x, x]), out=torch.empty(4, 6, dtype=torch.bool)),
        "aten.isin.Tensor_Tensor_out",
        "drops duplicates",
    ),
    "histc": (lambda: torch.histc(x, 4), "aten.histc.default", "give it a range"),
    "searchsorted": (
        lambda: torch.searchsorted(row, x, sorter=ids.repeat(2)),
        "aten.searchsorted.Tensor",
        HOST_VALUE,
    ),
    "segments": (
        lambda: torch.segment_reduce(x, "sum", lengths=ids),
        "aten.segment_reduce.default",
        "unsafe=True",
    ),
    "resize_": (lambda: x.resize_(2, 2), "aten.resize_.default", METADATA),
    "set_": (lambda: x.set_(weight), "aten.set_.source_Tensor", METADATA),
    "t_": (lambda: x.t_(), "aten.t_.default", METADATA),
    "data": (lambda: setattr(x, "data", weight), "torch.Tensor.data.__set__", METADATA),
    "out resized": (lambda: torch.add(x, x, out=torch.empty(0)), "aten.add.out", METADATA),
    "storage": (lambda: x.untyped_storage()[0], "aten.set_.source_Storage", METADATA),
    "sparse": (lambda: x.to_sparse(), "aten._to_sparse.default", LAYOUT),
    "meta": (lambda: torch.empty(3, device="meta"), "aten.empty.memory_format", LAYOUT),
    "conj": (lambda: torch.complex(x, x).conj(), "aten._conj.default", LAYOUT),
    "cond": (
        lambda: torch.cond(mask[0, 0], torch.sin, torch.cos, (x,)),
        "compiled code",
        "higher-order",
    ),
}


def _on_default_device(fn: Callable[[], Any]) -> Any:
    with torch.device(HERE):
        return fn()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Dynamo does not know")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_op_reason_and_line(name: str, mode: Any) -> None:
    fn, op, reason = REFUSED[name]
    backend = HostGraphBackend()
    before, pool = x.clone(), backend.new_pool()
    with mode(), pytest.raises(CaptureError) as caught:
        backend.capture(fn, pool)
    message = str(caught.value)
    assert op in message
    assert reason in message
    assert f"test_host_graph_refusals.py:{inspect.getsourcelines(fn)[1]}" in message
    assert torch.equal(x, before)


def test_higher_order_operator_that_is_not_compiled_is_refused() -> None:
    backend = HostGraphBackend()
    with torch.inference_mode(), pytest.raises(CaptureError, match=r"cond on bool.*higher-order"):
        backend.capture(
            lambda: torch.ops.higher_order.cond(mask[0, 0], torch.sin, torch.cos, (x,)),
            backend.new_pool(),
        )


def test_message_gives_dtypes_and_shapes() -> None:
    backend = HostGraphBackend()
    with (
        torch.inference_mode(),
        pytest.raises(CaptureError, match=r"float32\[4, 6\], bool\[4, 6\]"),
    ):
        backend.capture(lambda: x.masked_select(mask), backend.new_pool())


def test_line_is_the_innermost_of_the_callers() -> None:
    def helper(value: torch.Tensor) -> float:
        return float(value.sum())

    backend = HostGraphBackend()
    line = inspect.getsourcelines(helper)[1] + 1
    with torch.inference_mode(), pytest.raises(CaptureError, match=f"refusals.py:{line} "):
        backend.capture(lambda: helper(x), backend.new_pool())


def test_collective_is_refused() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        backend = HostGraphBackend()
        with torch.inference_mode(), pytest.raises(CaptureError, match="collectives"):
            backend.capture(lambda: dist.all_reduce(weight), backend.new_pool())
    finally:
        dist.destroy_process_group()


ALLOWED: dict[str, Callable[[], Any]] = {
    "shape": lambda: x[: x.shape[0] // 2] + len(x),
    "where with three": lambda: torch.where(mask, x, 0.0),
    "mask and one number": lambda: x.index_put((mask,), torch.tensor(0.0)),
    "set where a mask is": lambda: _set(x.clone(), mask, 0.0),
    "fill by a number": lambda: x.masked_fill(mask, torch.tensor(0.0)),
    "repeat to a known size": lambda: x[:3].repeat_interleave(ids, dim=0, output_size=3),
    "fill by a changed number": lambda: x.masked_fill(mask, -torch.tensor(1).to(torch.float32)),
    "fill by a number written over": lambda: x.masked_fill(mask, torch.zeros(()).add_(2.0)),
    "a number of the device by index": lambda: x.clone().index_put_(
        (ids,), torch.zeros((), device=HERE)
    ),
    "a number by index, filled": lambda: x.clone().index_fill_(0, ids, 1.0),
    "a number in some places": lambda: _set(x.clone(), slice(1, 3), 5.0),
    "a tensor of the device in one place": lambda: _set(row.clone(), 0, x[0, 1]),
    "a like copied": lambda: row.clone().copy_(torch.ones_like(row)),
    "a new tensor copied": lambda: row.clone().copy_(row.new_full((6,), 3.0)),
    "a constant of the default device copied": lambda: _on_default_device(
        lambda: row.clone().copy_(torch.arange(6))
    ),
    "host to host": lambda: torch.empty(3).copy_(torch.ones(3)).sum() + x,
    "split at numbers of the host": lambda: torch.tensor_split(x, torch.tensor([1, 3])),
    "split, by method": lambda: x.tensor_split(torch.tensor([1, 3]) - 0, dim=1),
    "isin of few": lambda: torch.isin(x, row),
    "isin of unique ones": lambda: torch.isin(
        ids, torch.arange(40, device=HERE), assume_unique=True
    ),
    "isin one number": lambda: torch.isin(x, 3),
    "histc of a range": lambda: torch.histc(x, 4, min=0.0, max=1.0),
    "searchsorted": lambda: torch.searchsorted(torch.linspace(0.0, 1.0, 5, device=HERE), x),
    "segments unchecked": lambda: torch.segment_reduce(
        x[:3], "sum", lengths=torch.ones_like(ids), unsafe=True
    ),
    "steps between numbers": lambda: torch.linspace(0.0, 1.0, 4) + x[0, :4],
    "long index": lambda: x[ids],
    "nonzero_static": lambda: torch.nonzero_static(x, size=3),
    "assert_async": lambda: (torch._assert_async((x >= 0).all()), x * 1)[1],
    "iterate rows": lambda: [row * 2 for row in x],
}


def _set(target: torch.Tensor, where: Any, value: Any) -> torch.Tensor:
    target[where] = value
    return target


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_only_looks_like_a_host_read_is_allowed(name: str, mode: Any, plain: bool) -> None:
    backend = HostGraphBackend(plain=plain)
    before = [each.clone() for each in (x, ids, mask)]
    try:
        with mode():
            graph, result = backend.capture(ALLOWED[name], backend.new_pool())
            x.copy_(x.flip(1))
            ids.copy_(ids.flip(0))
            mask.logical_not_()
            graph.replay()
            expected = ALLOWED[name]()
        made, wanted = list(tensors_in(result)), list(tensors_in(expected))
        assert wanted
        assert all(torch.equal(*pair) for pair in zip(made, wanted, strict=True))
    finally:
        for each, old in zip((x, ids, mask), before, strict=True):
            each.copy_(old)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_made_under_a_default_device_is_there(mode: Any) -> None:
    """The default was set before the capture, as an engine does for all it runs."""
    backend = HostGraphBackend()
    with torch.device(HERE), mode():
        graph, result = backend.capture(
            lambda: row.clone().copy_(torch.zeros(6)), backend.new_pool()
        )
        graph.replay()
        assert not result.any()
        with pytest.raises(CaptureError, match=r"masked_fill\.Tensor"):
            backend.capture(lambda: x.masked_fill(mask, torch.zeros(())), backend.new_pool())
        with pytest.raises(CaptureError, match=HOST_SOURCE):
            backend.capture(lambda: row.__setitem__(0, 1.0), backend.new_pool())


def test_custom_operator_that_returns_a_host_value_is_refused(counting: Any) -> None:
    backend = HostGraphBackend()
    with (
        torch.inference_mode(),
        pytest.raises(CaptureError, match=r"count\..*returns something other than tensors"),
    ):
        backend.capture(lambda: x * counting.count(ids), backend.new_pool())


def test_custom_operator_that_returns_a_number_beside_a_tensor_is_refused(counting: Any) -> None:
    backend = HostGraphBackend()
    with torch.inference_mode(), pytest.raises(CaptureError, match="other than tensors"):
        backend.capture(lambda: counting.both(ids)[0], backend.new_pool())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_custom_operator_that_is_a_recipe_is_judged_by_its_parts(counting: Any, mode: Any) -> None:
    backend = HostGraphBackend()
    values = torch.tensor([1.0, 2.0])
    with mode():
        graph, result = backend.capture(lambda: counting.recipe(values)[0], backend.new_pool())
        assert "aten.mul" in graph.listing[0]
        values.fill_(3.0)
        graph.replay()
        assert result.tolist() == [6.0, 6.0]
        with pytest.raises(CaptureError, match=f"aten.nonzero.*{DATA_SHAPE}"):
            backend.capture(lambda: counting.bad_recipe(values), backend.new_pool())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_custom_operator_may_call_a_tensor_what_torch_calls_a_reduction(
    counting: Any, mode: Any
) -> None:
    backend = HostGraphBackend()
    out, two = torch.zeros(2), torch.tensor([1.0, 2.0])
    with mode():
        graph, _ = backend.capture(lambda: counting.fold(out, two, two), backend.new_pool())
        graph.replay()
    assert out.tolist() == [2.0, 4.0]
    assert [(use.reads, use.writes) for use in graph.externals] == [(True, True), (True, False)]


def test_custom_operator_whose_tags_tell_of_sizes_is_refused(counting: Any) -> None:
    backend = HostGraphBackend()
    with torch.inference_mode(), pytest.raises(CaptureError, match=f"tagged.*{DATA_SHAPE}"):
        backend.capture(lambda: counting.tagged(ids), backend.new_pool())


def test_custom_result_of_another_shape_than_at_capture_is_an_error(counting: Any) -> None:
    backend = HostGraphBackend()
    source = torch.tensor([1, 2, 3])
    with torch.inference_mode():
        graph, result = backend.capture(lambda: counting.positive(source), backend.new_pool())
        graph.replay()
        assert result.tolist() == [1, 2, 3]
        source.copy_(torch.tensor([7, 0, 0]))
        with pytest.raises(RuntimeError, match=r"shape \[1\], and had \[3\]") as caught:
            graph.replay()
    assert result.tolist() == [1, 2, 3], "and nothing was spread over the block"
    assert "positive" in caught.value.__notes__[0]


@pytest.fixture(scope="module")
def counting() -> Any:
    """Operators of numbers, of shapes that depend on values, one of them declared, of parts."""
    library = torch.library.Library("pcpbench_counting", "FRAGMENT")
    library.define("count(Tensor x) -> int")
    library.define("positive(Tensor x) -> Tensor")
    library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
    library.define("both(Tensor x) -> (Tensor, int)")
    library.define("recipe(Tensor x) -> (Tensor, int)")
    library.define("bad_recipe(Tensor x) -> Tensor")
    library.define("fold(Tensor(a!) out, Tensor reduce, Tensor accumulate) -> ()")
    library.impl("both", lambda values: (values * 2, 3), "CPU")
    library.impl("recipe", lambda values: (values * 2, 3), "CompositeImplicitAutograd")
    library.impl("bad_recipe", lambda values: values.nonzero(), "CompositeImplicitAutograd")
    library.impl("fold", lambda out, a, b: out.copy_(a + b) is None or None, "CPU")
    library.impl("count", lambda values: int(values.sum()), "CPU")
    library.impl("positive", lambda values: values[values > 0], "CPU")
    library.impl("tagged", lambda values: values[values > 0], "CPU")
    yield torch.ops.pcpbench_counting
    library._destroy()


def test_raw_triton_launch_is_refused(tmp_path: Any) -> None:
    import importlib.util
    import subprocess
    import sys

    if importlib.util.find_spec("triton") is None:  # to import it here would be too early for vLLM
        pytest.skip("triton is not installed")
    script = tmp_path / "launch.py"
    script.write_text(
        "import torch, triton, triton.language as tl\n"
        "from pcpbench.device.host_graph import HostGraphBackend\n"
        "@triton.jit\n"
        "def double(x, out, n, block: tl.constexpr):\n"
        "    at = tl.arange(0, block)\n"
        "    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)\n"
        "x, out = torch.ones(5), torch.zeros(5)\n"
        "def step():\n"
        "    double[(1,)](x, out, 5, block=8)\n"
        "backend = HostGraphBackend()\n"
        "try:\n"
        "    backend.capture(step, backend.new_pool())\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "assert not out.any()\n"
    )
    import os

    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CaptureError a raw Triton launch")
    assert "launch.py:9" in done.stdout
