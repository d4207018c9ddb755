"""Comparing KV caches: bit for bit where the layout is the same, by position where it is not.

Owns `KvView`, which part of a cache is compared, and the mapping from a cache's slots to the token
positions of its requests (SPEC 7, 9). Never looks at the null block. Knows no engine: it is handed
arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.drift import is_ok, measure, same_bits, worse
from pcpbench.checks.oracle import Oracle, StepExpectation
from pcpbench.checks.oracle_tables import PAD
from pcpbench.checks.setup import ArmSetup
from pcpbench.plan import StepPlan
from pcpbench.records import Drift, IntArray

SCOPES = ("written", "all")


class KvView(Protocol):
    """The caches of one arm as they are right now.

    layer_groups: the KV group of each layer, in layer order. The arrays may be live memory: the
    judge reads them before it returns and keeps nothing.
    """

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """KV group of each layer."""

    def layer(self, rank: int, layer: int) -> NDArray[Any]:
        """[num_blocks, block_size, width] of one layer on one rank: float32, float16, or int16
        or uint16 holding bfloat16 patterns."""


@dataclass(frozen=True)
class KvArrays:
    """A KvView over caches laid out as [rank][layer][num_blocks, block_size, width].

    layer_groups: empty means that every layer belongs to KV group 0.
    """

    arrays: Sequence[Sequence[NDArray[Any]]]
    groups: tuple[int, ...] = ()

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """KV group of each layer."""
        return self.groups or (0,) * (len(self.arrays[0]) if self.arrays else 0)

    def layer(self, rank: int, layer: int) -> NDArray[Any]:
        """One layer's cache on one rank."""
        return self.arrays[rank][layer]


@dataclass(frozen=True)
class KvDifference:
    """Drift of one layer's cache on one rank, with the first differing place in words."""

    rank: int
    layer: int
    drift: Drift
    where: str


def compare_kv(
    found: KvView,
    twin: KvView,
    expected: StepExpectation | None,
    num_ranks: int,
    dtype: str,
    kind: str = "capture",
) -> Iterator[KvDifference]:
    """Compare two caches of equal layout; yields one entry a rank and layer.

    With an expectation only the slots that this step writes are read (cheap: a few rows a layer);
    with None whole caches are compared bit for bit, the null block left out.
    """
    for rank in range(num_ranks):
        for layer, group in enumerate(found.layer_groups):
            ours, theirs = found.layer(rank, layer), twin.layer(rank, layer)
            if expected is None:
                left, right = ours[1:], theirs[1:]
                slots = None
            else:
                slots = written_slots(expected, rank, group)
                left, right = _rows(ours)[slots], _rows(theirs)[slots]
            drift = measure(kind, "kv_cache", left, right, dtype)
            where = "" if same_bits(left, right) else _place(left, right, slots, ours.shape[1])
            yield KvDifference(rank, layer, drift, where)


def written_slots(expected: StepExpectation, rank: int, group: int) -> IntArray:
    """The slots that a step writes on one rank, in order, without PAD."""
    slots = expected.ranks[rank].slot_mappings[group]
    return np.unique(slots[slots != PAD])


def kv_by_position(
    view: KvView,
    oracle: Oracle,
    step: StepPlan,
    setup: ArmSetup,
    rank: int,
    layer: int,
    scope: str = "written",
) -> dict[str, tuple[IntArray, NDArray[Any]]]:
    """Positions and latents [positions, width] that one rank holds, for each request of a step.

    scope `written` takes the positions of this step's tokens, `all` every position up to them. The
    reference arm holds all positions in blocks of block_size x dcp; a rank of a DCP arm holds its
    own in blocks of block_size. Example: block size 4, dcp 2, interleave 2, block ids [7]: rank 1
    holds positions 2, 3, 6, 7 of it in rows 0..3 of block 7, the reference holds them in rows 2,
    3, 6, 7 of its own block 7.
    """
    group = view.layer_groups[layer]
    rows = _rows(view.layer(rank, layer))
    dcp_size = setup.dcp_size_of(group)
    me = setup.world.dcp_rank(rank) if dcp_size > 1 else 0
    held: dict[str, tuple[IntArray, NDArray[Any]]] = {}
    for request in step.scheduled:
        first = request.num_computed_tokens if scope == "written" else 0
        last = request.num_computed_tokens + request.num_scheduled_tokens
        positions = np.arange(first, last, dtype=np.int64)
        slots, owner = oracle.book.slots(
            request.req_id, group, positions, dcp_size, setup.interleave
        )
        mine = (owner == me) & (slots != PAD)
        held[request.req_id] = (positions[mine], rows[slots[mine]])
    return held


def compare_kv_by_position(
    found: KvView,
    twin: KvView,
    oracle: Oracle,
    step: StepPlan,
    setups: Mapping[str, ArmSetup],
    arms: tuple[str, str],
    kind: str,
    dtype: str,
    scope: str = "written",
    exclude: Collection[str] = (),
) -> Iterator[KvDifference]:
    """Compare caches of any layout; `twin` is read on the first rank that holds a position.

    Yields one entry a rank of `found` and layer, with the worst request's drift. Requests in
    `exclude` are left out.
    """
    arm, base = setups[arms[0]], setups[arms[1]]
    for layer in range(len(found.layer_groups)):
        whole = _whole(twin, oracle, step, base, layer, scope)
        for rank in range(arm.world.size):
            held = kv_by_position(found, oracle, step, arm, rank, layer, scope)
            worst: Drift | None = None
            where = ""
            for req_id, (positions, latents) in held.items():
                if not len(positions) or req_id in exclude:
                    continue
                known = whole[req_id]
                shared = [known[int(p)] for p in positions if int(p) in known]
                right = np.stack(shared) if shared else latents[:0]
                drift = measure(kind, "kv_cache", latents, right, dtype)
                if worst is None or worse(worst, drift) is drift:
                    worst = drift
                    where = "" if is_ok(drift) else _position(req_id, positions, latents, right)
            if worst is not None:
                yield KvDifference(rank, layer, worst, where)


def _whole(
    view: KvView, oracle: Oracle, step: StepPlan, setup: ArmSetup, layer: int, scope: str
) -> dict[str, dict[int, NDArray[Any]]]:
    """Latent of every position of every request, each from the first rank that holds it."""
    whole: dict[str, dict[int, NDArray[Any]]] = {r.req_id: {} for r in step.scheduled}
    for rank in range(setup.world.size):
        held = kv_by_position(view, oracle, step, setup, rank, layer, scope)
        for req_id, (positions, latents) in held.items():
            for position, latent in zip(positions.tolist(), latents, strict=True):
                whole[req_id].setdefault(position, latent)
    return whole


def _rows(cache: NDArray[Any]) -> NDArray[Any]:
    """[num_blocks, block_size, width] as [slots, width]."""
    return cache.reshape(-1, cache.shape[-1])


def _place(left: NDArray[Any], right: NDArray[Any], slots: IntArray | None, block_size: int) -> str:
    """The first slot at which two equally shaped caches differ."""
    if left.shape != right.shape:
        return f"shapes {list(left.shape)} and {list(right.shape)}"
    a, b = _rows(left), _rows(right)
    bits = f"u{a.dtype.itemsize}"
    differs = (np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)).any(axis=1)
    row = int(np.argmax(differs))
    slot = row + block_size if slots is None else int(slots[row])
    return f"slot {slot} (block {slot // block_size}); {int(differs.sum())} slots differ"


def _position(req_id: str, positions: IntArray, left: NDArray[Any], right: NDArray[Any]) -> str:
    if left.shape != right.shape:
        return f"request {req_id}: {len(left)} positions against {len(right)}"
    differs = (left != right).any(axis=1)
    return f"request {req_id}, position {int(positions[int(np.argmax(differs))])}"
