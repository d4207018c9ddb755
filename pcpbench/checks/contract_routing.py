"""C21: padding reaches no expert, and every real token exactly its k.

Owns which rows each rank routes and what must follow from them: -1 throughout for padding, k
different experts for a real token, the same choice on all ranks that hold a row, and as many rows
computed by each expert as were routed to it. Which rows are real comes from the plan, never from
the recorded mask. Which expert is the right one is a matter of numbers: drift and C18 tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pcpbench.checks.findings import StepView
from pcpbench.checks.setup import ArmSetup, ExpertSetup
from pcpbench.records import BoolArray, IntArray, RankRecord, RoutingRecord, Violation


@dataclass(frozen=True)
class _Pass:
    """One MoE layer of one microbatch, on all ranks.

    found: rank -> what it recorded. is_real: rank -> of the rows that it routes for itself, which
    hold real tokens; for a rank whose record is missing, too.
    """

    layer: int
    part: int
    found: Mapping[int, RoutingRecord]
    is_real: Mapping[int, BoolArray]

    @property
    def name(self) -> str:
        """Such as `layer 1` or `ubatch 1, layer 1`."""
        return f"layer{self.layer}" + (f".ubatch{self.part}" if self.part else "")


def check_routing(view: StepView) -> Iterator[Violation]:
    """C21 in every MoE layer of a step, an idle one (all padding) included."""
    experts = view.setup.experts
    if experts is None:
        return
    for one in _passes(view, experts):
        for rank, tensor, message in _check_pass(one, view.setup, experts):
            yield view.violation("C21", rank, f"{one.name}.{tensor}", message)


def _passes(view: StepView, experts: ExpertSetup) -> Iterator[_Pass]:
    records = {record.rank: record for record in view.record.ranks}
    num_real = {rank: 0 for rank in records}
    if view.expected is not None:
        num_real |= {expected.rank: expected.num_tokens for expected in view.expected.ranks}
    num_parts = max(len(record.microbatches) for record in records.values()) or 1
    for layer in experts.layers:
        for part in range(num_parts):
            found = {
                rank: routing
                for rank, record in records.items()
                for routing in record.routing
                if (routing.layer, routing.part) == (layer, part)
            }
            is_real = {
                rank: _own_rows(record, part, num_real[rank], view.setup, experts)
                for rank, record in records.items()
            }
            yield _Pass(layer, part, found, is_real)


def _own_rows(
    record: RankRecord, part: int, num_real: int, setup: ArmSetup, experts: ExpertSetup
) -> BoolArray:
    """Of the rows that a rank routes for itself, which hold real tokens.

    5 rows of which 4 are real, over 2 TP ranks under expert parallelism: True True True on TP rank
    0, True False False on rank 1, whose third row makes up the number.
    """
    first, count = 0, record.num_tokens_after_padding
    if part < len(record.microbatches):
        cut = record.microbatches[part]
        first, count = cut.first_token, cut.num_tokens_after_padding
    real: BoolArray = first + np.arange(count) < num_real
    if experts.backend is None:
        return real
    tp_size = setup.world.tp_size
    share = -(-count // tp_size)
    real = np.pad(real, (0, share * tp_size - count))
    place = setup.world.tp_rank(record.rank) * share
    return real[place : place + share]


def _check_pass(
    one: _Pass, setup: ArmSetup, experts: ExpertSetup
) -> Iterator[tuple[int, str, str]]:
    """(rank, tensor, message) of whatever is wrong."""
    whole = True
    for rank, own in one.is_real.items():
        message = _shape_message(one.found.get(rank), _rows_of(one, rank, experts), setup, experts)
        if message:
            whole = False
            yield rank, "chosen", message
        else:
            real = _rows_of(one, rank, experts)
            yield from _check_rows(rank, one.found[rank].chosen, real, len(own), experts)
    if not whole:
        return
    yield from _check_peers(one, setup, experts)
    yield from _check_counts(one, setup, experts)


def _rows_of(one: _Pass, rank: int, experts: ExpertSetup) -> BoolArray:
    """Which rows of a rank's `chosen` are real: its own, or those of all ranks, in rank order."""
    if not experts.gathers:
        return one.is_real[rank]
    return np.concatenate([one.is_real[peer] for peer in sorted(one.is_real)])


def _shape_message(
    found: RoutingRecord | None, real: BoolArray, setup: ArmSetup, experts: ExpertSetup
) -> str:
    if found is None:
        return "what was routed is not recorded"
    rows, counts = (len(real), experts.top_k), (experts.num_local(setup.world.size),)
    if found.chosen.shape != rows or found.num_rows.shape != counts:
        shapes = f"{list(found.chosen.shape)} and {list(found.num_rows.shape)}"
        return f"chosen and num_rows have shapes {shapes}, expected {list(rows)} and {list(counts)}"
    return ""


def _check_rows(
    rank: int, chosen: IntArray, real: BoolArray, per_rank: int, experts: ExpertSetup
) -> Iterator[tuple[int, str, str]]:
    """Padding is routed nowhere, a real token to k different experts."""

    def place(row: int) -> str:
        owner = f" of rank {row // per_rank}" if experts.gathers else ""
        return f"row {row % per_rank}{owner}"

    padded = np.flatnonzero((chosen != -1).any(axis=1) & ~real)
    if len(padded):
        row = int(padded[0])
        message = f"{place(row)} is padding and is routed to experts {chosen[row].tolist()}"
        message += f"; {len(padded)} of {int((~real).sum())} padding rows are routed"
        yield rank, "chosen", message
    ordered = np.sort(chosen, axis=1)
    bad = (ordered[:, 0] < 0) | (ordered[:, -1] >= experts.num_experts)
    bad |= (np.diff(ordered, axis=1) == 0).any(axis=1)
    lost = np.flatnonzero(bad & real)
    if len(lost):
        row = int(lost[0])
        message = f"{place(row)} is a token and is routed to experts {chosen[row].tolist()}, "
        message += f"expected {experts.top_k} different ones of {experts.num_experts}; "
        yield rank, "chosen", f"{message}{len(lost)} of {int(real.sum())} tokens"


def _check_peers(
    one: _Pass, setup: ArmSetup, experts: ExpertSetup
) -> Iterator[tuple[int, str, str]]:
    """Ranks that route the same rows choose the same: all of them, or those of one TP group."""
    if experts.backend is not None and not experts.gathers:
        return
    everyone = [list(range(setup.world.size))]
    for group in everyone if experts.gathers else setup.world.tp_groups():
        first, *others = (rank for rank in group if rank in one.found)
        for rank in others:
            mine, theirs = one.found[rank].chosen, one.found[first].chosen
            differs = np.flatnonzero((mine != theirs).any(axis=1))
            if len(differs):
                row = int(differs[0])
                message = f"row {row} is routed to experts {mine[row].tolist()} here and to "
                message += f"{theirs[row].tolist()} on rank {first}; "
                yield rank, "chosen", f"{message}{len(differs)} of {len(mine)} rows"


def _check_counts(
    one: _Pass, setup: ArmSetup, experts: ExpertSetup
) -> Iterator[tuple[int, str, str]]:
    """Each expert computed as many rows as were routed to it, over all ranks that could."""
    sent = {rank: _sent(one, rank, experts) for rank in one.found}
    total = np.sum(list(sent.values()), axis=0)
    for rank, found in one.found.items():
        count = len(found.num_rows)
        first = 0 if experts.backend is None else rank * count
        right = (sent[rank] if experts.backend is None else total)[first : first + count]
        differs = np.flatnonzero(found.num_rows != right)
        if len(differs):
            place = int(differs[0])
            message = f"expert {first + place} computed {int(found.num_rows[place])} rows, and "
            message += f"{int(right[place])} were routed to it; {len(differs)} of {count} experts"
            yield rank, "num_rows", message


def _sent(one: _Pass, rank: int, experts: ExpertSetup) -> IntArray:
    """How many of a rank's own rows it routed to each expert of the model."""
    chosen = one.found[rank].chosen
    if experts.gathers:
        place = sorted(one.is_real).index(rank) * len(one.is_real[rank])
        chosen = chosen[place : place + len(one.is_real[rank])]
    known = chosen[(chosen >= 0) & (chosen < experts.num_experts)]
    return np.bincount(known, minlength=experts.num_experts)
