"""Triton twin of `dcp.dcp_local_seq_lens`. Imported only for a CUDA tensor, or by its test."""

# Device code: its arguments are pointers and device scalars, which have no Python type.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["num_reqs"])
def _dcp_local_seq_lens_kernel(
    out, seq_lens, num_reqs, capacity, lap, first, interleave, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(seq_lens + row, mask=row < num_reqs, other=0)
    rest = tl.minimum(tl.maximum(length % lap - first, 0), interleave)
    # A row past the real ones was loaded as length 0, and the share of that is 0.
    tl.store(out + row, length // lap * interleave + rest, mask=row < capacity)


def dcp_local_seq_lens(
    out: Tensor, seq_lens: Tensor, num_reqs: int, dcp_size: int, dcp_rank: int, cp_interleave: int
) -> None:
    """See `dcp.maybe_prepare_dcp_local_seq_lens`; one program covers 256 rows."""
    capacity = out.shape[0]
    _dcp_local_seq_lens_kernel[(-(-capacity // _BLOCK),)](
        out,
        seq_lens,
        num_reqs,
        capacity,
        dcp_size * cp_interleave,
        dcp_rank * cp_interleave,
        cp_interleave,
        BLOCK=_BLOCK,
    )
