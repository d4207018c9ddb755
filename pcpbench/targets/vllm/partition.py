"""What the installed vLLM makes of the cases of `check partition`.

Owns one PCPManager and BlockTables a rank, fed with batches that vLLM's own runner prepares, and
reads off what a forward pass would be given. Nothing here computes metadata: what vLLM has no
function for is left out of the outputs, and told as missing. Judges nothing.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pcpbench.engine.host_copies import host_copy
from pcpbench.errors import EngineError, UsageError
from pcpbench.partition_cases import (
    BLOCK_SIZE,
    CAPTURE_SIZES,
    DISPATCHES,
    MAX_NUM_TOKENS,
    NUM_SLOTS,
    CaseRequest,
    DispatchSetup,
    PartitionCase,
    block_at,
    num_blocks_of,
    num_columns,
)
from pcpbench.partition_enumeration import largest_rank
from pcpbench.partition_results import (
    REFUSED,
    PartitionOutputs,
    Value,
    alike,
    broken_outputs,
    read_columns,
)
from pcpbench.targets.engine_errors import engine_errors
from pcpbench.targets.vllm import host
from pcpbench.targets.vllm.api import RankView, VllmApi, check_names, vllm_api
from pcpbench.targets.vllm.cuts import Cut
from pcpbench.targets.vllm.partition_inputs import RunnerInputs
from pcpbench.targets.vllm.partition_read import (
    fields_of,
    num_read_blocks,
    pcp_fields_of,
    rows_of,
)
from pcpbench.targets.vllm.partition_tables import RememberedTables, Shares
from pcpbench.targets.vllm.runner import MANAGER_STATE
from pcpbench.targets.vllm.views import check_flags, gathers_flags

REFUSALS = (ValueError, RuntimeError, AssertionError)
"""How vLLM refuses a batch."""

WHOLE_ONE_IN = 128
"""Of so many batches of requests one runs every kernel on itself, besides the smallest, where all
batches are enumerated. Padding that the others have is put there by the stand."""


class VllmPartitions:
    """Makes the makers of worlds that come one after the other, and what they share.

    whole_one_in: of so many batches one runs every kernel on itself; 1 for all of them. Raises
    CannotMeasure where vLLM is missing or has moved on.
    """

    name = "vllm"

    def __init__(self, whole_one_in: int = WHOLE_ONE_IN) -> None:
        self.whole_one_in = whole_one_in
        self.api = vllm_api()
        self.version = self.api.version
        self.device = torch.device("cuda" if host.has_accelerator() else "cpu")
        self.inputs = RunnerInputs(self.api, self.device)

    def check(self, pcp: int, dcp: int) -> None:
        """Raise UsageError for sizes with which this generation replicates decodes."""
        if pcp > 1 and dcp == 1 and not self.api.shards_decodes:
            raise UsageError(
                f"--pcp {pcp} with --dcp 1 is among the batches: in vllm {self.api.version} every "
                "rank runs every decode there, and the oracle has one rank run each: take --pcp 1, "
                "or --dcp 2, --dcp 4 and --dcp 8, or install vllm 0.32 or newer."
            )

    def of(self, case: PartitionCase) -> VllmPartition:
        """The maker for the world and interleave of this case."""
        return VllmPartition(self, case)


class VllmPartition:
    """Makes the outputs of cases of one world and interleave, one after the other."""

    def __init__(self, shared: VllmPartitions, case: PartitionCase) -> None:
        self.api, self.world, self._inputs = shared.api, case.world, shared.inputs
        self._whole_one_in = shared.whole_one_in
        self.device = shared.device
        self._kernels_before = (self._inputs.num_whole, self._inputs.num_rows)
        self._tables = [
            RememberedTables(_block_tables(self, case, rank)) for rank in range(case.dcp)
        ]
        self.ranks = [_Rank(self, case, rank) for rank in range(self.world.size)]
        self._dispatchers = {
            name: _dispatcher(self.api, setup, self.device) for name, setup in DISPATCHES.items()
        }
        self._staged: tuple[CaseRequest, ...] = ()
        self._batch: Any = None
        self._step: dict[str, Value] = {}

    @property
    def kernels(self) -> dict[str, int]:
        """Kernel calls for one batch alone, and distinct rows run for the others."""
        inputs, tables = self._inputs, self._tables
        whole, rows = self._kernels_before
        return {
            "whole batches: inputs": inputs.num_whole - whole,
            "distinct rows: inputs": inputs.num_rows - rows,
            "whole batches: tables and slots": sum(each.num_whole for each in tables),
            "distinct rows: slots": sum(each.num_rows for each in tables),
            "whole batches: DCP lengths": sum(rank.shares.num_whole for rank in self.ranks),
        }

    def outputs(self, cases: Sequence[PartitionCase]) -> list[PartitionOutputs]:
        """What vLLM makes of each case; the more at once, the fewer kernel calls."""
        with contextlib.suppress(Exception):  # whatever it is, it comes again with its case
            self._prefetch([case for case in cases if not self._is_whole(case)])
        return [self._outputs(case) for case in cases]

    def _is_whole(self, case: PartitionCase) -> bool:
        """On a device that runs kernels nothing is put together."""
        return self.device.type != "cpu" or is_whole(case, self._whole_one_in)

    @torch.inference_mode()
    def _prefetch(self, cases: Sequence[PartitionCase]) -> None:
        """Have the kernels work on the rows of all cases that are put together, many at a time."""
        requests = list(dict.fromkeys(r for case in cases for r in case.requests))
        if cases and cases[0].pcp > 1:
            self._inputs.rows(requests)
        keys = {
            (r.slot, r.num_computed_tokens, r.num_scheduled_tokens): None
            for r in requests
            if r.num_scheduled_tokens
        }
        for tables in self._tables:
            tables.learn(keys)

    @torch.inference_mode()
    def _outputs(self, case: PartitionCase) -> PartitionOutputs:
        whole = self._is_whole(case)
        try:
            with engine_errors():
                if case.requests != self._staged:
                    self._stage(case, whole)
                if case.pcp == 1:  # where the runner itself pads, it prepares every case
                    self._batch = self._inputs.whole(case.requests, case.descriptor)
        except EngineError as error:
            self._staged = ()
            return broken_outputs(self.world.size, error)
        for tables in self._tables:
            tables.is_whole = whole
        ranks = tuple(rank.outputs(case, self._batch, whole) for rank in self.ranks)
        return PartitionOutputs(ranks=ranks, step=self._step, is_composed=not whole)

    def _stage(self, case: PartitionCase, whole: bool) -> None:
        """The global batch, which all modes of one batch of requests share, and its dispatch."""
        requests = case.requests
        self._step = self._dispatch(case)
        if case.pcp > 1:
            has_empty = any(not r.num_scheduled_tokens for r in requests)
            if whole and not has_empty:
                self._batch = self._inputs.whole(requests, None)
            else:
                self._batch = self._inputs.composed(requests)
        self._staged = requests

    def _dispatch(self, case: PartitionCase) -> dict[str, Value]:
        """What CudaGraphManager chooses, for rank-local counts and as vLLM's runner asks it."""
        requests = case.requests
        uniform, has_prefill = self._inputs.uniform_token_count(requests, case.pcp > 1)
        longest = max(request.num_scheduled_tokens for request in requests)
        num_reqs, num_tokens = largest_rank(requests, self.world)
        counts = [num_tokens]
        if case.pcp > 1:
            lengths = np.array([r.num_scheduled_tokens for r in requests], dtype=np.int32)
            prefilling = np.array([r.is_prefilling for r in requests])
            counts = [
                int(rank.manager.get_num_tokens_for_dispatch(lengths, prefilling))
                for rank in self.ranks
            ]
            num_tokens = counts[0]
        fields: dict[str, Value] = {"dispatch_num_tokens": alike(counts)}
        for name, dispatcher in self._dispatchers.items():
            fields[f"candidates[{name}]"] = dispatcher.candidates
            for kind, rows, count in (
                ("dispatch", num_reqs, None if has_prefill else uniform),
                ("runner_dispatch", len(requests), uniform),
            ):
                chosen = dispatcher.manager.dispatch(
                    rows,
                    num_tokens,
                    count,
                    num_active_loras=0,
                    max_query_len=None if has_prefill else longest,
                )
                fields[f"{kind}[{name}]"] = self.api.our_descriptor(chosen).label
        return fields


class _Rank:
    """One rank: its manager, its share of lengths and the buffers of its microbatches."""

    def __init__(self, owner: VllmPartition, case: PartitionCase, rank: int) -> None:
        self.api, self.rank, world = owner.api, rank, owner.world
        self.dcp = (world.dcp_size, world.dcp_rank(rank), case.interleave)
        self.tables = owner._tables[self.dcp[1]]
        self.pcp_size = world.pcp_size
        self.manager: Any = None
        if world.pcp_size > 1:
            self.manager = self.api.pcp_manager(
                pcp_world_size=world.pcp_size,
                pcp_rank=world.pcp_rank(rank),
                device=owner.device,
                shard_decode_requests=world.shard_decode_requests,
                max_num_reqs=NUM_SLOTS,
                max_num_tokens=MAX_NUM_TOKENS,
                block_tables=self.tables,
                dcp_world_size=self.dcp[0],
                dcp_rank=self.dcp[1],
                cp_interleave=case.interleave,
                moe_gathers_tokens=True,
            )
            check_names(self.api, self.manager, (*MANAGER_STATE, "_padded_gather_idx"))
            check_flags(self.manager, True, self.api.version)
            buffers = self.manager.input_buffers
        else:
            buffers = self.api.InputBuffers(NUM_SLOTS, MAX_NUM_TOKENS, owner.device)
        self.shares = Shares(self.api, *self.dcp, buffers.dcp_local_seq_lens)
        self._cut = Cut(self.api, NUM_SLOTS * 2, self.dcp, owner.device)

    def outputs(self, case: PartitionCase, whole: Any, is_whole: bool) -> dict[str, Value]:
        """Everything that the rank's forward pass would be given, or that it refused the batch.

        An error that is no refusal is one of its own text, which no other maker has.
        """
        try:
            with engine_errors():
                batch = self._partition(case, whole)
        except EngineError as error:
            is_refusal = isinstance(error.__cause__, REFUSALS)
            return {"refusal": REFUSED if is_refusal else str(error)}
        try:
            with engine_errors():
                return self._read(case, batch, *self._attention(batch), is_whole)
        except EngineError as error:
            return {"refusal": str(error)}

    def _read(
        self,
        case: PartitionCase,
        batch: Any,
        tables: tuple[Tensor, ...],
        slots: Tensor,
        is_whole: bool,
    ) -> dict[str, Value]:
        """The fields of a batch that was taken, and of its microbatches."""
        local = self.shares.of(
            batch.seq_lens, batch.num_reqs, batch.num_reqs_after_padding, is_whole
        )
        batch, gathered = self._own_flags(batch)
        fields = fields_of(batch) | gathered
        fields |= rows_of(case, batch)
        fields["slot_mappings"] = host_copy(slots)
        blocks = num_read_blocks(case, batch, fields["row_req_index"])
        for group, table in enumerate(tables):
            read = read_columns(host_copy(table), blocks, batch.num_reqs)
            fields[f"block_tables.{group}"] = read
        if local is not None:
            fields["dcp_local_seq_lens"] = host_copy(local)
        if self.manager is not None:
            fields |= pcp_fields_of(self.api.pcp_metadata(batch), self.dcp[0])
            for name in ("hidden_restore_idx", "padded_gather_idx", "gathered_kv_write_mask"):
                fields[name] = host_copy(getattr(self.manager, f"_{name}"))
        if case.is_cut and batch.num_tokens_after_padding > 1:
            for index, part in enumerate(self._cut.parts(batch, is_whole)):
                fields |= {f"ubatch{index}.{name}": value for name, value in part.items()}
        return fields

    def _own_flags(self, batch: Any) -> tuple[Any, dict[str, Value]]:
        """The batch as it is with expert parallelism, and the flags that it has without."""
        if self.manager is None or not gathers_flags(self.manager):
            return batch, {}
        own = self.manager.input_buffers.is_padding[: batch.num_tokens_after_padding]
        return replace(batch, is_padding=own), {"pcp.is_padding": host_copy(batch.is_padding)}

    def _partition(self, case: PartitionCase, whole: Any) -> Any:
        """As the runner's prepare_inputs ends."""
        if self.manager is None:
            return whole
        return self.api.partition(self.manager, whole, case.descriptor)

    def _attention(self, whole: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        """As its prepare_attn goes on."""
        if self.manager is not None:
            tables, slots = self.manager.prepare_attn(whole)
            return tables, slots
        cursors = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=whole.positions.device)
        tables = self.api.gather_block_tables(
            self.tables, whole.idx_mapping, whole.num_reqs_after_padding, cursors
        )
        slots = self.tables.compute_slot_mappings(
            whole.idx_mapping,
            whole.query_start_loc,
            whole.positions,
            whole.num_tokens_after_padding,
        )
        return tables, slots


def is_whole(case: PartitionCase, one_in: int) -> bool:
    """Whether every kernel is run on the case itself: one request, and some of the others."""
    return len(case.requests) == 1 or zlib.crc32(str(case.requests).encode()) % one_in == 0


def _block_tables(owner: VllmPartition, case: PartitionCase, dcp_rank: int) -> Any:
    """Tables that hold every slot's blocks."""
    tables = owner.api.block_tables(
        block_sizes=[BLOCK_SIZE],
        max_num_reqs=NUM_SLOTS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_num_blocks_per_group=[num_columns(case.dcp)],
        device=owner.device,
        cp_size=case.dcp,
        cp_rank=dcp_rank,
        cp_interleave=case.interleave,
    )
    for slot in range(NUM_SLOTS):
        blocks = [block_at(slot, column) for column in range(num_blocks_of(slot, case.dcp))]
        tables.append_block_ids(slot, (blocks,), overwrite=True)
    tables.apply_staged_writes()
    return tables


def _dispatcher(api: VllmApi, setup: DispatchSetup, device: torch.device) -> Any:
    """A CudaGraphManager that takes its candidates for captured, and their names."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=NUM_SLOTS),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=list(CAPTURE_SIZES),
            max_cudagraph_capture_size=CAPTURE_SIZES[-1],
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        speculative_config=None,
        num_speculative_tokens=setup.decode_query_len - 1,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    with api.groups(pp=RankView(0, 1)):
        manager = api.CudaGraphManager(config, device, api.mode(setup.mode), setup.decode_query_len)
    manager._graphs_captured = True
    labels = {
        api.our_descriptor(each).label for known in manager._candidates.values() for each in known
    }
    return SimpleNamespace(manager=manager, candidates=" ".join(sorted(labels)))
