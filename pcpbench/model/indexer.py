"""What a layer of sparse MLA chooses keys by: an index query, head weights and a key of each token.

Owns the tables that they are looked up in. A model computes them from hidden states; here each
token id has its own, in small whole numbers. Scores are then exact in every dtype and whatever the
order of summation, so that the chosen keys are the same on every arm: any other choice is a fault,
and never a near tie that rounding tipped. Knows no cache and no rank.

Shape letters: T tokens, V vocabulary, I index heads, E width of an index head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pcpbench.model.layers import WeightSource
from pcpbench.model.presets import ModelShape

_LARGEST = 3  # of a query's and a key's entries; a score of 2 x 16 x 3 x 3 x 4 fits any float
_HEAVIEST = 4


class IndexInputs(NamedTuple):
    """Of each token: q [T, I, E], weights [T, I], key [T, E]."""

    q: Tensor
    weights: Tensor
    key: Tensor

    def tokens(self, first: int, last: int) -> IndexInputs:
        """Those of tokens first .. last - 1."""
        return IndexInputs(*(part[first:last] for part in self))


class Indexer(nn.Module):
    """`query` [V, I, E] and `key` [V, E] in -3 .. 3, `weights` [V, I] in 1 .. 4, whole
    on each rank.

    Drawn from a generator of their own: a decoder with indexers has the weights of one without.
    """

    def __init__(self, shape: ModelShape, layer: int, source: WeightSource) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(source.generator.initial_seed())
        heads, width = shape.index_n_heads, shape.index_head_dim
        sizes = ((heads, width), (width,), (heads,))
        lows, highs = (-_LARGEST, -_LARGEST, 1), (_LARGEST, _LARGEST, _HEAVIEST)
        for _ in range(layer + 1):  # layers differ
            drawn = [
                torch.randint(low, high + 1, (shape.vocab_size, *size), generator=generator)
                for low, high, size in zip(lows, highs, sizes, strict=True)
            ]
        self.query, self.key, self.weights = (source.place(table.float()) for table in drawn)

    def forward(self, input_ids: Tensor) -> IndexInputs:
        """input_ids: int32 [T]."""
        return IndexInputs(
            self.query.index_select(0, input_ids),
            self.weights.index_select(0, input_ids),
            self.key.index_select(0, input_ids),
        )
