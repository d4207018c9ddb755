"""Triton twins of the functions at the end of block_table.py. Owns the launches only.

Imported only when a CUDA tensor arrives, or by the test that runs it under Triton's interpreter.
No host synchronisation: grids depend on shapes alone.
"""

# Device code: its arguments are pointers and device scalars, which have no Python type.
# ruff: noqa: ANN001, ANN202
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 512
_TOKENS = 256
_PAD: tl.constexpr = tl.constexpr(-1)


@triton.jit(do_not_specialize=["num_reqs"])
def _gather_rows_kernel(table, idx_mapping, out, num_reqs, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = row < num_reqs
    slot = tl.load(idx_mapping + row, mask=is_real, other=-1).to(tl.int64)
    inside = column < columns
    # A dummy's row and one past the real ones load nothing and so store zeros.
    ids = tl.load(table + slot * columns + column, mask=inside & (slot >= 0), other=0)
    tl.store(out + row * columns + column, ids, mask=inside)


def gather_rows(table: Tensor, idx_mapping: Tensor, out: Tensor) -> None:
    """See `block_table.gather_rows`; one program a row and 512 columns."""
    num_rows, columns = out.shape
    if num_rows and columns:
        grid = (num_rows, -(-columns // _COLUMNS))
        _gather_rows_kernel[grid](
            table, idx_mapping, out, idx_mapping.shape[0], columns, BLOCK=_COLUMNS
        )


@triton.jit
def _hide_columns_kernel(
    rows, idx_mapping, computed, stride, columns, reach, span, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping + row).to(tl.int64)
    cursor = tl.load(computed + slot, mask=slot >= 0, other=0)
    first = tl.maximum(cursor + 1 - reach, 0) // span
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    hidden = (column < first) & (column < columns)
    tl.store(rows + row * stride + column, tl.zeros([BLOCK], tl.int32), mask=hidden)


def hide_columns(
    rows: Tensor, idx_mapping: Tensor, num_computed_tokens: Tensor, reach: int, span: int
) -> None:
    """See `block_table.hide_columns`; one program a row and 512 columns."""
    num_rows, columns = rows.shape
    if num_rows and columns:
        grid = (num_rows, -(-columns // _COLUMNS))
        _hide_columns_kernel[grid](
            rows,
            idx_mapping,
            num_computed_tokens,
            rows.stride(0),
            columns,
            reach,
            span,
            BLOCK=_COLUMNS,
        )


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "capacity"])
def _write_slots_kernel(
    table,
    idx_mapping,
    query_start_loc,
    positions,
    out,
    num_reqs,
    num_tokens,
    capacity,
    columns,
    block_size,
    cp_rank,
    CP_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Program num_reqs fills the tail that belongs to no request.
    row = tl.program_id(0)
    start = tl.load(query_start_loc + row)
    end = tl.minimum(tl.load(query_start_loc + row + 1, mask=row < num_reqs, other=0), num_tokens)
    if row == num_reqs:
        for first in range(tl.minimum(start, num_tokens), capacity, BLOCK):
            token = first + tl.arange(0, BLOCK)
            tl.store(out + token, _PAD, mask=token < capacity)
    else:
        slot = tl.load(idx_mapping + row).to(tl.int64)
        span = block_size * CP_SIZE
        for first in range(start, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            inside = token < end
            position = tl.load(positions + token, mask=inside, other=0)
            column = position // span
            known = inside & (column < columns) & (slot >= 0)
            block = tl.load(table + slot * columns + column, mask=known, other=0).to(tl.int64)
            offset = position - column * span
            owner = offset // INTERLEAVE % CP_SIZE
            local = offset // (CP_SIZE * INTERLEAVE) * INTERLEAVE + offset % INTERLEAVE
            value = tl.where(known & (owner == cp_rank), block * block_size + local, _PAD)
            tl.store(out + token, value, mask=inside)


def write_slots(
    table: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_size: int,
    cp_size: int,
    cp_rank: int,
    cp_interleave: int,
    out: Tensor,
) -> None:
    """See `block_table.write_slots`; one program a request and one for the tail."""
    num_reqs = idx_mapping.shape[0]
    _write_slots_kernel[(num_reqs + 1,)](
        table,
        idx_mapping,
        query_start_loc,
        positions,
        out,
        num_reqs,
        positions.shape[0],
        out.shape[0],
        table.shape[1],
        block_size,
        cp_rank,
        CP_SIZE=cp_size,
        INTERLEAVE=cp_interleave,
        BLOCK=_TOKENS,
    )
