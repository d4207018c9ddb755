"""Several forward passes of one rank that take turns: what two microbatches do (SPEC 8).

Owns the order of their turns. A turn lasts from one meeting of the rank with others to the next;
while one pass waits for the others' data, the next one runs. Knows no batch and no model.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Sequence
from typing import Any, TypeVar

from pcpbench.device.collectives import Meeting, Work

T = TypeVar("T")


async def hand_over(rank: int) -> None:
    """End this pass's turn without meeting anyone. Only under `take_turns`."""
    await Meeting("turn", (), rank)


async def take_turns(routines: Sequence[Coroutine[Meeting, Any, T]]) -> list[T]:
    """Run the routines of one rank in turn, in the order given; their results in that order.

    All of them must come to the same meetings in the same order, as passes through one model do.
    At a graph break they leave the segment together: the work between two segments is that of all
    of them, again in turn.

    Two passes that gather, hand over and end, a and b: a gathers, b gathers, a goes on to where it
    hands over, b likewise, a ends, b ends.
    """
    return await _Turns(routines)


class _Turns:
    def __init__(self, routines: Sequence[Coroutine[Meeting, Any, Any]]) -> None:
        self._routines = routines

    def __await__(self) -> Generator[Meeting, Any, list[Any]]:
        count = len(self._routines)
        answers: list[Any] = [None] * count
        results: dict[int, Any] = {}
        try:
            while len(results) < count:
                breaks: list[Meeting] = []
                for index, routine in enumerate(self._routines):
                    if index in results:
                        continue
                    # Let go of the answer: a tensor kept here would pin its block of a graph pool.
                    answer, answers[index] = answers[index], None
                    try:
                        meeting = routine.send(answer)
                    except StopIteration as stop:
                        results[index] = stop.value
                        continue
                    del answer
                    if meeting.kind == "break":
                        breaks.append(meeting)
                    elif meeting.kind != "turn":
                        answers[index] = yield meeting
                    del meeting
                if breaks:
                    yield Meeting("break", (), breaks[0].rank, work=_together(breaks))
        finally:
            for routine in self._routines:
                routine.close()
        return [results[index] for index in range(count)]


def _together(breaks: Sequence[Meeting]) -> Work:
    """The work of all passes at one break; made anew at each replay, like each one's own."""
    works = [meeting.work for meeting in breaks if meeting.work is not None]

    async def work() -> None:
        await take_turns([one() for one in works])

    return work
