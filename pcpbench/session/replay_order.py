"""Which other captured graphs are replayed between a step and its second replay (contract C14).

Owns the order. Knows labels only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

PER_STEP: Final = 2
"""Other graphs between a step and its second replay, after the first step of that graph."""


class ReplayOrder:
    """A fixed order that varies from step to step.

    At the first step that runs a graph all the others follow, in the reverse of the order in which
    they were captured: from then on every ordered pair of a captured graph and one that the
    scenario runs has been met. Later steps take PER_STEP of them in turn, every other round in
    the captured order, so that each comes last some time: the last one overwrites the most.
    """

    def __init__(self) -> None:
        self._visits: Counter[tuple[str, str]] = Counter()

    def between(self, arm: str, own: str, captured: Sequence[str]) -> tuple[str, ...]:
        """Graphs to replay, in order. own: what the step ran as, replayed first if captured.

        captured: labels in the order of capture.
        """
        others = [label for label in reversed(captured) if label != own]
        visit = self._visits[arm, own]
        self._visits[arm, own] += 1
        first = (own,) if own in captured else ()
        if visit == 0 or len(others) <= PER_STEP:
            chosen = others
        else:
            start = (visit - 1) * PER_STEP
            chosen = [others[(start + k) % len(others)] for k in range(PER_STEP)]
            if start // len(others) % 2:
                chosen.reverse()
        if len(others) <= PER_STEP and visit % 2:
            chosen = chosen[::-1]
        return (*first, *chosen)
