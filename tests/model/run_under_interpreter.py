"""Run the Triton twins on saved inputs. A program, not a test: it needs TRITON_INTERPRET=1 from
before the first import of triton, which a test process cannot promise.

usage: run_under_interpreter.py CASES RESULTS
"""

import sys

import torch

from pcpbench.model import attention_kernels, sparse_attention_kernels


def main(cases_path: str, results_path: str) -> None:
    results = []
    for kind, args in torch.load(cases_path):
        sparse = hasattr(sparse_attention_kernels, kind)
        kernel = getattr(sparse_attention_kernels if sparse else attention_kernels, kind)
        kernel(*args)
        results.append(args[-2:])
    torch.save(results, results_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
