"""Comparing KV caches: bit for bit where the layout is the same, by position where it is not.

Owns `KvView`, which part of a cache is compared, and the mapping from a cache's slots to the token
positions of its requests (SPEC 7, 9). Never looks at the null block. Knows no engine: it is handed
arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.drift import is_ok, measure, widen
from pcpbench.checks.oracle import Oracle, StepExpectation
from pcpbench.checks.oracle_tables import PAD
from pcpbench.checks.setup import ArmSetup
from pcpbench.plan import StepPlan
from pcpbench.records import Drift, IntArray

SCOPES = ("written", "all")


class CachePlace(NamedTuple):
    """tensor: `kv_cache`, or `index_cache` for index keys; a draft model's begin with `draft_`.

    layer: whose.
    """

    tensor: str
    layer: int

    def __str__(self) -> str:
        whose = "draft layer" if self.is_draft else "layer"
        return f"{whose} {self.layer}" + (" index cache" if "index" in self.tensor else "")

    @property
    def is_draft(self) -> bool:
        """Whether it is a draft model's."""
        return self.tensor.startswith("draft_")


class KvView(Protocol):
    """The caches of one arm as they are right now.

    layer_groups: the KV group of each cache: those of the layers in order, and behind them, where
    an indexer has caches of its own, as many of those. The arrays may be live memory: the judge
    reads them before it returns and keeps nothing.
    """

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """KV group of each layer."""

    def layer(self, rank: int, layer: int) -> NDArray[Any]:
        """[num_blocks, block_size, width] of one cache on one rank: float32, float16, or int16
        or uint16 holding bfloat16 patterns."""

    def place(self, layer: int) -> CachePlace:
        """Which cache that is."""


@dataclass(frozen=True)
class KvArrays:
    """A KvView over caches laid out as [rank][layer][num_blocks, block_size, width].

    groups: empty means that every cache belongs to KV group 0. num_layers: caches that are layers',
    before those of index keys; None where all are. num_drafts: caches at the end that are a draft
    model's: of its layer's latents, then of its index keys.
    """

    arrays: Sequence[Sequence[NDArray[Any]]]
    groups: tuple[int, ...] = ()
    num_layers: int | None = None
    num_drafts: int = 0

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """KV group of each layer."""
        return self.groups or (0,) * (len(self.arrays[0]) if self.arrays else 0)

    def layer(self, rank: int, layer: int) -> NDArray[Any]:
        """One cache on one rank."""
        return self.arrays[rank][layer]

    def place(self, layer: int) -> CachePlace:
        """Which cache that is: with 2 layers, 3 is the index cache of layer 1."""
        behind = layer + self.num_drafts - (len(self.arrays[0]) if self.arrays else 0)
        if behind >= 0 and self.num_drafts:
            return CachePlace(("draft_kv_cache", "draft_index_cache")[behind], 0)
        if self.num_layers is None or layer < self.num_layers:
            return CachePlace("kv_cache", layer)
        return CachePlace("index_cache", layer - self.num_layers)


@dataclass(frozen=True)
class KvDifference:
    """Drift of one cache of a layer on one rank, with the first differing place in words.

    drift.tensor tells which cache, see CachePlace.
    """

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
                slots = written_slots(expected, rank, group, found.place(layer))
                left, right = _rows(ours)[slots], _rows(theirs)[slots]
            place = found.place(layer)
            drift = measure(kind, place.tensor, left, right, dtype)
            where = ""
            if drift.outcome != "bitwise":
                where = _place(left, right, slots, ours.shape[1])
            yield KvDifference(rank, place.layer, drift, where)


def written_slots(
    expected: StepExpectation, rank: int, group: int, place: CachePlace | None = None
) -> IntArray:
    """The slots that a step writes on one rank, in order, without PAD.

    place: which cache; into a draft model's own the passes behind its first one write, too.
    """
    slots = expected.ranks[rank].slot_mappings[group]
    if place is not None and place.is_draft and expected.draft is not None:
        slots = np.concatenate([slots, expected.draft.slots[rank][:, group].ravel()])
    return np.unique(slots[slots != PAD])


@dataclass(frozen=True)
class _Held:
    """Which token positions of a step's requests lie on one rank, and where.

    row [n]: place in the step's list of positions, request after request. slots [n].
    """

    row: IntArray
    slots: IntArray


@dataclass(frozen=True)
class _Span:
    """The positions in scope, request after request.

    owner [n]: whose, as an index into the step's `scheduled`. position [n]. is_written: whether
    they are the step's own tokens.
    """

    owner: IntArray
    position: IntArray
    is_written: bool


def _span(step: StepPlan, scope: str) -> _Span:
    owners, positions = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for index, request in enumerate(step.scheduled):
        first = request.num_computed_tokens if scope == "written" else 0
        last = request.num_computed_tokens + request.num_scheduled_tokens
        positions.append(np.arange(first, last, dtype=np.int64))
        owners.append(np.full(last - first, index, dtype=np.int64))
    return _Span(np.concatenate(owners), np.concatenate(positions), scope == "written")


def _is_kept(span: _Span, step: StepPlan) -> NDArray[np.bool_]:
    """Which positions in scope still count as computed after the step: not those of rejects."""
    ends = [r.num_computed_tokens + r.num_scheduled_tokens - r.num_rejected_tokens
            for r in step.scheduled]  # fmt: skip
    kept: NDArray[np.bool_] = span.position < np.array(ends, dtype=np.int64)[span.owner]
    return kept


def _held(
    span: _Span, oracle: Oracle, step: StepPlan, setup: ArmSetup, rank: int, group: int
) -> _Held:
    dcp_size = setup.dcp_size_of(group)
    me = setup.world.dcp_rank(rank) if dcp_size > 1 else 0
    if span.is_written:
        slots, holder = oracle.token_slots(step, setup, group)
    else:
        parts = [
            oracle.book.slots(
                request.req_id, group, span.position[span.owner == i], dcp_size, setup.interleave
            )
            for i, request in enumerate(step.scheduled)
        ]
        slots = np.concatenate([part[0] for part in parts])
        holder = np.concatenate([part[1] for part in parts])
    rows = np.flatnonzero((holder == me) & (slots != PAD))
    return _Held(rows, slots[rows])


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
    span = _span(step, scope)
    held = _held(span, oracle, step, setup, rank, view.layer_groups[layer])
    latents = _rows(view.layer(rank, layer))[held.slots]
    owner, position = span.owner[held.row], span.position[held.row]
    return {
        request.req_id: (position[owner == index], latents[owner == index])
        for index, request in enumerate(step.scheduled)
    }


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

    Yields one entry a rank of `found` and layer. Requests in `exclude` are left out, and of a draft
    model's caches the positions of rejected drafts: what it writes there follows from its own
    guesses, and the next step overwrites it.
    """
    arm, base = setups[arms[0]], setups[arms[1]]
    span = _span(step, scope)
    left_out = [i for i, request in enumerate(step.scheduled) if request.req_id in exclude]
    wanted = ~np.isin(span.owner, left_out)
    kept = _is_kept(span, step)
    for group in sorted(set(found.layer_groups)):
        ours = [_held(span, oracle, step, arm, r, group) for r in range(arm.world.size)]
        theirs = [_held(span, oracle, step, base, r, group) for r in range(base.world.size)]
        for layer, its_group in enumerate(found.layer_groups):
            if its_group != group:
                continue
            whole, known = _whole(twin, theirs, layer, len(span.owner))
            asked = wanted & kept if found.place(layer).is_draft else wanted
            for rank, held in enumerate(ours):
                if not asked[held.row].any():
                    continue
                rows = held.row[asked[held.row]]
                left = _rows(found.layer(rank, layer))[held.slots[asked[held.row]]]
                right = whole[rows][known[rows]]
                place = found.place(layer)
                drift = measure(kind, place.tensor, left, right, dtype)
                where = ""
                if not is_ok(drift):
                    where = _position(span, rows, step, widen(left, dtype), widen(right, dtype))
                yield KvDifference(rank, place.layer, drift, where)


def _whole(
    view: KvView, held: Sequence[_Held], layer: int, count: int
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Latent of every position in scope, from the first rank that holds it, and which are known."""
    caches = [_rows(view.layer(rank, layer)) for rank in range(len(held))]
    whole = np.zeros((count, caches[0].shape[-1]), dtype=caches[0].dtype)
    known = np.zeros(count, dtype=np.bool_)
    for cache, one in reversed(list(zip(caches, held, strict=True))):
        whole[one.row] = cache[one.slots]
        known[one.row] = True
    return whole, known


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


def _position(
    span: _Span, rows: IntArray, step: StepPlan, left: NDArray[Any], right: NDArray[Any]
) -> str:
    """The position whose latents are furthest apart."""
    if left.shape != right.shape:
        return f"{len(left)} positions against {len(right)}"
    gap = np.abs(left.astype(np.float64) - right.astype(np.float64)).max(axis=1)
    row = rows[int(np.argmax(np.where(np.isfinite(gap), gap, np.inf)))]
    req_id = step.scheduled[span.owner[row]].req_id
    return f"request {req_id}, position {int(span.position[row])}"
