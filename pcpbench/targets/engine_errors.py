"""What an engine raises is a result of the engine, told with its place (contract C0).

Owns the line between an engine that broke and a machine that cannot go on.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pcpbench.errors import CannotMeasure, EngineError, PcpbenchError

TORCH_DIR = str(Path(torch.__file__).parent)
NO_MEMORY = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise EngineError for whatever the engine raises in this block, CannotMeasure for no memory.

    What pcpbench raises on purpose passes.
    """
    try:
        yield
    except PcpbenchError:
        raise
    except Exception as error:
        if _is_no_memory(error):
            said = " ".join(str(error).split())[:300].rstrip(". ")
            raise CannotMeasure(f"there is not enough memory: {said}.") from error
        said = " ".join(str(error).split())[:300]
        told = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise EngineError(f"the engine raised {told} (at {_place(error)})") from error


def _is_no_memory(error: Exception) -> bool:
    """torch's CPU allocator, and the C++ library, raise a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error) for said in NO_MEMORY)


def _place(error: Exception) -> str:
    """File, line and function of the innermost frame that is not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(TORCH_DIR)] or frames
    frame = own[-1]
    where = Path(frame.filename)
    return f"{where.parent.name}/{where.name}:{frame.lineno}, in {frame.name}"
