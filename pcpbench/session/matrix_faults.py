"""Which faults of the catalogue a cell's world gets: one of each class that can exist there."""

from __future__ import annotations

from dataclasses import replace

from pcpbench.faults.registry import choose_faults
from pcpbench.matrix_cells import Cell


def faults_for(cell: Cell) -> list[str]:
    """Names, in the order of their classes.

    The first of each class that the world can hold, that needs neither an engine of its own
    (`at_capture`) nor full checks, and that is to be found (no noise-floor entry).
    """
    sizes = cell.parallel
    chosen: dict[str, str] = {}
    for fault in choose_faults(()):
        setting = replace(
            fault.setting,
            pcp=sizes.pcp,
            tp=sizes.tp,
            dcp=sizes.dcp,
            interleave=sizes.interleave,
            spec_tokens=cell.spec_tokens,
            microbatch=cell.microbatch,
            model=cell.preset,
            expert_parallel=cell.model == "moe",
        )
        fits = not fault.lacks(setting) and fault.setting.checks == "quick"
        if fits and fault.contracts and not fault.at_capture:
            chosen.setdefault(fault.class_id, fault.name)
    return list(chosen.values())
