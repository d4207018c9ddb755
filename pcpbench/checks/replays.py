"""C14: what a second replay, other graphs in between and late reading may not change (SPEC 12).

Owns the comparison of two looks at one step. How long an output holds is promised in
targets/protocol.py; what is compared here is exactly that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from pcpbench.checks.findings import StepView, changed_outputs, count_differing
from pcpbench.checks.kv import written_slots
from pcpbench.records import IntArray, StepRecord, Violation

HANDED_OUT: Final[tuple[str, ...]] = ("hidden", "logits", "sampled", "draft_logits", "proposed")
"""Outputs of a step. hidden holds until the arm's next forward pass; the others while held.

The last two are a draft model's."""


def compare_again(
    first: StepRecord, second: StepRecord, between: Sequence[str] = ()
) -> Iterator[Violation]:
    """One violation for each output that a second run of the step changed.

    between: graphs that were replayed between the two.
    """
    yield from _compare(first, second, HANDED_OUT, again_words(first, between))


def compare_held(
    first: StepRecord, held: Sequence[tuple[NDArray[Any], NDArray[Any]]]
) -> Iterator[Violation]:
    """One violation for each output of an earlier step that the step after it changed.

    held: (sampled, logits) of each rank, read after that step; empty where nothing was sampled.
    """
    for rank, (sampled, logits) in zip(first.ranks, held, strict=False):
        tokens = first.sampled if rank.sampled is None else rank.sampled
        looks: list[tuple[str, NDArray[Any], NDArray[Any]]] = [("sampled", tokens, sampled)]
        looks += [("logits", first.logits, logits)] if rank is first.ranks[0] else []
        for tensor, before, after in looks:
            if before.tobytes() != after.tobytes():
                cause = "the next step, after this one had handed it out,"
                yield _changed(first, rank.rank, tensor, before, after, cause)


def again_words(first: StepRecord, between: Sequence[str]) -> str:
    """`a second replay on the same inputs, after FULL[reqs=8,tokens=8] in between,`."""
    what = "replay" if first.num_replays else "run"
    after = f", after {', '.join(between)} in between," if between else ""
    return f"a second {what} on the same inputs{after}"


def compare_late(
    first: StepRecord, late: StepRecord, between: Sequence[str] = ()
) -> Iterator[Violation]:
    """One violation for each output that no longer holds what it held when the step ended.

    between: graphs replayed since; without any, memory was only allocated and freed.
    """
    tensors = HANDED_OUT
    if between:
        tensors, cause = tensors[1:], f"replaying {', '.join(between)}"
    else:
        cause = "allocating and freeing memory"
    yield from _compare(first, late, tensors, f"{cause} after the step had handed it out")


def slots_of(view: StepView) -> list[list[IntArray]]:
    """[rank][KV group]: slots that the step had to write; none for an idle step."""
    if view.expected is None:
        return []
    return [
        [written_slots(view.expected, rank.rank, group) for group in range(len(rank.slot_mappings))]
        for rank in view.expected.ranks
    ]


def _compare(
    first: StepRecord, second: StepRecord, tensors: Sequence[str], cause: str
) -> Iterator[Violation]:
    for rank, tensor, before, after in changed_outputs(first, second, tensors):
        yield _changed(first, rank, tensor, before, after, cause)


def _changed(
    first: StepRecord,
    rank: int | None,
    tensor: str,
    before: NDArray[Any],
    after: NDArray[Any],
    cause: str,
) -> Violation:
    how = count_differing(before, after)
    return Violation(
        contract="C14",
        arm=first.arm,
        scenario=first.scenario,
        step=first.step,
        rank=rank,
        tensor=tensor,
        message=f"{cause} changed {tensor}: {how} (ran as {first.descriptor.label})",
    )
