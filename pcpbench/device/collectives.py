"""Ranks that meet: the Group protocol, the lockstep driver and groups of ranks in one process.

Owns how ranks of one process wait for each other and how data moves between them. A rank's forward
pass is a coroutine; `await group.all_gather(x)` is the only place where it can be suspended. The
driver runs every local rank until it waits, moves the data of each complete group with ordinary
torch ops on the device (so a graph under capture records them), and resumes the ranks.

A rank that is a process of its own has groups whose methods call torch.distributed and never
suspend; the engine cannot tell the difference. Knows no model and no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pcpbench.errors import CollectiveMismatch

T = TypeVar("T")
CollectiveLog = list[tuple[str, tuple[int, ...], tuple[int, ...], str]]


class Group(Protocol):
    """The collectives of one rank over one group of ranks.

    size: ranks in the group. rank: this rank's position in it. Every rank of a group must issue
    the same calls with the same shapes in the same order (contract C11).
    """

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def rank(self) -> int:
        """Position of this rank in the group."""

    async def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, in group order."""

    async def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, added in group order."""

    async def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Sum over the ranks, of which this rank keeps its even share along `dim`."""

    async def all_to_all(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's even share along `dim` of every rank's tensor, stacked in group order.

        [4, 6] on each of 3 ranks, dim 1: rank r gets columns 2r and 2r + 1 of each, [3, 4, 2].
        """


@dataclass(frozen=True)
class Meeting:
    """One rank waiting in one collective (or, with kind `break`, at a graph break)."""

    kind: str
    ranks: tuple[int, ...]
    rank: int
    tensor: Tensor | None = None
    dim: int = 0
    work: Work | None = None

    def __await__(self) -> Generator[Meeting, Any, Any]:
        return (yield self)


@dataclass
class InProcessGroup:
    """A group whose ranks all live in this process.

    ranks: global ranks in group order. global_rank: the owner of this handle. log: every call is
    appended as (kind, ranks, shape, dtype) when a list is set; None costs nothing.
    """

    ranks: tuple[int, ...]
    global_rank: int
    log: CollectiveLog | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Position of this rank in the group."""
        return self.ranks.index(self.global_rank)

    async def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, in group order."""
        return await self._meet("all_gather", tensor, dim)

    async def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, added in group order."""
        return await self._meet("all_reduce", tensor, 0)

    async def reduce_scatter(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Sum over the ranks, of which this rank keeps its even share along `dim`."""
        return await self._meet("reduce_scatter", tensor, dim)

    async def all_to_all(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """This rank's even share along `dim` of every rank's tensor, stacked in group order."""
        moved = await self._meet("all_to_all", tensor, dim)
        return tensor.unsqueeze(0) if self.size == 1 else moved

    async def _meet(self, kind: str, tensor: Tensor, dim: int) -> Tensor:
        if self.log is not None:
            self.log.append((kind, self.ranks, tuple(tensor.shape), str(tensor.dtype)))
        if self.size == 1:
            return tensor
        result: Tensor = await Meeting(kind, self.ranks, self.global_rank, tensor, dim)
        return result


async def graph_break(rank: int, work: Work) -> None:
    """Leave the captured segment, hand `work` to the driver, and start the next segment.

    Only sensible under a driver that captures in segments; all local ranks must break together.
    """
    await Meeting("break", (), rank, work=work)


Work = Callable[[], Coroutine[Meeting, Any, None]]


def lockstep(
    routines: Sequence[Coroutine[Meeting, Any, T]],
) -> Generator[list[Work], None, list[T]]:
    """Run one coroutine a local rank; yield every rank's work whenever all wait at a graph break.

    The generator returns the results in order. Raises CollectiveMismatch when ranks wait for each
    other in calls that do not match.
    """
    results: dict[int, T] = {}
    answers: list[Any] = [None] * len(routines)
    waiting: dict[int, Meeting] = {}
    try:
        while len(results) < len(routines):
            for index, routine in enumerate(routines):
                if index in results or index in waiting:
                    continue
                # Let go of the answer: a tensor kept here would pin its block of a graph pool.
                answer, answers[index] = answers[index], None
                try:
                    waiting[index] = routine.send(answer)
                except StopIteration as stop:
                    results[index] = stop.value
            if len(waiting) == len(routines) and all(m.kind == "break" for m in waiting.values()):
                works = [meeting.work for meeting in waiting.values() if meeting.work is not None]
                waiting.clear()
                yield works
            elif waiting:
                _serve(waiting, answers)
    finally:
        for routine in routines:
            routine.close()
    return [results[index] for index in range(len(routines))]


def run_lockstep(routines: Sequence[Coroutine[Meeting, Any, T]]) -> list[T]:
    """Run one coroutine a local rank to its end, without graph breaks; results in order."""
    steps = lockstep(routines)
    try:
        next(steps)
    except StopIteration as stop:
        results: list[T] = stop.value
        return results
    raise RuntimeError("a rank broke out of a graph although nothing is captured in segments")


def _serve(waiting: dict[int, Meeting], answers: list[Any]) -> None:
    """Complete every group whose members all wait, and free them to run on."""
    by_rank = {meeting.rank: index for index, meeting in waiting.items()}
    served = False
    for index in list(waiting):
        meeting = waiting.get(index)
        if meeting is None or not meeting.ranks:
            continue
        if any(rank not in by_rank for rank in meeting.ranks):
            continue
        members = [by_rank[rank] for rank in meeting.ranks]
        if any(waiting[member].ranks != meeting.ranks for member in members):
            continue
        for member, moved in zip(members, _move([waiting[m] for m in members]), strict=True):
            answers[member] = moved
        for member in members:
            del by_rank[waiting.pop(member).rank]
        served = True
    if not served:
        raise CollectiveMismatch("ranks wait for each other: " + _describe(waiting.values()))


def _move(meetings: list[Meeting]) -> list[Tensor]:
    """The data movement of one collective; each rank gets memory of its own."""
    kind, dim = meetings[0].kind, meetings[0].dim
    tensors = [meeting.tensor for meeting in meetings if meeting.tensor is not None]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len({(m.kind, m.dim) for m in meetings}) > 1 or len(shapes) > 1:
        raise CollectiveMismatch("ranks of one group disagree: " + _describe(meetings))
    size = len(tensors)
    if kind == "all_gather":
        return [torch.cat(tensors, dim) for _ in range(size)]
    if kind == "all_reduce":
        return [_sum(tensors) for _ in range(size)]
    shares = [tensor.chunk(size, dim) for tensor in tensors]
    if kind == "all_to_all":
        return [torch.stack([share[position] for share in shares]) for position in range(size)]
    return [_sum([share[position] for share in shares]) for position in range(size)]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        total = total + tensor
    return total


def _describe(meetings: Any) -> str:
    return "; ".join(
        f"rank {m.rank} in {m.kind} over {list(m.ranks)}"
        + (f" with shape {tuple(m.tensor.shape)}" if m.tensor is not None else "")
        for m in meetings
    )
