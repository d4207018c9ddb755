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

    What pcpbench raises on purpose passes.
    """
    try:
        yield
    except PcpbenchError:
        raise
    except Exception as error:
        first = _without_memory(error)
        if first is None:
            raise
        said = " ".join(str(first).split())[:300].rstrip(". ")
        raise NoMemory(f"there is not enough memory: {said}.") from error


def _without_memory(error: BaseException) -> BaseException | None:
    """The error that says that no memory is left: this one, or one that it was raised after.

    To end a capture that ran out of memory fails as well, and that error is the one that is seen.
    """
    if is_no_memory(error):
        return error
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None if before is None else _without_memory(before)


def is_no_memory(error: BaseException) -> bool:
    """Whether an exception says that no memory is left, on the host or on the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error) for said in SAID)
