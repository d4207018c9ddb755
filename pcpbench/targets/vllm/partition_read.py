"""What is read off a batch that vLLM has prepared for `check partition`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pcpbench.engine.host_copies import host_copy
from pcpbench.partition_cases import PartitionCase, num_blocks_of
from pcpbench.partition_results import Value, batch_fields


def fields_of(batch: Any) -> dict[str, Value]:
    """Counts and tensors of the batch itself."""
    fields: dict[str, Value] = {
        name: int(getattr(batch, name))
        for name in (
            "num_reqs",
            "num_reqs_after_padding",
            "num_tokens",
            "num_tokens_after_padding",
        )
    }
    for name in ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens"):
        fields[name] = host_copy(getattr(batch, name))
    return fields


def rows_of(case: PartitionCase, batch: Any) -> dict[str, Value]:
    """What the host knows of each real row; rows name their request by its slot.

    A row of a slot that the case has no request in is of request -1.
    """
    count = batch.num_reqs
    place = {request.slot: at for at, request in enumerate(case.requests)}
    request = np.array([place.get(int(slot), -1) for slot in batch.idx_mapping_np[:count]])
    on_device = [place.get(int(slot), -1) for slot in batch.idx_mapping[:count].tolist()]
    computed = np.array([r.num_computed_tokens for r in case.requests])[request]
    return {
        "row_req_index": request if on_device == request.tolist() else "host and device differ",
        "row_start": batch.num_computed_tokens_np[:count] - computed,
        **batch_fields(batch),
    }


def pcp_fields_of(metadata: Mapping[str, Any], dcp_size: int) -> dict[str, Value]:
    """What the batch says of whole requests; lengths of shares belong there under DCP alone."""
    fields: dict[str, Value] = {}
    for name, value in metadata.items():
        if value is not None or dcp_size > 1:
            is_single = value is None or isinstance(value, int)
            fields[f"pcp.{name}"] = str(value) if is_single else host_copy(torch.as_tensor(value))
    return fields


def num_read_blocks(case: PartitionCase, batch: Any, rows: Value) -> list[int]:
    """Columns of each real row's table that are read; none of a rank with nothing to do."""
    if not batch.num_tokens or not isinstance(rows, np.ndarray):
        return [0] * batch.num_reqs
    return [num_blocks_of(case.requests[at].slot, case.dcp) for at in rows.tolist()]
