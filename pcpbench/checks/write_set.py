"""C15 and C9: what a step, a dummy run or a capture changed, and what it had to leave alone.

Owns a copy of every arm's KV caches as they were after its last step. Knows no engine: it is handed
arrays, and reads the slots that a step may write from the oracle's expectation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.findings import StepView
from pcpbench.checks.kv import CachePlace, KvView, written_slots
from pcpbench.checks.replays import again_words
from pcpbench.plan import ScenarioPlan
from pcpbench.records import IntArray, Violation

Tables = Sequence[Sequence[NDArray[Any]]]
"""Global block tables, [rank][KV group][request slots, columns]."""

Change = tuple[int, str, str]
"""Rank, tensor and what changed, in words."""

NULL_BLOCK = 0

Bits = NDArray[np.unsignedinteger[Any]]


def slot_bits(cache: NDArray[Any]) -> Bits:
    """[num_blocks, block_size, width] as the bits of each slot, [slots, words], without a copy.

    Words are as wide as the slot's bytes allow: 24 float32 are 12 words of 8 bytes, 3 float16
    are 3 words of 2. Bits, not values: two NaN are equal, 0.0 and -0.0 are not.
    """
    rows = np.ascontiguousarray(cache).reshape(-1, cache.shape[-1])
    num_bytes = rows.shape[1] * rows.dtype.itemsize
    word = next(size for size in (8, 4, 2, 1) if num_bytes % size == 0)
    return rows.view(f"u{word}")


BFLOAT16_EXPONENT: Final = np.uint16(0x7F80)


class WriteSets:
    """Follows the caches of every arm from step to step."""

    def __init__(self) -> None:
        self._kv: dict[str, list[list[Bits]]] = {}
        self._tables: dict[str, list[list[NDArray[Any]]]] = {}
        self._not_finite: set[tuple[str, int, CachePlace]] = set()

    def start(self, name: str, view: KvView, num_ranks: int, tables: Tables | None = None) -> None:
        """Remember an arm's state before its first step."""
        self._kv[name] = [
            [slot_bits(view.layer(rank, layer)).copy() for layer in range(len(view.layer_groups))]
            for rank in range(num_ranks)
        ]
        self._keep_tables(name, tables)

    def _keep_tables(self, name: str, tables: Tables | None) -> None:
        if tables is not None:
            self._tables[name] = [[table.copy() for table in groups] for groups in tables]

    def check(
        self, view: StepView, kv: KvView, tables: Tables | None = None
    ) -> Iterator[Violation]:
        """Hold the arm's state against that of the step before; it is remembered from here on.

        C15 for a step that computed something, C9 for an idle one. Nothing for an arm that was
        never started.
        """
        name, num_ranks = view.record.arm, view.setup.world.size
        if name not in self._kv:
            return
        for rank in range(num_ranks):
            for layer, group in enumerate(kv.layer_groups):
                cache = kv.layer(rank, layer)
                place = kv.place(layer)
                yield from self._check_layer(view, cache, rank, layer, group, place)
                yield from self._check_null_block(view, cache[NULL_BLOCK], rank, place)
        if view.expected is None and not view.plan.new_block_ids and tables is not None:
            before = self._tables.get(name)
            for rank, table, message in changed_tables(before, tables) if before else ():
                yield view.violation("C9", rank, table, f"{message} in an idle step")
        self._keep_tables(name, tables)

    def check_idle_replays(
        self, view: StepView, kv: KvView, tables: Tables, between: Sequence[str]
    ) -> Iterator[Violation]:
        """C9: graphs replayed as dummy runs after a step left all but the null block alone."""
        name, what = view.record.arm, f"replaying {', '.join(between)} on padding alone"
        for rank, layer, before, now in self._layers(view, kv):
            block_size = kv.layer(rank, layer).shape[1]
            before[:block_size] = now[:block_size]
            changed = _differ(before, now)
            if len(changed):
                before[changed] = now[changed]
                place = kv.place(layer)
                message = f"{what} wrote {place}, {_slots(changed, block_size)}"
                yield view.violation("C9", rank, place.tensor, message)
        known = self._tables.get(name)
        for rank, table, message in changed_tables(known, tables) if known else ():
            yield view.violation("C9", rank, table, f"{message} by {what}")
        self._keep_tables(name, tables)

    def check_again(
        self, view: StepView, kv: KvView, between: Sequence[str] = ()
    ) -> Iterator[Violation]:
        """C14: a second run of the step that was just checked leaves every slot as it is.

        between: graphs replayed since the first one.
        """
        for rank, layer, before, now in self._layers(view, kv):
            changed = _differ(before, now)
            if len(changed):
                before[changed] = now[changed]
                where = _slots(changed, kv.layer(rank, layer).shape[1])
                cause = again_words(view.record, between)
                place = kv.place(layer)
                message = f"{cause} changed {place}, {where}"
                yield view.violation("C14", rank, place.tensor, message)

    def _layers(self, view: StepView, kv: KvView) -> Iterator[tuple[int, int, Bits, Bits]]:
        """(rank, layer, slots as remembered, slots now); nothing for an arm never started."""
        for rank, layers in enumerate(self._kv.get(view.record.arm, ())):
            for layer, before in enumerate(layers):
                yield rank, layer, before, slot_bits(kv.layer(rank, layer))

    def _check_layer(
        self,
        view: StepView,
        cache: NDArray[Any],
        rank: int,
        layer: int,
        group: int,
        place: CachePlace,
    ) -> Iterator[Violation]:
        """The copy is brought up to date slot by slot: first the allowed ones, then the rest."""
        before, now = self._kv[view.record.arm][rank][layer], slot_bits(cache)
        block_size, tensor = cache.shape[1], place.tensor
        if view.expected is None:
            before[:block_size] = now[:block_size]  # the null block is there for dummy runs
        else:
            slots = written_slots(view.expected, rank, group, place)
            slots = slots[slots < len(now)]
            # Only in memory that nobody has used can a missing write be told from a repeated one.
            missing = slots[~(before[slots].any(axis=1) | now[slots].any(axis=1))]
            before[slots] = now[slots]
            if len(missing):
                message = f"{place}, {_slots(missing, block_size)} of the mapping not written"
                yield view.violation("C15", rank, tensor, message)
        changed = _differ(before, now)
        if not len(changed):
            return
        before[changed] = now[changed]
        where = f"{place}, {_slots(changed, block_size)}"
        if view.expected is None:
            message = f"an idle step wrote outside the null block: {where}"
            yield view.violation("C9", rank, tensor, message)
        else:
            message = f"{where} written that the slot mapping does not name"
            yield view.violation("C15", rank, tensor, message)

    def _check_null_block(
        self, view: StepView, block: NDArray[Any], rank: int, cache: CachePlace
    ) -> Iterator[Violation]:
        """C9: dummy and capture runs may write the null block, but nothing that is not finite.

        A kernel may read it with weight zero, and 0 x NaN is NaN (vllm 36939, 57156). Told once.
        """
        place = (view.record.arm, rank, cache)
        if place in self._not_finite or is_finite(block):
            return
        self._not_finite.add(place)
        yield view.violation("C9", rank, cache.tensor, _null_block_text(cache))


def is_finite(values: NDArray[Any]) -> bool:
    """Of floats, or of the raw 16-bit patterns that bfloat16 comes as (exponent all ones)."""
    if values.dtype.kind == "f":
        return bool(np.isfinite(values).all())
    return bool(((values.view(np.uint16) & BFLOAT16_EXPONENT) != BFLOAT16_EXPONENT).all())


def _null_block_text(cache: CachePlace) -> str:
    return (
        f"{cache}, block {NULL_BLOCK} (the null block) is not finite: a kernel that reads it with "
        "weight zero gets NaN"
    )


def changed_tables(before: Tables, after: Tables) -> Iterator[Change]:
    """One entry for every global block table that is not as it was."""
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        for group, (left, right) in enumerate(zip(old, new, strict=True)):
            name = f"global.block_tables.{group}"
            if left.shape != right.shape:
                yield rank, name, f"shape went from {list(left.shape)} to {list(right.shape)}"
                continue
            differs = np.argwhere(left != right)
            if len(differs):
                row, column = differs[0].tolist()
                was, now = left[row, column], right[row, column]
                count = len(differs)
                yield rank, name, f"[{row}, {column}] went from {was} to {now}, {count} entries"


def changed_by_capture(
    kv_before: KvView, kv_after: KvView, before: Tables, after: Tables
) -> Iterator[Change]:
    """C9 over a capture: what changed outside the null block, and a null block that is not finite.

    Looked at here, since a scenario begins with caches that are zeroed.
    """
    for rank in range(len(after)):
        for layer in range(len(kv_after.layer_groups)):
            cache = kv_after.layer(rank, layer)
            block_size = cache.shape[1]
            old = slot_bits(kv_before.layer(rank, layer))[block_size:]
            changed = _differ(old, slot_bits(cache)[block_size:]) + block_size
            if len(changed):
                place = kv_after.place(layer)
                where = _slots(changed, block_size)
                yield rank, place.tensor, f"capture wrote {place}, {where}"
            if not is_finite(cache[NULL_BLOCK]):
                yield rank, kv_after.place(layer).tensor, _null_block_text(kv_after.place(layer))
    for rank, name, message in changed_tables(before, after):
        yield rank, name, f"{message} during capture"


def capture_violations(arm: str, changes: Iterable[Change], plan: ScenarioPlan) -> list[Violation]:
    """C9 violations of a capture, told at the first step of the scenario that follows it."""
    return [
        Violation(
            contract="C9",
            arm=arm,
            scenario=plan.scenario,
            step=plan.steps[0].index,
            rank=rank,
            tensor=tensor,
            message=message,
        )
        for rank, tensor, message in changes
    ]


def _differ(left: Bits, right: Bits) -> IntArray:
    """Slots whose bits differ; the common case, none, costs one pass."""
    if np.array_equal(left, right):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero((left != right).any(axis=1))


def _slots(slots: IntArray, block_size: int) -> str:
    first, count = int(slots[0]), len(slots)
    more = "" if count == 1 else f" and {count - 1} more"
    return f"slot {first} (block {first // block_size}){more}"


def copy_tables(tables: Tables) -> Tables:
    """Tables that later writes to the originals do not reach."""
    return [[table.copy() for table in groups] for groups in tables]
