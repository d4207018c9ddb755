"""Which line of the caller's code asked for an op. Knows frames and file names, not ops."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from types import FrameType

import numpy as np
import torch

_HELPERS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (__file__, torch.__file__, np.__file__)
)
_ADDRESS_RECORDER = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "address_recorder.py"
)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True)
class Source:
    """A place in the caller's code.

    text: `file.py:line`, the file relative to the working directory where it lies below it.
    in_triton: whether Triton's own Python stood between that line and torch, which is how a raw
    kernel launch under Triton's interpreter shows itself.
    """

    text: str
    in_triton: bool


def calling_source() -> Source:
    """The innermost frame outside torch, numpy, Triton, the standard library and our recorders."""
    in_triton = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if module == "triton" or module.startswith("triton."):
            in_triton = True
        elif not _is_helper(path):
            return Source(f"{_shorten(path)}:{frame.f_lineno}", in_triton)
        frame = frame.f_back
    return Source("unknown:0", in_triton)


def source_of(error: BaseException) -> str:
    """`file.py:line` of the innermost caller's frame that an error passed through."""
    found, step = "unknown:0", error.__traceback__
    while step is not None:
        path = step.tb_frame.f_code.co_filename
        if not _is_helper(path):
            found = f"{_shorten(path)}:{step.tb_lineno}"
        step = step.tb_next
    return found


def _is_helper(path: str) -> bool:
    if path.startswith(_HELPERS) or path == _ADDRESS_RECORDER:
        return True
    return path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path


def _shorten(path: str) -> str:
    here = os.getcwd() + os.sep
    return path[len(here) :] if path.startswith(here) else path
