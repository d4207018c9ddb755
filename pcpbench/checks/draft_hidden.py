"""C22 on what passes of a draft model hand on: each is fed what the one before made (SPEC 10).

Owns whose hidden state each token of a pass must have been fed, bit for bit. All arms run the same
loop, so that what it hands on wrongly they hand on alike, and no comparison of arms shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.budgets import BUDGETS
from pcpbench.checks.drift import same_bits
from pcpbench.checks.findings import StepView
from pcpbench.checks.oracle_drafts import DraftExpectation
from pcpbench.records import DraftPassRecord, RankRecord

Rows = NDArray[Any]

ROUNDING: Final = max(budget.relative for budget in BUDGETS["partition"].values())
"""Largest difference of two copies of a row, over its root mean square: far below that of two rows
of different tokens, which is about 1.5 and more."""


def hidden_message(
    view: StepView, record: RankRecord, number: int, one: DraftPassRecord, draft: DraftExpectation
) -> str:
    """What is wrong with the hidden states that a pass was fed, "" for nothing.

    The first pass: the target model's of the same tokens, bit for bit where what was restored is
    this rank's copy. The second: the first one's of the rows
    that requests are drafted from, of any rank that had the row. Later ones: those of the pass
    before, on this rank.
    """
    if number == 0:
        return _first_message(view, record, one)
    count = len(draft.rows)
    if number == 1:
        return _each(view, record, one, draft)
    before = record.draft_passes[number - 1].hidden_out
    return _differing(one, before[:count], f"those that pass {number - 1} made")


def _first_message(view: StepView, record: RankRecord, one: DraftPassRecord) -> str:
    tokens = _tokens(view, record)
    whole = view.record.hidden if record.hidden is None else record.hidden
    if len(whole) <= tokens.max(initial=-1):
        return ""  # C7 and the comparison of outputs name it
    found, right = one.hidden_in[: len(tokens)], whole[tokens]
    if found.shape == right.shape:
        # Behind chunks of another length a row is elsewhere in the batch of each rank, where a
        # matrix product may round it otherwise: of another rank's copy only that much is known.
        near = _is_of_another(view, record, tokens) & _are_near(found, right)
        right = np.where(near[:, None], found, right)
    return _differing(one, right, "the target model's")


def _is_of_another(
    view: StepView, record: RankRecord, tokens: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Of each token that this rank has: whether another rank's copy of it was restored."""
    index = record.hidden_restore_idx
    if index is None or len(index) <= tokens.max(initial=-1):
        return np.zeros(len(tokens), dtype=np.bool_)
    me = view.setup.world.pcp_rank(record.rank)
    return np.asarray(index[tokens] // record.num_tokens_after_padding != me)


def _are_near(found: Rows, right: Rows) -> NDArray[np.bool_]:
    """Whether each row is the other but for rounding, in whatever dtype the engine has."""
    rms = np.sqrt(np.mean(np.square(right, dtype=np.float64), axis=1))
    gap = np.abs(found.astype(np.float64) - right).max(axis=1, initial=0.0)
    return np.asarray(gap <= ROUNDING * rms)


def _each(view: StepView, record: RankRecord, one: DraftPassRecord, draft: DraftExpectation) -> str:
    """Row by row, as a row may have been on one rank or on all."""
    for place, row in enumerate(draft.rows.tolist()):
        made = list(_made(view, record, row))
        fed = one.hidden_in[place] if place < len(one.hidden_in) else one.hidden_in[:0]
        if made and not any(same_bits(fed, copy) for copy in made):
            request = view.plan.scheduled[place].req_id
            return (
                f"hidden_in[{place}], request {request}, is not what pass 0 made of token {row} of "
                "the step"
            )
    return ""


def _tokens(view: StepView, record: RankRecord) -> NDArray[np.int64]:
    """Tokens of the global batch that this rank has, in its order."""
    assert view.expected is not None
    mine = view.expected.ranks[record.rank]
    first = view.setup.world.pcp_rank(record.rank) * mine.num_tokens_after_padding
    return mine.gathered_token[first : first + mine.num_tokens].astype(np.int64)


def _made(view: StepView, record: RankRecord, token: int) -> Iterator[Rows]:
    """What the first pass made of a token of the global batch, on each PCP rank that has it."""
    assert view.expected is not None
    world, mine = view.setup.world, view.expected.ranks[record.rank]
    total = mine.num_tokens_after_padding
    for place in np.flatnonzero(mine.gathered_token == token).tolist():
        pcp_rank, row = divmod(place, total)
        owner = world.rank(pcp_rank, world.tp_rank(record.rank))
        passes = view.record.ranks[owner].draft_passes
        if passes and row < len(passes[0].hidden_out):
            yield passes[0].hidden_out[row]


def _differing(one: DraftPassRecord, right: Rows, whose: str) -> str:
    found = one.hidden_in[: len(right)]
    if same_bits(found, np.asarray(right, dtype=found.dtype)):
        return ""
    if found.shape != right.shape:
        return f"hidden_in has shape {list(found.shape)}, expected {list(right.shape)}"
    rows = np.flatnonzero((found != right).any(axis=1))
    first = int(rows[0]) if len(rows) else 0
    return f"hidden_in[{first}] is not {whose}; {len(rows)} of {len(right)} rows differ"
