"""Faults of what pcpbench puts beside vLLM's code: its model, KV caches and graphs.

Owns which of the built-in catalogue's entries this target runs as well, and in which world.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pcpbench.faults import dcp as builtin_dcp
from pcpbench.faults import dummies, graphs
from pcpbench.faults.fault import Fault, Setting
from pcpbench.faults.vllm.worlds import BOTH, DCP

WORLDS: Final[dict[str, Setting]] = {
    "null-block-nan": BOTH,
    "kv-cache-moved": BOTH,
    "weight-rebound": DCP,
    "lse-base-two": DCP,
    "empty-shard-counts": DCP,
    "partials-averaged": DCP,
    "last-shard-left-out": DCP,
}
"""Name of the entry -> where vLLM's target runs it."""


def _adopted() -> tuple[Fault, ...]:
    known = (*dummies.FAULTS, *graphs.FAULTS, *builtin_dcp.FAULTS)
    return tuple(
        replace(fault, target="vllm", setting=WORLDS[fault.name], max_pcp=None, min_pcp=1)
        for fault in known
        if fault.name in WORLDS
    )


FAULTS: Final = _adopted()
