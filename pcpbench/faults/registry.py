"""The catalogue: shipped faults and those that installed packages bring.

Owns which faults there are. A package adds its own under the entry-point group `pcpbench.faults`;
an entry point names a `Fault` or an iterable of them. What cannot be used of them is told by name
and keeps nobody else from being run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from pcpbench.errors import UsageError
from pcpbench.faults import (
    captures,
    collectives,
    dcp,
    dispatch,
    draft_model,
    drafts,
    dummies,
    dynamic_drafts,
    everywhere,
    experts,
    graphs,
    kv_groups,
    lifetimes,
    microbatches,
    numerics,
    padding,
    partition,
    phases,
    plans,
    refresh,
    sparse,
    tables,
)
from pcpbench.faults.entries import Unusable, reason_against
from pcpbench.faults.fault import Fault
from pcpbench.faults.vllm import FAULTS as VLLM_FAULTS

GROUP: Final = "pcpbench.faults"
SHIPPED_SOURCE: Final = "pcpbench"

SHIPPED: Final[tuple[Fault, ...]] = tuple(
    sorted(
        (
            *padding.FAULTS,
            *tables.FAULTS,
            *dummies.FAULTS,
            *numerics.FAULTS,
            *graphs.FAULTS,
            *lifetimes.FAULTS,
            *refresh.FAULTS,
            *phases.FAULTS,
            *dispatch.FAULTS,
            *captures.FAULTS,
            *plans.FAULTS,
            *dcp.FAULTS,
            *drafts.FAULTS,
            *dynamic_drafts.FAULTS,
            *draft_model.FAULTS,
            *collectives.FAULTS,
            *partition.FAULTS,
            *everywhere.FAULTS,
            *microbatches.FAULTS,
            *kv_groups.FAULTS,
            *sparse.FAULTS,
            *experts.FAULTS,
        ),
        key=lambda fault: fault.class_id,
    )
)
"""The faults of the built-in engine that come with pcpbench, by class."""

SHIPPED_FOR: Final[dict[str, tuple[Fault, ...]]] = {"builtin": SHIPPED, "vllm": VLLM_FAULTS}
"""Those of each target that faults can be injected into."""

SHIPPED_NAMES: Final = frozenset(fault.name for fault in SHIPPED)


@dataclass(frozen=True)
class Catalogue:
    """Every entry of one target. faults: those that can be run, by name, shipped ones first.

    target: as on the command line. sources: who brings each, in words. unusable: what installed
    packages bring and cannot be run.
    """

    faults: dict[str, Fault]
    sources: dict[str, str]
    unusable: tuple[Unusable, ...] = ()
    target: str = "builtin"

    def lacks(self, flag: str, name: str) -> UsageError:
        """The refusal of a name that no usable entry has: with the reason, or with near names."""
        for entry in self.unusable:
            if entry.name == name:
                return UsageError(f"{flag} is {name!r}, which cannot be used ({entry.told}).")
        names = [*self.faults, *(entry.name for entry in self.unusable)]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        broken = f" and {len(self.unusable)} that cannot be used" if self.unusable else ""
        whose = "" if self.target == "builtin" else f" of --target {self.target}"
        command = f"pcpbench faults list{whose.removeprefix(' of')}"
        return UsageError(
            f"{flag} is {name!r}, which the catalogue{whose} lacks: {hint}"
            f"`{command}` shows all {len(self.faults)} names{broken}."
        )


def catalogue(target: str = "builtin") -> Catalogue:
    """A target's shipped faults and those of installed packages.

    Nothing that the latter do is an error here. target: one of SHIPPED_FOR.

    An entry point that cannot be loaded, and an entry that is no fault, cannot be run or takes a
    name that is taken, is among the unusable ones. The others are as good as ever.
    """
    found = {fault.name: fault for fault in SHIPPED_FOR[target]}
    sources = dict.fromkeys(found, SHIPPED_SOURCE)
    unusable = []
    for point in metadata.entry_points(group=GROUP):
        source = _source(point)
        for entry in _load(point, source):
            if isinstance(entry, Unusable):
                unusable.append(entry)
            elif entry.target != target:
                continue
            elif entry.name in found:
                reason = f"there is a fault of this name already, of {sources[entry.name]}"
                unusable.append(Unusable(entry.name, source, reason))
            else:
                found[entry.name], sources[entry.name] = entry, source
    return Catalogue(found, sources, tuple(unusable), target)


def all_faults() -> dict[str, Fault]:
    """Every fault that can be run, by name, shipped ones first."""
    return catalogue().faults


def choose_faults(names: Sequence[str], target: str = "builtin") -> list[Fault]:
    """Faults of a target by name, each once, all of them when none is named; UsageError if unknown.

    What cannot be used is left out: `choose_unusable` has it.
    """
    known = catalogue(target)
    left_out = {entry.name for entry in known.unusable}
    for name in names:
        if name not in known.faults and name not in left_out:
            raise known.lacks("--fault", name)
    if not names:
        return list(known.faults.values())
    return [known.faults[name] for name in dict.fromkeys(names) if name in known.faults]


def choose_unusable(names: Sequence[str], target: str = "builtin") -> list[Unusable]:
    """Entries that cannot be used, by name; all of them when none is named."""
    return [e for e in catalogue(target).unusable if not names or e.name in names]


def source_of(name: str, target: str = "builtin") -> str:
    """Who brings a fault, in words; "" for one that the catalogue lacks."""
    return catalogue(target).sources.get(name, "")


def _source(point: metadata.EntryPoint) -> str:
    package = getattr(getattr(point, "dist", None), "name", "")
    return f"{f'package {package}, ' if package else ''}entry point {point.name!r}"


def _load(point: metadata.EntryPoint, source: str) -> list[Fault | Unusable]:
    """What an entry point brings. Loading runs foreign code, which may raise anything."""
    try:
        loaded: Any = point.load()
        is_many = isinstance(loaded, Iterable) and not isinstance(loaded, str)
        entries = list(loaded) if is_many else [loaded]
    except Exception as error:
        reason = f"{point.value} cannot be loaded ({type(error).__name__}: {error})"
        return [Unusable(point.name, source, reason)]
    return [_entry(each, point, source) for each in entries]


def _entry(loaded: Any, point: metadata.EntryPoint, source: str) -> Fault | Unusable:
    if not isinstance(loaded, Fault):
        reason = f"it brings {loaded!r}: name a Fault or an iterable of Faults"
        return Unusable(point.name, source, reason)
    reason = reason_against(loaded)
    if not reason:
        return loaded
    name = loaded.name if isinstance(loaded.name, str) and loaded.name else point.name
    return Unusable(name, source, reason)
