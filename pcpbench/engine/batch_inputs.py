"""What a step's tokens are and where they stand, from the state on the device (SPEC 4, 10).

Owns two vectorised fills of the input buffers. No host synchronisation: shapes come from the
tensors' own. Knows no plan and no rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pcpbench.engine.request_state import RequestState


def token_rows(query_start_loc: Tensor, num_reqs: int, num_tokens: int) -> Tensor:
    """Row of each of num_tokens tokens, int64; num_reqs for tokens past the last row.

    query_start_loc [0, 1, 1, 3] and 4 tokens give [0, 2, 2, 3]: row 1 is empty, token 3 is padding.
    """
    tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1 : num_reqs + 1], tokens, right=True)


def prepare_pos_seq_lens(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    pos: Tensor,
    seq_lens: Tensor,
) -> None:
    """Positions and lengths of a step from the cursors on the device (SPEC 10), in place.

    idx_mapping: int32 [num_reqs]. query_start_loc: int32 [at least num_reqs + 1].
    num_computed_tokens: int32 [request slots]. pos: int64; entries past the last real token keep
    what they hold. seq_lens: int32 [at least num_reqs], 0 past the real rows to its end.

    Slots [5, 2] with cursors 10 and 3 and queries of 1 and 2 tokens (query_start_loc [0, 1, 3])
    give pos [10, 3, 4] and seq_lens [11, 5].
    """
    num_reqs = idx_mapping.shape[0]
    seq_lens[num_reqs:].zero_()
    if num_reqs == 0:
        return
    starts, ends = query_start_loc[:num_reqs], query_start_loc[1 : num_reqs + 1]
    computed = num_computed_tokens.index_select(0, idx_mapping)
    torch.add(computed, ends - starts, out=seq_lens[:num_reqs])
    rows = token_rows(query_start_loc, num_reqs, pos.shape[0])
    is_real = rows < num_reqs
    shift = (computed - starts).to(pos.dtype).index_select(0, rows.clamp_(max=num_reqs - 1))
    values = shift.add_(torch.arange(pos.shape[0], dtype=pos.dtype, device=pos.device))
    torch.where(is_real, values, pos, out=pos)


def fill_input_ids(
    input_ids: Tensor,
    positions: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    state: RequestState,
) -> None:
    """Input ids of a step's tokens, in place.

    input_ids: int32 [T], positions: int64 [T], T the real tokens. idx_mapping: int32 [num_reqs].
    A position below the request's prefill_len takes the known token there. Past it the request
    decodes: its first query token is the last sampled one, the others are its draft tokens in
    order.
    """
    num_reqs, num_tokens = idx_mapping.shape[0], input_ids.shape[0]
    rows = token_rows(query_start_loc, num_reqs, num_tokens)
    slots = idx_mapping.index_select(0, rows)
    known = state.all_token_ids[slots, positions.clamp(max=state.max_model_len - 1)]
    fresh = state.last_sampled_tokens[:, 0].index_select(0, slots)
    if state.num_speculative_steps:
        offsets = torch.arange(num_tokens, device=input_ids.device)
        offsets.sub_(query_start_loc.index_select(0, rows))
        last = state.num_speculative_steps - 1
        drafts = state.draft_tokens[slots, (offsets - 1).clamp_(0, last)]
        fresh = torch.where(offsets == 0, fresh, drafts)
    is_known = positions < state.prefill_len.index_select(0, slots)
    torch.where(is_known, known, fresh, out=input_ids)
