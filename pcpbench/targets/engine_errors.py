"""What an engine raises is a result of the engine, told with its place (contract C0).

Owns the line between an engine that broke and a machine that cannot go on: no memory, no Triton or
nothing to compile its launchers with, a cache of kernels that cannot be written, a library of the
device that does not start.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Final, TypeVar

import torch

from pcpbench.device.memory import memory_errors
from pcpbench.errors import CannotMeasure, EngineError, MeasuredFailure, PcpbenchError

T = TypeVar("T")

TORCH_DIR = str(Path(torch.__file__).parent)

NOT_STARTED: Final = ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
"""What cuBLAS says of a device that has no room for it, or that is another's."""

NOT_WRITTEN: Final = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
TRITON_CACHE: Final = (("triton", "runtime", "cache.py"), ("triton", "runtime", "build.py"))
"""The modules of Triton that write files: compiled kernels, and launchers on their way there."""


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise EngineError for whatever the engine raises in this block.

    NoMemory where there is none, CannotMeasure for what else the machine lacks. What pcpbench
    raises on purpose passes.
    """
    try:
        with memory_errors():
            yield
    except MeasuredFailure as failure:  # such as a capture that the device is said to have refused
        lack = None if failure.__cause__ is None else _lack(failure.__cause__)
        if lack is None:
            raise
        raise CannotMeasure(lack) from failure
    except PcpbenchError:
        raise
    except Exception as error:
        lack = _lack(error)
        if lack is not None:
            raise CannotMeasure(lack) from error
        raise EngineError(f"the engine raised {_told(error)} (at {_place(error)})") from error


def _lack(error: BaseException) -> str | None:
    """What the machine does not have, in one sentence; None for an error of the engine's own."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "triton":
        return (
            f"triton cannot be imported ({_told(error)}): install it as constraints.txt has it, or "
            "pass --device cpu."
        )
    if isinstance(error, RuntimeError) and "Failed to find C compiler" in str(error):
        return (
            "triton finds no C compiler to build its launchers with: install gcc or clang, or name "
            "one in the environment variable CC."
        )
    if isinstance(error, OSError) and error.errno in NOT_WRITTEN and _is_of_the_cache(error):
        return (
            f"triton cannot write the kernels that it compiles ({_told(error)}): make room, or "
            "name a directory that can be written in TRITON_CACHE_DIR."
        )
    if isinstance(error, RuntimeError) and any(said in str(error) for said in NOT_STARTED):
        return (
            f"cuBLAS does not start on this device ({_told(error)}): free memory on it, or pass "
            "another --device."
        )
    return None


def _is_of_the_cache(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(PurePath(frame.filename).parts[-3:] in TRITON_CACHE for frame in frames)


def _told(error: BaseException) -> str:
    said = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


class _Telling(PcpbenchError):
    """Carries an error of who is told of a capture through the engine, whose doing it is not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def errors_of_telling() -> Iterator[None]:
    """Raise as it was what a callback from `through_the_engine` has raised in this block."""
    try:
        yield
    except _Telling as carrier:
        raise carrier.error from None


def through_the_engine(tell: Callable[[T], None]) -> Callable[[T], None]:
    """The callback, whose errors `engine_errors` lets pass."""

    def told(what: T) -> None:
        try:
            tell(what)
        except Exception as error:
            raise _Telling(error) from error

    return told


def _place(error: Exception) -> str:
    """File, line and function of the innermost frame that is not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(TORCH_DIR)] or frames
    frame = own[-1]
    where = Path(frame.filename)
    return f"{where.parent.name}/{where.name}:{frame.lineno}, in {frame.name}"
