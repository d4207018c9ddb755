"""Sparse latent attention of several ranks against one, on hand-made batches."""

from dataclasses import replace

import pytest
import torch

from pcpbench.model.presets import TINY, TINY_SPARSE
from pcpbench.world import World

SPARSE = replace(TINY_SPARSE, max_position_embeddings=256)
DENSE = replace(TINY, max_position_embeddings=256)
ROWS = [[(0, 0, 40), (1, 0, 3)], [(0, 40, 1), (1, 3, 1)], [(0, 41, 4), (1, 4, 2)]]


def run(stand, tokens, **padding):
    """Hidden states of the real tokens of each step."""
    hidden = []
    for rows in ROWS:
        count = sum(length for _, _, length in rows)
        hidden.append(stand.step(tokens, rows, **padding)[:count])
    return torch.cat(hidden)


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("backend", ["ag_rs", "a2a"])
def test_shards_compute_what_one_rank_does(make_stand, tokens, interleave, backend):
    whole = run(make_stand(shape=SPARSE), tokens)
    stand = make_stand(World(tp_size=4, dcp_size=4), interleave=interleave, shape=SPARSE)
    for context in stand.contexts:
        context.dcp_backend = backend
    torch.testing.assert_close(run(stand, tokens), whole, rtol=1e-4, atol=1e-5)


def test_up_to_topk_keys_it_is_dense_attention(make_stand, tokens):
    rows = [(0, 0, 16)]
    found = make_stand(shape=SPARSE).step(tokens, rows)
    wanted = make_stand(shape=DENSE).step(tokens, rows)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_beyond_topk_keys_it_is_not(make_stand, tokens):
    found, wanted = run(make_stand(shape=SPARSE), tokens), run(make_stand(shape=DENSE), tokens)
    assert (found - wanted)[16:40].abs().amax(1).min() > 1e-3


def test_padding_and_what_is_unread_change_no_bit(make_stand, tokens):
    world = World(tp_size=2, dcp_size=2)
    clean = run(make_stand(world, shape=SPARSE), tokens)
    dirty = make_stand(world, shape=SPARSE, fill=float("nan"))
    padded = run(dirty, tokens, extra_tokens=3, extra_rows=2, garbage=64)
    torch.testing.assert_close(padded, clean, rtol=1e-5, atol=1e-5)


def test_the_chosen_positions_are_left_to_be_looked_at(make_stand, tokens):
    stand = make_stand(World(tp_size=2, dcp_size=2), interleave=2, shape=SPARSE)
    for context in stand.contexts:
        context.selected = torch.full((2, 64, 16), 7, dtype=torch.int32)
    stand.step(tokens, [(0, 0, 40)])
    first, second = (context.selected for context in stand.contexts)
    assert torch.equal(first, second)
    assert first[0, 2].sort().values.tolist() == [-1] * 13 + [0, 1, 2]
    for layer in range(2):
        chosen = first[layer, 39].tolist()
        assert len(set(chosen)) == 16
        assert set(chosen) <= set(range(40))
    assert (first[:, 40:] == 7).all()
