"""One whole file that a command makes from others: written at once, and over none but its like.

Owns which existing file may be replaced.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.paths import reachable


def check_target(path: Path, mark: str, what: str) -> None:
    """Raise UsageError for a path where `what` cannot go; asked before anything is made."""
    if reachable(path).is_dir():
        raise UsageError(f"--out is {str(path)!r}, which is a directory: name a file in it.")
    if not path.parent.is_dir():
        raise UsageError(
            f"--out is {str(path)!r}, and {str(path.parent)!r} is no directory: make it first."
        )
    if not path.exists():
        return
    if not path.is_file():
        raise UsageError(f"--out is {str(path)!r}, which is no regular file: name another.")
    try:
        with path.open("rb") as stream:
            head = stream.read(len(mark.encode()))
    except OSError as error:
        raise UsageError(f"--out is {str(path)!r}, which cannot be read ({error.strerror}).") from (
            error
        )
    if head != mark.encode():
        raise UsageError(
            f"--out is {str(path)!r}, which is no {what} of pcpbench: name another file, so that "
            "nothing of yours is written over."
        )


def write_whole(path: Path, text: str) -> None:
    """Write a file: a reader finds the old one or the new one, never half."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(3)}.part")
    try:
        try:
            # A name that is no UTF-8 comes as surrogates, which are written as their escapes.
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CannotMeasure(
            f"{str(path)!r} cannot be written ({error.strerror}): make room or pass --out with "
            "another file."
        ) from error
