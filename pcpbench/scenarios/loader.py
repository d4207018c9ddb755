"""Scenario files: find, read, check. Every failure is one sentence with the place and the remedy.

Owns the way from a name or path to a `Scenario`. Raises ScenarioError only. Knows no scheduler.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from pcpbench.errors import ScenarioError
from pcpbench.scenarios import fields, yaml_doc
from pcpbench.scenarios.limits import limits_problem, request_problem
from pcpbench.scenarios.schema import MAX_REQUESTS, Scenario

DATA_DIR = Path(__file__).parent / "data"
ALL = "all"
MAX_FILE_BYTES = 256 * 1024
_SUFFIXES = (".yaml", ".yml", ".json")


def shipped_names() -> list[str]:
    """Names of the scenarios in the package, sorted, s2 before s11."""
    return sorted((path.stem for path in DATA_DIR.glob("*.yaml")), key=_natural)


def scenario_path(name_or_file: str | os.PathLike[str]) -> Path:
    """The file behind a shipped name or a path; a shipped name wins over a file of that name."""
    text = os.fspath(name_or_file)
    names = shipped_names()
    if text in names:
        return DATA_DIR / f"{text}.yaml"
    path = Path(text)
    if text and (len(path.parts) > 1 or path.suffix.lower() in _SUFFIXES or _exists(path)):
        return path
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.4)
    near += [name for name in names if text and text in name and name not in near][:3]
    hint = f"did you mean {_either(near)}?" if near else f"use one of {', '.join(names)}."
    raise ScenarioError(f"scenario {text!r}: no such scenario is shipped, nor is it a file; {hint}")


def load_scenario(name_or_file: str | os.PathLike[str]) -> Scenario:
    """The scenario of a shipped name or of a YAML (or JSON) file, checked."""
    path = scenario_path(name_or_file)
    return parse_scenario(_read(path), str(path))


def choose_scenarios(names_or_files: Sequence[str] = ()) -> list[Scenario]:
    """What a command runs: the shipped core scenarios when none is named, `all` for every one."""
    if not names_or_files:
        return [scenario for scenario in load_scenarios() if scenario.core]
    if ALL in names_or_files:
        others = [name for name in names_or_files if name != ALL and name not in shipped_names()]
        return load_scenarios([*shipped_names(), *others])
    return load_scenarios(names_or_files)


def load_scenarios(names_or_files: Sequence[str] = ()) -> list[Scenario]:
    """Several scenarios in the order asked for; all shipped ones when none is named.

    Two of one name would overwrite each other in the results and are refused.
    """
    seen: dict[str, str] = {}
    scenarios = []
    for asked in names_or_files or shipped_names():
        scenario = load_scenario(asked)
        if scenario.name in seen:
            raise ScenarioError(
                f"--scenario {asked}: the name {scenario.name!r} was already given by "
                f"{seen[scenario.name]}; rename one of the two, or ask for it once."
            )
        seen[scenario.name] = str(asked)
        scenarios.append(scenario)
    return scenarios


def parse_scenario(text: str, origin: str) -> Scenario:
    """The scenario in `text`; `origin` (a path) begins every message."""
    try:
        document = yaml_doc.parse(text)
    except yaml_doc.YamlProblem as problem:
        raise ScenarioError(f"{origin}, {problem}.") from problem
    if document.value is None:
        raise ScenarioError(
            f"{origin} is empty: a scenario needs at least name, description and requests."
        )
    problem_found = fields.first_problem(document.value, Scenario)
    if problem_found is not None:
        raise _error(origin, document, *problem_found)
    scenario = msgspec.convert(document.value, Scenario)
    problem_found = _first_conflict(scenario)
    if problem_found is not None:
        raise _error(origin, document, *problem_found)
    return scenario


def _first_conflict(scenario: Scenario) -> tuple[str, str] | None:
    """(path, reason) of the first values that exclude each other."""
    limits = scenario.limits
    problem = limits_problem(limits)
    if problem is not None:
        return f"limits.{problem.field}", problem.reason
    if scenario.num_requests > MAX_REQUESTS:
        return "requests", f"hold {scenario.num_requests} requests: use at most {MAX_REQUESTS}"
    for i, entry in enumerate(scenario.requests):
        if entry.at_step is not None and entry.at_s is not None:
            return f"requests[{i}].at_s", "is given next to at_step: keep one of the two"
        problem = request_problem(entry.prompt_len, entry.output_len, limits)
        if problem is not None:
            return f"requests[{i}]", f"cannot run: limits.{problem.field} {problem.reason}"
    return _repeated_name(scenario)


def _repeated_name(scenario: Scenario) -> tuple[str, str] | None:
    owner: dict[str, int] = {}
    for i, entry in enumerate(scenario.requests):
        name = entry.name or f"r{i}"
        for req_id in _req_ids(name, entry.count):
            if req_id in owner:
                return f"requests[{i}].name", (
                    f"makes a second request {req_id!r} (the first is requests[{owner[req_id]}]): "
                    "give each its own name"
                )
            owner[req_id] = i
    return None


def _req_ids(name: str, count: int) -> Iterable[str]:
    return [name] if count == 1 else [f"{name}.{copy}" for copy in range(count)]


def _error(origin: str, document: yaml_doc.Document, path: str, reason: str) -> ScenarioError:
    """Name file, line and field; a field that is absent has the line of what should hold it."""
    holder = path
    while holder and holder not in document.lines:
        holder = holder[: max(holder.rfind("."), holder.rfind("["), 0)]
    line = document.lines.get(holder, 1)
    return ScenarioError(f"{origin}, line {line}: {path or 'the document'} {reason}.")


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise ScenarioError(f"{path} is a directory: name a scenario file in it.")
        if not _exists(path):
            raise ScenarioError(
                f"{str(path)!r} does not exist: name a YAML file, or a shipped scenario such as "
                f"{shipped_names()[0]}."
            )
        if not path.is_file():
            raise ScenarioError(f"{path} is not a regular file: name a scenario file.")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScenarioError(f"{str(path)!r} cannot be read ({reason}): check the path.") from error
    if len(data) > MAX_FILE_BYTES:
        raise ScenarioError(
            f"{path} is larger than {MAX_FILE_BYTES // 1024} KiB: write repeated requests with "
            "`count`, or cut the scenario in several files."
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        byte = data[error.start]
        raise ScenarioError(
            f"{path}, line {line}: not UTF-8 text (byte 0x{byte:02x}): save it as UTF-8."
        ) from error


def _natural(name: str) -> list[tuple[bool, int, str]]:
    parts = re.split(r"([0-9]+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts if part]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return True  # a name too long or with a NUL: let the read say why


def _either(words: list[str]) -> str:
    return " or ".join(", ".join(words).rsplit(", ", 1))
