"""Who owns which KV block as a plan goes on (C19).

Owns the judge's own block book: one owner a block, and as many blocks as tokens need, no later and
no earlier; blocks before a sliding window go back in time, and none that is still seen. Knows
neither phases nor outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from pcpbench.checks.oracle_tables import unseen

NULL_BLOCK = 0


@dataclass
class _Holding:
    """One request: blocks held a group, positions that it has come to, what was told of a group.

    num_freed: blocks that lay before those held, one entry a group. late: groups of which it was
    told that a block was kept past its use.
    """

    blocks: list[list[int]]
    num_freed: list[int]
    late: set[int] = field(default_factory=set)
    num_positions: int = 0
    told: dict[int, int] | None = None


class BlockAudit:
    """Blocks of all running requests.

    The KV groups share one pool: no two of them hold the same id (`make_plan`).
    """

    def __init__(
        self, num_blocks: int, block_sizes: tuple[int, ...], windows: tuple[int, ...] = ()
    ) -> None:
        self._num_blocks, self._spans = num_blocks, block_sizes
        self._windows = windows or (0,) * len(block_sizes)
        self._owner: dict[int, str] = {}
        self._held: dict[str, _Holding] = {}

    def enter(self, req_id: str) -> None:
        """A request is admitted; it holds nothing."""
        self.give_back(req_id)
        self._held[req_id] = _Holding([[] for _ in self._spans], [0 for _ in self._spans])

    def give_back(self, req_id: str) -> None:
        """A request leaves; its blocks may be handed out again."""
        holding = self._held.pop(req_id, None)
        for block in (b for blocks in holding.blocks for b in blocks) if holding else ():
            if self._owner.get(block) == req_id:
                del self._owner[block]

    def recycle(
        self,
        freed_block_ids: Mapping[str, tuple[tuple[int, ...], ...]],
        computed: Mapping[str, int],
    ) -> Iterator[str]:
        """Take back blocks before a window, while their requests run; what is wrong with that.

        computed: of each running request, the tokens with KV before this step: its next query is
        behind them. Blocks that are unseen from there on must go back now, and no others.
        """
        for req_id, groups in freed_block_ids.items():
            if req_id not in computed:
                yield f"request {req_id} gives back blocks {_ids(groups)} and does not run"
            elif len(groups) != len(self._spans):
                count = len(self._spans)
                yield f"request {req_id} gives back blocks of {len(groups)} of {count} groups"
        for req_id, position in computed.items():
            given = freed_block_ids.get(req_id, ())
            for group, span in enumerate(self._spans):
                blocks = given[group] if group < len(given) else ()
                wanted = unseen(position, self._windows[group]) // span
                yield from self._give_back_first(req_id, group, blocks, wanted, position)

    def _give_back_first(
        self, req_id: str, group: int, blocks: tuple[int, ...], wanted: int, position: int
    ) -> Iterator[str]:
        """wanted: blocks of the group that are to be back by now. position: of the next query."""
        holding = self._held[req_id]
        held, name = holding.blocks[group], f"request {req_id}"
        if tuple(held[: len(blocks)]) != blocks:
            right = _ids((tuple(held[: len(blocks)]),))
            yield f"{name} gives back blocks {_ids((blocks,))}; its first ones are {right}"
        for block in blocks:
            if self._owner.get(block) == req_id:
                del self._owner[block]
        del held[: len(blocks)]
        before = holding.num_freed[group]
        holding.num_freed[group] += len(blocks)
        span, window = self._spans[group], self._windows[group]
        if holding.num_freed[group] > wanted and blocks:
            first = max(wanted, before)
            places = f"positions {first * span} to {(first + 1) * span - 1}"
            seen = f"sees {window} positions" if window else "sees all"
            block = blocks[first - before]
            yield f"{name} gives back block {block} with {places}: a query at {position} {seen}"
        if holding.num_freed[group] >= wanted:
            holding.late.discard(group)
        elif held and group not in holding.late:
            holding.late.add(group)
            last = (holding.num_freed[group] + 1) * span - 1
            yield (
                f"{name} keeps block {held[0]} with positions up to {last}, which no query from "
                f"{position} on sees (window {window})"
            )

    def hand_out(
        self, new_block_ids: Mapping[str, tuple[tuple[int, ...], ...]], running: Set[str]
    ) -> Iterator[str]:
        """Take in the new blocks of a step; what is wrong with them."""
        for req_id, groups in new_block_ids.items():
            if req_id not in running:
                yield f"blocks {_ids(groups)} go to request {req_id}, which does not run"
                continue
            if len(groups) != len(self._spans):
                yield f"request {req_id} gets blocks for {len(groups)} of {len(self._spans)} groups"
            for held, blocks in zip(self._held[req_id].blocks, groups, strict=False):
                for block in blocks:
                    message = self._taken(req_id, block)
                    if message:
                        yield message
                    self._owner[block] = req_id
                    held.append(block)

    def need(self, req_id: str, num_positions: int) -> None:
        """A step computes a running request up to this position."""
        holding = self._held[req_id]
        holding.num_positions = max(holding.num_positions, num_positions)

    def missing(self) -> Iterator[str]:
        """Requests that, after a step, hold fewer or more blocks than they ever came to need.

        A surplus is told once, not in every step that it lasts.
        """
        for req_id, holding in self._held.items():
            told, holding.told = holding.told or {}, {}
            for group, blocks in enumerate(holding.blocks):
                needed = -(-holding.num_positions // self._spans[group])
                surplus = holding.num_freed[group] + len(blocks) - needed
                holding.told[group] = surplus
                if surplus < 0 or surplus > max(0, told.get(group, 0)):
                    only = "" if surplus < 0 else "only "
                    yield (
                        f"request {req_id} holds {len(blocks)} blocks ({_ids((tuple(blocks),))}) "
                        f"for {holding.num_positions} positions: {only}{needed} of "
                        f"{self._spans[group]} are needed"
                    )

    def _taken(self, req_id: str, block: int) -> str:
        if block == NULL_BLOCK:
            return f"block {block}, the null block, is handed to request {req_id}"
        if not 0 < block < self._num_blocks:
            last = self._num_blocks - 1
            return f"block {block} is handed to request {req_id}, and the pool ends at {last}"
        owner = self._owner.get(block)
        if owner is None:
            return ""
        held = "already" if owner == req_id else f"while request {owner} holds it"
        return f"block {block} is handed to request {req_id} {held}"


def _ids(groups: tuple[tuple[int, ...], ...]) -> str:
    """The last few ids of all groups: `.., 7, 8, 9`."""
    ids = [str(block) for group in groups for block in group]
    return "none" if not ids else ", ".join([".."] * (len(ids) > 4) + ids[-4:])
