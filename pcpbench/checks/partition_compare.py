"""Makers' outputs of one case held against each other, field by field, exactly.

Owns the counting and the wording. Knows no maker; which differences are known and why is in
partition_known.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pcpbench.partition_cases import PartitionCase
from pcpbench.partition_results import (
    FieldCount,
    GroupCount,
    PartCount,
    PartitionDifference,
    PartitionOutputs,
    Value,
)

KEPT = 20
"""Unexplained differences of one part that are kept whole; all are counted."""

Explain = Callable[[str, "Sides"], str]
"""(field, both sides) -> why they have to differ, "" where nobody knows."""

MayLack = Callable[[str, str, bool], bool]
"""(maker, field, whether its batch was composed) -> whether it has no such thing to give."""

ABSENT = "absent"


class Sides:
    """Two makers' outputs of one case, as an explanation may look at them."""

    def __init__(
        self,
        left: str,
        right: str,
        outputs: Mapping[str, PartitionOutputs],
        case: PartitionCase | None,
        rank: int | None,
    ) -> None:
        self.left, self.right, self.case, self.rank = left, right, case, rank
        self.outputs = outputs

    def fields(self, maker: str) -> Mapping[str, Value]:
        """The fields of the rank in question, or of the step."""
        found = self.outputs[maker]
        return found.step if self.rank is None else found.ranks[self.rank]


class Tally:
    """What the comparisons of one part of the work come to."""

    def __init__(
        self, name: str, explain: Explain, may_lack: MayLack = lambda maker, name, composed: False
    ) -> None:
        self.name, self._explain, self._may_lack = name, explain, may_lack
        self._groups: dict[str, dict[str, int]] = {}
        self._fields: dict[tuple[str, str, str], dict[str, int]] = {}
        self._differences: list[PartitionDifference] = []
        self._reasons: dict[str, int] = {}
        self._first: dict[str, PartitionDifference] = {}

    def compare(
        self,
        label: str,
        group: str,
        outputs: Mapping[str, PartitionOutputs],
        case: PartitionCase | None = None,
    ) -> None:
        """Hold each maker's outputs of one batch against every other's.

        label: the batch as text. outputs: maker -> what it made, the judge's own first. A batch
        that no maker runs counts as refused.
        """
        counts = self._groups.setdefault(group, dict.fromkeys(_COUNTS, 0))
        counts["num_batches"] += 1
        names = list(outputs)
        first = outputs[names[0]].ranks
        counts["num_refused"] += bool(first) and all("refusal" in fields for fields in first)
        alike: set[tuple[str, int | None, str]] = set()
        for index, left in enumerate(names):
            for right in names[index + 1 :]:
                self._compare_two(label, counts, left, right, outputs, case, alike)

    def _compare_two(
        self,
        label: str,
        counts: dict[str, int],
        left: str,
        right: str,
        outputs: Mapping[str, PartitionOutputs],
        case: PartitionCase | None,
        alike: set[tuple[str, int | None, str]],
    ) -> None:
        """alike: (maker, rank, field) of what is the first maker's; two such are each other's."""
        is_first = left == next(iter(outputs))
        a, b = outputs[left], outputs[right]
        if len(a.ranks) != len(b.ranks):
            raise ValueError(f"{left} has {len(a.ranks)} ranks, {right} {len(b.ranks)}")
        for rank in (None, *range(len(a.ranks))):
            sides = Sides(left, right, outputs, case, rank)
            for name, ours, theirs in _pairs(sides):
                known = self._fields.setdefault(
                    (left, right, name), dict.fromkeys(_FIELD_COUNTS, 0)
                )
                if self._is_excused(sides, name, ours, theirs):
                    known["num_missing"] += 1
                    continue
                is_absent = ours is None or theirs is None
                ours = ABSENT if ours is None else ours
                theirs = ABSENT if theirs is None else theirs
                known["num_compared"] += 1
                counts["num_compared"] += 1
                if {(left, rank, name), (right, rank, name)} <= alike:
                    continue
                message = mismatch_of(name, ours, theirs)
                if not message:
                    if is_first:
                        alike.add((right, rank, name))
                    continue
                reason = "" if is_absent else self._explain(name, sides)
                what = "num_explained" if reason else "num_different"
                known[what] += 1
                counts[what] += 1
                if self._is_kept(reason):
                    self._keep(
                        PartitionDifference(
                            case=label,
                            left=left,
                            right=right,
                            rank=rank,
                            field=name,
                            left_value=as_text(ours),
                            right_value=as_text(theirs),
                            message=f"{message} ({right} against {left}"
                            f"{'' if rank is None else f', rank {rank}'}) in {label}",
                            reason=reason,
                        )
                    )

    def _is_excused(
        self, sides: Sides, name: str, ours: Value | None, theirs: Value | None
    ) -> bool:
        """Whether a field is absent on a side that has nothing of the kind to give."""
        return any(
            value is None and self._may_lack(maker, name, sides.outputs[maker].is_composed)
            for maker, value in ((sides.left, ours), (sides.right, theirs))
        )

    def _is_kept(self, reason: str) -> bool:
        if reason:
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
            return reason not in self._first
        return len(self._differences) < KEPT

    def _keep(self, difference: PartitionDifference) -> None:
        if difference.reason:
            self._first[difference.reason] = difference
        else:
            self._differences.append(difference)

    def result(self, kernels: Mapping[str, int], wall_s: float) -> PartCount:
        """Everything counted so far."""
        return PartCount(
            name=self.name,
            groups=tuple(GroupCount(group=g, **counts) for g, counts in self._groups.items()),
            fields=tuple(
                FieldCount(left=left, right=right, field=name, **counts)
                for (left, right, name), counts in self._fields.items()
            ),
            differences=tuple(self._differences),
            explained=tuple(self._first.values()),
            reasons=self._reasons,
            kernels=dict(kernels),
            wall_s=wall_s,
        )


_COUNTS = ("num_batches", "num_compared", "num_different", "num_explained", "num_refused")
_FIELD_COUNTS = ("num_compared", "num_different", "num_explained", "num_missing")


def _pairs(sides: Sides) -> Iterator[tuple[str, Value | None, Value | None]]:
    """(field, left, right) of one rank; None for a maker that says nothing of it.

    Where one of them refused the batch, that is all there is to compare.
    """
    ours, theirs = sides.fields(sides.left), sides.fields(sides.right)
    if "refusal" in ours or "refusal" in theirs:
        yield "refusal", ours.get("refusal", "taken"), theirs.get("refusal", "taken")
        return
    for name in {**ours, **theirs}:
        yield name, ours.get(name), theirs.get(name)


def mismatch_of(name: str, ours: Value, theirs: Value) -> str:
    """What is not alike, "" where everything is."""
    if not isinstance(ours, np.ndarray) or not isinstance(theirs, np.ndarray):
        alike = type(ours) is type(theirs) and ours == theirs
        return "" if alike else f"{name} is {theirs}, not {ours}"
    if ours.shape != theirs.shape:
        return f"{name} has shape {list(theirs.shape)}, not {list(ours.shape)}"
    if (ours.dtype == np.bool_) != (theirs.dtype == np.bool_):
        return f"{name} has dtype {theirs.dtype}, not {ours.dtype}"
    differs = ours != theirs
    if not differs.any():
        return ""
    place = tuple(int(axis[0]) for axis in np.nonzero(differs))
    where = ", ".join(map(str, place))
    return (
        f"{name}[{where}] is {theirs[place].item()}, not {ours[place].item()}; "
        f"{int(differs.sum())} of {differs.size} differ"
    )


def as_text(value: Value) -> str:
    """A value on one line."""
    if isinstance(value, np.ndarray):
        array: Any = value.astype(np.int64) if value.dtype == np.bool_ else value
        return " ".join(str(array.tolist()).split())
    return str(value)
