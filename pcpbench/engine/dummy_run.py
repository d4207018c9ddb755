"""Dummy batches: warm-up, capture and idle steps (SPEC 6).

Owns the one straight path of a dummy run: stage the batch in persistent buffers, stop there if
attention is skipped, then dummy attention inputs, dummy context, DCP lengths. It touches neither
the global block tables nor any KV block but the null block.
"""

from __future__ import annotations

from pcpbench.engine.input_batch import InputBatch, set_dummy_context
from pcpbench.engine.worker import Worker
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode


def stage_dummy_batch(worker: Worker, descriptor: BatchExecutionDescriptor) -> InputBatch:
    """Stage a dummy batch of a descriptor's rank-local shape on one worker.

    FULL descriptors get attention inputs; the others skip attention. A FULL graph under DCP is
    given dcp x interleave tokens of context a request, so that no rank's share is empty and no
    host-side "nothing to attend to" is baked in.
    """
    full = descriptor.cg_mode is CUDAGraphMode.FULL
    num_reqs = descriptor.num_reqs
    if num_reqs is None:
        num_reqs = min(descriptor.num_tokens, worker.config.scheduler_config.max_num_seqs)
    batch = InputBatch.make_dummy(
        num_reqs, descriptor.num_tokens, worker.input_buffers, descriptor.max_query_len
    )
    if worker.pcp_manager is not None:
        batch = worker.pcp_manager.prepare_inputs_to_capture(batch)
    worker.use_batch(batch, attention=full)
    if not full:
        worker.cut_batch(descriptor)
        return batch
    provider = worker.pcp_manager or worker.block_tables
    tables = provider.get_dummy_block_tables(batch.num_reqs_after_padding)
    slots = provider.get_dummy_slot_mappings(batch.num_tokens_after_padding)
    if worker.dcp_size > 1:
        set_dummy_context(
            batch,
            worker.block_tables,
            worker.dcp_size * worker.cp_interleave,
            worker.config.cache_config.num_gpu_blocks,
            worker.config.model_config.max_model_len,
            input_block_tables=tables,
        )
    worker.set_dummy_attention(batch, tables, slots)
    worker.cut_batch(descriptor)
    return batch
