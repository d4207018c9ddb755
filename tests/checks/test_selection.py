"""Which keys a token attends to: the judge's own choice, and what it says of a record (C20)."""

from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks.contract_selection import check_selection
from pcpbench.checks.findings import StepView
from pcpbench.checks.selection import select
from pcpbench.records import IndexTable, IndexTables

VOCAB, TOPK = 11, 3


def tables(topk=TOPK, layers=2, seed=0):
    draw = np.random.default_rng(seed)
    return IndexTables(
        topk=topk,
        layers=tuple(
            IndexTable(
                query=draw.integers(-3, 4, (VOCAB, 2, 4)).astype(float),
                key=draw.integers(-3, 4, (VOCAB, 4)).astype(float),
                weights=draw.integers(1, 5, (VOCAB, 2)).astype(float),
            )
            for _ in range(layers)
        ),
    )


def by_hand(table, tokens, place, topk):
    found = []
    for position in range(place + 1):
        score = 0.0
        for head in range(2):
            query, key = table.query[tokens[place], head], table.key[tokens[position]]
            score += table.weights[tokens[place], head] * max(0.0, float(query @ key))
        found.append((score, position))
    best = sorted(position for _, position in sorted(found, reverse=True)[:topk])
    return [-1] * (topk - len(best)) + best


@pytest.mark.parametrize("first", [0, 5, 19])
@pytest.mark.parametrize("topk", [1, 3, 40])
def test_the_choice_is_that_of_a_loop_over_keys(first, topk):
    tokens = np.random.default_rng(2).integers(0, VOCAB, 20)
    chosen = select(tables(topk), tokens, first)
    assert chosen.shape == (2, 20 - first, topk)
    for layer, table in enumerate(tables(topk).layers):
        for row, place in enumerate(range(first, 20)):
            assert chosen[layer, row].tolist() == by_hand(table, tokens, place, topk)


def test_tokens_behind_one_that_nobody_knows_are_not_judged():
    tokens = np.array([3, 4, -1, 5])
    chosen = select(tables(), tokens, 1)
    assert (chosen[:, 0] >= -1).all()
    assert (chosen[:, 1:] == -2).all()


@pytest.fixture(params=[{"pcp": 2, "dcp": 2}, {"pcp": 2}, {"tp": 2, "dcp": 2}], ids=str)
def view(request, kit):
    """A step of prefills on an arm that chose rightly, two tokens of padding on each rank."""
    setup = kit.setup("full", index_tables=tables(), **request.param)
    plan = kit.make_plan([9, 2, 13], 1)
    step, expected, record = kit.Bench(plan, setup).at(0, kit.piecewise(40))
    total = expected.ranks[0].num_tokens_after_padding
    ranks = []
    for rank, right in zip(record.ranks, expected.ranks, strict=True):
        first = setup.world.pcp_rank(rank.rank) * total
        tokens = right.gathered_token[first : first + total]
        selected = np.full((2, total, TOPK), -1)
        selected[:, tokens >= 0] = expected.selected[:, tokens[tokens >= 0]]
        ranks.append(replace(rank, selected=selected[:, :, ::-1].astype(np.int32)))
    record = replace(record, ranks=tuple(ranks))
    return StepView(plan=step, record=record, setup=setup, expected=expected)


def changed(view, kit, selected):
    record = kit.change_rank(view.record, 1, selected=selected)
    return list(check_selection(replace(view, record=record)))


def test_the_right_choice_in_any_order_is_no_finding(view):
    assert list(check_selection(view)) == []


def test_a_wrong_position_is_named_with_its_token(view, kit):
    selected = view.record.ranks[1].selected.copy()
    row = int(np.flatnonzero((selected[1] >= 0).all(axis=1))[-1])
    missing = int(selected[1, row, 0])
    selected[1, row, 0] = 77
    (found,) = changed(view, kit, selected)
    assert (found.contract, found.rank, found.tensor) == ("C20", 1, "selected")
    assert "layer 1, request r" in found.message
    assert f"attends to 77 and leaves out {missing}; 1 of" in found.message


def test_a_position_named_twice_is_wrong(view, kit):
    selected = view.record.ranks[1].selected.copy()
    row = int(np.flatnonzero((selected[0] >= 0).all(axis=1))[0])
    selected[0, row, 1] = selected[0, row, 0]
    (found,) = changed(view, kit, selected)
    assert "leaves out" in found.message


def test_padding_attends_to_nothing(view, kit):
    selected = view.record.ranks[1].selected.copy()
    selected[0, -1, 0] = 0
    (found,) = changed(view, kit, selected)
    assert "padding token" in found.message
    assert "attends to 0" in found.message


def test_a_missing_or_misshapen_choice_is_told(view, kit):
    (missing,) = changed(view, kit, None)
    assert "are missing" in missing.message
    (short,) = changed(view, kit, view.record.ranks[1].selected[:, :-1])
    assert "has shape" in short.message


def test_a_dense_model_has_nothing_to_choose(kit):
    plan = kit.make_plan([9, 2], 1)
    setup = kit.setup("full", pcp=2)
    step, expected, record = kit.Bench(plan, setup).at(0)
    assert expected.selected is None
    view = StepView(plan=step, record=record, setup=setup, expected=expected)
    assert list(check_selection(view)) == []


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
def test_from_a_token_that_the_model_lacks_on_nobody_knows(token):
    tokens = np.random.default_rng(3).integers(0, VOCAB, 12)
    right = select(tables(), tokens, 0)
    tokens[7] = token
    found = select(tables(), tokens, 0)
    assert (found[:, :7] == right[:, :7]).all()
    assert (found[:, 7:] == -2).all()
