"""Turns what a draft model left behind a step into records. Owns the copying; judges nothing."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pcpbench.engine.draft_model import DraftPass
from pcpbench.engine.draft_runner import Proposal, RankedPass
from pcpbench.records import DraftPassRecord, IntArray

_NO_SLOTS: Final[IntArray] = np.zeros((0, 0), dtype=np.int64)


def step_drafts(proposal: Proposal | None) -> dict[str, Any]:
    """The fields of a StepRecord that a draft model fills."""
    if proposal is None or proposal.logits is None:
        return {}
    return {"draft_logits": _wide(proposal.logits), "proposed": _host(proposal.tokens[0])}


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
        found["proposed"] = _host(proposal.tokens[index])
        found["draft_rows"] = _host(proposal.rows[index])
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
        input_ids=_host(own.input_ids),
        positions=_host(own.positions),
        is_padding=_host(own.is_padding),
        query_start_loc=None if given is None else _host(given.query_start_loc),
        seq_lens=None if given is None else _host(given.seq_lens),
        dcp_local_seq_lens=None if local is None else _host(local),
        block_tables=() if given is None else tuple(map(_host, given.block_tables)),
        slot_mappings=_NO_SLOTS if given is None else _host(given.slot_mappings),
        hidden_in=_wide(own.hidden_states),
        hidden_out=_wide(drafted),
    )


def _host(tensor: Tensor) -> NDArray[Any]:
    return np.array(tensor.cpu().numpy(), copy=True)


def _wide(tensor: Tensor) -> NDArray[np.float32]:
    return np.array(tensor.float().cpu().numpy(), copy=True)
