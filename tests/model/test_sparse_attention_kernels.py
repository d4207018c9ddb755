"""The Triton twins of the sparse ops over odd sizes, under Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pcpbench.model.sparse_attention import index_topk, sparse_mla_attention

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)


def _cases():
    spec = importlib.util.spec_from_file_location("sparse_cases", HERE / "test_sparse_attention.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


CASES = _cases()


def build(name):
    kind, _, rest = name.partition(" ")
    if kind == "index_topk":
        settings, rows = CASES.CASES[rest]
        case = CASES.index_case(rows, **settings)
        return (*case.args, case.out)
    return CASES.attention_case(CASES.SLOTS[rest])[0]


NAMES = [f"index_topk {name}" for name in CASES.CASES]
NAMES += [f"sparse_mla_attention {name}" for name in CASES.SLOTS]


@pytest.fixture(scope="module")
def triton_results(tmp_path_factory):
    """What the Triton kernels made of every case; one interpreter process for all of them."""
    folder = tmp_path_factory.mktemp("triton")
    torch.save([(name.partition(" ")[0], build(name)) for name in NAMES], folder / "cases")
    program = HERE / "run_under_interpreter.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(program), str(folder / "cases"), str(folder / "results")],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        pytest.fail(done.stderr)
    return dict(zip(NAMES, torch.load(folder / "results"), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_kernel_equals_its_twin(triton_results, name):
    args = build(name)
    if name.startswith("index_topk"):
        index_topk(*args)
        assert torch.equal(triton_results[name][-1], args[-1])
        return
    sparse_mla_attention(*args)
    for found, right in zip(triton_results[name], args[-2:], strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
