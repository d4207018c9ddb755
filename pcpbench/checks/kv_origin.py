"""Where KV first went wrong: the first slot that a step wrote and should not have, or not so.

Owns a copy of one arm's caches as they were a step earlier, and whose token each slot is for. Reads
plans and arrays only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pcpbench.checks.drift import FloatArray, widen
from pcpbench.checks.kv import CachePlace, KvView, written_slots
from pcpbench.checks.oracle import Oracle, StepExpectation
from pcpbench.checks.oracle_tables import PAD
from pcpbench.checks.setup import ArmSetup
from pcpbench.checks.tap_compare import beyond, values_text
from pcpbench.checks.write_set import slot_bits
from pcpbench.divergence import KvOrigin
from pcpbench.plan import StepPlan
from pcpbench.records import BoolArray, IntArray


@dataclass(frozen=True)
class _Tenants:
    """For each slot of a cache of one KV group: whose token, and where the twin holds that.

    request: index into `names`, -1 for nobody's slot. position: in that request. twin_rank,
    twin_slot: -1 where there is no twin or it does not hold the position.
    """

    group: int
    names: tuple[str, ...]
    request: IntArray
    position: IntArray
    twin_rank: IntArray
    twin_slot: IntArray


class KvOrigins:
    """Follows the caches of one arm; `first` is the first bad write once there was one.

    twin: what it is held against, None for an arm without one. kind, dtype: of the comparison.
    found, expected: the whole bad slot [width] on both sides.
    """

    def __init__(self, arm: ArmSetup, twin: ArmSetup | None, kind: str, dtype: str) -> None:
        self.arm, self.twin, self.kind, self.dtype = arm, twin, kind, dtype
        self.first: KvOrigin | None = None
        self.found: FloatArray | None = None
        self.expected: FloatArray | None = None
        self._before: list[list[NDArray[Any]]] = []

    def start(self, view: KvView) -> None:
        """Take in the caches before the first step."""
        layers = range(len(view.layer_groups))
        self._before = [
            [slot_bits(view.layer(rank, layer)).copy() for layer in layers]
            for rank in range(self.arm.world.size)
        ]

    def observe(
        self,
        step: StepPlan,
        oracle: Oracle,
        expected: StepExpectation | None,
        views: Mapping[str, KvView],
    ) -> None:
        """Look at one step, in the order of the plan; within it layer by layer, rank by rank.

        expected: of the arm, None for an idle step.
        """
        if self.first is not None:
            return
        view = views[self.arm.name]
        twin = None if self.twin is None else views[self.twin.name]
        tenants: dict[tuple[int, int], _Tenants] = {}
        for layer, group in enumerate(view.layer_groups):
            place = view.place(layer)
            for rank in range(self.arm.world.size):
                cache = view.layer(rank, layer)
                if (rank, group) not in tenants:
                    num_slots = cache.shape[0] * cache.shape[1]
                    tenants[rank, group] = self._tenants(oracle, rank, group, num_slots)
                self._look(step, expected, cache, twin, rank, layer, place, tenants[rank, group])
                if self.first is not None:
                    self.first = replace(self.first, tensor=place.tensor, layer=place.layer)
                    return
        self.start(view)

    def _look(
        self,
        step: StepPlan,
        expected: StepExpectation | None,
        cache: NDArray[Any],
        twin: KvView | None,
        rank: int,
        layer: int,
        place: CachePlace,
        tenants: _Tenants,
    ) -> None:
        """The slots that changed and those that had to, in order."""
        changed = (slot_bits(cache) != self._before[rank][layer]).any(axis=1)
        planned = np.zeros_like(changed)
        if expected is None:
            null = slice(cache.shape[1])  # there for dummy runs, as long as it stays finite
            changed[null] &= ~np.isfinite(_rows(cache, self.dtype)[null]).all(axis=1)
        else:
            planned[written_slots(expected, rank, tenants.group, place)] = True
        slots = np.flatnonzero(changed | planned)
        found = _rows(cache, self.dtype)[slots]
        right, known = self._right(twin, layer, slots, tenants)
        wrong = known & beyond(found, right, self.kind, self.dtype).any(axis=1)
        bad = np.asarray((~np.isfinite(found)).any(axis=1))
        hit = np.flatnonzero(bad | wrong | ~planned[slots])
        if not len(hit):
            return
        row = int(hit[0])
        slot, request = int(slots[row]), int(tenants.request[slots[row]])
        what = "non-finite" if bad[row] else "wrong" if planned[slot] else "unplanned"
        self.found, self.expected = found[row], right[row] if known[row] else None
        req_id = tenants.names[request] if request >= 0 else None
        differs = beyond(found[row], right[row], self.kind, self.dtype)
        shown = differs if known[row] and differs.any() else np.ones_like(differs)
        self.first = KvOrigin(
            what=what,
            phase=_phase(step, req_id),
            step=step.index,
            rank=rank,
            layer=layer,
            slot=slot,
            block=slot // cache.shape[1],
            req_id=req_id,
            position=int(tenants.position[slot]) if request >= 0 else None,
            found=values_text(found[row][shown]),
            expected=values_text(right[row][shown]) if known[row] else (),
        )

    def _right(
        self, twin: KvView | None, layer: int, slots: IntArray, tenants: _Tenants
    ) -> tuple[FloatArray, BoolArray]:
        """What the twin holds for each of these slots, and for which of them it does."""
        if twin is None or self.twin is None:
            return np.zeros((len(slots), 1), dtype=np.float32), np.zeros(len(slots), dtype=np.bool_)
        ranks, other = tenants.twin_rank[slots], tenants.twin_slot[slots]
        caches = [_rows(twin.layer(r, layer), self.dtype) for r in range(self.twin.world.size)]
        right = np.zeros((len(slots), caches[0].shape[1]), dtype=caches[0].dtype)
        for rank, cache in enumerate(caches):
            right[ranks == rank] = cache[other[ranks == rank]]
        return right, ranks >= 0

    def _tenants(self, oracle: Oracle, rank: int, group: int, num_slots: int) -> _Tenants:
        names = tuple(oracle.book.prompts)
        request, position, twin_rank, twin_slot = (np.full(num_slots, -1) for _ in range(4))
        if self.twin is not None and self.twin.world == self.arm.world:
            twin_rank[:], twin_slot[:] = rank, np.arange(num_slots)
        for index, req_id in enumerate(names):
            count = len(oracle.book.table(req_id, group)) * oracle.book.block_sizes[group]
            places = np.arange(count, dtype=np.int64)
            slots, holder = _slots(oracle, self.arm, req_id, group, places)
            mine = (holder == _dcp_rank(self.arm, rank, group)) & (slots != PAD)
            request[slots[mine]], position[slots[mine]] = index, places[mine]
            if self.twin is not None and self.twin.world != self.arm.world:
                other, its_holder = _slots(oracle, self.twin, req_id, group, places[mine])
                size = range(self.twin.world.size)
                first = {_dcp_rank(self.twin, r, group): r for r in reversed(size)}
                twin_slot[slots[mine]] = other
                twin_rank[slots[mine]] = [first[int(dcp_rank)] for dcp_rank in its_holder]
        return _Tenants(group, names, request, position, twin_rank, twin_slot)


def _rows(cache: NDArray[Any], dtype: str) -> FloatArray:
    wide = widen(cache, dtype)
    return wide.reshape(-1, wide.shape[-1])


def _slots(
    oracle: Oracle, setup: ArmSetup, req_id: str, group: int, positions: IntArray
) -> tuple[IntArray, IntArray]:
    size = setup.dcp_size_of(group)
    return oracle.book.slots(req_id, group, positions, size, setup.interleave)


def _dcp_rank(setup: ArmSetup, rank: int, group: int) -> int:
    return setup.world.dcp_rank(rank) if setup.dcp_size_of(group) > 1 else 0


def _phase(step: StepPlan, req_id: str | None) -> str:
    """Of the request whose slot it is, where that runs in this step, else of the whole step."""
    if not step.scheduled:
        return "dummy"
    for request in step.scheduled:
        if request.req_id == req_id:
            return "prefill" if request.is_prefilling else "decode"
    return "prefill" if step.has_prefill else "decode"
