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
ids = torch.tensor([1, 2, 0])
mask = x > 0.5
weight = torch.rand(4, 4)

HOST_VALUE = "value to the host"
DATA_SHAPE = "shape of its result depends"
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
    "steps between numbers": lambda: torch.linspace(0.0, 1.0, 4) + x[0, :4],
    "long index": lambda: x[ids],
    "nonzero_static": lambda: torch.nonzero_static(x, size=3),
    "assert_async": lambda: (torch._assert_async((x >= 0).all()), x * 1)[1],
    "iterate rows": lambda: [row * 2 for row in x],
}


def _set(target: torch.Tensor, where: torch.Tensor, value: float) -> torch.Tensor:
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


def test_custom_operator_that_returns_a_host_value_is_refused(counting: Any) -> None:
    backend = HostGraphBackend()
    with torch.inference_mode(), pytest.raises(CaptureError, match=r"count\..*returns no tensor"):
        backend.capture(lambda: x * counting.count(ids), backend.new_pool())


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
    """Operators whose results depend on values: a number, and two shapes, one of them declared."""
    library = torch.library.Library("pcpbench_counting", "FRAGMENT")
    library.define("count(Tensor x) -> int")
    library.define("positive(Tensor x) -> Tensor")
    library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.dynamic_output_shape,))
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
