"""A divergence on disk: all that a later process needs to run into it again.

Owns `bundle.json` (what to run, what was found) and `values.npz` (both sides' arrays), and the
refusal of whatever is no bundle of ours. Runs nothing.
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
from pcpbench.divergence import Accusation, Divergence
from pcpbench.errors import UsageError
from pcpbench.plan import ScenarioPlan
from pcpbench.records import Environment
from pcpbench.request import CHECKS, FEEDS, EngineOptions

FORMAT: Final = "pcpbench-divergence"
SCHEMA_VERSION: Final = 1
DIRECTORY: Final = "divergence"
BUNDLE_NAME: Final = "bundle.json"
VALUES_NAME: Final = "values.npz"


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run. options: of every engine, device and backend resolved.

    base, candidate: the arms that were compared. accusation: names the pair to run.
    plan: the scenario's steps, up to the last one to look at. tokens: what fed the arms, one list a
    step; empty where each fed itself. repetitions: timed runs, for a finding that only they show.
    fault: to be injected, "" for none.
    """

    options: EngineOptions
    base: str
    candidate: str
    accusation: Accusation
    plan: ScenarioPlan
    tokens: tuple[tuple[int, ...], ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
    feed: str = "teacher-forced"
    checks: str = "quick"
    repetitions: int = 0
    fault: str = ""


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
    """The files of a bundle by name."""
    text = msgspec.json.format(msgspec.json.encode(bundle), indent=2)
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **dict(arrays))
    return {BUNDLE_NAME: text + b"\n", VALUES_NAME: stream.getvalue()}


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
    except msgspec.DecodeError as error:
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
    except msgspec.ValidationError as error:
        raise _refusal(file, f"is damaged ({error})") from error
    problem = _problem(bundle.case) or _values_problem(file.parent / VALUES_NAME)
    if problem:
        raise _refusal(file, f"is damaged ({problem})")
    return bundle


def _find(path: Path) -> Path:
    if path.is_dir():
        for place in (path / BUNDLE_NAME, path / DIRECTORY / BUNDLE_NAME):
            if place.exists():
                return place
        raise _refusal(path, f"holds no {BUNDLE_NAME}")
    if not path.exists():
        raise _refusal(path, "does not exist")
    return path


def _problem(case: Case) -> str:
    """What cannot be run of a case whose types are right, "" for nothing."""
    indices = [step.index for step in case.plan.steps]
    if not indices or indices != list(range(len(indices))):
        return "its plan's steps are not numbered from 0"
    if not case.accusation.step <= case.accusation.last_step <= indices[-1]:
        return f"step {case.accusation.last_step} is not in its plan"
    if case.feed not in FEEDS or case.checks not in CHECKS:
        return "its feed or its checks are unknown"
    if not 0 <= case.repetitions <= 1:
        return "its repetitions are neither 0 nor 1"
    for step, tokens in zip(case.plan.steps, case.tokens, strict=False):
        num_sampled = sum(request.num_logits for request in step.scheduled)
        if len(tokens) != num_sampled:
            return f"step {step.index} samples {num_sampled} tokens and {len(tokens)} are given"
    for step, drafts in zip(case.plan.steps, case.drafts, strict=False):
        if len(drafts) != step.num_draft_tokens:
            return f"step {step.index} has {step.num_draft_tokens} drafts, {len(drafts)} are given"
    given = [token for step in (*case.tokens, *case.drafts) for token in step]
    if any(not 0 <= token < case.plan.vocab_size for token in given):
        return "a token that it gives is outside the vocabulary"
    return ""


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
