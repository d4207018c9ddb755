"""C20: every token attends to the keys that score best (SPEC 3, 7, 12).

Holds for each arm and rank by itself: scores are exact, so that there is one right choice. Knows no
slot: whether a chosen position was then looked up in the right place, the outputs show.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pcpbench.checks.findings import StepView
from pcpbench.checks.oracle import RankExpectation
from pcpbench.checks.selection import NONE, UNKNOWN
from pcpbench.checks.tap_compare import token_place
from pcpbench.records import IntArray, RankRecord, Violation

SHOWN = 4


def check_selection(view: StepView) -> Iterator[Violation]:
    """C20: the positions that real tokens attend to are the best ones; padding attends to none."""
    if view.expected is None or view.expected.selected is None:
        return
    for record, expected in view.ranks():
        message = _message(view, record, expected, view.expected.selected)
        if message:
            yield view.violation("C20", record.rank, "selected", message)


def _message(view: StepView, record: RankRecord, expected: RankExpectation, right: IntArray) -> str:
    total, found = expected.num_tokens_after_padding, record.selected
    if found is None:
        return "the positions that tokens attend to are missing"
    shape = (right.shape[0], total, right.shape[2])
    if found.shape != shape:
        return f"selected has shape {list(found.shape)}, expected {list(shape)}"
    if record.num_tokens != expected.num_tokens:
        return ""  # C7 tells
    first = view.setup.world.pcp_rank(record.rank) * total
    tokens = expected.gathered_token[first : first + total]
    wanted = np.full(shape, NONE, dtype=np.int64)
    wanted[:, tokens >= 0] = right[:, tokens[tokens >= 0]]
    chosen = np.sort(found, axis=2)
    wrong = (chosen != wanted).any(axis=2) & (wanted != UNKNOWN).all(axis=2)
    if not wrong.any():
        return ""
    layer, row = (int(axis[0]) for axis in np.nonzero(wrong))
    token = int(tokens[row])
    whose = f"padding token {row}" if token < 0 else token_place(view.plan, token)
    return (
        f"layer {layer}, {whose}: {_difference(chosen[layer, row], wanted[layer, row])}; "
        f"{int(wrong.sum())} of {wrong.size} choices wrong"
    )


def _difference(found: IntArray, right: IntArray) -> str:
    """What is attended to and should not be, and the reverse."""
    extra, missing = (
        [int(position) for position in np.setdiff1d(one, other) if position != NONE]
        for one, other in ((found, right), (right, found))
    )
    parts = [
        f"{what} {', '.join(map(str, places[:SHOWN]))}" + (", ..." if len(places) > SHOWN else "")
        for what, places in (("attends to", extra), ("leaves out", missing))
        if places
    ]
    return " and ".join(parts) or "attends to a position twice"
