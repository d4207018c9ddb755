"""Capture on a device, with torch's part of it played: what is raised where the capture ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcpbench.device.accelerator import AcceleratorGraphBackend
from pcpbench.errors import CaptureError, NoMemory, UsageError

FULL = "CUDA out of memory. Tried to allocate 2 GiB."


class PlayedGraph:
    """Stands for torch.cuda.graph; a capture that failed inside raises `at_end` as it ends."""

    at_end: BaseException | None = None

    def __init__(self, graph: Any, pool: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None and self.at_end is not None:
            raise self.at_end


@pytest.fixture
def backend(monkeypatch: Any) -> AcceleratorGraphBackend:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", PlayedGraph)
    return AcceleratorGraphBackend()


@pytest.fixture
def at_end(monkeypatch: Any) -> Callable[[BaseException], None]:
    return lambda error: monkeypatch.setattr(PlayedGraph, "at_end", error)


def raising(error: BaseException) -> Callable[[], None]:
    def fn() -> None:
        raise error

    return fn


def test_what_the_function_returns_comes_back(backend: AcceleratorGraphBackend) -> None:
    x = torch.ones(2)
    graph, result = backend.capture(lambda: x * 2, backend.new_pool())
    assert result.tolist() == [2.0, 2.0]
    assert [use.address for use in graph.externals] == [x.untyped_storage().data_ptr()]


@pytest.mark.parametrize("ends", [None, "capture_end was called before capture_begin", FULL])
def test_memory_that_ran_out_is_told_whatever_the_end_of_the_capture_raises(
    backend: AcceleratorGraphBackend, at_end: Any, ends: str | None
) -> None:
    if ends is not None:
        at_end(RuntimeError(ends))
    with pytest.raises(NoMemory, match="Tried to allocate 2 GiB"):
        backend.capture(raising(torch.OutOfMemoryError(FULL)), backend.new_pool())


def test_the_first_refusal_of_a_device_is_the_one_that_is_told(
    backend: AcceleratorGraphBackend, at_end: Any
) -> None:
    at_end(RuntimeError("operation failed due to a previous error during capture"))
    with pytest.raises(CaptureError, match=r"refused the capture: .*not permitted"):
        backend.capture(raising(RuntimeError("it is not permitted")), backend.new_pool())


def test_a_fallback_that_fails_after_memory_ran_out_is_the_engines(
    backend: AcceleratorGraphBackend, at_end: Any
) -> None:
    def engine() -> None:
        try:
            raise torch.OutOfMemoryError(FULL)
        except torch.OutOfMemoryError:
            raise ValueError("bug")  # noqa: B904

    at_end(RuntimeError("capture_end"))
    with pytest.raises(ValueError, match="bug"):
        backend.capture(engine, backend.new_pool())


def test_what_is_raised_on_purpose_passes_as_it_was(
    backend: AcceleratorGraphBackend, at_end: Any
) -> None:
    at_end(RuntimeError("capture_end"))
    for error in (UsageError("--model is too large."), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            backend.capture(raising(error), backend.new_pool())
        assert caught.value is error
