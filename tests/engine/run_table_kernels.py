"""Run Triton kernels on saved inputs: a program, not a test.

It needs TRITON_INTERPRET=1 from before the first import of triton, which a test process cannot
promise.

usage: run_table_kernels.py CASES RESULTS
"""

import sys

import torch

from pcpbench import dcp_kernels
from pcpbench.engine import block_table_kernels

KERNELS = {
    "gather_rows": (block_table_kernels.gather_rows, 2),
    "hide_columns": (block_table_kernels.hide_columns, 0),
    "write_slots": (block_table_kernels.write_slots, 8),
    "dcp_local_seq_lens": (dcp_kernels.dcp_local_seq_lens, 0),
}


def main(cases_path: str, results_path: str) -> None:
    results = []
    for name, args in torch.load(cases_path):
        kernel, out = KERNELS[name]
        kernel(*args)
        results.append(args[out])
    torch.save(results, results_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
