"""Which tokens of a step each PCP rank runs: DualChunkSwap on arrays (SPEC 5).

Owns the layout of a step over all ranks at once, in numpy, with no Python loop over requests,
segments or ranks: it is made on every decode step. Knows no tensor and no buffer.

P ranks, R requests, T tokens of the global batch, L tokens of a rank after padding to the common
count, C columns of a rank's line in the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pcpbench.records import BoolArray, IntArray


@dataclass(frozen=True)
class RankSegment:
    """A run of one request's tokens on one rank.

    global_batch_req_idx: the request's row in the global batch. global_batch_slice: its tokens
    there. rank_local_batch_slice: the same tokens in the rank's batch.
    """

    global_batch_req_idx: int
    global_batch_slice: slice
    rank_local_batch_slice: slice

    @property
    def num_tokens(self) -> int:
        """Tokens of the run."""
        length: int = self.global_batch_slice.stop - self.global_batch_slice.start
        return length


class RowGrid(NamedTuple):
    """Candidate rows of all ranks, one line a rank; those of length 0 are no rows. All [P, C].

    Within a line: decodes, then prefills, by request, then by start; the last column is kept free
    for the padding of the line. request: index into the step's requests. start: first token within
    the request's query. length: tokens. is_written: whether the rank writes the row's KV (rank 0
    alone does for a replicated row).
    """

    request: IntArray
    start: IntArray
    length: IntArray
    is_written: BoolArray

    def rows_per_rank(self) -> IntArray:
        """Rows with tokens of each rank, [P]."""
        counts: IntArray = (self.length > 0).sum(axis=1)
        return counts

    def tokens_per_rank(self) -> IntArray:
        """Tokens of each rank, [P]."""
        counts: IntArray = self.length.sum(axis=1)
        return counts


class Layout(NamedTuple):
    """A step over all ranks, padded to L tokens each. Read-only arrays.

    request, start, length: the grid's, [P, C - 1]. tokens_per_rank: [P]. num_tokens_padded: L.
    padded_gather_idx: [P * L], the global token at each place of the gathered batch, 0 in padding.
    gathered_kv_write_mask: bool [P * L], true at exactly one place of each token.
    hidden_restore_idx: [T], that place.
    """

    request: IntArray
    start: IntArray
    length: IntArray
    tokens_per_rank: IntArray
    num_tokens_padded: int
    padded_gather_idx: IntArray
    gathered_kv_write_mask: BoolArray
    hidden_restore_idx: IntArray


def replicated_requests(
    num_scheduled_tokens: IntArray,
    is_prefilling: BoolArray,
    num_ranks: int,
    shard_decode_requests: bool,
    replicate_short_prefills: bool,
) -> BoolArray:
    """Which requests every rank runs whole, [R]: see `row_grid`."""
    size = -(-num_scheduled_tokens // (2 * num_ranks))
    is_short = size * (2 * num_ranks - 1) >= num_scheduled_tokens
    replicated: BoolArray = np.where(
        is_prefilling, is_short & replicate_short_prefills, not shard_decode_requests
    )
    return replicated


def row_grid(
    num_scheduled_tokens: IntArray,
    is_prefilling: BoolArray,
    num_ranks: int,
    shard_decode_requests: bool,
    replicate_short_prefills: bool,
) -> RowGrid:
    """Deal a step's requests out to the ranks.

    Decodes go round-robin by their ordinal among the step's decodes, or to every rank. A prefill of
    q tokens is cut in 2P chunks of ceil(q / 2P), of which rank r takes r and 2P - 1 - r; with
    replicate_short_prefills one whose last chunk would be empty goes to every rank whole. Requests
    without tokens take no part.

    P = 2, a prefill of 7: chunks of 2, 2, 2, 1. Rank 0 takes [0:2] and [6:7], rank 1 [2:4] and
    [4:6]. One of 5 has chunks of 2, 2, 1, 0 and is short.
    """
    is_active = num_scheduled_tokens > 0
    (prefills,) = (is_active & is_prefilling).nonzero()
    (decodes,) = (is_active & ~is_prefilling).nonzero()
    num_decodes, num_prefills = len(decodes), len(prefills)
    width = -(-num_decodes // num_ranks) if shard_decode_requests else num_decodes
    shape = (num_ranks, width + 2 * num_prefills + 1)
    request, start, length = np.zeros((3, *shape), dtype=np.int64)
    grid = RowGrid(request, start, length, np.zeros(shape, dtype=np.bool_))
    if shard_decode_requests:
        _shard_decodes(grid, decodes, num_scheduled_tokens)
    elif num_decodes:
        request[:, :width] = decodes
        length[:, :width] = num_scheduled_tokens[decodes]
        grid.is_written[0, :width] = True
    if num_prefills:
        _cut_prefills(grid, width, prefills, num_scheduled_tokens, replicate_short_prefills)
    return grid


def _shard_decodes(grid: RowGrid, decodes: IntArray, num_scheduled_tokens: IntArray) -> None:
    """Decode k goes to rank k % P as its row k // P.

    Seven decodes on three ranks fill three lines of the grid as 0 3 6, 1 4, 2 5: two full columns,
    then the rest.
    """
    num_ranks = len(grid.request)
    full = len(decodes) // num_ranks
    rest = len(decodes) - full * num_ranks
    lengths = num_scheduled_tokens[decodes]
    for target, values in ((grid.request, decodes), (grid.length, lengths)):
        target.T[:full] = values[: full * num_ranks].reshape(full, num_ranks)
        if rest:
            target[:rest, full] = values[full * num_ranks :]
    grid.is_written[:, :full] = True
    grid.is_written[:rest, full] = True


def _cut_prefills(
    grid: RowGrid,
    column: int,
    prefills: IntArray,
    num_scheduled_tokens: IntArray,
    replicate_short_prefills: bool,
) -> None:
    """Fill the two columns of each prefill, from `column` on."""
    num_ranks, num_chunks = len(grid.request), 2 * len(grid.request)
    total = num_scheduled_tokens[prefills].astype(np.int64)
    size = -(-total // num_chunks)
    chunk = np.arange(num_chunks).reshape(2, num_ranks)
    chunk[1] = chunk[1, ::-1]
    start = np.minimum(chunk.T[:, None, :] * size[:, None], total[:, None])
    length = np.minimum(size[:, None], total[:, None] - start)
    is_written = np.ones(start.shape, dtype=np.bool_)
    if replicate_short_prefills:
        is_short = size * (num_chunks - 1) >= total
        start[:, is_short] = 0
        length[:, is_short, 0] = total[is_short]
        length[:, is_short, 1] = 0
        is_written[1:, is_short] = False
    line = (num_ranks, 2 * len(prefills))
    grid.request[:, column:-1] = prefills.repeat(2)
    grid.start[:, column:-1] = start.reshape(line)
    grid.length[:, column:-1] = length.reshape(line)
    grid.is_written[:, column:-1] = is_written.reshape(line)


def build_layout(
    grid: RowGrid, query_start_loc: IntArray, num_tokens_padded: int | None = None
) -> Layout:
    """Number a step's tokens over all ranks, padded to a common count.

    query_start_loc: int [at least R + 1], of the global batch. num_tokens_padded: L; the largest
    rank's count when not given. Raises ValueError when it is below that.

    Each line of the grid is a rank's part of the gathered batch, with its padding as the last row.
    Place k of the gathered batch, in a row that begins at place b with global token g, holds token
    g + k - b. Two ranks with 1 and 2 tokens, L = 2, and rows (token 5), (tokens 7, 8): the rows
    begin at places 0, 1 (padding) and 2, so the gather index is 5, 0, 7, 8.
    """
    tokens_per_rank = grid.tokens_per_rank()
    largest = int(tokens_per_rank.max())
    padded = largest if num_tokens_padded is None else num_tokens_padded
    if padded < largest:
        raise ValueError(
            f"a padded count of {padded} tokens is smaller than the largest rank-local batch, "
            f"which has {largest}"
        )
    first = query_start_loc[grid.request] + grid.start
    spans = grid.length.copy()
    spans[:, -1] = num_padding = padded - tokens_per_rank
    repeats = spans.reshape(-1)
    begins = repeats.cumsum() - repeats
    gather = (first.reshape(-1) - begins).repeat(repeats)
    gather += np.arange(len(gather))
    if num_padding.any():
        gather.reshape(-1, padded)[np.arange(padded) >= tokens_per_rank[:, None]] = 0
    mask = grid.is_written.reshape(-1).repeat(repeats)
    (writers,) = mask.nonzero()
    restore = np.empty(len(writers), dtype=np.int64)
    restore[gather[writers]] = writers
    for array in (grid.request, grid.start, grid.length, gather, mask, restore):
        array.setflags(write=False)
    return Layout(
        request=grid.request[:, :-1],
        start=grid.start[:, :-1],
        length=grid.length[:, :-1],
        tokens_per_rank=tokens_per_rank,
        num_tokens_padded=padded,
        padded_gather_idx=gather,
        gathered_kv_write_mask=mask,
        hidden_restore_idx=restore,
    )


def rank_segments(layout: Layout, rank: int, query_start_loc: IntArray) -> list[RankSegment]:
    """One rank's rows as slices, one Python object each: for people and tests, not for steps."""
    rows = zip(layout.request[rank], layout.start[rank], layout.length[rank], strict=True)
    segments = []
    done = 0
    for request, start, length in ((int(a), int(b), int(n)) for a, b, n in rows if n):
        first = int(query_start_loc[request]) + start
        segments.append(
            RankSegment(request, slice(first, first + length), slice(done, done + length))
        )
        done += length
    return segments or [RankSegment(0, slice(0, 0), slice(0, 0))]
