"""Faults of the installed vLLM's worker code: the catalogue of `--target vllm`.

Owns which there are. They wrap vLLM's functions and classes, which `Site.api` hands them: nothing
here imports vllm. Faults of what pcpbench puts beside vLLM's code (its model, its KV caches) are
the built-in catalogue's own, in worlds that this target runs.
"""

from __future__ import annotations

from typing import Final

from pcpbench.faults.fault import Fault
from pcpbench.faults.vllm import batches, captures, dcp, dispatch, idle, partition, shared, tables

FAULTS: Final[tuple[Fault, ...]] = tuple(
    sorted(
        (
            *batches.FAULTS,
            *tables.FAULTS,
            *idle.FAULTS,
            *captures.FAULTS,
            *dispatch.FAULTS,
            *dcp.FAULTS,
            *partition.FAULTS,
            *shared.FAULTS,
        ),
        key=lambda fault: fault.class_id,
    )
)
"""The faults of `--target vllm`, by class."""
