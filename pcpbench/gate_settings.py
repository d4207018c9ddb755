"""How a gate is set: command line, a file, `[tool.pcpbench]` of pyproject.toml, defaults.

Owns which of them wins and what is refused. The command line is stronger than --config FILE, that
is stronger than pyproject.toml, and that than the defaults: setting by setting, and for rules
metric by metric. Knows no samples.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench.errors import UsageError
from pcpbench.gate_defaults import (
    DEFAULT_MAX_TIME_S,
    DEFAULT_PROCESSES,
    LEAST_PROCESSES,
    MOST_PROCESSES,
)
from pcpbench.gate_results import ON_UNDECIDED
from pcpbench.gate_rules import Acceptance, Rule, effective_acceptances, effective_rules

KEYS: Final = ("fail-on", "accept", "on-undecided", "max-time", "processes")
COMMAND_LINE: Final = "command line"
MAX_TIME_S: Final = 7 * 86400.0
PYPROJECT: Final = "pyproject.toml"
_ACCEPT: Final = re.compile(r"\s*(?P<rule>.+?)\s+until\s+(?P<until>\S+)\s+because\s+(?P<why>.+)")


class GateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line said; None and () where it said nothing."""

    fail_on: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    on_undecided: str | None = None
    max_time_s: float | None = None
    processes: int | None = None
    config: Path | None = None


class GateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What applies.

    processes: fresh processes before the first look. max_time_s: of the whole gate. sources:
    setting -> where it came from.
    """

    rules: tuple[Rule, ...]
    accept: tuple[Acceptance, ...] = ()
    on_undecided: str = "warn"
    max_time_s: float = DEFAULT_MAX_TIME_S
    processes: int = DEFAULT_PROCESSES
    sources: dict[str, str] = {}

    def shown(self) -> dict[str, Any]:
        """For a result: everything but the rules, which it has already."""
        return {
            "on_undecided": self.on_undecided,
            "max_time_s": self.max_time_s,
            "processes": self.processes,
            "accept": [msgspec.to_builtins(acceptance) for acceptance in self.accept],
            "sources": self.sources,
        }


def resolve_settings(options: GateOptions, directory: Path | None = None) -> GateSettings:
    """The settings that apply in a directory (the working one); raises UsageError for bad ones."""
    layers = _layers(options, Path.cwd() if directory is None else directory)
    rules = effective_rules([(source, _texts(table, source)) for source, table in layers])
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, table in layers:
        for key, read in _READERS.items():
            if key in table:
                values[key] = read(table[key], source)
                sources[key] = source
    accept = effective_acceptances(
        (source, _tables(table.get("accept", []), source)) for source, table in layers
    )
    return GateSettings(
        rules=rules,
        accept=accept,
        on_undecided=values.get("on-undecided", "warn"),
        max_time_s=values.get("max-time", DEFAULT_MAX_TIME_S),
        processes=values.get("processes", DEFAULT_PROCESSES),
        sources=sources,
    )


def _layers(options: GateOptions, directory: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """(source, table) from the weakest to the strongest."""
    layers: list[tuple[str, Mapping[str, Any]]] = []
    project = _find_project(directory)
    if project is not None:
        tool = _read_toml(project).get("tool", {})
        if isinstance(tool, dict) and "pcpbench" in tool:
            source = f"[tool.pcpbench] of {project.name}"
            layers.append((source, _checked(tool["pcpbench"], source)))
    if options.config is not None:
        if not options.config.is_file():
            raise UsageError(f"--config is {str(options.config)!r}, which is no file.")
        source = f"--config {options.config}"
        layers.append((source, _checked(_read_toml(options.config), source)))
    typed = {
        "fail-on": list(options.fail_on),
        "accept": [_accept_words(text) for text in options.accept],
        "on-undecided": options.on_undecided,
        "max-time": options.max_time_s,
        "processes": options.processes,
    }
    given = {key: value for key, value in typed.items() if value not in (None, [])}
    layers.append((COMMAND_LINE, given))
    return layers


def _find_project(directory: Path) -> Path | None:
    """The nearest pyproject.toml, looking upwards to the root of a repository."""
    for place in (directory, *directory.parents):
        if (place / PYPROJECT).is_file():
            return place / PYPROJECT
        if (place / ".git").exists():
            return None
    return None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        repr(table)  # a number of too many digits to be shown in a refusal ends here
        return table
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no TOML, or without end
        raise UsageError(f"{str(path)!r} cannot be read as TOML: {error}.") from error


def _checked(table: Any, source: str) -> Mapping[str, Any]:
    """The table with `-` in its keys; raises UsageError for a key that is none of ours."""
    if not isinstance(table, dict):
        raise UsageError(f"{source} is no table: write settings such as fail-on = [...].")
    found = {str(key).replace("_", "-"): value for key, value in table.items()}
    if len(found) < len(table):
        twice = next(key for key in table if "_" in key and key.replace("_", "-") in table)
        raise UsageError(f"{source} has {twice} in two spellings: leave one of the two out.")
    unknown = sorted(found.keys() - set(KEYS))
    if unknown:
        raise UsageError(f"{source} has no setting {unknown[0]!r}: use one of {', '.join(KEYS)}.")
    return found


def _texts(table: Mapping[str, Any], source: str) -> Sequence[str]:
    rules = table.get("fail-on", [])
    if isinstance(rules, str):
        rules = [rules]
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise UsageError(f"{source}: fail-on is {rules!r}: write a list of rules in quotes.")
    return rules


def _tables(items: Any, source: str) -> Sequence[Mapping[str, object]]:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise UsageError(
            f"{source}: accept is {items!r}: write tables with rule, until and reason."
        )
    return items


def _accept_words(text: str) -> dict[str, object]:
    match = _ACCEPT.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--accept is {text!r}: write it as 'tpot:8% until {date.today() + timedelta(days=30)} "
            "because WHY'."
        )
    return {"rule": match["rule"], "until": match["until"], "reason": match["why"]}


def _undecided(value: Any, source: str) -> str:
    if value not in ON_UNDECIDED:
        name = _named("on-undecided", source)
        raise UsageError(f"{name} is {value!r}: use one of {', '.join(ON_UNDECIDED)}.")
    return str(value)


def _seconds(value: Any, source: str) -> float:
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not sound or not 0 < value <= MAX_TIME_S:  # nan compares as neither
        name = _named("max-time", source)
        raise UsageError(f"{name} is {value!r}: use seconds above 0, such as 75.")
    return float(value)


def _count(value: Any, source: str) -> int:
    name = _named("processes", source)
    if type(value) is not int:
        raise UsageError(f"{name} is {value!r}: use a whole number of fresh processes.")
    return check_processes(name, value)


def check_processes(name: str, value: int) -> int:
    """A number of fresh processes that can be judged; raises UsageError for any other."""
    if not LEAST_PROCESSES <= value <= MOST_PROCESSES:
        raise UsageError(
            f"{name} is {value}: use {LEAST_PROCESSES} to {MOST_PROCESSES} fresh processes."
        )
    return value


def _named(key: str, source: str) -> str:
    """A setting as its reader wrote it."""
    return f"--{key}" if source == COMMAND_LINE else f"{source}: {key}"


_READERS: Final = {"on-undecided": _undecided, "max-time": _seconds, "processes": _count}
