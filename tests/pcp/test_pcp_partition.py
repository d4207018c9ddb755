"""DualChunkSwap on arrays, against cases worked out by hand."""

import numpy as np
import pytest

from pcpbench.pcp_partition import build_layout, replicated_requests, row_grid


def rows(query_lens, prefilling, ranks, *, shard, short=False):
    """(request, start, length, is_written) of each rank's rows."""
    grid = row_grid(np.array(query_lens), np.array(prefilling, dtype=bool), ranks, shard, short)
    lines = zip(grid.request, grid.start, grid.length, grid.is_written, strict=True)
    return [
        [(int(r), int(s), int(n), bool(w)) for r, s, n, w in zip(*line, strict=True) if n]
        for line in lines
    ]


def layout(query_lens, prefilling, ranks, *, shard, short=False, padded=None):
    lens = np.array(query_lens, dtype=np.int32)
    grid = row_grid(lens, np.array(prefilling, dtype=bool), ranks, shard, short)
    return build_layout(grid, np.concatenate(([0], lens.cumsum())), padded)


def test_rank_r_takes_chunk_r_and_its_mirror_image():
    assert rows([7], [True], 2, shard=True) == [
        [(0, 0, 2, True), (0, 6, 1, True)],
        [(0, 2, 2, True), (0, 4, 2, True)],
    ]


def test_short_prefill_leaves_ranks_without_rows():
    # Three tokens in eight chunks of 1: chunks 3 to 7 are empty, so rank 3 has none.
    assert rows([3], [True], 4, shard=True) == [
        [(0, 0, 1, True)],
        [(0, 1, 1, True)],
        [(0, 2, 1, True)],
        [],
    ]


def test_decodes_go_round_robin_by_ordinal_among_decodes():
    # Request 1 has no tokens and request 2 prefills: the decodes are 0, 3, 4 and 5.
    found = rows([1, 0, 4, 1, 3, 1], [0, 0, 1, 0, 0, 0], 3, shard=True)
    assert [[row[:3] for row in rank if row[0] != 2] for rank in found] == [
        [(0, 0, 1), (5, 0, 1)],
        [(3, 0, 1)],
        [(4, 0, 3)],
    ]


def test_decodes_come_before_prefills_whatever_their_place_in_the_batch():
    found = rows([8, 1, 8, 1], [1, 0, 1, 0], 2, shard=True)
    assert [row[0] for row in found[0]] == [1, 0, 0, 2, 2]
    assert [row[0] for row in found[1]] == [3, 0, 0, 2, 2]


def test_replicated_decodes_are_written_by_rank_0_alone():
    assert rows([1, 3], [0, 0], 2, shard=False, short=True) == [
        [(0, 0, 1, True), (1, 0, 3, True)],
        [(0, 0, 1, False), (1, 0, 3, False)],
    ]


@pytest.mark.parametrize(("tokens", "whole"), [(1, True), (5, True), (6, True), (7, False)])
def test_prefill_with_an_empty_last_chunk_is_replicated_under_dcp(tokens, whole):
    # Two ranks, four chunks of ceil(q / 4): the last is empty for q <= 3 * ceil(q / 4).
    found = rows([tokens], [True], 2, shard=False, short=True)
    is_whole = found == [[(0, 0, tokens, True)], [(0, 0, tokens, False)]]
    assert is_whole is whole
    mask = replicated_requests(np.array([tokens]), np.array([True]), 2, False, True)
    assert mask.tolist() == [whole]


def test_replicated_requests_without_dcp_is_none():
    mask = replicated_requests(np.array([1, 5]), np.array([False, True]), 2, True, False)
    assert mask.tolist() == [False, False]


def test_indices_of_a_mixed_step():
    # Tokens 0, 1, 2 decode; 3 to 9 prefill. Rank 0: 0, 2, 3, 4, 9; rank 1: 1, 5, 6, 7, 8.
    found = layout([1, 1, 1, 7], [0, 0, 0, 1], 2, shard=True, padded=6)
    assert found.padded_gather_idx.tolist() == [0, 2, 3, 4, 9, 0, 1, 5, 6, 7, 8, 0]
    assert found.gathered_kv_write_mask.tolist() == ([True] * 5 + [False]) * 2
    assert found.hidden_restore_idx.tolist() == [0, 6, 1, 2, 3, 7, 8, 9, 10, 4]
    assert found.tokens_per_rank.tolist() == [5, 5]


def test_indices_of_replicated_decodes():
    found = layout([1, 1, 1], [0, 0, 0], 2, shard=False, padded=4)
    assert found.padded_gather_idx.tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    assert found.gathered_kv_write_mask.tolist() == [True] * 3 + [False] * 5
    assert found.hidden_restore_idx.tolist() == [0, 1, 2]


def test_ranks_share_the_largest_count_when_nothing_pads():
    found = layout([1, 1, 1], [0, 0, 0], 2, shard=True)
    assert found.num_tokens_padded == 2
    assert found.padded_gather_idx.tolist() == [0, 2, 1, 0]
    assert found.gathered_kv_write_mask.tolist() == [True, True, True, False]


def test_padding_below_the_largest_rank_is_refused():
    with pytest.raises(ValueError, match="1 tokens is smaller than the largest rank-local batch"):
        layout([1, 1, 1], [0, 0, 0], 2, shard=True, padded=1)


def test_step_without_tokens_has_empty_indices():
    found = layout([0, 0], [0, 1], 4, shard=True)
    assert found.num_tokens_padded == 0
    assert len(found.padded_gather_idx) == len(found.hidden_restore_idx) == 0
