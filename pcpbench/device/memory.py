"""Running out of memory, told from what an engine does wrong."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from pcpbench.errors import NoMemory

SAID: Final = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
"""By torch's CPU allocator and the C++ library, which raise a plain RuntimeError."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise NoMemory for whatever says in this block that there is none left."""
    try:
        yield
    except Exception as error:
        if not is_no_memory(error):
            raise
        said = " ".join(str(error).split())[:300].rstrip(". ")
        raise NoMemory(f"there is not enough memory: {said}.") from error


def is_no_memory(error: Exception) -> bool:
    """Whether an exception says that no memory is left, on the host or on the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error) for said in SAID)
