"""The Triton kernels against their CPU twins over odd sizes, under Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pcpbench.model.attention import kv_cache_write, mla_attention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)

ATTENTION = {
    "one": ({}, [(1, 1)]),
    "decode": ({}, [(5, 1), (1, 1), (70, 1), (4, 1)]),
    "mixed": ({}, [(6, 1), (130, 3), (5, 5), (7, 0), (2, 1)]),
    "padded": ({"extra_tokens": 3, "extra_rows": 4}, [(9, 2), (0, 0), (3, 1)]),
    "all padding": ({"extra_tokens": 2}, [(0, 0)]),
    "odd sizes": ({"heads": 5, "rank": 24, "rope": 6, "block_size": 3}, [(11, 2), (4, 1)]),
    "many heads": ({"heads": 40, "rank": 16, "rope": 8}, [(9, 1)]),
    "wide latent": ({"heads": 16, "rank": 512, "rope": 64, "block_size": 16}, [(35, 2)]),
    "dcp 2 rank 0": ({"dcp": (2, 0, 1)}, [(8, 1), (1, 1), (7, 4)]),
    "dcp 2 rank 1": ({"dcp": (2, 1, 2), "extra_tokens": 1}, [(8, 3), (1, 1), (2, 2)]),
    "dcp 4 rank 3": ({"dcp": (4, 3, 4), "extra_rows": 2}, [(15, 1), (16, 2), (17, 3), (40, 30)]),
    "window": ({"window": 5, "block_size": 3}, [(70, 1), (130, 9), (4, 4), (3, 0)]),
    "wide window": ({"window": 70, "extra_tokens": 1}, [(150, 1), (130, 100)]),
    "dcp 2 window": ({"dcp": (2, 1, 2), "window": 3}, [(9, 1), (8, 3), (1, 1), (40, 12)]),
    # Not bfloat16: the interpreter multiplies its bit patterns as integers.
    "float16": ({"dtype": torch.float16}, [(21, 2), (64, 1)]),
    # The local length names more keys than the table can: cut, not followed out of bounds.
    "cut": ({"dcp": (2, 0, 1)}, [(12, 1)]),
}
WRITES = {
    "plain": (torch.float32, 48, [5, 2, 11]),
    "pads": (torch.float32, 6, [-1, 2, -1, 0]),
    "all pads": (torch.float32, 6, [-1, -1]),
    "wide": (torch.bfloat16, 576, [3, -1, 7]),
}


def build(make_case, name):
    settings, rows = ATTENTION[name]
    case = make_case(rows, **settings)
    if name == "cut":
        case.args[1].nan_to_num_(0.0)
        case.args[2].clamp_(max=1)
        case.args[5].fill_(100)
    return (*case.args, *case.empty_results())


def write_args(dtype, width, slots):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(len(slots), width, generator=generator).to(dtype)
    return kv, torch.tensor(slots), torch.full((3, 4, width), 9.0, dtype=dtype)


@pytest.fixture(scope="module")
def triton_results(tmp_path_factory, module_cases):
    """What the Triton kernels made of every case; one interpreter process for all of them."""
    folder = tmp_path_factory.mktemp("triton")
    torch.save([(kind, args) for kind, args in module_cases.values()], folder / "cases")
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
    return dict(zip(module_cases, torch.load(folder / "results"), strict=True))


@pytest.fixture(scope="module")
def module_cases(make_case):
    cases = {}
    for name in ATTENTION:
        cases[name] = ("mla_attention", build(make_case, name))
    for name, write in WRITES.items():
        cases[f"write {name}"] = ("kv_cache_write", write_args(*write))
    return cases


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_its_twin(make_case, triton_results, name):
    args = build(make_case, name)
    mla_attention(*args)
    out, lse = args[-2:]
    got_out, got_lse = triton_results[name]
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}[out.dtype]
    torch.testing.assert_close(got_out, out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got_lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WRITES)
def test_cache_write_equals_its_twin(triton_results, name):
    kv, slots, cache = write_args(*WRITES[name])
    kv_cache_write(kv, slots, cache)
    assert torch.equal(triton_results[f"write {name}"][1], cache)


def test_kernels_compile_for_a_gpu():
    """Triton brings its own assembler: whether a kernel compiles needs no device."""
    program = Path(__file__).with_name("compile_for_gpu.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "_mla_attention_kernel",
        "_kv_cache_write_kernel",
        "_index_topk_kernel",
        "_sparse_mla_attention_kernel",
    ]
