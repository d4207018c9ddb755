"""Ownership of positions, local lengths and the merge of partial attention."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcpbench.dcp import (
    dcp_local_lens,
    maybe_prepare_dcp_local_seq_lens,
    merge_attn_states,
    owner_of,
)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def count(length, dcp, rank, interleave):
    """Positions below `length` that a rank owns, dealt out one by one."""
    return sum((position // interleave) % dcp == rank for position in range(length))


def test_positions_are_dealt_out_in_runs():
    owners = owner_of(np.arange(10), 2, 2)
    assert owners.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert owner_of(np.arange(6), 3, 1).tolist() == [0, 1, 2, 0, 1, 2]


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 200), st.integers(1, 8), st.sampled_from([1, 2, 3, 16]))
def test_shares_are_counted_and_add_up(length, dcp, interleave):
    shares = [int(dcp_local_lens(np.array(length), dcp, r, interleave)) for r in range(dcp)]
    assert shares == [count(length, dcp, r, interleave) for r in range(dcp)]
    assert sum(shares) == length


@pytest.mark.parametrize("dcp", [2, 4])
@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_local_lengths_of_a_step(dcp, interleave):
    i, d = interleave, dcp
    lengths = [0, 1, i - 1, i, i + 1, d * i - 1, d * i, d * i + 1, 1000]
    seq_lens = torch.tensor([*lengths, 5], dtype=torch.int32)
    for rank in range(dcp):
        out = torch.full((14,), 77, dtype=torch.int32)
        found = maybe_prepare_dcp_local_seq_lens(
            out, seq_lens, len(lengths), dcp, rank, interleave, num_reqs_padded=11
        )
        expected = [count(n, dcp, rank, interleave) for n in lengths]
        assert found.tolist() == [*expected, 0, 0]
        assert found.data_ptr() == out.data_ptr()
        # The caller's buffer is neutral to its end, not only as far as the batch goes.
        assert out.tolist() == [*expected, 0, 0, 0, 0, 0]
    assert seq_lens.tolist() == [*lengths, 5]


def test_rows_are_not_padded_unless_asked():
    out = torch.full((4,), 77, dtype=torch.int32)
    found = maybe_prepare_dcp_local_seq_lens(out, torch.tensor([5, 9]).int(), 2, 2, 0, 1)
    assert found.tolist() == [3, 5]
    assert out.tolist() == [3, 5, 0, 0]


def test_without_dcp_there_are_no_local_lengths_and_nothing_is_written():
    out = torch.full((4,), 77, dtype=torch.int32)
    assert maybe_prepare_dcp_local_seq_lens(out, torch.ones(4).int(), 2, 1, 0, 1) is None
    assert out.tolist() == [77] * 4


@pytest.mark.parametrize(("num_reqs", "padded"), [(3, None), (1, 5), (2, 1)])
def test_rows_that_do_not_fit_are_refused(num_reqs, padded):
    out, seq_lens = torch.zeros(4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        maybe_prepare_dcp_local_seq_lens(out, seq_lens, num_reqs, 2, 0, 1, num_reqs_padded=padded)


def attention(scores, values):
    """Softmax attention and its natural-log LSE; 0 and -inf without keys."""
    if scores.shape[-1] == 0:
        return torch.zeros(values.shape[-1]), -math.inf
    weights = scores.double().softmax(-1)
    return (weights @ values.double()).float(), float(torch.logsumexp(scores.double(), -1))


@pytest.mark.parametrize("offset", [0.0, 300.0, -300.0])
def test_merge_equals_attention_over_all_keys(offset):
    generator = torch.Generator().manual_seed(1)
    num_keys, tokens, heads, width = 13, 3, 2, 5
    scores = torch.randn(tokens, heads, num_keys, generator=generator) * 3 + offset
    values = torch.randn(num_keys, width, generator=generator)
    cuts = [slice(0, 4), slice(4, 4), slice(4, 5), slice(5, 13)]
    outs, lses = torch.zeros(4, tokens, heads, width), torch.zeros(4, tokens, heads)
    expected, lse = torch.zeros(tokens, heads, width), torch.zeros(tokens, heads)
    for t in range(tokens):
        for h in range(heads):
            expected[t, h], lse[t, h] = attention(scores[t, h], values)
            for part, cut in enumerate(cuts):
                outs[part, t, h], lses[part, t, h] = attention(scores[t, h, cut], values[cut])
    outs[1] = torch.nan  # a part without keys may leave anything behind
    found, found_lse = merge_attn_states(outs, lses)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_lse, lse, rtol=1e-6, atol=1e-5)


def test_merge_weighs_by_the_natural_exponential():
    outs = torch.tensor([0.0, 4.0]).view(2, 1, 1, 1)
    lses = torch.tensor([0.0, math.log(3)]).view(2, 1, 1)
    out, lse = merge_attn_states(outs, lses)
    assert out.item() == pytest.approx(3.0)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_merge_of_nothing_is_zero_and_never_nan(dtype, garbage):
    outs = torch.full((2, 1, 1, 3), garbage, dtype=dtype)
    out, lse = merge_attn_states(outs, torch.full((2, 1, 1), -math.inf))
    assert out.tolist() == [[[0.0, 0.0, 0.0]]]
    assert out.dtype is dtype
    assert lse.tolist() == [[-math.inf]]


def test_merge_shows_a_nan_of_a_part_that_has_keys():
    outs = torch.tensor([1.0, math.nan]).view(2, 1, 1, 1)
    out, _ = merge_attn_states(outs, torch.zeros(2, 1, 1))
    assert math.isnan(out.item())
