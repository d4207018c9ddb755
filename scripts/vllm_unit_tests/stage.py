"""pytest plugin: what vLLM's tests ask of a machine that has no GPU, and nothing on one that has.

Owns four things, all about where tensors live: a tensor that a test puts on "cuda" lands on the
CPU, a test file is read as if CUDA were there (else its skip marks would take every test away), the
worker is told the same while a test runs, and the one kernel of vLLM's MoE router that these tests
call has a stand-in. The rest is pcpbench.targets.vllm.host's. Knows no class of either side.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from pcpbench.targets.vllm import host

HAS_GPU = host.has_accelerator()
if not HAS_GPU:
    # Before another plugin imports pcpbench's kernels: Triton decides once what it is.
    os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
LOCAL_MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
    "torch_dtype": "float16",
}
"""Stands for the model whose configuration some tests read from the hub; no weight is loaded."""


class CudaIsTheHost(TorchFunctionMode):
    """Every device "cuda" in an argument of a torch function is the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with the CPU in the place of the GPU."""
        args, kwargs = tree_map(_on_host, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


@contextmanager
def as_if_cuda() -> Iterator[None]:
    """vLLM's platform and torch say that there is a GPU."""
    from vllm.platforms import PlatformEnum, current_platform

    kept = type(current_platform)._enum, torch.cuda.is_available
    type(current_platform)._enum = PlatformEnum.CUDA
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        type(current_platform)._enum, torch.cuda.is_available = kept


def prepare() -> None:
    """Bring up vLLM in this process and leave a local model's configuration in its directory."""
    done = host.prepare(streams=True)
    model = Path("facebook/opt-125m")
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(LOCAL_MODEL))
    _stand_in_for_tests_utils()
    if done:
        _quiet_accelerator()
        _stand_in_for_router_kernel()


def _quiet_accelerator() -> None:
    """What vLLM's microbatch threads ask of the device itself."""
    from vllm.platforms import current_platform
    from vllm.utils import torch_utils

    for name in ("set_device_index", "current_device_index"):
        setattr(torch.accelerator, name, lambda *_: 0)
    torch.cuda.current_blas_handle = lambda: 0
    # vLLM follows the current stream by this function, which its own stand-ins empty.
    torch.cuda.set_stream = lambda stream: setattr(torch_utils._current_stream_tls, "value", stream)
    type(current_platform).num_compute_units = classmethod(lambda *_: 1)


def _stand_in_for_tests_utils() -> None:
    """The one decorator that these files take from a module that wants a dozen more packages."""
    module = types.ModuleType("tests.utils")
    module.create_new_process_for_each_test = lambda *_: lambda test: test  # type: ignore
    sys.modules["tests.utils"] = module


def _stand_in_for_router_kernel() -> None:
    """vLLM's compiled top-k of the router, whose rows of padding get expert -1."""
    import vllm._custom_ops as ops

    def topk_softmax(
        weights: torch.Tensor,
        indices: torch.Tensor,
        sources: torch.Tensor,
        logits: torch.Tensor,
        renormalize: bool = False,
        bias: torch.Tensor | None = None,
        *,
        is_padding: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        values, chosen = logits.softmax(-1).topk(indices.shape[1])
        weights.copy_(values)
        indices.copy_(chosen)
        if is_padding is not None:
            indices[is_padding] = -1

    ops.topk_softmax = topk_softmax


def import_what_a_test_imports(path: Path) -> None:
    """Import the modules that a test file asks for, before anything says that there is a GPU.

    Modules of vLLM decide at import what they need of CUDA; only the test file's marks are to be
    read in its name.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("vllm", "tests"):
                with suppress(ImportError):
                    importlib.import_module(name)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Read a test file as if there were a GPU."""
    if HAS_GPU or not isinstance(collector, pytest.Module):
        return (yield)
    import_what_a_test_imports(collector.path)
    with as_if_cuda():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run a test, its fixtures included, with the CPU in the place of the GPU."""
    if HAS_GPU:
        return (yield)
    with as_if_cuda(), CudaIsTheHost():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Bring up vLLM before the first test file is read."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    prepare()
