"""The contracts of SPEC 12 that one step's record can be held against; and C17, C20, C21, C22.

Owns their registry: which exist, what each costs, and the loop over them. A contract is a function
from a `StepView` to violations; each group of them has a module of its own. What needs more than
one step's record is not in the registry: C9, C14 and C15 are in write_set.py, C16 in poison.py, C10
over candidates in candidates.py, C18 in dense.py, C19 in plan_audit.py, C1-C6 of idle steps in
contract_idle.py, and `ScenarioJudge` raises C13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pcpbench.checks import (
    contract_dispatch,
    contract_draft_model,
    contract_drafts,
    contract_microbatch,
    contract_partition,
    contract_routing,
    contract_rows,
    contract_selection,
    contract_slots,
)
from pcpbench.checks.contract_idle import check_idle
from pcpbench.checks.findings import StepView
from pcpbench.records import Violation


@dataclass(frozen=True)
class Contract:
    """One rule: its id and title in SPEC 12, its cost (`quick` or `full`) and its check."""

    id: str
    title: str
    cost: str
    check: Callable[[StepView], Iterable[Violation]]


CONTRACTS: Final = (
    Contract("C1", "padded seq_lens rows are 0, real rows are the plan's", "quick",
             contract_rows.check_seq_lens),
    Contract("C2", "query_start_loc never decreases and ends at num_tokens", "quick",
             contract_rows.check_query_start_loc),
    Contract("C3", "padded tokens are 0 and flagged, real ones are the plan's", "quick",
             contract_rows.check_tokens),
    Contract("C4", "padded tokens write no KV slot, real ones write their own", "quick",
             contract_slots.check_slot_mappings),
    Contract("C5", "padded block-table rows are 0, real rows are the plan's", "quick",
             contract_slots.check_block_tables),
    Contract("C6", "DCP-local lengths follow from this batch's seq_lens", "quick",
             contract_rows.check_dcp_lengths),
    Contract("C7", "PCP ranks cover every token, restore it and write it once", "quick",
             contract_partition.check_partition),
    Contract("C8", "captured graphs find their buffers where they were", "quick",
             contract_dispatch.check_addresses),
    Contract("C10", "smallest covering descriptor, the same on every rank", "quick",
             contract_dispatch.check_dispatch),
    Contract("C11", "ranks of a group issue the same collectives", "quick",
             contract_dispatch.check_collectives),
    Contract("C12", "microbatches make up the batch and own their buffers", "quick",
             contract_microbatch.check_microbatches),
    Contract("C17", "draft tokens are verified as planned, cursors follow", "quick",
             contract_drafts.check_drafts),
    Contract("C20", "tokens of a sparse model attend to the keys that score best", "quick",
             contract_selection.check_selection),
    Contract("C21", "padding reaches no expert, every token exactly its own", "quick",
             contract_routing.check_routing),
    Contract("C22", "passes of a draft model are given what is their own", "quick",
             contract_draft_model.check_draft_model),
)  # fmt: skip
"""Every contract that `check_step` knows, in the order of their ids."""


def check_step(
    view: StepView, contracts: Iterable[Contract] = CONTRACTS, cost: str = "quick"
) -> list[Violation]:
    """Hold one step against the contracts; `quick` leaves out those marked `full`.

    An idle step's dummy batch is held against what is documented of it, whatever `contracts` are.
    """
    found: list[Violation] = list(check_idle(view))
    for contract in contracts:
        if cost == "full" or contract.cost == "quick":
            found.extend(contract.check(view))
    return found
