"""C16: which KV slots a step must not read, and what a poisoned run may not change (SPEC 12).

Owns the map of live slots, rebuilt from the plan, and the comparison of a poisoned run with the
clean one of the same arm. Knows no engine: a target does the poisoning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.findings import changed_outputs, count_differing
from pcpbench.checks.kv import KvView
from pcpbench.checks.oracle import Oracle
from pcpbench.checks.oracle_tables import PAD, unseen
from pcpbench.checks.replays import HANDED_OUT
from pcpbench.checks.setup import ArmSetup
from pcpbench.checks.write_set import slot_bits
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import BoolArray, IntArray, StepRecord, Violation

POISONS: Final = ("nan", "large")
"""What unread memory is filled with: NaN, and the finite values that a NaN filter would miss."""

Rows = list[list[NDArray[Any]]]
"""Bits of the slots that a step wrote, [rank][layer][slots, words]."""


class LiveSlots:
    """Follows a plan and tells which slots of an arm's caches hold tokens that may be read."""

    def __init__(self, plan: ScenarioPlan, setup: ArmSetup) -> None:
        self._plan, self._setup = plan, setup
        self._oracle = Oracle(plan)
        self._computed: dict[str, int] = {}

    def advance(self, step: StepPlan) -> None:
        """Enter the next step of the plan."""
        self._oracle.advance(step)
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            self._computed.pop(req_id, None)
        for request in step.scheduled:
            self._computed[request.req_id] = request.num_computed_tokens

    def leave(self, step: StepPlan) -> None:
        """The step has run: its tokens are live, rejected drafts excepted."""
        for request in step.scheduled:
            kept = request.num_scheduled_tokens - request.num_rejected_tokens
            self._computed[request.req_id] += kept

    def unread(self) -> list[list[BoolArray]]:
        """[rank][KV group][slots]: True where the current step may not read.

        That is all but the positions computed before it of requests that are still there: the null
        block, blocks never handed out or given back, and in a block that is partly filled, the
        rest. Nor may it read positions before the sliding window of a request's first query. A step
        may read what it wrote itself; it writes before it reads.
        """
        masks = []
        for rank in range(self._setup.world.size):
            groups = []
            for group, span in enumerate(self._plan.block_sizes):
                block_size = span // self._setup.dcp_size_of(group)
                mask = np.ones(self._plan.num_blocks * block_size, dtype=np.bool_)
                window = self._plan.sliding_window(group)
                for req_id, computed in self._computed.items():
                    seen = np.arange(unseen(computed, window), computed)
                    mask[self._held(req_id, group, rank, seen)] = False
                groups.append(mask)
            masks.append(groups)
        return masks

    def written(self, step: StepPlan, rank: int, group: int) -> IntArray:
        """Slots that the step writes on one rank."""
        slots, owner = self._oracle.token_slots(step, self._setup, group)
        mine: IntArray = slots[(owner == self._owner(rank, group)) & (slots != PAD)]
        return mine

    def written_rows(self, step: StepPlan, kv: KvView) -> Rows:
        """Copies of what stands in those slots now."""
        groups = kv.layer_groups
        return [
            [
                slot_bits(kv.layer(rank, layer))[self.written(step, rank, group)]
                for layer, group in enumerate(groups)
            ]
            for rank in range(self._setup.world.size)
        ]

    def _held(self, req_id: str, group: int, rank: int, positions: IntArray) -> IntArray:
        setup = self._setup
        slots, owner = self._oracle.book.slots(
            req_id, group, positions, setup.dcp_size_of(group), setup.interleave
        )
        mine: IntArray = slots[(owner == self._owner(rank, group)) & (slots != PAD)]
        return mine

    def _owner(self, rank: int, group: int) -> int:
        return self._setup.world.dcp_rank(rank) if self._setup.dcp_size_of(group) > 1 else 0


def compare_poisoned(
    clean: StepRecord, poisoned: StepRecord, clean_rows: Rows, rows: Rows, poison: str, kv: KvView
) -> Iterator[Violation]:
    """One violation for each result that is not bit for bit that of the run without poison.

    kv: tells which cache the rows are of.
    """
    for rank, tensor, before, after in changed_outputs(clean, poisoned, HANDED_OUT):
        yield _violation(clean, rank, tensor, poison, count_differing(before, after))
    for rank, (layers, clean_layers) in enumerate(zip(rows, clean_rows, strict=True)):
        for layer, (row, clean_row) in enumerate(zip(layers, clean_layers, strict=True)):
            if not np.array_equal(row, clean_row):
                place = kv.place(layer)
                what = f"{place}, {count_differing(row, clean_row)}"
                yield _violation(clean, rank, place.tensor, poison, what)


def broken_by_poison(clean: StepRecord, poison: str, error: Exception) -> Violation:
    """A step that ran clean and cannot run with unread memory poisoned has read it."""
    what = f"the step failed: {type(error).__name__}: {error}"
    return _violation(clean, None, "step", poison, what)


def _violation(
    record: StepRecord, rank: int | None, tensor: str, poison: str, what: str
) -> Violation:
    message = f"with unread memory poisoned ({poison}), not as without: {what}"
    return Violation(
        contract="C16",
        arm=record.arm,
        scenario=record.scenario,
        step=record.step,
        rank=rank,
        tensor=tensor,
        message=f"{message} (ran as {record.descriptor.label})",
    )
