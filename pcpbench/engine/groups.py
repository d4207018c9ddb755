"""The collective groups of one rank. Owns who a rank meets; moves no data."""

from __future__ import annotations

from dataclasses import dataclass

from pcpbench.device.collectives import CollectiveLog, Group, InProcessGroup
from pcpbench.world import World


@dataclass(frozen=True)
class RankGroups:
    """Handles of one rank on its PCP, TP and DCP groups (SPEC 2), and on all ranks (world).

    log: calls of this rank over all its groups, in order of issue.
    """

    rank: int
    pcp: Group
    tp: Group
    dcp: Group
    world: Group
    log: CollectiveLog


def in_process_groups(world: World) -> list[RankGroups]:
    """The groups of every rank of a world that lives in one process, in rank order."""
    handles = []
    for rank in range(world.size):
        log: CollectiveLog = []
        everyone = [list(range(world.size))]
        pcp, tp, dcp, all_ranks = (
            InProcessGroup(_group_of(rank, groups), rank, log)
            for groups in (world.pcp_groups(), world.tp_groups(), world.dcp_groups(), everyone)
        )
        handles.append(RankGroups(rank, pcp, tp, dcp, all_ranks, log))
    return handles


def _group_of(rank: int, groups: list[list[int]]) -> tuple[int, ...]:
    return next(tuple(group) for group in groups if rank in group)
