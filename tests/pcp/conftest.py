"""Hand-made global batches and the managers of all PCP ranks; nothing of the engine above them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.input_batch import InputBatch, InputBuffers
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.pcp_manager import PCPManager

CPU = torch.device("cpu")
MAX_NUM_REQS, MAX_NUM_TOKENS = 24, 512


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


class PcpStand:
    """All ranks of one PCP group (tp 1), each with its manager, tables and buffers.

    One request slot a row, in reverse, so that a row is never its own slot. Blocks of a slot are
    ids of its own, and tokens have ids that name them: 1000 + global index.
    """

    def __init__(
        self,
        pcp: int,
        dcp: int = 1,
        interleave: int = 1,
        block_size: int = 4,
        dcp_sharded: Sequence[bool] = (True,),
        max_num_reqs: int = MAX_NUM_REQS,
        max_num_tokens: int = MAX_NUM_TOKENS,
    ) -> None:
        self.pcp, self.dcp, self.interleave, self.block_size = pcp, dcp, interleave, block_size
        self.dcp_sharded = list(dcp_sharded)
        self.max_num_reqs = max_num_reqs
        columns = 64
        self.managers = []
        for rank in range(pcp):
            tables = BlockTables(
                [block_size] * len(self.dcp_sharded),
                max_num_reqs,
                max_num_tokens,
                [columns] * len(self.dcp_sharded),
                CPU,
                cp_size=dcp,
                cp_rank=rank if dcp > 1 else 0,
                cp_interleave=interleave,
                dcp_sharded=self.dcp_sharded,
            )
            for slot in range(max_num_reqs):
                tables.append_block_ids(
                    slot,
                    tuple(self.block_ids(slot, g)[:columns] for g in range(len(self.dcp_sharded))),
                    overwrite=True,
                )
            tables.apply_staged_writes()
            self.managers.append(
                PCPManager(
                    pcp,
                    rank,
                    CPU,
                    pcp > 1 and dcp == 1,
                    max_num_reqs,
                    max_num_tokens,
                    tables,
                    dcp_world_size=dcp,
                    dcp_rank=rank if dcp > 1 else 0,
                    cp_interleave=interleave,
                )
            )
        self.buffers = InputBuffers(max_num_reqs, max_num_tokens, CPU)

    def block_ids(self, slot: int, group: int) -> list[int]:
        """Blocks of a request slot, from 1 up; no two slots or groups share one."""
        first = 1 + (group * self.max_num_reqs + slot) * 64
        return list(range(first, first + 64))

    def slot_of(self, row: int) -> int:
        """The request slot of a global row."""
        return self.max_num_reqs - 1 - row

    def batch(
        self, query_lens: Sequence[int], prefilling: Sequence[bool], computed: Sequence[int]
    ) -> InputBatch:
        """A global batch on the stand's global buffers."""
        num_reqs = len(query_lens)
        lens = np.array(query_lens, dtype=np.int32)
        is_prefilling = np.array(prefilling, dtype=np.bool_)
        before = np.array(computed, dtype=np.int32)
        starts = np.concatenate(([0], lens.cumsum())).astype(np.int32)
        num_tokens = int(starts[-1])
        views = self.buffers.views(num_reqs, num_tokens)
        views.input_ids.copy_(torch.arange(num_tokens) + 1000)
        positions = [c + k for c, q in zip(computed, query_lens, strict=True) for k in range(q)]
        views.positions.copy_(torch.tensor(positions, dtype=torch.int64))
        views.is_padding.fill_(False)
        views.query_start_loc.copy_(torch.from_numpy(starts))
        views.seq_lens.copy_(torch.from_numpy(before + lens))
        slots = np.array([self.slot_of(row) for row in range(num_reqs)], dtype=np.int32)
        prefill_len = np.where(is_prefilling, before + lens, np.minimum(before, 1))
        return InputBatch(
            req_ids=[f"r{row}" for row in range(num_reqs)],
            num_reqs=num_reqs,
            num_reqs_after_padding=num_reqs,
            idx_mapping=torch.from_numpy(slots.copy()),
            idx_mapping_np=slots,
            num_scheduled_tokens=lens,
            num_tokens=num_tokens,
            num_tokens_after_padding=num_tokens,
            query_start_loc=views.query_start_loc,
            query_start_loc_np=starts,
            seq_lens=views.seq_lens,
            seq_lens_cpu_upper_bound=torch.from_numpy(before + lens),
            num_computed_tokens_np=before,
            prefill_len_np=prefill_len,
            num_computed_prefill_tokens_np=np.minimum(before, prefill_len),
            is_prefilling_np=is_prefilling,
            has_prefill=bool(is_prefilling.any()),
            input_ids=views.input_ids,
            positions=views.positions,
            is_padding=views.is_padding,
            logits_indices=views.query_start_loc[1:].long().sub_(1),
        )

    def soil(self) -> None:
        """Leave garbage in everything a step must overwrite."""
        for manager in self.managers:
            buffers = manager.input_buffers
            for name in ("input_ids", "positions", "query_start_loc", "seq_lens"):
                getattr(buffers, name).fill_(77)
            buffers.dcp_local_seq_lens.fill_(77)
            buffers.is_padding.fill_(True)
            buffers.is_padding[::2] = False
            for tensor in manager.persistent_buffers().values():
                tensor.fill_(77)


@pytest.fixture
def pcp_stand():
    return PcpStand


@pytest.fixture
def none_desc():
    return BatchExecutionDescriptor(CUDAGraphMode.NONE, 0, None)
