import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pcpbench.device.collectives import lockstep, run_lockstep
from pcpbench.errors import UsageError
from pcpbench.model.decoder import MLADecoder
from pcpbench.model.layers import RMSNorm
from pcpbench.model.presets import SMALL, TINY
from pcpbench.model.taps import tap_points
from pcpbench.world import World

TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def naive_hidden(model: MLADecoder, ids: list[int]) -> torch.Tensor:
    """The decoder over one whole sequence in float64: keys and values expanded for each head."""
    shape = model.shape
    heads, rope, nope = (
        shape.num_attention_heads,
        shape.qk_rope_head_dim,
        shape.qk_nope_head_dim,
    )
    length = len(ids)

    def norm(x, module):
        weight = module.scaled_weight.double() / math.sqrt(x.shape[-1])
        return x * (x.square().mean(-1, keepdim=True) + shape.rms_norm_eps).rsqrt() * weight

    def rotate(x):  # [length, heads, rope]
        steps = torch.arange(0, rope, 2, dtype=torch.float64) / rope
        angle = torch.arange(length, dtype=torch.float64)[:, None, None] / shape.rope_theta**steps
        even, odd = x[..., ::2], x[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
        return torch.stack(turned, -1).flatten(-2)

    x = model.embedding.double()[ids]
    for layer in model.layers:
        attention = layer.attention
        columns = norm(x, layer.input_norm) @ attention.w_qkv.double()
        q_rope, k_rope, q_nope, latent = columns.split(
            [heads * rope, rope, heads * nope, shape.kv_lora_rank], -1
        )
        latent = norm(latent, attention.kv_norm)
        q = torch.cat(
            (q_nope.view(length, heads, nope), rotate(q_rope.view(length, heads, rope))), -1
        )
        k_nope = torch.einsum("sr,hnr->shn", latent, attention.w_uk.double())
        k_rope = rotate(k_rope.view(length, 1, rope)).expand(-1, heads, -1)
        k = torch.cat((k_nope, k_rope), -1)
        v = torch.einsum("sr,hrv->shv", latent, attention.w_uv.double())
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(nope + rope)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        values = torch.einsum("hts,shv->thv", scores.softmax(-1), v).flatten(1)
        x = x + values @ attention.w_o.double()
        gate, up = (norm(x, layer.post_norm) @ layer.mlp.w_gate_up.double()).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.mlp.w_down.double()
    return norm(x, model.norm)


def test_absorbed_attention_equals_naive_mla(make_stand, tokens):
    stand = make_stand()
    prefill = stand.step(tokens, [(0, 0, 21), (1, 0, 5)])
    decode = stand.step(tokens, [(0, 21, 1), (1, 5, 1)])
    for request, first, count, row in ((0, 0, 21, 0), (1, 21, 5, 1)):
        wanted = naive_hidden(stand.models[0], tokens[request][: count + 1]).float()
        torch.testing.assert_close(prefill[first : first + count], wanted[:count], **TOLERANCE)
        torch.testing.assert_close(decode[row], wanted[count], **TOLERANCE)


def test_incremental_decode_equals_full_prefill(make_stand, tokens):
    whole = make_stand().step(tokens, [(0, 0, 40), (1, 0, 7)])
    stand = make_stand()
    pieces = [stand.step(tokens, [(0, 0, 17)]), stand.step(tokens, [(0, 17, 3), (1, 0, 7)])]
    chunks = [pieces[0], pieces[1][:3]]
    chunks += [stand.step(tokens, [(0, position, 1)]) for position in range(20, 40)]
    torch.testing.assert_close(torch.cat(chunks), whole[:40], **TOLERANCE)
    torch.testing.assert_close(pieces[1][3:], whole[40:], **TOLERANCE)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tp_equals_one_rank(make_stand, tokens, tp_size):
    single, split = make_stand(), make_stand(World(tp_size=tp_size))
    for rows in ([(0, 0, 19), (1, 0, 4)], [(0, 19, 1), (1, 4, 1)]):
        expected = single.step(tokens, rows)
        inputs = split.prepare(tokens, [rows] * tp_size)
        for hidden in split.run(inputs):
            torch.testing.assert_close(hidden, expected, **TOLERANCE)


@pytest.mark.parametrize("interleave", [1, 2, 16])
@pytest.mark.parametrize("dcp_size", [2, 4])
def test_dcp_equals_one_rank_at_the_edges(make_stand, tokens, dcp_size, interleave):
    d, i = dcp_size, interleave
    edges = sorted({1, i - 1, i, i + 1, d * i - 1, d * i, d * i + 1} - {0})
    single = make_stand()
    split = make_stand(World(tp_size=dcp_size, dcp_size=dcp_size), interleave=i)
    for length in edges:  # the whole sequence at once, then its last three tokens again
        for rows in ([(0, 0, length)], [(0, max(length - 3, 0), min(length, 3))]):
            expected = single.step(tokens, rows)
            for hidden in split.run(split.prepare(tokens, [rows] * dcp_size)):
                torch.testing.assert_close(hidden, expected, **TOLERANCE)


def test_dcp_rows_of_all_edge_lengths_in_one_padded_decode(make_stand, tokens):
    single, split = make_stand(), make_stand(World(tp_size=4, dcp_size=4), interleave=2)
    for stand in (single, split):
        stand.step(tokens, [(q, 0, n) for q, n in ((0, 1), (1, 6), (2, 7), (3, 8))])
    rows = [(0, 1, 1), (1, 6, 1), (2, 7, 1), (3, 8, 1)]
    expected = single.step(tokens, rows)
    hidden = split.step(tokens, rows, extra_tokens=4, extra_rows=4)
    torch.testing.assert_close(hidden[:4], expected, **TOLERANCE)
    assert hidden.isfinite().all()


def test_two_dcp_groups_within_tp(make_stand, tokens):
    single, split = make_stand(), make_stand(World(tp_size=4, dcp_size=2), interleave=2)
    for rows in ([(0, 0, 11)], [(0, 11, 1)]):
        expected = single.step(tokens, rows)
        torch.testing.assert_close(split.step(tokens, rows), expected, **TOLERANCE)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_pcp_equals_one_rank(make_stand, tokens, tp_size):
    """Chunks of a prefill dealt out by hand as (0, 3) and (1, 2), one decode on rank 1."""
    single, split = make_stand(), make_stand(World(pcp_size=2, tp_size=tp_size))
    warm = [(1, 0, 6)]
    expected_warm = single.step(tokens, warm)
    empty = [(1, 0, 0)]
    for hidden in split.run(split.prepare(tokens, [warm] * tp_size + [empty] * tp_size))[:tp_size]:
        torch.testing.assert_close(hidden, expected_warm, **TOLERANCE)
    expected = single.step(tokens, [(1, 6, 1), (0, 0, 11)])
    first = [(0, 0, 3), (0, 9, 2)]
    second = [(1, 6, 1), (0, 3, 3), (0, 6, 3)]
    inputs = split.prepare(tokens, [first] * tp_size + [second] * tp_size, extra_tokens=1)
    hidden = split.run(inputs)
    real = (torch.cat((hidden[0][:3], hidden[0][3:5])), hidden[tp_size][:7])
    wanted = (
        torch.cat((expected[1:4], expected[10:12])),
        torch.cat((expected[:1], expected[4:10])),
    )
    for result, want in zip(real, wanted, strict=True):
        torch.testing.assert_close(result, want, **TOLERANCE)
    # After the gather every rank holds the whole cache, bit for bit the same within a TP rank.
    for layer, cache in enumerate(split.contexts[0].kv_caches):
        assert torch.equal(cache, split.contexts[tp_size].kv_caches[layer])


def test_ranks_of_one_tp_rank_share_a_module(make_stand):
    stand = make_stand(World(pcp_size=2))
    assert len(stand.models) == 1


def test_padding_changes_no_bit(make_stand, tokens):
    """Rows, tokens, NaN in unread slots and nonsense ids in unread table columns."""
    plain, padded = make_stand(), make_stand(fill=math.nan)
    for rows in ([(0, 0, 9), (1, 0, 4)], [(0, 9, 1), (1, 4, 1)], [(0, 10, 2), (1, 5, 1)]):
        count = sum(n for _, _, n in rows)
        # Equal token counts: another number of rows in a GEMM may pick another kernel (K30).
        expected = plain.step(tokens, rows, extra_tokens=3)
        hidden = padded.step(tokens, rows, extra_tokens=3, extra_rows=5, garbage=2**30)
        assert torch.equal(hidden[:count], expected[:count])
        assert hidden.isfinite().all()


def test_dcp_poison_changes_no_bit(make_stand, tokens):
    world = World(tp_size=2, dcp_size=2)
    plain = make_stand(world, interleave=2)
    poisoned = make_stand(world, interleave=2, fill=math.nan)
    for rows in ([(0, 0, 2), (1, 0, 9)], [(0, 2, 1), (1, 9, 1)]):
        expected = plain.step(tokens, rows, extra_tokens=2)
        hidden = poisoned.step(tokens, rows, extra_tokens=2, extra_rows=2, garbage=2**30)
        assert torch.equal(hidden, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_stay_finite_and_near_float32(make_stand, tokens, dtype):
    reference, stand = make_stand(), make_stand(dtype=dtype)
    budget = {torch.float32: 0.0, torch.bfloat16: 0.25, torch.float16: 0.05}[dtype]
    for rows in ([(0, 0, 33)], [(0, 33, 1)]):
        expected, hidden = reference.step(tokens, rows), stand.step(tokens, rows)
        assert hidden.dtype == dtype
        assert hidden.isfinite().all()
        assert (hidden.float() - expected).abs().max() <= budget
        assert stand.models[0].compute_logits(hidden).isfinite().all()


def test_seed_decides_and_logits_are_not_flat(make_stand, tokens):
    rows = [(0, 0, 64)]
    first, again, other = (make_stand(seed=seed).step(tokens, rows) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=0.1)
    logits = make_stand(seed=1).models[0].compute_logits(first)
    assert logits.dtype == torch.float32
    top = logits.topk(2).values
    gaps = top[:, 0] - top[:, 1]
    assert gaps.median() > 0.1
    assert gaps.min() > 1e-3
    assert len(set(logits.argmax(-1).tolist())) > 20


def test_context_matters_to_the_next_token(make_stand, tokens):
    """A stale key must be able to change a result by far more than rounding does."""
    changed = [list(row) for row in tokens]
    changed[0][5] = (changed[0][5] + 1) % 256
    hidden = [make_stand().step(t, [(0, 0, 30)]) for t in (tokens, changed)]
    assert torch.equal(hidden[0][:5], hidden[1][:5])
    assert ((hidden[0] - hidden[1])[6:].abs().amax(-1) > 1e-3).all()


def test_position_matters_to_attention(make_stand, tokens):
    """Two earlier tokens swapped: weights that are all alike would hide it in the first layer."""
    swapped = [list(row) for row in tokens]
    swapped[0][3], swapped[0][20] = swapped[0][20], swapped[0][3]
    attention = []
    for ids in (tokens, swapped):
        stand = make_stand()
        inputs = stand.prepare(ids, [[(0, 0, 30)]])
        stand.contexts[0].taps = kept = Kept()
        stand.run(inputs)
        attention.append(kept[0, "mla_attention.out"])
    assert ((attention[0] - attention[1])[21:].abs().amax((1, 2)) > 1e-3).all()


def test_norm_is_finite_where_all_is_zero_and_has_its_epsilon():
    norm = RMSNorm(torch.tensor([1.0, 2.0]), 0.25, torch.device("cpu"))
    assert not norm(torch.zeros(1, 2)).any()
    x = torch.tensor([[1.0, 1.0]])
    torch.testing.assert_close(norm(x), torch.tensor([[1.0, 2.0]]) / math.sqrt(1.25))


def test_without_metadata_attention_is_skipped(make_stand, tokens):
    stand = make_stand(World(pcp_size=2), fill=5.0)
    inputs = stand.prepare(tokens, [[(0, 0, 3)]] * 2)
    for context in stand.contexts:
        context.metadata, context.taps = None, Kept()
    hidden = stand.run(inputs)[0]
    assert hidden.isfinite().all()
    for context in stand.contexts:
        assert not context.pcp.log
        assert {name for _, name in context.taps} == {
            "embed.hidden", "input_norm.hidden", "qkv_proj.q", "qkv_proj.latent", "o_proj.hidden",
            "post_norm.hidden", "mlp.hidden", "norm.hidden",
        }  # fmt: skip
        assert all((cache == 5.0).all() for cache in context.kv_caches)


def test_kv_groups_choose_slots_and_tables(make_stand, tokens):
    """Layer 1 in a second group with blocks of its own computes the same from other slots."""
    rows = [(0, 0, 9)]
    expected = make_stand().step(tokens, rows)
    stand = make_stand()
    inputs = stand.prepare(tokens, [rows])
    context = stand.contexts[0]
    context.kv_groups = (0, 1)
    other = torch.tensor([[64, 63, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    context.metadata = replace(
        context.metadata,
        block_tables=(context.metadata.block_tables[0], other),
        slot_mappings=torch.cat((context.metadata.slot_mappings, 64 * 16 + torch.arange(9)[None])),
    )
    assert torch.equal(stand.run(inputs)[0], expected)
    assert context.kv_caches[1][64, :9].any(-1).all()


WORLDS = {
    "pcp 2": (World(pcp_size=2), [[(0, 0, 3)], [(1, 0, 3)]]),
    "tp 4 dcp 4": (World(tp_size=4, dcp_size=4), [[(0, 0, 3)]] * 4),
}


@pytest.mark.parametrize(("world", "rows"), WORLDS.values(), ids=WORLDS)
def test_every_tap_point_is_met_once_in_order_with_its_shape(make_stand, tokens, world, rows):
    stand = make_stand(world)
    for context in stand.contexts:
        context.taps = Kept()
    hidden = stand.run(stand.prepare(tokens, rows))
    points = tap_points(TINY, world.tp_size, world.dcp_size)
    for context in stand.contexts:
        assert list(context.taps) == [(point.layer, point.name) for point in points]
        for point, value in zip(points, context.taps.values(), strict=True):
            num_rows = 3 * world.pcp_size if point.is_gathered else 3
            assert tuple(value.shape) == (num_rows, *point.width), point
            assert value.dtype == (point.dtype or torch.float32), point
    taps = stand.contexts[0].taps
    assert torch.equal(taps[2, "norm.hidden"], hidden[0])
    assert not torch.equal(taps[0, "mla_attention.out"], taps[1, "mla_attention.out"])


def test_what_was_written_is_read_back_from_the_cache(make_stand, tokens):
    """Of every PCP rank's tokens, zeros for those that are not to be written."""
    stand = make_stand(World(pcp_size=2))
    inputs = stand.prepare(tokens, [[(0, 0, 3)], [(1, 0, 2)]])
    stand.contexts[0].taps = kept = Kept()
    stand.run(inputs)
    written = kept[0, "kv_cache_write.kv_cache"]
    assert torch.equal(written[:5], kept[0, "pcp_all_gather.latent"][:5])
    assert not written[5].any(), "the second rank's third token is padding"


def test_attention_behind_a_graph_break_reads_its_step_when_it_runs(make_stand, tokens):
    """PIECEWISE: the work is kept and run again on the same tensors with another step's tables."""
    rows = [[(0, 0, 4)], [(1, 0, 4)]]
    plain, broken = make_stand(World(pcp_size=2)), make_stand(World(pcp_size=2))
    expected = plain.run(plain.prepare(tokens, rows))
    inputs = broken.prepare(tokens, rows)
    for context in broken.contexts:
        context.breaks = True
    steps = lockstep(
        [
            broken.models[0](*given, context)
            for context, given in zip(broken.contexts, inputs, strict=True)
        ]
    )
    kept, hidden = [], None
    while hidden is None:
        try:
            kept.append(next(steps))
            run_lockstep([work() for work in kept[-1]])
        except StopIteration as stop:
            hidden = stop.value
    assert all(torch.equal(got, want) for got, want in zip(hidden, expected, strict=True))
    assert len(kept) == 2
    other = [[(2, 0, 4)], [(3, 0, 4)]]
    broken.prepare(tokens, other)  # only the metadata matters: the KV is what the tensors hold
    run_lockstep([work() for work in kept[0]])
    for context in broken.contexts:
        flat = context.kv_caches[0].flatten(0, 1)
        for old, new in ((0, 2), (1, 3)):
            moved = [[broken.slot(0, q, p) for p in range(4)] for q in (old, new)]
            assert torch.equal(flat[moved[0]], flat[moved[1]])


class Kept(dict):
    """Taps that keep a copy of everything, in order; a point met twice is an error."""

    def put(self, layer, name, value):
        assert (layer, name) not in self
        self[layer, name] = value.clone()


class CountOps(TorchDispatchMode):
    """Dispatched calls, without those that only make a view."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        views = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        self.count += not views and func.namespace != "prim" and "_unsafe_view" not in str(func)
        return result


def test_a_layer_stays_small(make_stand, tokens):
    """Host time of a step is calls; the budget is for one rank in float32."""
    counts = []
    for num_layers in (2, 3):
        stand = make_stand(shape=replace(TINY, num_hidden_layers=num_layers))
        inputs = stand.prepare(tokens, [[(0, 0, 1), (1, 0, 1)]])
        with torch.inference_mode(False), torch.no_grad(), CountOps() as counter:
            stand.run(inputs)
        counts.append(counter.count)
    assert counts[1] - counts[0] <= 26


def test_weights_are_the_same_function_for_every_tp_size():
    args = (SMALL, torch.float32, torch.device("cpu"), 4)
    whole = MLADecoder(*args)
    halves = [MLADecoder(*args, tp_size=2, tp_rank=rank) for rank in range(2)]
    layer = whole.layers[3]
    for get, dim in ((lambda x: x.attention.w_o, 0), (lambda x: x.mlp.w_down, 0)):
        joined = torch.cat([get(half.layers[3]) for half in halves], dim)
        assert torch.equal(joined, get(layer))
    assert torch.equal(halves[1].lm_head, whole.lm_head)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tp_size": 3}, "--tp is 3"), ({"max_model_len": 0}, "max_model_len is 0")],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        MLADecoder(TINY, torch.float32, torch.device("cpu"), 0, **change)
