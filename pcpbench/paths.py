"""Paths that people name."""

from __future__ import annotations

from pathlib import Path

from pcpbench.errors import UsageError


def reachable(path: Path, what: str = "") -> Path:
    """The path itself; raises UsageError for one that this process may not even look for.

    (A directory without search permission, a name that is too long, a loop of links.) what: whose
    path it is, for the sentence.
    """
    try:
        path.exists()
        path.resolve()
    except (OSError, RuntimeError) as error:  # a loop is a RuntimeError before Python 3.13
        why = getattr(error, "strerror", None) or "its links go in a circle"
        named = f"{what} {str(path)!r}".lstrip()
        raise UsageError(f"{named} cannot be read ({why}).") from error
    return path
