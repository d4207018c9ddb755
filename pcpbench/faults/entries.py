"""What the catalogue can take from an installed package, entry by entry.

Owns the rules for a `Fault` that somebody else wrote: its words and types. An entry that breaks one
is unusable, with a reason that names it; the others are not touched by that. Whether an engine
takes an entry's setting is known by the session.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pcpbench.config import DCP_BACKENDS, DRAFT_MODELS, PRESETS
from pcpbench.errors import ScenarioError
from pcpbench.faults.fault import PADDING_DRIFT, PARTITION_DRIFT, Fault, Setting
from pcpbench.modes import ARM_MODES, CUDAGraphMode
from pcpbench.records import CONTRACT_IDS
from pcpbench.scenarios.loader import load_scenario

KNOWN_FINDINGS: Final = frozenset({*CONTRACT_IDS, PARTITION_DRIFT, PADDING_DRIFT})
NAME: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "candidate": tuple(arm for arm, mode in ARM_MODES.items() if mode is not CUDAGraphMode.NONE),
    "checks": ("quick", "full"),
    "model": PRESETS,
    "dcp_backend": DCP_BACKENDS,
    "draft_model": DRAFT_MODELS,
}
TARGETS: Final = ("builtin", "vllm")
"""What a setting may say, where a word is asked for."""


@dataclass(frozen=True)
class Unusable:
    """An entry that cannot be run. name: its own, or its entry point's where it has none.

    source: who brings it, in words. reason: one sentence without its full stop.
    """

    name: str
    source: str
    reason: str

    @property
    def told(self) -> str:
        """Who brings it, and what is wrong."""
        return f"{self.source}: {self.reason}"


def reason_against(fault: Fault) -> str:
    """Why an entry cannot be used, "" where nothing speaks against it."""
    for look in (_words, _findings, _numbers, _setting):
        for problem in look(fault):
            return problem
    return ""


def _words(fault: Fault) -> Iterator[str]:
    if not isinstance(fault.name, str) or not NAME.fullmatch(fault.name):
        yield f"name is {fault.name!r}: use small letters, digits and hyphens"
    for field in ("class_id", "description"):
        if not isinstance(getattr(fault, field), str) or not getattr(fault, field).strip():
            yield f"{field} is {getattr(fault, field)!r}: it must be text"
    if fault.target not in TARGETS:
        yield f"target is {fault.target!r}: use {' or '.join(TARGETS)}"
    if not _are_texts(fault.reports):
        yield f"reports are {fault.reports!r}: use a tuple of texts"


def _findings(fault: Fault) -> Iterator[str]:
    if not _are_texts(fault.contracts):
        yield f"contracts are {fault.contracts!r}: use a frozenset of ids"
        return
    for contract in sorted(set(fault.contracts) - KNOWN_FINDINGS):
        drifts = f"{PARTITION_DRIFT!r} and {PADDING_DRIFT!r}"
        last = CONTRACT_IDS[-1]
        yield f"contracts hold {contract!r}, which there is not: use C0 to {last}, {drifts}"


def _numbers(fault: Fault) -> Iterator[str]:
    if not callable(fault.inject):
        yield f"inject is {fault.inject!r}: it must be callable, such as planted(...)"
    for field in ("min_pcp", "min_dcp", "min_spec_tokens", "max_pcp"):
        value = getattr(fault, field)
        if not _is_whole(value) and (field, value) != ("max_pcp", None):
            yield f"{field} is {value!r}: it must be a whole number"


def _setting(fault: Fault) -> Iterator[str]:
    setting = fault.setting
    if not isinstance(setting, Setting):
        yield f"setting is {setting!r}: it must be a Setting"
        return
    for field in ("pcp", "tp", "dcp", "interleave", "spec_tokens"):
        value, low = getattr(setting, field), int(field != "spec_tokens")
        if not _is_whole(value) or value < low:
            yield f"setting.{field} is {value!r}: it must be a whole number from {low} up"
    for field, known in CHOICES.items():
        if getattr(setting, field) not in known:
            yield f"setting.{field} is {getattr(setting, field)!r}: use one of {', '.join(known)}"
    if not isinstance(setting.microbatch, bool):
        yield f"setting.microbatch is {setting.microbatch!r}: it must be True or False"
    if not isinstance(setting.capture_sizes, str | None):
        yield f"setting.capture_sizes is {setting.capture_sizes!r}: use text such as '1,2,4'"
    try:
        load_scenario(str(setting.scenario))
    except ScenarioError as error:
        yield f"its setting names {str(error).rstrip('.?')}"


def _are_texts(values: Any) -> bool:
    return isinstance(values, tuple | list | set | frozenset) and all(
        isinstance(value, str) for value in values
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
