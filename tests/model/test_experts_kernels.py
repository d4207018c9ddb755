"""The Triton kernels of the experts against their CPU twin, under Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pcpbench.model.experts import moe_experts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)

CASES = {
    "one": ([[0, 2]], {}),
    "padding among them": ([[0, 1], [-1, -1], [2, 0], [1, 1]], {}),
    "nothing is routed": ([[-1, -1], [-1, -1]], {}),
    "of another rank": ([[5, 1], [3, 4], [0, 2]], {"first": 3}),
    "odd sizes": ([[1, 0, 2], [2, 1, -1]], {"hidden": 37, "inner": 11}),
    "several blocks": ([[0, 1], [2, 1]], {"hidden": 130, "inner": 70}),
    "weights in columns": ([[0, 1], [2, 1]], {"transposed": True}),
    "float16": ([[0, 1], [2, 1], [-1, -1]], {"dtype": torch.float16}),
}


def build(ids, hidden=10, inner=6, first=0, dtype=torch.float32, transposed=False):
    draw = torch.Generator().manual_seed(1)
    ids = torch.tensor(ids, dtype=torch.int32)
    x = torch.randn(len(ids), hidden, generator=draw).to(dtype)
    x[(ids < 0).all(1)] = torch.nan  # what is not routed is not read
    gate_up = (torch.randn(3, hidden, 2 * inner, generator=draw) / hidden**0.5).to(dtype)
    down = (torch.randn(3, inner, hidden, generator=draw) / inner**0.5).to(dtype)
    if transposed:
        gate_up, down = gate_up.mT.contiguous().mT, down.mT.contiguous().mT
    out, num_rows = torch.full((len(ids), hidden), torch.nan), torch.full((3,), -7)
    weights = torch.rand(ids.shape, generator=draw)
    return x, ids, weights, gate_up, down, first, out, num_rows.int()


@pytest.fixture(scope="module")
def triton_results(tmp_path_factory):
    """What the Triton kernels made of every case; one interpreter process for all of them."""
    folder = tmp_path_factory.mktemp("triton")
    cases = [("moe_experts", build(ids, **more)) for ids, more in CASES.values()]
    torch.save(cases, folder / "cases")
    program = Path(__file__).with_name("run_under_interpreter.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(program), str(folder / "cases"), str(folder / "results")],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        pytest.fail(done.stderr)
    return dict(zip(CASES, torch.load(folder / "results"), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_experts_equal_their_twin(triton_results, name):
    ids, more = CASES[name]
    args = build(ids, **more)
    moe_experts(*args)
    out, num_rows = triton_results[name]
    tolerance = 1e-5 if args[0].dtype == torch.float32 else 3e-3
    torch.testing.assert_close(out, args[-2], rtol=tolerance, atol=tolerance)
    assert torch.equal(num_rows, args[-1])


def test_kernels_compile_for_a_gpu():
    program = Path(__file__).with_name("compile_experts_for_gpu.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_gate_up_kernel", "_down_kernel", "_num_rows_kernel"]
