"""What PCPManager.partition_batch costs on the host in one step of one rank.

usage: python benchmarks/partition.py [--pcp 2 4 8] [--seconds 0.4] [--full] [--steady]

Rows are batches, columns PCP sizes, each with DCP off (decodes sharded) and with DCP over the PCP
group (decodes on every rank). Two batches that differ in one query length take turns, so that every
call lays its step out anew; with --steady one batch repeats, as decode steps do, and the last
layout is used again. Cells: median ms of single calls (fastest tenth - slowest tenth). One
thread, CPU tensors. On a busy machine read the fastest tenth: the median counts the neighbours.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np
import torch

from pcpbench.engine.input_batch import InputBatch, InputBuffers
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.pcp_manager import PCPManager

CPU = torch.device("cpu")
BATCHES = {
    "16 decodes": (16, 0),
    "64 decodes": (64, 0),
    "256 decodes": (256, 0),
    "1024 decodes": (1024, 0),
    "256 decodes + 8 x 2048": (256, 8),
    "1024 decodes + 8 x 2048": (1024, 8),
    "8 x 2048 prefill": (0, 8),
}


def global_batch(num_decodes: int, num_prefills: int, spare: int = 0) -> InputBatch:
    """spare: tokens that the last request has more than its like."""
    query_lens = np.array([1] * num_decodes + [2048] * num_prefills, dtype=np.int32)
    query_lens[-1] += spare
    num_reqs, num_tokens = len(query_lens), int(query_lens.sum())
    starts = np.zeros(num_reqs + 1, dtype=np.int32)
    query_lens.cumsum(out=starts[1:])
    computed = np.full(num_reqs, 100, dtype=np.int32)
    is_prefilling = np.arange(num_reqs) >= num_decodes
    slots = np.arange(num_reqs, dtype=np.int32)
    views = InputBuffers(num_reqs, num_tokens, CPU).views(num_reqs, num_tokens)
    views.query_start_loc.copy_(torch.from_numpy(starts))
    views.seq_lens.copy_(torch.from_numpy(computed + query_lens))
    return InputBatch(
        req_ids=[f"req-{row}" for row in range(num_reqs)],
        num_reqs=num_reqs,
        num_reqs_after_padding=num_reqs,
        idx_mapping=torch.from_numpy(slots.copy()),
        idx_mapping_np=slots,
        num_scheduled_tokens=query_lens,
        num_tokens=num_tokens,
        num_tokens_after_padding=num_tokens,
        query_start_loc_np=starts,
        seq_lens_cpu_upper_bound=torch.from_numpy(computed + query_lens),
        num_computed_tokens_np=computed,
        prefill_len_np=computed + np.where(is_prefilling, query_lens, 0),
        num_computed_prefill_tokens_np=computed,
        is_prefilling_np=is_prefilling,
        has_prefill=bool(num_prefills),
        logits_indices=views.query_start_loc[1:].long().sub_(1),
        **views._asdict(),
    )


def sample(
    batches: list[InputBatch], pcp: int, dcp: int, seconds: float, *, full: bool
) -> list[float]:
    """Seconds of single calls on rank 0, the batches taking turns."""
    largest = batches[-1]
    manager = PCPManager(
        pcp, 0, CPU, dcp == 1, largest.num_reqs, largest.num_tokens, dcp_world_size=dcp
    )
    num_reqs, num_tokens = manager.get_counts_for_dispatch(
        largest.num_scheduled_tokens, largest.is_prefilling_np
    )
    mode = CUDAGraphMode.FULL if full and not largest.has_prefill else CUDAGraphMode.NONE
    descriptor = BatchExecutionDescriptor(mode, num_tokens, num_reqs)
    turns = itertools.cycle(batches)
    for _ in range(10):
        manager.partition_batch(next(turns), descriptor)
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch = next(turns)
        start = time.perf_counter()
        manager.partition_batch(batch, descriptor)
        times.append(time.perf_counter() - start)
    return times


def cell(times: list[float]) -> str:
    low, median, high = np.percentile(np.array(times) * 1e3, (10, 50, 90))
    return f"{median:.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Times PCPManager.partition_batch.")
    parser.add_argument("--pcp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, default=0.4, help="measured for each cell")
    parser.add_argument("--full", action="store_true", help="pad decode batches as FULL does")
    parser.add_argument("--steady", action="store_true", help="repeat one batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [(pcp, dcp) for pcp in options.pcp for dcp in (1, pcp)]
    print(f"{'ms: median (p10-p90)':26}" + "".join(f"pcp {p} dcp {d:<14}" for p, d in sizes))
    with torch.inference_mode():
        for name, (num_decodes, num_prefills) in BATCHES.items():
            batches = [
                global_batch(num_decodes, num_prefills, spare)
                for spare in ((0,) if options.steady else (0, 1))
            ]
            cells = [cell(sample(batches, *s, options.seconds, full=options.full)) for s in sizes]
            print(f"{name:26}" + "".join(f"{text:24}" for text in cells), flush=True)


if __name__ == "__main__":
    main()
