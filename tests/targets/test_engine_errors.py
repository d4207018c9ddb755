"""What a machine lacks is told from what an engine does wrong: exit 3 from exit 1."""

import errno
import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

from pcpbench.errors import CannotMeasure, CaptureError, EngineError
from pcpbench.model.presets import TINY
from pcpbench.targets.builtin import BuiltinArm
from pcpbench.targets.engine_errors import engine_errors

HAS_TRITON = importlib.util.find_spec("triton") is not None
NO_TRITON = "triton is not installed: run scripts/setup"


def raised_in(error):
    with pytest.raises(Exception) as caught, engine_errors():
        raise error
    assert "\n" not in str(caught.value)
    return caught.value


LACKS = [
    (ModuleNotFoundError("No module named 'triton'", name="triton"), "triton cannot be imported"),
    (ImportError("cannot import name 'jit'", name="triton.language"), "triton cannot be imported"),
    (
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        "triton finds no C compiler",
    ),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "cuBLAS does not start on this device",
    ),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
        "cuBLAS does not start on this device",
    ),
]
OWN = [
    ModuleNotFoundError("No module named 'tritonic'", name="tritonic"),
    ModuleNotFoundError("No module named 'engine.kernels'", name="engine.kernels"),
    ImportError("cannot import name 'plan'"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    PermissionError(errno.EACCES, "Permission denied", "/engine/weights"),
    OSError(errno.ENOSPC, "No space left on device", "/engine/log"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
]


@pytest.mark.parametrize(("error", "told"), LACKS, ids=lambda value: str(value)[:50])
def test_what_the_machine_lacks_is_no_verdict(error, told):
    found = raised_in(error)
    assert isinstance(found, CannotMeasure)
    assert str(found).startswith(told)
    assert str(found).endswith(".")


@pytest.mark.parametrize("error", OWN, ids=str)
def test_what_an_engine_does_itself_is_its_own(error):
    assert isinstance(raised_in(error), EngineError)


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_cache_of_kernels_that_cannot_be_written(monkeypatch, tmp_path, number):
    from triton.runtime.cache import FileCacheManager

    def refused(*_, **__):
        raise OSError(number, os.strerror(number), "/home/.triton")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "makedirs", refused)
    with pytest.raises(CannotMeasure, match="triton cannot write the kernels"), engine_errors():
        FileCacheManager("key")
    with pytest.raises(EngineError), engine_errors():
        os.makedirs("/engine")


@pytest.mark.skipif(not HAS_TRITON, reason=NO_TRITON)
def test_a_cache_that_breaks_otherwise_is_told_with_its_place(monkeypatch, tmp_path):
    from triton.runtime.cache import FileCacheManager

    def broken(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "makedirs", broken)
    with pytest.raises(EngineError, match="Input/output error"), engine_errors():
        FileCacheManager("key")


def test_a_capture_that_a_lack_ended_is_no_verdict():
    lack = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    with pytest.raises(CannotMeasure, match="cuBLAS does not start"), engine_errors():
        raise CaptureError("the device refused the capture") from lack
    with pytest.raises(CaptureError), engine_errors():
        raise CaptureError("the device refused the capture") from RuntimeError("a sync")


def test_an_engine_that_goes_on_without_triton_and_breaks_is_its_own():
    def falls_back():
        try:
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        except ModuleNotFoundError:
            {}["no twin of this kernel"]

    with pytest.raises(EngineError, match="no twin of this kernel"), engine_errors():
        falls_back()


def test_an_error_of_who_is_told_of_graphs_is_not_the_engines():
    def broken(_):
        raise BlockingIOError(errno.EAGAIN, "a console that takes nothing")

    def captures(tell):
        tell("graph")

    arm = BuiltinArm(
        "full", SimpleNamespace(capture=captures, shape=TINY, device=torch.device("cpu"))
    )
    with pytest.raises(BlockingIOError, match="a console that takes nothing"):
        arm.capture(broken)
    told = []
    arm.capture(told.append)
    assert told == ["graph"]
