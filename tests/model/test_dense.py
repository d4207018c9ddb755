"""The dense forward against the paged one, and its own rules: causal, packed, in pieces."""

from dataclasses import replace

import pytest
import torch

from pcpbench.model import dense
from pcpbench.model.decoder import MLADecoder
from pcpbench.model.presets import SMALL, TINY, TINY_MOE, TINY_SPARSE, TINY_SPARSE_MOE, TINY_SWA

CPU = torch.device("cpu")
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


WINDOW = replace(TINY_SWA, sliding_window=6)
SHAPES = [TINY, SMALL, TINY_SPARSE, TINY_MOE, TINY_SPARSE_MOE, WINDOW]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_it_computes_what_prefill_and_decode_compute_over_the_cache(make_stand, tokens, shape):
    stand = make_stand(shape=replace(shape, max_position_embeddings=256, vocab_size=256))
    model = stand.models[0]
    hidden = [stand.step(tokens, [(0, 0, 21), (1, 0, 5)])]
    hidden += [stand.step(tokens, [(0, 21 + i, 1), (1, 5 + i, 1)]) for i in range(3)]
    first = model.compute_logits(torch.stack([hidden[0][20], *(h[0] for h in hidden[1:])]))
    second = model.compute_logits(torch.stack([hidden[0][25], *(h[1] for h in hidden[1:])]))
    found = dense.dense_logits(
        model, [tokens[0][:24], tokens[1][:8]], [[20, 21, 22, 23], [4, 5, 6, 7]]
    )
    torch.testing.assert_close(found[0], first, **TOLERANCE)
    torch.testing.assert_close(found[1], second, **TOLERANCE)


def test_weights_of_a_16_bit_type_are_widened_and_nothing_is_rounded_in_between(tokens):
    rounded = MLADecoder(TINY, torch.bfloat16, CPU, seed=0)
    wide = MLADecoder(TINY, torch.float32, CPU, seed=0)
    own = dict(rounded.named_parameters())
    for name, weight in wide.named_parameters():
        weight.copy_(own[name].float())
    args = [tokens[0][:12]], [[3, 11]]
    (found,), (wanted,) = dense.dense_logits(rounded, *args), dense.dense_logits(wide, *args)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_position_sees_itself_and_what_is_before_it_and_no_other_sequence(tokens):
    model = MLADecoder(TINY, torch.float32, CPU, seed=0)
    sequence, other = tokens[0][:10], tokens[1][:7]
    changed = [*sequence[:6], (sequence[6] + 1) % 256, *sequence[7:]]
    places = list(range(10))
    (before,) = dense.dense_logits(model, [sequence], [places])
    (after,) = dense.dense_logits(model, [changed], [places])
    torch.testing.assert_close(after[:6], before[:6])
    assert ((after - before)[6:].abs().amax(1) > 1e-2).all()
    packed = dense.dense_logits(model, [other, sequence], [[6], places])
    torch.testing.assert_close(packed[1], before, **TOLERANCE)


def test_a_position_sees_no_further_back_than_its_window(tokens):
    """One sliding layer of window 6: token 2 is seen by 2 .. 7."""
    shape = replace(WINDOW, num_hidden_layers=1, layer_types=("sliding_attention",))
    model = MLADecoder(shape, torch.float32, CPU, seed=0)
    sequence = tokens[0][:12]
    changed = [*sequence[:2], (sequence[2] + 1) % 256, *sequence[3:]]
    places = list(range(12))
    (before,) = dense.dense_logits(model, [sequence], [places])
    (after,) = dense.dense_logits(model, [changed], [places])
    moved = (after - before).abs().amax(1) > 1e-3
    assert moved.tolist() == [2 <= place <= 7 for place in places]


@pytest.mark.parametrize("shape", [TINY, WINDOW, TINY_SPARSE], ids=lambda shape: shape.name)
def test_queries_taken_in_pieces_see_the_same(tokens, monkeypatch, shape):
    model = MLADecoder(shape, torch.float32, CPU, seed=0)
    args = model, [tokens[0][:50]], [list(range(50))]
    (whole,) = dense.dense_logits(*args)
    monkeypatch.setattr(dense, "MAX_SCORES", 4 * 50 * 7)
    (pieces,) = dense.dense_logits(*args)
    torch.testing.assert_close(pieces, whole, **TOLERANCE)


def test_a_share_of_the_weights_is_refused():
    share = MLADecoder(TINY, torch.float32, CPU, seed=0, tp_size=2)
    with pytest.raises(ValueError, match="1 of 2 shares"):
        dense.dense_logits(share, [[1]], [[0]])


def test_sparse_attention_is_dense_until_there_is_something_to_choose(tokens):
    places = list(range(30))
    found, wanted = (
        dense.dense_logits(
            MLADecoder(shape, torch.float32, CPU, seed=0), [tokens[0][:30]], [places]
        )[0]
        for shape in (TINY_SPARSE, TINY)
    )
    torch.testing.assert_close(found[:16], wanted[:16], rtol=0, atol=0)
    assert ((found - wanted)[16:].abs().amax(1) > 1e-3).all()


def test_tables_of_an_indexer_are_small_whole_numbers_and_layers_differ():
    sparse = MLADecoder(TINY_SPARSE, torch.bfloat16, CPU, seed=5)
    tables = dense.index_tables(sparse)
    assert tables.topk == 16
    first, second = tables.layers
    for table in tables.layers:
        assert set(table.key.ravel()) == set(table.query.ravel()) == set(range(-3, 4))
        assert set(table.weights.ravel()) == {1, 2, 3, 4}
    assert (first.key != second.key).any()
    assert dense.index_tables(MLADecoder(TINY, torch.float32, CPU, seed=5)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_chosen_in_pieces_are_the_same(tokens, dtype):
    attention = MLADecoder(TINY_SPARSE, dtype, CPU, seed=0).layers[1].attention
    (chosen,) = dense._chosen(attention, [tokens[0][:50]], TINY_SPARSE, CPU)
    whole = chosen(0, 50)
    assert whole.sum(1).tolist()[15:] == [16] * 35
    pieces = [chosen(start, min(start + 7, 50)) for start in range(0, 50, 7)]
    assert torch.equal(torch.cat(pieces), whole)


def test_a_sequence_is_never_scored_whole_by_whole(tokens, monkeypatch):
    """In float64 that would be 8.6 GB for 32k tokens."""
    sizes, zeros = [], torch.zeros

    def noted(*size, **settings):
        sizes.append(size)
        return zeros(*size, **settings)

    model = MLADecoder(TINY_SPARSE, torch.float32, CPU, seed=0)
    monkeypatch.setattr(dense, "MAX_SCORES", 4 * 50 * 7)
    monkeypatch.setattr(torch, "zeros", noted)
    dense.dense_logits(model, [tokens[0][:50]], [[49]])
    assert max(rows for rows, keys in sizes if keys == 50) == 7
