"""What a draft model's passes should be given behind a step, rebuilt from the plan (SPEC 7, 10).

Owns where each request is drafted from and where its later passes stand. The first pass has the
rows of the step itself: see oracle.py.

n scheduled requests, k drafts a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pcpbench.checks.oracle_tables import PAD, RequestBook, TokenFeed
from pcpbench.checks.setup import ArmSetup
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import IntArray


@dataclass(frozen=True, kw_only=True)
class DraftExpectation:
    """The same for every rank but where a rank's number is named.

    rows [n]: the token of the global batch that a request is drafted from, the last kept one.
    positions [k - 1, n]: of the passes behind the first. block_ids[group][n]: a request's blocks.
    slots: one [k - 1, groups, n] a rank, PAD where another rank of its DCP group owns the position.
    following [tokens of the global batch]: the token behind each one as far as it was known before
    the step, -1 where not.
    """

    rows: IntArray
    positions: IntArray
    block_ids: tuple[tuple[IntArray, ...], ...]
    slots: tuple[IntArray, ...]
    following: IntArray


def expect_drafts(
    step: StepPlan, setup: ArmSetup, plan: ScenarioPlan, book: RequestBook, feed: TokenFeed
) -> DraftExpectation | None:
    """What is expected behind a step; None where no draft model runs.

    With 12 tokens computed after the step the last kept one is at position 11, the second pass
    stands at 12, the third at 13, none past the last position that max_model_len allows.
    """
    if setup.draft is None:
        return None
    limit = plan.max_model_len if setup.max_model_len is None else setup.max_model_len
    rows, kept, following, offset = [], [], [], 0
    for request in step.scheduled:
        first, count = request.num_computed_tokens, request.num_scheduled_tokens
        kept.append(first + count - request.num_rejected_tokens)
        rows.append(offset + kept[-1] - 1 - first)
        following += book.tokens(request.req_id, first + 1, count, feed)
        offset += count
    passes = np.arange(setup.draft.num_steps - 1, dtype=np.int64)
    positions = np.minimum(passes[:, None] + np.array(kept, dtype=np.int64), limit - 1)
    names = [request.req_id for request in step.scheduled]
    groups = range(len(plan.block_sizes))
    return DraftExpectation(
        rows=np.array(rows, dtype=np.int64),
        positions=positions,
        block_ids=tuple(
            tuple(np.array(book.table(name, group), dtype=np.int64) for name in names)
            for group in groups
        ),
        slots=tuple(
            _slots(names, positions, setup, book, rank, len(plan.block_sizes))
            for rank in range(setup.world.size)
        ),
        following=np.array(following, dtype=np.int64),
    )


def _slots(
    names: list[str],
    positions: IntArray,
    setup: ArmSetup,
    book: RequestBook,
    rank: int,
    num_groups: int,
) -> IntArray:
    """[k - 1, groups, n]."""
    out = np.full((len(positions), num_groups, len(names)), PAD, dtype=np.int64)
    for group in range(num_groups):
        dcp_size = setup.dcp_size_of(group)
        me = setup.world.dcp_rank(rank) if dcp_size > 1 else 0
        for place, name in enumerate(names):
            where = positions[:, place]
            slots, owner = book.slots(name, group, where, dcp_size, setup.interleave)
            out[:, group, place] = np.where(owner == me, slots, PAD)
    return out
