"""The two ops of sparse attention and what lies between them, against loops over positions."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pcpbench.model.sparse_attention import (
    MAX_SCORE,
    index_topk,
    localize,
    merge_candidates,
    positions_of,
    sparse_mla_attention,
)

WIDTH, HEADS = 5, 2


@dataclass
class IndexCase:
    """Arguments of index_topk up to `out`, and the candidates that must come out of it."""

    args: tuple[object, ...]
    out: Tensor
    right: Tensor


def owned(position, dcp):
    size, rank, interleave = dcp
    return position // interleave % size == rank


def index_case(rows, dcp=(1, 0, 1), topk=3, block_size=4, extra_tokens=0, extra_rows=0, seed=0):
    """rows: (seq_len, query tokens). What must not be read is NaN or far out of range."""
    draw = np.random.default_rng(seed)
    num_tokens = sum(n for _, n in rows)
    q = torch.full((num_tokens + extra_tokens, HEADS, WIDTH), float("nan"))
    weights = torch.full((num_tokens + extra_tokens, HEADS), float("nan"))
    per_row = max(length for length, _ in rows) // block_size + 2
    cache = torch.full((len(rows) * per_row + 1, block_size, WIDTH), float("nan"))
    table = torch.full((len(rows) + extra_rows, per_row), 2**30, dtype=torch.int32)
    blocks = (draw.permutation(len(rows) * per_row) + 1).reshape(len(rows), per_row)
    right = torch.full((num_tokens + extra_tokens, topk), -1, dtype=torch.int64)
    starts, local = [0], []
    for row, (length, count) in enumerate(rows):
        keys = draw.integers(-3, 4, (length, WIDTH))
        mine = [p for p in range(length) if owned(p, dcp)]
        local.append(len(mine))
        for place, position in enumerate(mine):
            block = blocks[row, place // block_size]
            table[row, place // block_size] = int(block)
            cache[block, place % block_size] = torch.from_numpy(keys[position]).float()
        for j in range(count):
            token = starts[-1] + j
            query = draw.integers(-3, 4, (HEADS, WIDTH))
            weight = draw.integers(1, 5, HEADS)
            q[token], weights[token] = torch.from_numpy(query), torch.from_numpy(weight)
            found = []
            for position in (p for p in mine if p <= length - count + j):
                products = [max(0, int(head @ keys[position])) for head in query]
                score = sum(int(w) * p for w, p in zip(weight, products, strict=True))
                found.append(score * 2**32 + position)
            best = sorted(found, reverse=True)[:topk]
            right[token, : len(best)] = torch.tensor(best, dtype=torch.int64)
        starts.append(starts[-1] + count)
    args = (
        q,
        weights,
        cache,
        table,
        torch.tensor(starts + starts[-1:] * extra_rows, dtype=torch.int32),
        torch.tensor([length for length, _ in rows] + [0] * extra_rows, dtype=torch.int32),
        torch.tensor(local + [0] * extra_rows, dtype=torch.int32) if dcp[0] > 1 else None,
        *dcp,
    )
    return IndexCase(args, torch.full_like(right, 7), right)


CASES = {
    "one key": ({}, [(1, 1)]),
    "decodes": ({}, [(5, 1), (1, 1), (30, 1), (4, 1)]),
    "mixed": ({}, [(6, 1), (41, 3), (5, 5), (7, 0), (2, 1)]),
    "padded": ({"extra_tokens": 3, "extra_rows": 4}, [(9, 2), (3, 1)]),
    "more than keys": ({"topk": 40}, [(9, 2), (30, 1)]),
    "rank 0 of 2": ({"dcp": (2, 0, 1)}, [(8, 1), (1, 1), (7, 4)]),
    "rank 1 of 2": ({"dcp": (2, 1, 2), "extra_tokens": 1}, [(8, 3), (1, 1), (2, 2), (3, 1)]),
    "rank 3 of 4": ({"dcp": (4, 3, 4), "extra_rows": 2}, [(15, 1), (16, 2), (17, 3), (40, 30)]),
    "one choice": ({"topk": 1, "block_size": 1}, [(20, 4), (3, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_candidates_are_the_best_of_what_a_token_sees(name):
    settings, rows = CASES[name]
    case = index_case(rows, **settings)
    index_topk(*case.args, case.out)
    assert torch.equal(case.out, case.right)


def test_candidates_of_all_ranks_are_those_of_one():
    rows = [(1, 1), (2, 2), (19, 4), (40, 1)]
    whole = index_case(rows, topk=6)
    parts = []
    for rank in range(4):
        part = index_case(rows, dcp=(4, rank, 2), topk=6)
        index_topk(*part.args, part.out)
        parts.append(part.out)
    assert torch.equal(merge_candidates(torch.cat(parts, 1), 6), whole.right)


def test_a_later_key_comes_first_among_equal_ones():
    q, cache = torch.ones(1, 1, 2), torch.tensor([[[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0]]])
    out = torch.empty((1, 2), dtype=torch.int64)
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    lengths = torch.tensor([3], dtype=torch.int32)
    index_topk(q, torch.ones(1, 1), cache, table, starts, lengths, None, 1, 0, 1, out)
    assert positions_of(out).tolist() == [[2, 0]]


def test_keys_that_are_no_numbers_stay_in_range():
    q, cache = torch.ones(1, 1, 1), torch.tensor([[[float("nan")], [float("inf")], [1.0]]])
    out = torch.empty((1, 3), dtype=torch.int64)
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    lengths = torch.tensor([3], dtype=torch.int32)
    index_topk(q, torch.ones(1, 1), cache, table, starts, lengths, None, 1, 0, 1, out)
    assert (out >> 32).tolist() == [[MAX_SCORE, 1, 0]]
    assert positions_of(out).tolist() == [[1, 2, 0]]


def test_positions_become_slots_of_their_owner():
    table = torch.tensor([[5, 9], [2, 3]], dtype=torch.int32)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    positions = torch.tensor([[11, 12, -1], [2, 0, 7], [3, 10, 1], [4, 4, 4]], dtype=torch.int32)
    positions[3] = -1  # a token behind the last row
    for_rank = localize(positions, table, starts, 4, 2, 1, 2)
    # Rank 1 of 2 with interleave 2 owns 2, 3, 6, 7, 10, 11 as its keys 0, 1, 2, 3, 4, 5.
    assert for_rank.tolist() == [[37, -1, -1], [8, -1, 11], [9, 12, -1], [-1, -1, -1]]
    whole = localize(positions, table, starts, 16, 1, 0, 1)
    assert whole.tolist() == [[91, 92, -1], [34, 32, 39], [35, 42, 33], [-1, -1, -1]]


def test_without_rows_nothing_is_looked_up():
    table, starts = torch.zeros((0, 3), dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    found = localize(torch.tensor([[4, -1]], dtype=torch.int32), table, starts, 4, 1, 0, 1)
    assert found.tolist() == [[-1, -1]]


def attention_case(slots, heads=3, rank=8, rope=4, seed=0):
    """A cache that is NaN wherever no slot is named; expectation in float64."""
    generator = torch.Generator().manual_seed(seed)
    width, scale = rank + rope, 0.3
    cache = torch.full((6, 4, width), float("nan"))
    flat = cache.view(-1, width)
    for slot in sorted({s for row in slots for s in row if s >= 0}):
        flat[slot] = torch.randn(width, generator=generator)
    q = torch.randn(len(slots), heads, width, generator=generator)
    out = torch.zeros(len(slots), heads, rank, dtype=torch.float64)
    lse = torch.full((len(slots), heads), -torch.inf, dtype=torch.float64)
    for token, row in enumerate(slots):
        keys = flat[[s for s in row if s >= 0]].double()
        if len(keys):
            scores = q[token].double() @ keys.T * scale
            out[token], lse[token] = scores.softmax(-1) @ keys[:, :rank], scores.logsumexp(-1)
        else:
            q[token] = float("nan")
    named = torch.tensor(slots, dtype=torch.int32)
    empty = torch.full(out.shape, float("nan")), torch.full(lse.shape, float("nan"))
    return (q, cache, named, scale, rank, *empty), out, lse


SLOTS = {
    "all": [[3, 1, 20], [5, 6, 7]],
    "some": [[3, -1, 20], [-1, -1, 7], [-1, 2, -1]],
    "none": [[-1, -1], [-1, -1]],
    "some tokens": [[-1, -1], [4, 9], [-1, -1]],
    "one": [[11]],
}


@pytest.mark.parametrize("name", SLOTS)
def test_attention_reads_the_named_slots_only(name):
    args, out, lse = attention_case(SLOTS[name])
    sparse_mla_attention(*args)
    torch.testing.assert_close(args[-2], out.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(args[-1], lse.float(), rtol=1e-5, atol=1e-5)


def test_a_key_that_is_no_number_reaches_its_own_tokens_only():
    args, out, _ = attention_case([[3, 1], [1, 5], [5, -1]])
    args[1].view(-1, 12)[3] = float("nan")
    sparse_mla_attention(*args)
    assert args[-2][0].isnan().all()
    torch.testing.assert_close(args[-2][1:], out[1:].float(), rtol=1e-5, atol=1e-5)
