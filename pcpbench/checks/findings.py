"""What a contract sees of a step, and how it words what it finds.

Owns `StepView` and the comparison of one array with its expectation. Knows no particular contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.oracle import RankExpectation, StepExpectation
from pcpbench.checks.setup import ArmSetup
from pcpbench.plan import StepPlan
from pcpbench.records import IntArray, NonFinite, RankRecord, StepRecord, Violation


@dataclass(frozen=True, kw_only=True)
class StepView:
    """One step of one arm: the plan, what was recorded and what was expected.

    expected is None for an idle step, whose dummy batch the plan does not describe. fed: the best
    token behind each row of logits in the arm whose tokens are fed on; None where nobody said.
    """

    plan: StepPlan
    record: StepRecord
    setup: ArmSetup
    expected: StepExpectation | None
    fed: IntArray | None = None

    def violation(self, contract: str, rank: int | None, tensor: str, message: str) -> Violation:
        """A finding about this step."""
        return Violation(
            contract=contract,
            arm=self.record.arm,
            scenario=self.record.scenario,
            step=self.record.step,
            rank=rank,
            tensor=tensor,
            message=message,
        )

    def ranks(self) -> Iterator[tuple[RankRecord, RankExpectation]]:
        """Each recorded rank beside its expectation; nothing for an idle step."""
        if self.expected is None:
            return
        by_rank = {expectation.rank: expectation for expectation in self.expected.ranks}
        for record in self.record.ranks:
            if record.rank in by_rank:
                yield record, by_rank[record.rank]


COUNTS: Final = ("num_reqs", "num_reqs_after_padding", "num_tokens", "num_tokens_after_padding")


def wrong_counts(found: RankRecord, right: RankExpectation) -> Iterator[tuple[str, str]]:
    """Real and padded rows and tokens that are not as expected: which, and a sentence."""
    for name in COUNTS:
        count, expected = getattr(found, name), getattr(right, name)
        if count != expected:
            yield name, f"{name} is {count}, expected {expected}"


def non_finite_in(record: StepRecord) -> NonFinite | None:
    """The first output row of a step with a NaN or inf: hidden states, logits, a draft model's.

    Of a draft model's logits [drafts, requests, vocab] the row is the request.
    """
    for tensor in ("hidden", "logits", "draft_logits"):
        values = getattr(record, tensor)
        finite = np.ones(1) if values is None else np.isfinite(values)
        if not finite.all():
            rows = finite.all(axis=-1)
            row = int(np.argmin(rows.all(axis=0) if rows.ndim > 1 else rows))
            return NonFinite(record.arm, record.step, tensor, row)
    return None


def non_finite_text(bad: NonFinite) -> str:
    """One sentence on a NaN or inf among an arm's outputs."""
    where = f"step {bad.step}, tensor {bad.tensor}, row {bad.row}"
    return f"{bad.arm} computed a non-finite value: {where}"


def mismatch(
    name: str,
    found: NDArray[Any],
    expected: NDArray[Any],
    what: str,
    ignore: NDArray[np.bool_] | None = None,
) -> str:
    """One sentence on where `found` is not `expected`, or "" where it is.

    Places where `ignore` is True are not looked at. Example: "seq_lens[3] is 17, expected 0
    (padding row); 1 of 4 wrong".
    """
    if found.shape != expected.shape:
        return f"{name} has shape {list(found.shape)}, expected {list(expected.shape)} ({what})"
    differs = np.asarray(found != expected)
    if ignore is not None:
        differs &= ~ignore
    if not differs.any():
        return ""
    count = int(differs.sum())
    place = tuple(int(axis[0]) for axis in np.nonzero(differs))
    index = ", ".join(str(p) for p in place)
    return (
        f"{name}[{index}] is {found[place].item()}, expected {expected[place].item()} ({what}); "
        f"{count} of {differs.size} wrong"
    )


def nonzero(name: str, found: NDArray[Any], first: int, what: str) -> str:
    """One sentence on the first value of `found[first:]` that is not 0, or ""."""
    tail = found[first:]
    if not tail.any():
        return ""
    where = np.argwhere(tail)
    place = where[0].tolist()
    value = tail[tuple(place)].item()
    index = ", ".join(str(p) for p in [place[0] + first, *place[1:]])
    return f"{name}[{index}] is {value}, expected 0 ({what}); {len(where)} of {tail.size} wrong"


def count_differing(left: NDArray[Any], right: NDArray[Any]) -> str:
    """`64 of 512 values differ`, or both shapes where they are not the same."""
    if left.shape != right.shape:
        return f"shape {list(left.shape)} against {list(right.shape)}"
    differs = left != right
    return f"{int(differs.sum())} of {differs.size} values differ"


def changed_outputs(
    first: StepRecord, second: StepRecord, tensors: Sequence[str]
) -> Iterator[tuple[int | None, str, NDArray[Any], NDArray[Any]]]:
    """(rank, tensor, before, after) of each output that a second run did not repeat bit for bit.

    The step's own come first, with rank None; what a record does not have is left out (a rank's has
    no logits).
    """
    pairs: list[tuple[int | None, Any, Any]] = [(None, first, second)]
    pairs += [(a.rank, a, b) for a, b in zip(first.ranks, second.ranks, strict=True)]
    for rank, left, right in pairs:
        for tensor in tensors:
            before, after = getattr(left, tensor, None), getattr(right, tensor, None)
            if before is not None and after is not None and before.tobytes() != after.tobytes():
                yield rank, tensor, before, after
