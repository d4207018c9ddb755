"""Who owns a KV position under decode context parallelism, and merging what owners computed.

Owns the arithmetic of SPEC 7: ownership, each rank's share of a sequence, the step's local lengths
(torch here, the Triton twin in dcp_kernels.py) and the merge of partial attention. Knows no
request and no model.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pcpbench.records import IntArray


def owner_of(positions: IntArray, dcp_size: int, cp_interleave: int) -> IntArray:
    """DCP rank on which each position's KV lives: `(p // interleave) % dcp_size`.

    dcp 2, interleave 2: positions 0 1 2 3 4 5 live on ranks 0 0 1 1 0 0.
    """
    owner: IntArray = positions // cp_interleave % dcp_size
    return owner


def dcp_local_lens(lengths: IntArray, dcp_size: int, dcp_rank: int, cp_interleave: int) -> IntArray:
    """How many of the first `lengths` positions one DCP rank owns, elementwise (SPEC 7).

    dcp 2, interleave 2, length 7: one full lap of 4 gives each rank 2; of the remaining 3
    positions rank 0 owns 2 and rank 1 owns 1, so the shares are 4 and 3.
    """
    lap = dcp_size * cp_interleave
    rest = np.clip(lengths % lap - dcp_rank * cp_interleave, 0, cp_interleave)
    share: IntArray = lengths // lap * cp_interleave + rest
    return share


def maybe_prepare_dcp_local_seq_lens(
    out: Tensor,
    seq_lens: Tensor,
    num_reqs: int,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    *,
    num_reqs_padded: int | None = None,
) -> Tensor | None:
    """This rank's share of every row's length, written into the caller's persistent buffer.

    out: int32 [capacity], overwritten to its end: shares for the first num_reqs rows, zeros after.
    seq_lens: int32 [at least num_reqs], the lengths of the final (partitioned, padded) batch.
    Returns `out[:num_reqs_padded]` (num_reqs when not given), or None when dcp_size is 1.
    Raises ValueError when the rows do not fit.
    """
    if dcp_size == 1:
        return None
    num_rows = num_reqs if num_reqs_padded is None else num_reqs_padded
    if not num_reqs <= num_rows <= out.shape[0] or num_reqs > seq_lens.shape[0]:
        raise ValueError(
            f"{num_reqs} rows, {num_rows} with padding, do not fit DCP lengths of "
            f"{out.shape[0]} rows made from {seq_lens.shape[0]} sequence lengths"
        )
    if out.is_cuda:
        from pcpbench import dcp_kernels  # triton only where there is a device

        dcp_kernels.dcp_local_seq_lens(out, seq_lens, num_reqs, dcp_size, dcp_rank, cp_interleave)
    else:
        dcp_local_seq_lens(out, seq_lens, num_reqs, dcp_size, dcp_rank, cp_interleave)
    return out[:num_rows]


def dcp_local_seq_lens(
    out: Tensor, seq_lens: Tensor, num_reqs: int, dcp_size: int, dcp_rank: int, cp_interleave: int
) -> None:
    """Torch twin of `dcp_kernels.dcp_local_seq_lens`; see maybe_prepare_dcp_local_seq_lens."""
    lap = dcp_size * cp_interleave
    lengths = seq_lens[:num_reqs]
    rest = lengths.remainder(lap).sub_(dcp_rank * cp_interleave).clamp_(0, cp_interleave)
    torch.add(rest, lengths.div(lap, rounding_mode="floor"), alpha=cp_interleave, out=rest)
    out[:num_reqs].copy_(rest)
    out[num_reqs:].zero_()


def merge_attn_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys from N partial attentions over disjoint sets of keys.

    outs: [N, T, H, D], each normalised over its own keys. lses: [N, T, H], natural logarithm of
    each part's sum of exponentials; -inf for a part without keys, whose `outs` may hold anything.
    Returns out [T, H, D] in the dtype of `outs` and lse [T, H] in that of `lses`. Where no part has
    keys they are 0 and -inf. Computed in float32 or wider.

    Two parts with lse 0 and log 3 have weights 1/4 and 3/4, and the merged lse is log 4.
    """
    wide = torch.promote_types(lses.dtype, torch.float32)
    scores = lses.to(wide)
    empty = scores == -torch.inf
    # The largest score is subtracted to stay in range; with no keys at all it is -inf, and
    # -inf minus -inf would be NaN.
    top = scores.amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (scores - top).exp_()
    total = weights.sum(0)
    # A part without keys weighs 0, but 0 x NaN is NaN: what it left in `outs` must not be read.
    parts = outs.to(wide).masked_fill(empty.unsqueeze(-1), 0.0)
    share = weights / total.masked_fill(total == 0, 1.0)
    out = (parts * share.unsqueeze(-1)).sum(0)
    return out.to(outs.dtype), total.log().add_(top).to(lses.dtype)
