"""What sampling leaves on a rank, and which tokens of a batch it samples from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pcpbench.engine.input_batch import InputBatch
from pcpbench.plan import StepPlan
from pcpbench.records import IntArray


@dataclass
class Sampled:
    """What sampling left on one rank: tokens [n], logits [n, vocab], hidden [tokens, hidden].

    rows [n]: which tokens of the global batch were sampled from; with drafts, several a request.
    """

    tokens: Tensor
    logits: Tensor
    hidden: Tensor
    rows: IntArray


def logits_rows(batch: InputBatch, plan: StepPlan) -> IntArray:
    """Tokens of the global batch to sample from: the last of each request that is due one.

    With drafts, those before it, too: queries of 4 (three drafts) and 2 (none, a last chunk) tokens
    give 0, 1, 2, 3 and 5.
    """
    samples = [row for row, request in enumerate(plan.scheduled) if request.samples]
    ends: IntArray = batch.query_start_loc_np[1:][samples]
    if not batch.num_draft_tokens or batch.num_draft_tokens_per_req is None:
        return ends - 1
    counts = 1 + batch.num_draft_tokens_per_req[samples]
    rows: IntArray = np.repeat(ends - counts.cumsum(), counts) + np.arange(counts.sum())
    return rows
