"""What an engine raises is a result of the engine, told with its place (contract C0).

Owns the line between an engine that broke and a machine that cannot go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pcpbench.device.memory import memory_errors
from pcpbench.errors import EngineError, PcpbenchError

TORCH_DIR = str(Path(torch.__file__).parent)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise EngineError for whatever the engine raises in this block, NoMemory where there is none.

    What pcpbench raises on purpose passes.
    """
    try:
        with memory_errors():
            yield
    except PcpbenchError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        told = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise EngineError(f"the engine raised {told} (at {_place(error)})") from error


def _place(error: Exception) -> str:
    """File, line and function of the innermost frame that is not torch's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(TORCH_DIR)] or frames
    frame = own[-1]
    where = Path(frame.filename)
    return f"{where.parent.name}/{where.name}:{frame.lineno}, in {frame.name}"
