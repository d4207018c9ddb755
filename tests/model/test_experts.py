"""The experts op against a loop over rows, and what must not reach a row."""

import math

import pytest
import torch

from pcpbench.model.experts import moe_experts


def case(ids, num_experts=3, first=0, hidden=10, inner=6, dtype=torch.float32, seed=0):
    """Arguments of moe_experts for these choices; results full of what nobody computes."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.tensor(ids, dtype=torch.int32)
    x = torch.randn(len(ids), hidden, generator=draw).to(dtype)
    weights = torch.rand(ids.shape, generator=draw)
    gate_up = (torch.randn(num_experts, hidden, 2 * inner, generator=draw) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, inner, hidden, generator=draw) / inner**0.5).to(dtype)
    out = torch.full((len(ids), hidden), math.nan)
    num_rows = torch.full((num_experts,), -7, dtype=torch.int32)
    return x, ids, weights, gate_up, down, first, out, num_rows


def by_rows(x, ids, weights, gate_up, down, first, *_):
    """Row after row, expert after expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    counts = [0] * len(down)
    for row, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            if 0 <= expert - first < len(down):
                gate, up = (x[row].double() @ gate_up[expert - first].double()).chunk(2)
                value = (gate * gate.sigmoid() * up) @ down[expert - first].double()
                out[row] += weights[row, place].double() * value
                counts[expert - first] += 1
    return out, counts


@pytest.mark.parametrize("ids", [
    [[0, 1]], [[2, 0], [-1, -1], [1, 2], [0, 1]], [[5, 4], [3, 1], [0, 5], [-1, -1], [4, 3]],
    [[-1, -1]] * 3, [[7, 8], [9, 7]],
], ids=str)  # fmt: skip
@pytest.mark.parametrize("first", [0, 3])
def test_each_row_is_the_weighted_sum_of_its_experts(ids, first):
    args = case(ids, first=first)
    moe_experts(*args)
    wanted, counts = by_rows(*args)
    torch.testing.assert_close(args[-2], wanted.float(), rtol=1e-5, atol=1e-6)
    assert args[-1].tolist() == counts


def test_the_example_of_the_docstring():
    args = case([[4, 1], [-1, -1], [5, 4]], num_experts=2, first=4)
    moe_experts(*args)
    assert args[-1].tolist() == [2, 1]
    assert args[-2][1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_types_sum_in_float32(dtype):
    args = case([[0, 2], [1, 0], [2, 1]], dtype=dtype)
    moe_experts(*args)
    torch.testing.assert_close(args[-2], by_rows(*args)[0].float(), rtol=2e-2, atol=2e-2)


def test_rows_without_an_expert_are_not_read_and_change_no_bit():
    real = [[0, 1], [2, 0], [1, 2]]
    alone = case(real)
    moe_experts(*alone)
    padded = list(case([*real[:2], [-1, -1], real[2], [-1, -1], [-1, -1]]))
    places = [0, 1, 3]
    padded[0] = torch.full((6, 10), math.nan)
    padded[0][places], padded[2][places] = alone[0], alone[2]
    padded[2][[2, 4, 5]] = math.nan
    padded[3], padded[4] = alone[3], alone[4]
    moe_experts(*padded)
    assert torch.equal(padded[-2][places], alone[-2])
    assert padded[-2][[2, 4, 5]].eq(0).all()
    assert torch.equal(padded[-1], alone[-1])
