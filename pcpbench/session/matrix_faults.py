"""Which faults of the catalogue a cell's world gets: one of each class that can exist there."""

from __future__ import annotations

from dataclasses import replace

from pcpbench.faults.fault import Fault
from pcpbench.faults.registry import choose_faults
from pcpbench.matrix_cells import Cell


def faults_for(cell: Cell) -> list[str]:
    """Names, in the order of their classes: of each the first that is most of all about the cell.

    Left out are those that the world cannot hold, that need an engine of their own (`at_capture`)
    or full checks, and those that are not to be found (noise floor). A prompt of one token that is
    taken for a decode, for example, changes nothing where decodes have drafts; with drafts the
    class has one about prompts of a decode's length, which is taken instead.
    """
    sizes = cell.parallel
    chosen: dict[str, Fault] = {}
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
            best = chosen.setdefault(fault.class_id, fault)
            if _num_own(fault) > _num_own(best):
                chosen[fault.class_id] = fault
    return [fault.name for fault in chosen.values()]


def _num_own(fault: Fault) -> int:
    """How many of the things that cells differ in a fault is about."""
    if fault.needs_draft_model or fault.needs_dynamic_spec:  # no cell has them of itself
        return 0
    own = (
        fault.min_spec_tokens > 0,
        fault.needs_microbatch,
        fault.needs_sparse,
        fault.needs_experts,
    )
    return sum(own)
