"""Running out of memory, told from what an engine does wrong."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from pcpbench.errors import NoMemory, PcpbenchError

SAID: Final = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
"""By torch's CPU allocator and the C++ library, which raise a plain RuntimeError."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise NoMemory for whatever says in this block that there is none left.

    What pcpbench raises on purpose passes. An error is judged by itself: one that an engine raises
    while it handles a lack of memory is the engine's.
    """
    try:
        yield
    except PcpbenchError:
        raise
    except Exception as error:
        if not is_no_memory(error):
            raise
        raise no_memory(error) from error


def no_memory(error: BaseException) -> NoMemory:
    """What pcpbench raises for an error that says that no memory is left."""
    said = " ".join(str(error).split())[:300].rstrip(". ")
    return NoMemory(f"there is not enough memory: {said}.")


def is_no_memory(error: BaseException) -> bool:
    """Whether an exception says that no memory is left, on the host or on the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error) for said in SAID)
