"""C21: good routings of every way over the world, and broken ones."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pcpbench.checks.contract_routing import check_routing
from pcpbench.checks.contracts import check_step
from pcpbench.checks.findings import StepView
from pcpbench.checks.setup import ExpertSetup
from pcpbench.config import ALL2ALL_BACKENDS
from pcpbench.records import RoutingRecord

GATHER, EXCHANGE = ALL2ALL_BACKENDS
WORLDS = {"one rank": {}, "pcp 2": {"pcp": 2}, "pcp 2 tp 2": {"pcp": 2, "tp": 2}, "tp 4": {"tp": 4}}
NUM_EXPERTS, TOP_K = 8, 2


def own_rows(record, setup, experts):
    """(real, choices) of the rows that a rank routes for itself; two different experts each."""
    count, real = record.num_tokens_after_padding, record.num_tokens
    places = list(range(count))
    if experts.backend is not None:
        size = setup.world.tp_size
        share = -(-count // size)
        first = setup.world.tp_rank(record.rank) * share
        places = list(range(first, first + share))
    seed = setup.world.pcp_rank(record.rank)  # ranks of one TP group hold the same rows
    choices = [(3 * place + seed) % NUM_EXPERTS for place in places]
    rows = [[c, (c + 5) % NUM_EXPERTS] for c in choices]
    return [[-1, -1] if place >= real else row for place, row in zip(places, rows, strict=True)]


def routed(record, setup):
    """The record of an engine that routes soundly."""
    experts = setup.experts
    own = {rank.rank: own_rows(rank, setup, experts) for rank in record.ranks}
    everyone = [row for rank in sorted(own) for row in own[rank]]
    total = [e for row in everyone for e in row]
    ranks = []
    for rank in record.ranks:
        mine = [e for row in own[rank.rank] for e in row]
        if experts.backend is None:
            counts = [mine.count(e) for e in range(NUM_EXPERTS)]
        else:
            local = NUM_EXPERTS // setup.world.size
            counts = [total.count(rank.rank * local + e) for e in range(local)]
        chosen = everyone if experts.backend == GATHER else own[rank.rank]
        routing = tuple(
            RoutingRecord(layer=layer, part=0, chosen=np.array(chosen), num_rows=np.array(counts))
            for layer in experts.layers
        )
        ranks.append(replace(rank, routing=routing))
    return replace(record, ranks=tuple(ranks))


@pytest.fixture
def step(kit):
    """Makes (view, record) of a decode step of five requests, padded to `tokens`."""

    def make(backend, world="pcp 2", tokens=5, idle=False):
        experts = ExpertSetup(num_experts=NUM_EXPERTS, top_k=TOP_K, layers=(1, 2), backend=backend)
        setup = kit.setup(experts=experts, **WORLDS[world])
        if idle:
            plan = kit.make_plan([4], 0)
            record = kit.idle_record(setup, kit.NONE, num_tokens=tokens)
            quiet = replace(record, ranks=tuple(replace(r, num_tokens=0) for r in record.ranks))
            record = replace(
                record,
                ranks=tuple(
                    replace(r, routing=q.routing)
                    for r, q in zip(record.ranks, routed(quiet, setup).ranks, strict=True)
                ),
            )
            return StepView(plan=plan.steps[0], record=record, setup=setup, expected=None)
        bench = kit.Bench(kit.make_plan([3, 5, 2, 6, 4], 2), setup)
        plan, expected, record = bench.at(1, kit.piecewise(tokens))
        record = routed(record, setup)
        return StepView(plan=plan, record=record, setup=setup, expected=expected)

    return make


def accused(view):
    return [v for v in check_step(view) if v.contract == "C21"]


def change(view, rank, layer=1, **fields):
    """The view with fields of one rank's routing replaced."""
    ranks = list(view.record.ranks)
    routing = tuple(replace(r, **fields) if r.layer == layer else r for r in ranks[rank].routing)
    ranks[rank] = replace(ranks[rank], routing=routing)
    return replace(view, record=replace(view.record, ranks=tuple(ranks)))


def chosen(view, rank, layer=1):
    return next(r for r in view.record.ranks[rank].routing if r.layer == layer).chosen.copy()


def counts(view, rank, layer=1):
    return next(r for r in view.record.ranks[rank].routing if r.layer == layer).num_rows.copy()


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", [None, GATHER, EXCHANGE])
def test_sound_routing_is_not_accused(step, backend, world, idle):
    view = step(backend, world, tokens=7, idle=idle)
    assert not accused(view)
    assert all(len(rank.routing) == 2 for rank in view.record.ranks)


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("backend", [None, GATHER, EXCHANGE])
def test_padding_that_is_routed_is_named(step, backend, idle):
    view = step(backend, tokens=7, idle=idle)
    rows = chosen(view, 1)
    rows[-1] = [2, 6]
    found = accused(change(view, 1, chosen=rows))
    where = "row 6 of rank 1" if backend == GATHER else "row 6"
    message = f"{where} is padding and is routed to experts [2, 6]; 1 of "
    assert any(v.rank == 1 and v.message.startswith(message) for v in found)
    assert {v.tensor for v in found} <= {"layer1.chosen", "layer1.num_rows"}


@pytest.mark.parametrize("wrong", [[-1, -1], [3, -1], [3, 3], [3, 8]], ids=str)
@pytest.mark.parametrize("backend", [None, GATHER, EXCHANGE])
def test_a_token_that_does_not_reach_its_k_experts_is_named(step, backend, wrong):
    view = step(backend)
    rows = chosen(view, 0)
    rows[0] = wrong
    found = accused(change(view, 0, chosen=rows))
    message = f"is a token and is routed to experts {wrong}, expected 2 different ones of 8"
    assert any(v.rank == 0 and message in v.message for v in found)


@pytest.mark.parametrize("backend", [None, GATHER])
def test_ranks_that_route_one_row_differently_are_named(step, backend):
    view = step(backend, "pcp 2 tp 2")
    rows = chosen(view, 1)
    rows[0] = rows[0][::-1]
    found = accused(change(view, 1, chosen=rows))
    (first,) = (v for v in found if "on rank 0" in v.message)
    assert (first.rank, first.tensor) == (1, "layer1.chosen")


@pytest.mark.parametrize("backend", [None, GATHER, EXCHANGE])
def test_an_expert_that_computes_other_rows_than_were_sent_is_named(step, backend):
    view = step(backend)
    more = counts(view, 1)
    more[0] += 1
    (found,) = accused(change(view, 1, num_rows=more))
    expert = 0 if backend is None else 4
    assert found.message.startswith(f"expert {expert} computed {more[0]} rows, and {more[0] - 1} ")
    assert found.tensor == "layer1.num_rows"


def test_what_is_not_recorded_or_has_another_shape_is_named(step):
    view = step(GATHER)
    ranks = list(view.record.ranks)
    ranks[1] = replace(ranks[1], routing=ranks[1].routing[:1])
    found = accused(replace(view, record=replace(view.record, ranks=tuple(ranks))))
    assert [(v.rank, v.tensor, v.message) for v in found] == [
        (1, "layer2.chosen", "what was routed is not recorded")
    ]
    (found,) = accused(change(view, 0, chosen=chosen(view, 0)[:-1]))
    assert found.message == (
        "chosen and num_rows have shapes [9, 2] and [4], expected [10, 2] and [4]"
    )


def test_which_rows_are_real_comes_from_the_plan_not_from_the_recorded_mask(step):
    """An engine that flags a token as padding and leaves it out agrees with itself."""
    view = step(EXCHANGE)
    rank = view.record.ranks[0]
    flags = rank.is_padding.copy()
    flags[0] = True
    ranks = [replace(rank, is_padding=flags), *view.record.ranks[1:]]
    rows, less = chosen(view, 0), counts(view, 0)
    for expert in rows[0]:
        if expert < 4:
            less[expert] -= 1
    rows[0] = -1
    view = replace(view, record=replace(view.record, ranks=tuple(ranks)))
    assert any("is a token" in v.message for v in accused(change(view, 0, chosen=rows)))


def test_each_microbatch_is_looked_at(step):
    view = step(None, "one rank", tokens=6)
    (rank,) = view.record.ranks
    rows, total = chosen(view, 0), rank.num_tokens_after_padding
    parts, routing = [], []
    for number, first in enumerate((0, 3)):
        fields = dict.fromkeys(("num_reqs", "num_reqs_after_padding", "num_tokens"), 1)
        parts.append(
            SimpleNamespace(first_token=first, num_tokens_after_padding=total // 2, **fields)
        )
        mine = rows[first : first + 3]
        tally = np.bincount(mine[mine >= 0], minlength=NUM_EXPERTS)
        routing += [
            RoutingRecord(layer=layer, part=number, chosen=mine, num_rows=tally) for layer in (1, 2)
        ]
    cut = replace(rank, microbatches=tuple(parts), routing=tuple(routing))
    record = replace(view.record, ranks=(cut,))
    assert not list(check_routing(replace(view, record=record)))
    wrong = [replace(r, chosen=np.full((3, 2), 1)) if r.part else r for r in routing]
    record = replace(view.record, ranks=(replace(cut, routing=tuple(wrong)),))
    found = list(check_routing(replace(view, record=record)))
    assert {v.tensor for v in found} >= {"layer1.ubatch1.chosen", "layer2.ubatch1.num_rows"}
