"""Turns what a draft model left behind a step into records. Owns the copying; judges nothing."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from torch import Tensor

from pcpbench.engine.draft_model import DraftPass
from pcpbench.engine.draft_runner import Proposal, RankedPass
from pcpbench.engine.host_copies import host_copy, wide_copy
from pcpbench.records import DraftPassRecord, IntArray

_NO_SLOTS: Final[IntArray] = np.zeros((0, 0), dtype=np.int64)


def step_drafts(proposal: Proposal | None) -> dict[str, Any]:
    """The fields of a StepRecord that a draft model fills."""
    if proposal is None or proposal.logits is None:
        return {}
    return {"draft_logits": wide_copy(proposal.logits), "proposed": host_copy(proposal.tokens[0])}


def rank_drafts(proposal: Proposal | None, index: int) -> dict[str, Any]:
    """The fields of the RankRecord of the local rank at this place that a draft model fills."""
    if proposal is None:
        return {}
    found: dict[str, Any] = {
        "draft_passes": tuple(
            _record(one, one.ranks[index], one.drafted[index]) for one in proposal.passes
        )
    }
    if proposal.tokens:
        found["proposed"] = host_copy(proposal.tokens[index])
        found["draft_rows"] = host_copy(proposal.rows[index])
    return found


def _record(one: RankedPass, own: DraftPass, drafted: Tensor) -> DraftPassRecord:
    given, counts = own.metadata, own.counts
    local = None if given is None else given.dcp_local_seq_lens
    return DraftPassRecord(
        descriptor=one.descriptor,
        num_replays=one.num_replays,
        num_reqs=counts.num_reqs,
        num_reqs_after_padding=counts.num_reqs_after_padding,
        num_tokens=counts.num_tokens,
        num_tokens_after_padding=counts.num_tokens_after_padding,
        input_ids=host_copy(own.input_ids),
        positions=host_copy(own.positions),
        is_padding=host_copy(own.is_padding),
        query_start_loc=None if given is None else host_copy(given.query_start_loc),
        seq_lens=None if given is None else host_copy(given.seq_lens),
        dcp_local_seq_lens=None if local is None else host_copy(local),
        block_tables=() if given is None else tuple(map(host_copy, given.block_tables)),
        slot_mappings=_NO_SLOTS if given is None else host_copy(given.slot_mappings),
        hidden_in=wide_copy(own.hidden_states),
        hidden_out=wide_copy(drafted),
    )
