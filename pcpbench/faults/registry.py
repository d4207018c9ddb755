"""The catalogue: shipped faults and those that installed packages bring.

Owns which faults there are. A package adds its own under the entry-point group `pcpbench.faults`;
an entry point names a `Fault` or an iterable of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, Final

from pcpbench.errors import UsageError
from pcpbench.faults import (
    captures,
    collectives,
    dcp,
    dispatch,
    drafts,
    dummies,
    dynamic_drafts,
    everywhere,
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
from pcpbench.faults.fault import Fault

GROUP: Final = "pcpbench.faults"

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
            *collectives.FAULTS,
            *partition.FAULTS,
            *everywhere.FAULTS,
            *microbatches.FAULTS,
            *kv_groups.FAULTS,
            *sparse.FAULTS,
        ),
        key=lambda fault: fault.class_id,
    )
)
"""The faults that come with pcpbench, by class."""


def all_faults() -> dict[str, Fault]:
    """Every fault by name, shipped ones first.

    Raises UsageError for an entry point that cannot be loaded, is no fault, or takes a name that is
    taken.
    """
    found: dict[str, Fault] = {}
    for fault in SHIPPED:
        _add(found, fault, "pcpbench")
    for point in metadata.entry_points(group=GROUP):
        for fault in _load(point):
            _add(found, fault, f"entry point {point.name!r}")
    return found


def choose_faults(names: Sequence[str]) -> list[Fault]:
    """Faults by name, each once, all of them when none is named; UsageError if unknown."""
    known = all_faults()
    for name in names:
        if name not in known:
            raise UsageError(
                f"--fault is {name!r}, which the catalogue lacks: `pcpbench faults list` shows all "
                f"{len(known)} names."
            )
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def _add(found: dict[str, Fault], fault: Fault, source: str) -> None:
    if fault.name in found:
        raise UsageError(f"{source} brings a fault named {fault.name!r}, and there is one already.")
    found[fault.name] = fault


def _load(point: metadata.EntryPoint) -> list[Fault]:
    try:
        loaded: Any = point.load()
    except Exception as error:
        raise UsageError(
            f"entry point {point.name!r} of group {GROUP} cannot be loaded from {point.value}: "
            f"{error}"
        ) from error
    faults = [loaded] if isinstance(loaded, Fault) else loaded
    if not isinstance(faults, Iterable) or isinstance(faults, str):
        faults = [loaded]
    listed = list(faults)
    if not all(isinstance(fault, Fault) for fault in listed):
        raise UsageError(
            f"entry point {point.name!r} of group {GROUP} is {loaded!r}: name a Fault or an "
            "iterable of Faults."
        )
    return listed
