"""Which tokens of a step each PCP rank runs: DualChunkSwap on arrays (SPEC 5).

Owns the layout of a step over all ranks at once, in numpy, with no Python loop over requests,
segments or ranks: it is made on every decode step. Knows no tensor and no buffer.

P ranks, R requests, N rows over all ranks, T tokens of the global batch, L tokens of a rank after
padding to the common count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pcpbench.records import BoolArray, IntArray


@dataclass(frozen=True)
class RowGrid:
    """Candidate rows of all ranks, one grid line a rank; those of length 0 are no rows.

    Within a line: decodes, then prefills, by request, then by start. All [P, columns].
    request: index into the step's requests. start: first token within the request's query.
    length: tokens. is_written: whether the rank writes the row's KV (rank 0 alone does for a
    replicated row).
    """

    request: IntArray
    start: IntArray
    length: IntArray
    is_written: BoolArray

    def rows_per_rank(self) -> IntArray:
        """Rows with tokens of each rank, [P]."""
        counts: IntArray = np.count_nonzero(self.length, axis=1)
        return counts

    def tokens_per_rank(self) -> IntArray:
        """Tokens of each rank, [P]."""
        counts: IntArray = self.length.sum(axis=1)
        return counts


@dataclass(frozen=True)
class Layout:
    """A step over all ranks, padded to L tokens each.

    request, start, length: rows of all ranks, rank after rank, [N]. row_offsets: [P+1]; rank r has
    the rows row_offsets[r] to row_offsets[r + 1]. tokens_per_rank: [P]. num_tokens_padded: L.
    padded_gather_idx: int64 [P * L], the global token at each place of the gathered batch, 0 in
    padding. gathered_kv_write_mask: bool [P * L], true at exactly one place of each token.
    hidden_restore_idx: int64 [T], that place.
    """

    request: IntArray
    start: IntArray
    length: IntArray
    row_offsets: IntArray
    tokens_per_rank: IntArray
    num_tokens_padded: int
    padded_gather_idx: IntArray
    gathered_kv_write_mask: BoolArray
    hidden_restore_idx: IntArray

    def rows_of(self, rank: int) -> IntArray:
        """(request, start, length) of one rank's rows, [3, rows]."""
        first, last = self.row_offsets[rank : rank + 2]
        return np.stack((self.request[first:last], self.start[first:last], self.length[first:last]))


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
    (decodes,) = (is_active & ~is_prefilling).nonzero()
    parts = []
    if len(decodes):
        parts.append(_decode_grid(decodes, num_scheduled_tokens, num_ranks, shard_decode_requests))
    (prefills,) = (is_active & is_prefilling).nonzero()
    if len(prefills):
        parts.append(
            _prefill_grid(prefills, num_scheduled_tokens, num_ranks, replicate_short_prefills)
        )
    if len(parts) == 1:
        return parts[0]
    if not parts:
        nothing = np.zeros((num_ranks, 0), dtype=np.int64)
        return RowGrid(nothing, nothing, nothing, nothing.astype(np.bool_))
    first, second = parts
    return RowGrid(
        np.concatenate((first.request, second.request), axis=1),
        np.concatenate((first.start, second.start), axis=1),
        np.concatenate((first.length, second.length), axis=1),
        np.concatenate((first.is_written, second.is_written), axis=1),
    )


def _decode_grid(
    decodes: IntArray, num_scheduled_tokens: IntArray, num_ranks: int, is_sharded: bool
) -> RowGrid:
    lengths = num_scheduled_tokens[decodes]
    if not is_sharded:
        shape = (num_ranks, len(decodes))
        is_written = np.zeros(shape, dtype=np.bool_)
        is_written[0] = True
        return RowGrid(
            np.broadcast_to(decodes, shape),
            np.zeros(shape, dtype=np.int64),
            np.broadcast_to(lengths, shape),
            is_written,
        )
    # Seven decodes on two ranks: the table [[0, 1], [2, 3], [4, 5], [6, -]] read by columns.
    depth = -(-len(decodes) // num_ranks)
    table = np.zeros((2, depth * num_ranks), dtype=np.int64)
    table[0, : len(decodes)] = decodes
    table[1, : len(decodes)] = lengths
    request, length = table.reshape(2, depth, num_ranks).transpose(0, 2, 1)
    return RowGrid(request, np.zeros_like(request), length, np.ones(request.shape, dtype=np.bool_))


def _prefill_grid(
    prefills: IntArray,
    num_scheduled_tokens: IntArray,
    num_ranks: int,
    replicate_short_prefills: bool,
) -> RowGrid:
    num_chunks = 2 * num_ranks
    total = num_scheduled_tokens[prefills].astype(np.int64)
    size = -(-total // num_chunks)
    rank = np.arange(num_ranks)
    chunk = np.stack((rank, num_chunks - 1 - rank), axis=1)[:, None, :]
    start = np.minimum(chunk * size[:, None], total[:, None])
    length = np.minimum(size[:, None], total[:, None] - start)
    is_written = np.ones(start.shape, dtype=np.bool_)
    if replicate_short_prefills:
        is_short = size * (num_chunks - 1) >= total
        start[:, is_short] = 0
        length[:, is_short, 0] = total[is_short]
        length[:, is_short, 1] = 0
        is_written[1:, is_short] = False
    shape = (num_ranks, 2 * len(prefills))
    request = np.broadcast_to(prefills.repeat(2), shape)
    return RowGrid(request, start.reshape(shape), length.reshape(shape), is_written.reshape(shape))


def build_layout(
    grid: RowGrid, query_start_loc: IntArray, num_tokens_padded: int | None = None
) -> Layout:
    """Number a step's tokens over all ranks, padded to a common count.

    query_start_loc: int [at least R + 1], of the global batch. num_tokens_padded: L; the largest
    rank's count when not given. Raises ValueError when it is below that.
    """
    num_ranks = grid.length.shape[0]
    tokens_per_rank = grid.tokens_per_rank()
    largest = int(tokens_per_rank.max())
    padded = largest if num_tokens_padded is None else num_tokens_padded
    if padded < largest:
        raise ValueError(
            f"{padded} tokens after padding do not cover the PCP rank with the most, {largest}"
        )
    is_row = grid.length > 0
    request, start, length = grid.request[is_row], grid.start[is_row], grid.length[is_row]
    row_offsets = np.zeros(num_ranks + 1, dtype=np.int64)
    np.cumsum(is_row.sum(axis=1), out=row_offsets[1:])
    # Token k of a row is the row's first global token plus k; in the ranks' concatenation it
    # stands at the row's end minus length, plus k.
    ends = length.cumsum()
    num_held = int(ends[-1]) if len(ends) else 0
    shift = query_start_loc[request] + start - (ends - length)
    held = np.arange(num_held) + shift.repeat(length)
    place = np.arange(padded) < tokens_per_rank[:, None]
    gather = np.zeros((num_ranks, padded), dtype=np.int64)
    gather[place] = held
    mask = np.zeros((num_ranks, padded), dtype=np.bool_)
    mask[place] = grid.is_written[is_row].repeat(length)
    flat_gather, flat_mask = gather.reshape(-1), mask.reshape(-1)
    (writers,) = flat_mask.nonzero()
    restore = np.empty(len(writers), dtype=np.int64)
    restore[flat_gather[writers]] = writers
    return Layout(
        request=request,
        start=start,
        length=length,
        row_offsets=row_offsets,
        tokens_per_rank=tokens_per_rank,
        num_tokens_padded=padded,
        padded_gather_idx=flat_gather,
        gathered_kv_write_mask=flat_mask,
        hidden_restore_idx=restore,
    )
