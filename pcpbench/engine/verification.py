"""Greedy verification of draft tokens, on the device (SPEC 10).

Owns which drafts are accepted, and the rule by which a plan's acceptance is turned into drafts.
Knows no cursor and no rank. k: most draft tokens of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pcpbench.plan import ScheduledRequest


def count_accepted(drafts: Tensor, targets: Tensor, num_drafts: Tensor) -> Tensor:
    """Length of each row's longest prefix of drafts that the model would have chosen, int64 [R].

    drafts: int [R, k]. targets: int [R, 1 + k], the best token behind each query token. num_drafts:
    int [R], drafts that a row has. Drafts 5, 6, 7 with targets 5, 9, 7, 1: one is accepted, and the
    token after it is 9.
    """
    offsets = torch.arange(drafts.shape[1], device=drafts.device)
    hits = (drafts == targets[:, :-1]).logical_and_(offsets < num_drafts.unsqueeze(1))
    return hits.long().cumprod(1).sum(1)


def planned_drafts(
    scheduled: Iterable[ScheduledRequest], targets: Sequence[int], vocab_size: int
) -> list[int]:
    """Draft tokens, request after request, of which the planned number is right.

    targets: the best token behind each query token of the requests that sample, as sampled with
    some drafts in place. A draft is its target; the one that is to be rejected is the next token of
    the vocabulary, and what stands behind it is right again, for nothing. With 1 of 3 accepted,
    targets 5, 9, 7, 1 give 5, 10, 7.
    """
    drafts: list[int] = []
    row = 0
    for request in scheduled:
        for place in range(request.num_draft_tokens):
            miss = place == request.num_accepted_tokens
            drafts.append((targets[row + place] + miss) % vocab_size)
        row += request.num_logits
    return drafts
