"""The MoE layer: its weights' formula, both ways over the world, and padding that stays out."""

import math
from dataclasses import replace

import pytest
import torch

from pcpbench.config import ALL2ALL_BACKENDS
from pcpbench.device.collectives import InProcessGroup, run_lockstep
from pcpbench.errors import UsageError
from pcpbench.model.context import ExpertParallel, ForwardContext
from pcpbench.model.decoder import MLADecoder
from pcpbench.model.expert_dispatch import route, send_places
from pcpbench.model.layers import WeightSource
from pcpbench.model.moe import MoE
from pcpbench.model.presets import TINY, TINY_MOE
from pcpbench.world import World

CPU = torch.device("cpu")
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
SHAPE = replace(TINY_MOE, max_position_embeddings=256)
WORLDS = {
    "pcp 2": World(pcp_size=2),
    "pcp 4": World(pcp_size=4),
    "pcp 2 tp 2": World(pcp_size=2, tp_size=2),
    "tp 4": World(tp_size=4),
    "pcp 4 tp 2": World(pcp_size=4, tp_size=2),
}


class Log:
    """Keeps what a pass routed."""

    def __init__(self):
        self.chosen, self.num_rows = None, None

    def put(self, layer, chosen, num_rows):
        self.chosen, self.num_rows = chosen, num_rows


class Ranks:
    """One MoE layer on all ranks of a world; `run` takes each PCP rank's rows."""

    def __init__(self, world=None, backend=None, dtype=torch.float32, shape=SHAPE):
        self.world = world = world or World()
        ep_size = world.size if backend else 1
        sources = [WeightSource(3, dtype, CPU, world.tp_size, t) for t in range(world.tp_size)]
        self.layers = [MoE(shape, 1, source, ep_size) for source in sources]
        self.logs = [Log() for _ in range(world.size)]
        everyone = tuple(range(world.size))
        self.contexts = [
            ForwardContext(
                rank=rank,
                pcp=group(world.pcp_groups(), rank),
                tp=group(world.tp_groups(), rank),
                dcp=group(world.dcp_groups(), rank),
                cp_interleave=1,
                kv_caches=[],
                ep=ExpertParallel(InProcessGroup(everyone, rank), backend) if backend else None,
                routing=self.logs[rank],
            )
            for rank in everyone
        ]

    def run(self, rows, masks=None):
        """rows: [T, hidden] of each PCP rank; every rank's result without the residual."""
        passes = []
        for context in self.contexts:
            x = rows[self.world.pcp_rank(context.rank)]
            context.is_padding = masks[self.world.pcp_rank(context.rank)] if masks else None
            layer = self.layers[self.world.tp_rank(context.rank)]
            passes.append(layer(torch.zeros_like(x), x, context))
        return run_lockstep(passes)


def group(groups, rank):
    return InProcessGroup(next(tuple(g) for g in groups if rank in g), rank)


def draw(num_rows, dtype=torch.float32, seed=5):
    return torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_weight_is_the_lead_over_the_best_score_left_out():
    ids, weights = route(torch.tensor([[0.2, 2.5, 3.0, 1.0]]), torch.tensor([False]), 2)
    assert ids.tolist() == [[2, 1]]
    assert weights[0].tolist() == pytest.approx([math.tanh(2.0), math.tanh(1.5)])


def test_padding_is_routed_nowhere_whatever_it_scores():
    logits = torch.tensor([[1.0, 2.0, 3.0], [math.nan] * 3, [3.0, 2.0, 1.0]])
    ids, weights = route(logits, torch.tensor([False, True, True]), 1)
    assert ids.tolist() == [[2], [-1], [-1]]
    assert weights.tolist() == [[pytest.approx(math.tanh(1.0))], [0.0], [0.0]]


def test_the_output_is_continuous_where_the_choice_tips():
    """Across a tie another expert is chosen, and the output moves no more than elsewhere."""
    ranks, (x,) = Ranks(), [draw(2000)]
    router = ranks.layers[0].w_router
    steps = 1e-3 * draw(2000, seed=6)
    (before,), (after,) = ranks.run([x]), ranks.run([x + steps])
    chosen = [(v @ router).topk(2).indices.sort(-1).values for v in (x, x + steps)]
    tipped = (chosen[0] != chosen[1]).any(1)
    moved = (after - before).norm(dim=1) / steps.norm(dim=1)
    assert tipped.sum() >= 2
    assert moved[tipped].max() < 2 * moved[~tipped].max()


@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_experts_over_the_world_compute_what_one_rank_computes(world, backend, num_rows):
    rows = [draw(num_rows, seed=q) for q in range(world.pcp_size)]
    masks = [torch.arange(num_rows) >= num_rows - q % 3 for q in range(world.pcp_size)]
    single = Ranks()
    for rank, found in enumerate(Ranks(world, backend).run(rows, masks)):
        q = world.pcp_rank(rank)
        (wanted,) = single.run([rows[q]], [masks[q]])
        torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tp_divides_each_expert_without_expert_parallelism(tp_size):
    x = draw(7)
    (wanted,) = Ranks().run([x])
    for found in Ranks(World(tp_size=tp_size)).run([x]):
        torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [WORLDS["pcp 4"], WORLDS["pcp 2 tp 2"]], ids=str)
def test_both_ways_give_the_same_bits(world, dtype):
    rows = [draw(6, dtype, seed=q) for q in range(world.pcp_size)]
    masks = [torch.arange(6) >= 6 - q for q in range(world.pcp_size)]
    one, other = (Ranks(world, backend, dtype).run(rows, masks) for backend in ALL2ALL_BACKENDS)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("backend", [None, *ALL2ALL_BACKENDS])
def test_what_padding_holds_changes_no_bit_of_a_token(backend):
    world = World(pcp_size=2)
    masks = [torch.arange(6) >= 5, torch.arange(6) >= 1]
    results = []
    for filler in (0.0, math.nan, 1e30):
        rows = [draw(6, seed=q) for q in range(2)]
        for x, mask in zip(rows, masks, strict=True):
            x[mask] = filler
        results.append(Ranks(world, backend).run(rows, masks))
    for found in results[1:]:
        for rank in range(2):
            real = ~masks[rank]
            assert torch.equal(found[rank][real], results[0][rank][real])


@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
def test_each_expert_computes_the_rows_routed_to_it_and_no_padding(backend):
    world = WORLDS["pcp 2 tp 2"]
    rows, masks = (
        [draw(5, seed=q) for q in range(2)],
        [torch.arange(5) >= 5 - 2 * q for q in (0, 1)],
    )
    ranks = Ranks(world, backend)
    ranks.run(rows, masks)
    computed = torch.cat([log.num_rows for log in ranks.logs]).tolist()
    router = ranks.layers[0].w_router
    chosen = torch.cat([(rows[q] @ router)[~masks[q]].topk(2).indices for q in range(2)])
    assert computed == chosen.flatten().bincount(minlength=8).tolist()
    size = 3 if backend == "all_to_all" else 12  # ceil(5 / 2) rows of one rank, or of all four
    assert all(len(log.chosen) == size for log in ranks.logs)


def test_the_ranks_of_one_tp_rank_share_their_experts_pcp_rank_after_pcp_rank():
    whole = Ranks().layers[0]
    shared = Ranks(WORLDS["pcp 2 tp 2"], ALL2ALL_BACKENDS[0]).layers
    assert torch.equal(shared[0].w_down, whole.w_down[[0, 1, 4, 5]])
    assert torch.equal(shared[1].w_gate_up, whole.w_gate_up[[2, 3, 6, 7]])


def test_the_example_of_send_places():
    ids = torch.tensor([[0, 5], [-1, -1], [6, 7]], dtype=torch.int32)
    assert send_places(ids, 2, 4).tolist() == [0, 3, 6, 6, 6, 4]


def test_without_shared_experts_the_residual_gets_the_routed_ones_alone():
    ranks = Ranks(shape=replace(SHAPE, n_shared_experts=0))
    out = ranks.run([draw(3)], [torch.ones(3, dtype=torch.bool)])[0]
    assert ranks.layers[0].shared is None
    assert out.eq(0).all()


@pytest.mark.parametrize("backend", [None, *ALL2ALL_BACKENDS])
def test_a_decoder_with_experts_equals_one_rank(make_stand, tokens, backend):
    world = World(pcp_size=2, tp_size=2)
    single = make_stand(shape=SHAPE)
    split = make_stand(world, shape=SHAPE, all2all_backend=backend)
    wanted = single.step(tokens, [(0, 0, 9), (1, 0, 4)])
    rows = [[(0, 0, 9)], [(1, 0, 4)]]
    inputs = split.prepare(tokens, [rows[world.pcp_rank(rank)] for rank in range(4)])
    found = split.run(inputs)
    for rank in range(4):
        first, last = ((0, 9), (9, 13))[world.pcp_rank(rank)]
        torch.testing.assert_close(found[rank][: last - first], wanted[first:last], **TOLERANCE)


def test_ranks_that_cannot_share_the_experts_are_refused():
    with pytest.raises(UsageError, match=r"over 3 ranks .* tiny-moe, 8: use 1, 2, 4, 8 ranks"):
        TINY_MOE.check_ep(3)
    with pytest.raises(UsageError, match=r"--model tiny, which has no experts: .* tiny-moe"):
        TINY.check_ep(2)
    with pytest.raises(UsageError, match="over 16 ranks"):
        MLADecoder(TINY_MOE, torch.float32, CPU, 0, ep_size=16)
    with pytest.raises(UsageError, match="moe_intermediate_size of tiny-moe"):
        replace(TINY_MOE, moe_intermediate_size=62).check_tp(4)
