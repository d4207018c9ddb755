"""The Triton kernels of tables, slots and DCP lengths against their torch twins, over odd sizes.

They run under Triton's interpreter, in one process of their own, on every machine with triton.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pcpbench.dcp import dcp_local_seq_lens
from pcpbench.engine.block_table import gather_rows, hide_columns, write_slots

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)

TWINS = {
    "gather_rows": (gather_rows, 2),
    "hide_columns": (hide_columns, 0),
    "write_slots": (write_slots, 8),
    "dcp_local_seq_lens": (dcp_local_seq_lens, 0),
}
SLOTS = 9
# rows of the batch, rows of the output, columns of the table
GATHERS = [(3, 5, 7), (1, 1, 1), (0, 4, 3), (7, 7, 600), (4, 9, 513), (0, 0, 5)]
# rows of the batch, columns of the table, reach, span
HIDES = [(3, 7, 5, 4), (1, 1, 1, 1), (0, 3, 4, 4), (5, 600, 24, 1), (4, 9, 300, 16)]
# query lengths (rows), spare positions, block size, columns, cp size, cp rank, interleave
WRITES = [
    ([1, 1, 1], 0, 4, 3, 1, 0, 1),
    ([5], 2, 4, 3, 2, 1, 2),
    ([0, 3, 0, 1], 0, 3, 7, 3, 0, 1),
    ([300, 1, 257], 9, 16, 40, 2, 0, 16),
    ([2, 0], 5, 1, 1, 4, 3, 1),
    ([], 3, 4, 3, 1, 0, 1),
    ([0, 0], 0, 4, 3, 2, 1, 1),
    ([1, 255, 256], 0, 5, 99, 1, 0, 4),
]
# real rows, rows of the lengths, rows of the output, dcp size, dcp rank, interleave
LENGTHS = [
    (5, 5, 9, 2, 1, 2),
    (0, 3, 4, 4, 0, 1),
    (300, 301, 513, 3, 2, 5),
    (1, 1, 1, 8, 7, 16),
    (256, 256, 256, 2, 0, 1),
]


def random_ints(high, *shape, dtype=torch.int32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=dtype)


def gather_args(num_rows, num_out, columns):
    idx_mapping = random_ints(SLOTS, num_rows, seed=num_rows)
    if num_rows > 2:
        idx_mapping[1] = -1  # a dummy's row
    return (
        random_ints(999, SLOTS, columns),
        idx_mapping,
        torch.full((num_out, columns), 77, dtype=torch.int32),
    )


def hide_args(num_rows, columns, reach, span):
    """Of a view of wider rows, as the tables of a step are."""
    idx_mapping = random_ints(SLOTS, num_rows, seed=num_rows)
    if num_rows > 2:
        idx_mapping[1] = -1
    rows = random_ints(999, num_rows + 2, columns, seed=1).add_(1)[:num_rows]
    rows[idx_mapping < 0] = 0
    return rows, idx_mapping, random_ints(columns * span, SLOTS, seed=2), reach, span


def write_args(lens, spare, block_size, columns, cp_size, cp_rank, interleave):
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    num_positions = int(starts[-1]) + spare
    idx_mapping = random_ints(SLOTS, len(lens), seed=len(lens))
    if len(lens) > 2:
        idx_mapping[-2] = -1
    # One position in nine is past the table.
    reach = columns * block_size * cp_size * 9 // 8 + 1
    return (
        random_ints(999, SLOTS, columns),
        idx_mapping,
        starts,
        random_ints(reach, num_positions, dtype=torch.int64),
        block_size,
        cp_size,
        cp_rank,
        interleave,
        torch.full((num_positions + 300,), 77),
    )


def length_args(num_reqs, num_lens, num_out, dcp_size, dcp_rank, interleave):
    return (
        torch.full((num_out,), 77, dtype=torch.int32),
        random_ints(200, num_lens),
        num_reqs,
        dcp_size,
        dcp_rank,
        interleave,
    )


CASES = {
    **{f"gather {case}": ("gather_rows", gather_args(*case)) for case in GATHERS},
    **{f"hide {case}": ("hide_columns", hide_args(*case)) for case in HIDES},
    **{f"write {case}": ("write_slots", write_args(*case)) for case in WRITES},
    **{f"lengths {case}": ("dcp_local_seq_lens", length_args(*case)) for case in LENGTHS},
}


@pytest.fixture(scope="module")
def triton_results(tmp_path_factory):
    """What the kernels made of every case; one interpreter process for all of them."""
    folder = tmp_path_factory.mktemp("triton")
    torch.save(list(CASES.values()), folder / "cases")
    program = Path(__file__).with_name("run_table_kernels.py")
    done = subprocess.run(
        [sys.executable, str(program), str(folder / "cases"), str(folder / "results")],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        pytest.fail(done.stderr)
    return dict(zip(CASES, torch.load(folder / "results"), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_its_twin(triton_results, name):
    kind, args = CASES[name]
    twin, out = TWINS[kind]
    own = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    twin(*own)
    assert torch.equal(triton_results[name], own[out])


def test_engine_and_dcp_do_not_import_triton():
    code = "import sys, pcpbench.dcp, pcpbench.pcp_manager; sys.exit('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
