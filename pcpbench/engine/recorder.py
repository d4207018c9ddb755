"""Turns what a step left on the ranks into records: host copies that nothing writes to afterwards.

Owns the copying; judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pcpbench.engine.dispatcher import BatchCounts
from pcpbench.engine.draft_recorder import rank_drafts, step_drafts
from pcpbench.engine.engine import Engine, StepOutput
from pcpbench.engine.host_copies import host_copy, wide_copy
from pcpbench.engine.microbatch_recorder import record_microbatches
from pcpbench.engine.sampled import Sampled
from pcpbench.engine.worker import Worker
from pcpbench.modes import BatchExecutionDescriptor
from pcpbench.plan import StepPlan
from pcpbench.records import RankRecord, RoutingRecord, StepRecord


def record_step(
    engine: Engine,
    output: StepOutput,
    plan: StepPlan,
    *,
    arm: str,
    scenario: str,
) -> StepRecord:
    """Copy the metadata and results of the step that `engine` has just run.

    Its address changes are those seen before the forward passes, and those that are there now.
    """
    descriptor = output.decision.descriptor
    outputs = output.sampled or (None,) * len(engine.workers)
    accepted = output.accepted or (None,) * len(engine.workers)
    ranks = tuple(
        record_rank(
            worker, descriptor, counts, sampled, verified, rank_drafts(output.proposal, index)
        )
        for index, (worker, counts, sampled, verified) in enumerate(
            zip(engine.workers, output.counts, outputs, accepted, strict=True)
        )
    )
    empty = np.zeros((0, 0), dtype=np.float32)
    by_drafts = () if output.proposal is None else output.proposal.moved
    moved = (*output.moved, *by_drafts, *engine.moved_buffers(descriptor))
    first = output.sampled[0] if output.sampled else None
    return StepRecord(
        arm=arm,
        scenario=scenario,
        step=plan.index,
        descriptor=descriptor,
        miss_reason=output.decision.miss_reason,
        ranks=ranks,
        sampled_req_ids=tuple(r.req_id for r in plan.scheduled for _ in range(r.num_logits)),
        sampled=np.zeros(0, dtype=np.int64) if first is None else host_copy(first.tokens),
        logits=empty if first is None else wide_copy(first.logits),
        hidden=empty if first is None else wide_copy(first.hidden),
        address_changes=tuple(dict.fromkeys(moved)),
        idle=output.idle,
        num_replays=output.num_replays,
        draft_tokens=np.array(output.drafts, dtype=np.int64) if output.drafts else None,
        **step_drafts(output.proposal),
    )


def kv_arrays(engine: Engine) -> list[list[Tensor]]:
    """The caches of every rank and layer, as they are (no copy): [rank][layer]."""
    return [list(worker.kv_caches) for worker in engine.workers]


NO_DRAFTS: Mapping[str, Any] = MappingProxyType({})


def record_rank(
    worker: Worker,
    descriptor: BatchExecutionDescriptor,
    counts: BatchCounts,
    sampled: Sampled | None = None,
    accepted: Tensor | None = None,
    drafts: Mapping[str, Any] = NO_DRAFTS,
) -> RankRecord:
    """Copy what a prepared step left on one rank, with its results where there are any."""
    batch, metadata, manager = worker.local_batch, worker.context.metadata, worker.pcp_manager
    assert batch is not None
    dcp_lens, gathered = batch.dcp_local_seq_lens, batch.gathered_is_padding
    tables = () if metadata is None else metadata.block_tables
    slots = (
        np.zeros((0, 0), dtype=np.int64) if metadata is None else host_copy(metadata.slot_mappings)
    )
    restore: Tensor | None = None
    mask: Tensor | None = None
    if manager is not None and worker.global_batch is not None and metadata is not None:
        row_req_index, row_start = manager.row_req_index, manager.row_start
        restore, mask = manager.hidden_restore_idx, manager.gathered_kv_write_mask
    else:
        row_req_index = np.arange(batch.num_reqs)
        row_start = np.zeros(batch.num_reqs, dtype=np.int64)
    return RankRecord(
        rank=worker.rank,
        num_reqs=batch.num_reqs,
        num_reqs_after_padding=batch.num_reqs_after_padding,
        num_tokens=batch.num_tokens,
        num_tokens_after_padding=batch.num_tokens_after_padding,
        input_ids=host_copy(batch.input_ids),
        positions=host_copy(batch.positions),
        is_padding=host_copy(batch.is_padding),
        query_start_loc=host_copy(batch.query_start_loc),
        seq_lens=host_copy(batch.seq_lens),
        dcp_local_seq_lens=None if dcp_lens is None else host_copy(dcp_lens),
        block_tables=tuple(host_copy(table) for table in tables),
        slot_mappings=slots,
        row_req_index=np.array(row_req_index),
        row_start=np.array(row_start),
        hidden_restore_idx=None if restore is None else host_copy(restore),
        gathered_kv_write_mask=None if mask is None else host_copy(mask),
        gathered_is_padding=None if gathered is None else host_copy(gathered),
        descriptor=descriptor,
        dispatch_num_reqs=counts.num_reqs,
        dispatch_num_tokens=counts.num_tokens,
        collectives=tuple(worker.groups.log),
        hidden=None if sampled is None else wide_copy(sampled.hidden),
        sampled=None if sampled is None else host_copy(sampled.tokens),
        sampled_rows=None if sampled is None else np.array(sampled.rows),
        num_accepted=None if accepted is None else host_copy(accepted),
        num_computed_after=None if accepted is None else _cursors(worker),
        seq_lens_cpu_upper_bound=host_copy(batch.seq_lens_cpu_upper_bound),
        selected=_selected(worker),
        routing=tuple(_routing(worker)),
        **record_microbatches(worker),
        **drafts,
    )


def _routing(worker: Worker) -> Iterator[RoutingRecord]:
    """What MoE layers routed, in the batch or in each of its microbatches."""
    batches = [part.batch for part in worker.microbatches.parts] if worker.microbatches else []
    of_parts = worker.routing_buffers()[1:]
    if not batches and worker.local_batch is not None:
        batches, of_parts = [worker.local_batch], worker.routing_buffers()[:1]
    for number, (batch, own) in enumerate(zip(batches, of_parts, strict=False)):
        yield from own.records(batch.num_tokens_after_padding, number)


def _cursors(worker: Worker) -> NDArray[Any]:
    """The device's cursors of the requests of the last step."""
    batch = worker.global_batch
    assert batch is not None
    return host_copy(worker.request_state.num_computed_tokens.index_select(0, batch.idx_mapping))


def _selected(worker: Worker) -> NDArray[Any] | None:
    """What the tokens of the last step attended to; None where nothing chose."""
    batch, chosen = worker.local_batch, worker.context.selected
    if batch is None or chosen is None or worker.context.metadata is None:
        return None
    return host_copy(chosen[:, : batch.num_tokens_after_padding])
