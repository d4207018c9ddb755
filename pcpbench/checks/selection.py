"""Which keys a token of a sparse model attends to, chosen again from the tokens alone (SPEC 3).

Owns the slow, plain choice: all scores of a sequence, sorted. Knows no cache, no rank and no page.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pcpbench.records import IndexTable, IndexTables, IntArray

NONE = -1
UNKNOWN = -2


def select(tables: IndexTables, tokens: IntArray, first: int) -> IntArray:
    """Positions that the tokens from position `first` on attend to, [layers, tokens, topk], rising.

    tokens: of one sequence, from position 0 on. Of the keys up to and with a token's own, the topk
    with the largest score, the later one of two alike; -1 in front where there are fewer. -2 in
    all places of a token that sees one which nobody knows, or which is no token of the model's.

    With topk 2 and scores 4, 9, 4 of three keys the third token attends to positions 1 and 2.
    """
    vocab_size = min((len(table.key) for table in tables.layers), default=0)
    unknown = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    end = int(unknown[0]) if len(unknown) else len(tokens)
    chosen = np.full((len(tables.layers), len(tokens) - first, tables.topk), UNKNOWN)
    for layer, table in enumerate(tables.layers):
        if end > first:
            chosen[layer, : end - first] = _choose(table, tokens[:end], first, tables.topk)
    return chosen


def _choose(table: IndexTable, tokens: IntArray, first: int, topk: int) -> IntArray:
    """Of one layer: [tokens from `first` on, topk]."""
    scores = _scores(table, tokens, first)
    count, length = scores.shape
    places = np.arange(length)
    order = np.where(places <= np.arange(first, length)[:, None], scores * length + places, NONE)
    best = np.argsort(-order, axis=1, kind="stable")[:, :topk]
    best = np.where(np.take_along_axis(order, best, axis=1) == NONE, NONE, best)
    chosen = np.full((count, topk), NONE, dtype=np.int64)
    chosen[:, topk - best.shape[1] :] = np.sort(best, axis=1)
    return np.sort(chosen, axis=1)


def _scores(table: IndexTable, tokens: IntArray, first: int) -> NDArray[np.float64]:
    """Score of every key for each token from `first` on, [tokens, keys]; whole numbers."""
    keys = table.key[tokens]
    scores = np.zeros((len(tokens) - first, len(tokens)))
    for head in range(table.weights.shape[1]):
        products = table.query[tokens[first:], head] @ keys.T
        scores += table.weights[tokens[first:], head, None] * np.maximum(products, 0.0)
    return scores
