"""A divergence on disk: all that a later process needs to run into it again.

Owns `bundle.json` (what to run, what was found) and `values.npz` (both sides' arrays), and the
refusal of whatever is no bundle of ours; what a case may say is in case.py. Runs nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pcpbench import __version__
from pcpbench.divergence import Divergence
from pcpbench.errors import UsageError
from pcpbench.paths import reachable
from pcpbench.records import Environment
from pcpbench.session.case import Case, problem_of

FORMAT: Final = "pcpbench-divergence"
SCHEMA_VERSION: Final = 1
DIRECTORY: Final = "divergence"
BUNDLE_NAME: Final = "bundle.json"
VALUES_NAME: Final = "values.npz"


class Bundle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`bundle.json`. environment: where it was found."""

    format: str
    schema_version: int
    pcpbench_version: str
    environment: Environment
    case: Case
    finding: Divergence


def make_bundle(case: Case, finding: Divergence, environment: Environment) -> Bundle:
    """A bundle of this version."""
    return Bundle(
        format=FORMAT,
        schema_version=SCHEMA_VERSION,
        pcpbench_version=__version__,
        environment=environment,
        case=case,
        finding=finding,
    )


def bundle_files(bundle: Bundle, arrays: Mapping[str, NDArray[Any]]) -> dict[str, bytes]:
    """The files of a bundle by name; `bundle.json` last, so that one cut short is none."""
    text = msgspec.json.format(msgspec.json.encode(bundle), indent=2)
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **dict(arrays))
    return {VALUES_NAME: stream.getvalue(), BUNDLE_NAME: text + b"\n"}


def read_bundle(path: Path) -> Bundle:
    """The bundle in a directory, in a run's directory, or in a `bundle.json`.

    Raises UsageError, naming file and remedy, for one that is missing, foreign or damaged.
    """
    file = _find(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _refusal(file, f"cannot be read ({error.strerror})") from error
    try:
        head = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested without end
        raise _refusal(file, f"is damaged ({error})") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise _refusal(file, "is no divergence bundle")
    if head.get("schema_version") != SCHEMA_VERSION:
        raise _refusal(
            file,
            f"has schema version {head.get('schema_version')!r}, and pcpbench {__version__} reads "
            f"{SCHEMA_VERSION}",
        )
    try:
        bundle = msgspec.json.decode(data, type=Bundle)
    except (ValueError, RecursionError) as error:
        raise _refusal(file, f"is damaged ({error})") from error
    problem = problem_of(bundle.case, bundle.finding) or _values_problem(file.parent / VALUES_NAME)
    if problem:
        raise _refusal(file, f"is damaged ({problem})")
    return bundle


def _find(path: Path) -> Path:
    if reachable(path).is_dir():
        for place in (path / BUNDLE_NAME, path / DIRECTORY / BUNDLE_NAME):
            if place.exists():
                return place
        raise _refusal(path, f"holds no {BUNDLE_NAME}")
    if not path.exists():
        raise _refusal(path, "does not exist")
    return path


def _values_problem(path: Path) -> str:
    try:
        with np.load(path, allow_pickle=False) as stored:
            for name in stored.files:
                stored[name]
    except Exception as error:  # a zip file can be broken in many ways
        return f"{path.name} next to it cannot be read: {error or type(error).__name__}"
    return ""


def _refusal(path: Path, what: str) -> UsageError:
    return UsageError(
        f"bundle {str(path)!r} {what}: name a {DIRECTORY}/ directory that `pcpbench compare` wrote."
    )
