"""Host copies of a rank's microbatches, and where their tensors lie. Judges nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from pcpbench.engine.host_copies import host_copy
from pcpbench.engine.microbatch import Microbatch
from pcpbench.engine.worker import Worker
from pcpbench.model.context import AttentionMetadata
from pcpbench.records import BufferSpan, MicrobatchRecord


def record_microbatches(worker: Worker) -> dict[str, Any]:
    """The fields of a RankRecord that tell of microbatches; none for a step that ran whole."""
    parts = () if worker.microbatches is None else tuple(worker.microbatches.parts)
    batch, whole = worker.local_batch, worker.context.metadata
    if not parts or whole is None or batch is None:
        return {}
    records = tuple(_record(part, part.metadata) for part in parts if part.metadata is not None)
    tokens = {name: getattr(batch, name) for name in ("input_ids", "positions", "is_padding")}
    return {"microbatches": records, "spans": tuple(_spans({**tokens, **_tensors(whole)}))}


def _record(part: Microbatch, metadata: AttentionMetadata) -> MicrobatchRecord:
    """What attention read is taken from the metadata, which is what it was handed."""
    batch = part.batch
    tokens = {name: getattr(batch, name) for name in ("input_ids", "positions", "is_padding")}
    local = metadata.dcp_local_seq_lens
    return MicrobatchRecord(
        first_token=part.first_token,
        num_reqs=batch.num_reqs,
        num_reqs_after_padding=batch.num_reqs_after_padding,
        num_tokens=batch.num_tokens,
        num_tokens_after_padding=batch.num_tokens_after_padding,
        row_index=np.array(part.rows),
        query_start_loc=host_copy(metadata.query_start_loc),
        seq_lens=host_copy(metadata.seq_lens),
        dcp_local_seq_lens=None if local is None else host_copy(local),
        block_tables=tuple(host_copy(table) for table in metadata.block_tables),
        slot_mappings=host_copy(metadata.slot_mappings),
        spans=tuple(_spans({**tokens, **_tensors(metadata)})),
        **{name: host_copy(tensor) for name, tensor in tokens.items()},
    )


def _tensors(metadata: AttentionMetadata) -> dict[str, Tensor]:
    named = {
        "query_start_loc": metadata.query_start_loc,
        "seq_lens": metadata.seq_lens,
        "slot_mappings": metadata.slot_mappings,
    }
    named |= {f"block_tables.{i}": table for i, table in enumerate(metadata.block_tables)}
    if metadata.dcp_local_seq_lens is not None:
        named["dcp_local_seq_lens"] = metadata.dcp_local_seq_lens
    return named


def _spans(tensors: Mapping[str, Tensor]) -> Iterator[BufferSpan]:
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in pairs)
        num_bytes = (last + 1) * tensor.element_size()
        yield BufferSpan(name=name, address=tensor.data_ptr(), num_bytes=num_bytes)
