"""What makers say of a batch, and what a comparison of makers came to: frozen words.

Owns the outputs of one case, the rows that reports count by and the result of a whole run. Knows
neither an engine nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pcpbench.records import Environment, MicrobatchRecord, Notice, RankRecord
from pcpbench.results import Outcome

Value = NDArray[Any] | str | int
"""One field: an array, a word or a number."""

UNREAD: Final = -2
"""Stands in a block table where the contract has nobody read: past a row's last block."""

REFUSED: Final = "refused"

NOT_ALIKE: Final = "not the same on all ranks"

ORACLE: Final = "oracle"


@dataclass(frozen=True, kw_only=True)
class PartitionOutputs:
    """All that one maker made of one batch.

    ranks: field -> value for each rank, in rank order. step: the same for what belongs to no rank.
    A rank that refused the batch has the field `refusal` alone: REFUSED, or the error that nobody
    expects. is_composed: put together from rows that the maker worked on before.
    """

    ranks: tuple[Mapping[str, Value], ...]
    step: Mapping[str, Value] = field(default_factory=dict)
    is_composed: bool = False


def broken_outputs(num_ranks: int, error: Exception) -> PartitionOutputs:
    """Of a maker that could not even make the global batch: an error on every rank."""
    told = f"{type(error).__name__}: {error}"
    return PartitionOutputs(ranks=tuple({"refusal": told} for _ in range(num_ranks)))


def alike(values: Iterable[int]) -> Value:
    """What all ranks say, or that they do not say the same."""
    found = set(values)
    return found.pop() if len(found) == 1 else NOT_ALIKE


class PartitionDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One field that two makers do not have alike.

    case: the batch as text. left, right: the makers. rank: None for what belongs to no rank.
    left_value, right_value: as text. reason: why it has to be so, "" for a difference that nobody
    can explain.
    """

    case: str
    left: str
    right: str
    rank: int | None
    field: str
    left_value: str
    right_value: str
    message: str
    reason: str = ""


class GroupCount(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of one world, interleave and mode: how many, fields compared, differences."""

    group: str
    num_batches: int = 0
    num_compared: int = 0
    num_different: int = 0
    num_explained: int = 0
    num_refused: int = 0

    def plus(self, other: GroupCount) -> GroupCount:
        """The sum of two counts of one group."""
        return GroupCount(
            group=self.group,
            num_batches=self.num_batches + other.num_batches,
            num_compared=self.num_compared + other.num_compared,
            num_different=self.num_different + other.num_different,
            num_explained=self.num_explained + other.num_explained,
            num_refused=self.num_refused + other.num_refused,
        )


class FieldCount(msgspec.Struct, frozen=True, kw_only=True):
    """One field between two makers. num_missing: batches of which one maker says nothing of it."""

    left: str
    right: str
    field: str
    num_compared: int = 0
    num_different: int = 0
    num_explained: int = 0
    num_missing: int = 0

    def plus(self, other: FieldCount) -> FieldCount:
        """The sum of two counts of one field."""
        return FieldCount(
            left=self.left,
            right=self.right,
            field=self.field,
            num_compared=self.num_compared + other.num_compared,
            num_different=self.num_different + other.num_different,
            num_explained=self.num_explained + other.num_explained,
            num_missing=self.num_missing + other.num_missing,
        )


class PartCount(msgspec.Struct, frozen=True, kw_only=True):
    """What one piece of the work came to. name: the piece.

    differences: the first few that nobody can explain. explained: reason -> first of its kind.
    kernels: how often a target's kernels ran for one batch alone, and for rows put together.
    """

    name: str
    groups: tuple[GroupCount, ...] = ()
    fields: tuple[FieldCount, ...] = ()
    differences: tuple[PartitionDifference, ...] = ()
    explained: tuple[PartitionDifference, ...] = ()
    reasons: dict[str, int] = {}
    kernels: dict[str, int] = {}
    wall_s: float = 0.0

    @property
    def num_different(self) -> int:
        """Fields that differ and nobody can say why."""
        return sum(count.num_different for count in self.groups)


class PartitionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. parts: what is done. num_parts: of how many.

    unfinished: pieces that were broken off; what was found in them counts, they are not done.
    makers: who was compared, the judge's own first. what: "batches" or "steps".
    """

    command: str
    makers: tuple[str, ...]
    parts: tuple[PartCount, ...]
    num_parts: int
    settings: dict[str, Any]
    environment: Environment
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    run_dir: str = ""
    what: str = "batches"
    stopped: str = ""
    unfinished: tuple[PartCount, ...] = ()

    @property
    def seen(self) -> tuple[PartCount, ...]:
        """All that was compared, in pieces that are done and in those that are not."""
        return (*self.parts, *self.unfinished)

    @property
    def groups(self) -> tuple[GroupCount, ...]:
        """Counts by world, interleave and mode, over all parts."""
        found: dict[str, GroupCount] = {}
        for part in self.seen:
            for count in part.groups:
                known = found.get(count.group)
                found[count.group] = count if known is None else known.plus(count)
        return tuple(found.values())

    @property
    def fields(self) -> tuple[FieldCount, ...]:
        """Counts by field and pair of makers, over all parts."""
        found: dict[tuple[str, str, str], FieldCount] = {}
        for part in self.seen:
            for count in part.fields:
                key = (count.left, count.right, count.field)
                known = found.get(key)
                found[key] = count if known is None else known.plus(count)
        return tuple(found.values())

    @property
    def kernels(self) -> dict[str, int]:
        """How often kernels ran, by how."""
        return _summed([part.kernels for part in self.seen])

    @property
    def explained(self) -> dict[str, tuple[int, PartitionDifference]]:
        """Reason of a known difference -> how often, and the first one."""
        counts = _summed([part.reasons for part in self.seen])
        first: dict[str, PartitionDifference] = {}
        for part in self.seen:
            for difference in part.explained:
                first.setdefault(difference.reason, difference)
        return {reason: (number, first[reason]) for reason, number in counts.items()}

    @property
    def differences(self) -> tuple[PartitionDifference, ...]:
        """Those that nobody can explain, as far as they were kept."""
        return tuple(difference for part in self.seen for difference in part.differences)

    @property
    def num_batches(self) -> int:
        """Batches (or steps) that were compared."""
        return sum(count.num_batches for count in self.groups)

    @property
    def num_compared(self) -> int:
        """Fields that were compared, over all batches, ranks and pairs of makers."""
        return sum(count.num_compared for count in self.groups)

    @property
    def num_different(self) -> int:
        """Fields that differ and nobody can say why."""
        return sum(count.num_different for count in self.groups)

    @property
    def num_explained(self) -> int:
        """Fields that differ for a reason that was verified."""
        return sum(count.num_explained for count in self.groups)

    @property
    def outcome(self) -> Outcome:
        """FAIL for one unexplained difference; nothing compared or a run cut short is no pass."""
        if self.num_different:
            return Outcome.FAIL
        if not self.num_compared or len(self.parts) < self.num_parts:
            return Outcome.NOT_COMPARED
        return Outcome.PASS

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is no pass."""
        found = [difference.message for difference in self.differences[:5]]
        if not self.num_compared:
            found.append("nothing was compared")
        elif len(self.parts) < self.num_parts:
            found.append(
                f"{len(self.parts)} of {self.num_parts} parts were compared"
                + (f": {self.stopped}" if self.stopped else "")
            )
        return tuple(found)


def _summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for name, number in count.items():
            total[name] = total.get(name, 0) + number
    return total


def rank_fields(record: RankRecord, num_blocks: Sequence[Sequence[int]]) -> dict[str, Value]:
    """The fields of a rank's record. num_blocks[group][row]: columns of its table that are read.

    What lies past them is UNREAD. Microbatches come as `ubatch0.seq_lens` and so on.
    """
    fields: dict[str, Value] = {
        name: getattr(record, name)
        for name in (
            "num_reqs",
            "num_reqs_after_padding",
            "num_tokens",
            "num_tokens_after_padding",
            "input_ids",
            "positions",
            "is_padding",
            "query_start_loc",
            "seq_lens",
            "slot_mappings",
        )
    }
    fields["row_req_index"] = record.row_req_index
    fields["row_start"] = np.maximum(record.row_start, 0)
    for name in ("dcp_local_seq_lens", "hidden_restore_idx", "gathered_kv_write_mask"):
        value = getattr(record, name)
        if value is not None:
            fields[name] = value
    for group, table in enumerate(record.block_tables):
        fields[f"block_tables.{group}"] = read_columns(table, num_blocks[group], record.num_reqs)
    for index, part in enumerate(record.microbatches):
        fields |= {f"ubatch{index}.{n}": v for n, v in _part_fields(part, num_blocks).items()}
    return fields


def batch_fields(batch: Any) -> dict[str, Value]:
    """What the host knows of a rank's rows. batch: an InputBatch of either engine."""
    fields: dict[str, Value] = {
        name: np.array(getattr(batch, name)[: batch.num_reqs])
        for name in (
            "num_scheduled_tokens",
            "num_computed_tokens_np",
            "prefill_len_np",
            "is_prefilling_np",
        )
    }
    fields["query_start_loc_np"] = np.array(batch.query_start_loc_np)
    fields["seq_lens_cpu_upper_bound"] = batch.seq_lens_cpu_upper_bound.numpy().copy()
    return fields


def _part_fields(part: MicrobatchRecord, num_blocks: Sequence[Sequence[int]]) -> dict[str, Value]:
    count = part.num_reqs
    fields: dict[str, Value] = {
        "first_token": part.first_token,
        "num_reqs": count,
        "num_reqs_after_padding": part.num_reqs_after_padding,
        "num_tokens": part.num_tokens,
        "num_tokens_after_padding": part.num_tokens_after_padding,
        "row_index": part.row_index,
        "input_ids": part.input_ids,
        "positions": part.positions,
        "is_padding": part.is_padding,
        "query_start_loc": part.query_start_loc[: count + 1],
        "seq_lens": part.seq_lens[:count],
        "slot_mappings": part.slot_mappings,
        "padding_rows": padding_rows(part.query_start_loc, part.seq_lens, part.num_tokens, count),
    }
    if part.dcp_local_seq_lens is not None:
        fields["dcp_local_seq_lens"] = part.dcp_local_seq_lens[:count]
        if part.dcp_local_seq_lens[count:].any():
            fields["padding_rows"] = "DCP lengths of padding rows are not 0"
    for group, table in enumerate(part.block_tables):
        read = [num_blocks[group][row] for row in part.row_index.tolist()]
        fields[f"block_tables.{group}"] = read_columns(table, read, count)[:count]
        if table[count:].any():
            fields["padding_rows"] = "tables of padding rows are not 0"
    return fields


def padding_rows(
    query_start_loc: NDArray[Any], seq_lens: NDArray[Any], num_tokens: int, num_reqs: int
) -> str:
    """`neutral`, or what is wrong with the rows past the real ones (SPEC 12, C1 and C2).

    How many there are may differ between makers; that they are neutral may not.
    """
    if (query_start_loc[num_reqs:] != num_tokens).any():
        return "queries of padding rows are not empty"
    return "lengths of padding rows are not 0" if seq_lens[num_reqs:].any() else "neutral"


def read_columns(table: NDArray[Any], num_blocks: Sequence[int], num_reqs: int) -> NDArray[Any]:
    """A table with UNREAD past each real row's blocks; padding rows are read whole (C5)."""
    read = np.array(table)
    for row in range(min(num_reqs, len(read))):
        read[row, num_blocks[row] :] = UNREAD
    return read
