"""What the built-in engine makes of the cases of `check partition`: its workers, without a forward.

Owns one worker a rank whose request slots are filled once; a case moves cursors and lets the worker
prepare the step as it does in a run. Buffers live on from case to case, as they do from step to
step. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pcpbench.config import (
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pcpbench.engine.dispatcher import BatchCounts, Dispatcher, build_candidates
from pcpbench.engine.groups import in_process_groups
from pcpbench.engine.recorder import record_rank
from pcpbench.engine.worker import Worker
from pcpbench.model.decoder import MLADecoder
from pcpbench.model.presets import model_shape
from pcpbench.modes import BatchExecutionDescriptor
from pcpbench.partition_cases import (
    BLOCK_SIZE,
    CAPTURE_SIZES,
    DISPATCHES,
    MAX_MODEL_LEN,
    MAX_NUM_TOKENS,
    NUM_SLOTS,
    CaseRequest,
    PartitionCase,
    block_at,
    num_blocks_of,
    num_columns,
    token_at,
)
from pcpbench.partition_results import (
    NOT_ALIKE,
    REFUSED,
    PartitionOutputs,
    Value,
    broken_outputs,
    rank_fields,
)
from pcpbench.plan import NewRequest, ScheduledRequest, StepPlan

REFUSALS = (ValueError, RuntimeError)
"""How the engine refuses a batch (SPEC 5)."""

MAX_DRAFTS = 15
"""Draft tokens of a decode that slots have room for."""


class BuiltinPartitions:
    """Makes the makers of worlds that come one after the other."""

    name = "builtin"
    version = ""

    def check(self, pcp: int, dcp: int) -> None:
        """Every world is taken."""

    def of(self, case: PartitionCase) -> BuiltinPartition:
        """The maker for the world and interleave of this case."""
        return BuiltinPartition(case)


class BuiltinPartition:
    """Makes the outputs of cases of one world and interleave, one after the other."""

    def __init__(self, case: PartitionCase) -> None:
        self.world, self.interleave = case.world, case.interleave
        config = _config(case)
        model = MLADecoder(
            model_shape("tiny"),
            dtype=torch.float32,
            device=torch.device("cpu"),
            seed=0,
            tp_size=1,
            tp_rank=0,
            max_model_len=MAX_MODEL_LEN,
        )  # never run, and of no rank in particular
        self.workers = [
            Worker(config, groups, model, torch.device("cpu"), MAX_NUM_TOKENS)
            for groups in in_process_groups(self.world)
        ]
        self._dispatchers = {
            name: Dispatcher(
                setup.mode,
                build_candidates(
                    setup.mode,
                    CAPTURE_SIZES,
                    decode_query_len=setup.decode_query_len,
                    max_num_seqs=NUM_SLOTS,
                    max_num_tokens=MAX_NUM_TOKENS,
                ).descriptors,
            )
            for name, setup in DISPATCHES.items()
        }
        self._candidates = {
            f"candidates[{name}]": " ".join(sorted(each.label for each in known.descriptors))
            for name, known in self._dispatchers.items()
        }
        self._staged: tuple[CaseRequest, ...] = ()
        self._counts: list[BatchCounts] = []
        for worker in self.workers:
            _admit(worker, case.dcp)

    @property
    def kernels(self) -> dict[str, int]:
        """Nothing: every case runs through the engine's own functions, whole."""
        return {}

    def outputs(self, cases: Sequence[PartitionCase]) -> list[PartitionOutputs]:
        """What the workers make of each case."""
        return [self._outputs(case) for case in cases]

    @torch.inference_mode()
    def _outputs(self, case: PartitionCase) -> PartitionOutputs:
        try:
            if case.requests != self._staged:
                self._stage(case.requests)
        except Exception as error:  # the engine's doing: nothing of pcpbench's own is called here
            self._staged = ()
            return broken_outputs(self.world.size, error)
        ranks: list[dict[str, Value]] = []
        blocks = [num_blocks_of(request.slot, case.dcp) for request in case.requests]
        descriptor = self._cut(case)
        for worker, counts in zip(self.workers, self._counts, strict=True):
            try:
                worker.prepare_attention(descriptor)
            except REFUSALS:
                ranks.append({"refusal": REFUSED})
            except Exception as error:
                ranks.append({"refusal": f"{type(error).__name__}: {error}"})
            else:
                ranks.append(_fields(worker, descriptor, counts, blocks))
        return PartitionOutputs(ranks=tuple(ranks), step=self._dispatch())

    def _stage(self, requests: tuple[CaseRequest, ...]) -> None:
        """The global batch of every rank, and the counts that it hands to dispatch."""
        plan = StepPlan(index=0, scheduled=tuple(map(_scheduled, requests)))
        self._counts = []
        for worker in self.workers:
            _move_cursors(worker, requests)
            self._counts.append(worker.prepare_inputs(plan))
        self._staged = requests

    def _cut(self, case: PartitionCase) -> BatchExecutionDescriptor:
        """The case's descriptor, in two microbatches where it is cut and has tokens for both."""
        descriptor = case.descriptor
        padded = max(self._counts[0].num_tokens, case.num_tokens or 0)
        is_cut = case.is_cut and padded > 1
        return replace(descriptor, num_ubatches=2) if is_cut else descriptor

    def _dispatch(self) -> dict[str, Value]:
        """What each setup's dispatcher chooses; all ranks have to hand in the same counts."""
        first = replace(self._counts[0], num_ubatches=1)
        same = all(replace(counts, num_ubatches=1) == first for counts in self._counts)
        fields: dict[str, Value] = {
            "dispatch_num_reqs": first.num_reqs if same else NOT_ALIKE,
            "dispatch_num_tokens": first.num_tokens if same else NOT_ALIKE,
            **self._candidates,
        }
        for name, dispatcher in self._dispatchers.items():
            chosen = dispatcher.decide(first).descriptor.label
            fields[f"dispatch[{name}]"] = fields[f"runner_dispatch[{name}]"] = chosen
        return fields


def _config(case: PartitionCase) -> EngineConfig:
    return EngineConfig(
        parallel_config=ParallelConfig(
            prefill_context_parallel_size=case.pcp,
            decode_context_parallel_size=case.dcp,
            tensor_parallel_size=case.tp,
            cp_kv_cache_interleave_size=case.interleave,
            enable_dbo=True,
        ),
        model_config=ModelConfig(
            preset="tiny", max_model_len=num_columns(case.dcp) * BLOCK_SIZE * case.dcp
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, num_gpu_blocks=1 + NUM_SLOTS * num_columns(case.dcp)
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=NUM_SLOTS, max_num_batched_tokens=MAX_NUM_TOKENS
        ),
        compilation_config=CompilationConfig(cudagraph_capture_sizes=CAPTURE_SIZES),
        speculative_config=SpeculativeConfig(num_speculative_tokens=MAX_DRAFTS),
        device="cpu",
    )  # fmt: skip


def _admit(worker: Worker, dcp: int) -> None:
    """Fill every request slot with its tokens and blocks; cases only say how far each has come."""
    tokens = {
        f"slot{slot}": [token_at(slot, at) for at in range(MAX_MODEL_LEN)]
        for slot in range(NUM_SLOTS)
    }
    plan = StepPlan(
        index=0,
        scheduled=(),
        new_requests=tuple(
            NewRequest(req_id=name, prompt_token_ids=tuple(ids), max_tokens=1)
            for name, ids in tokens.items()
        ),
        new_block_ids={
            f"slot{slot}": (
                tuple(block_at(slot, column) for column in range(num_blocks_of(slot, dcp))),
            )
            for slot in range(NUM_SLOTS)
        },
    )
    worker.update_states(plan, tokens)


def _scheduled(request: CaseRequest) -> ScheduledRequest:
    num_drafts = 0 if request.is_prefilling else max(0, request.num_scheduled_tokens - 1)
    return ScheduledRequest(
        req_id=f"slot{request.slot}",
        num_scheduled_tokens=request.num_scheduled_tokens,
        num_computed_tokens=request.num_computed_tokens,
        prefill_len=request.prefill_len,
        prompt_len=request.prefill_len,
        num_draft_tokens=num_drafts,
    )


def _move_cursors(worker: Worker, requests: Sequence[CaseRequest]) -> None:
    """Have the device's state be as if each request had come as far as the case says.

    A decode's last sampled token and its drafts are those that its slot has at these positions;
    known tokens past prefill_len are wiped, so that reading them in their place is seen.
    """
    state = worker.request_state
    for request in requests:
        slot = state.req_id_to_index[f"slot{request.slot}"]
        first, end = request.num_computed_tokens, request.prefill_len
        state.num_computed_tokens[slot] = first
        state.num_computed_tokens_np[slot] = first
        state.prefill_len[slot] = end
        known: Any = np.zeros(state.all_token_ids.shape[1], dtype=np.int32)
        known[:end] = [token_at(request.slot, at) for at in range(end)]
        state.all_token_ids[slot] = torch.from_numpy(known)
        if request.is_prefilling:
            continue
        state.last_sampled_tokens[slot, 0] = token_at(request.slot, first)
        drafts = [token_at(request.slot, first + 1 + at) for at in range(MAX_DRAFTS)]
        state.draft_tokens[slot] = torch.tensor(drafts, dtype=torch.int32)


def _fields(
    worker: Worker,
    descriptor: BatchExecutionDescriptor,
    counts: BatchCounts,
    num_blocks: Sequence[int],
) -> dict[str, Value]:
    record = record_rank(worker, descriptor, counts)
    batch, manager = worker.local_batch, worker.pcp_manager
    assert batch is not None
    has_rows = batch.num_tokens > 0
    read = [num_blocks[at] if has_rows else 0 for at in record.row_req_index.tolist()]
    fields = rank_fields(record, [read])
    for name in (
        "num_scheduled_tokens",
        "num_computed_tokens_np",
        "prefill_len_np",
        "is_prefilling_np",
        "query_start_loc_np",
    ):
        fields[name] = np.array(getattr(batch, name))
    fields["seq_lens_cpu_upper_bound"] = batch.seq_lens_cpu_upper_bound.numpy().copy()
    if manager is not None:
        fields["padded_gather_idx"] = manager.padded_gather_idx.numpy().copy()
    return fields
