"""Two microbatches of a rank-local batch, by vLLM's own slicing.

Owns the persistent buffers that vLLM's UBatchRunner would have. The runner itself refuses context
parallelism, and with it go its slices of tables and slots: what is cut here is the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from pcpbench.engine.host_copies import host_copy
from pcpbench.partition_results import Value, padding_rows
from pcpbench.targets.builtin import BuiltinArm
from pcpbench.targets.engine_errors import engine_errors
from pcpbench.targets.vllm.api import VllmApi
from pcpbench.targets.vllm.worker import VllmWorker


class Cut:
    """create_ubatch_slices and _slice_input_batch on one rank.

    max_num_rows: of its batches. dcp: size, rank and interleave.
    """

    def __init__(
        self, api: VllmApi, max_num_rows: int, dcp: tuple[int, int, int], device: torch.device
    ) -> None:
        self._api, self._dcp = api, dcp
        self._buffers = [
            [
                torch.zeros(max_num_rows + more, dtype=torch.int32, device=device)
                for more in (1, 0, 0)
            ]
            for _ in range(2)
        ]

    def parts(self, batch: Any, has_dcp_lengths: bool = True) -> list[dict[str, Value]]:
        """The fields of both. has_dcp_lengths: run the kernel that makes their DCP lengths."""
        size, rank, interleave = self._dcp
        slices = self._api.function("create_ubatch_slices")(batch, 2)
        parts = []
        for where, (starts, lengths, local) in zip(slices, self._buffers, strict=True):
            part = self._api.function("_slice_input_batch")(
                batch,
                where,
                starts,
                lengths,
                local,
                dcp_size=size if has_dcp_lengths else 1,
                dcp_rank=rank,
                cp_interleave=interleave,
            )
            parts.append(_part_fields(part, where))
        return parts


class Cutter:
    """Cuts the batch that each rank of a vLLM arm has prepared last."""

    def __init__(self, arm: BuiltinArm) -> None:
        self._workers = [cast(VllmWorker, worker) for worker in arm.engine.workers]
        self._cuts = []
        for worker in self._workers:
            rows = 2 * worker.config.scheduler_config.max_num_seqs
            dcp = (worker.dcp_size, worker.dcp_rank, worker.cp_interleave)
            self._cuts.append(Cut(worker.api, rows, dcp, worker.device))

    def parts(self) -> list[list[dict[str, Value]]]:
        """The fields as [rank][microbatch]; nothing for a rank that has not two tokens.

        Raises EngineError for what vLLM raises.
        """
        found = []
        with engine_errors():
            for worker, cut in zip(self._workers, self._cuts, strict=True):
                # With experts vLLM's flags are those of all PCP ranks' rows: this rank's are cut.
                flags = worker.local_batch.is_padding if worker.local_batch is not None else None
                batch = replace(worker.prepared_batch, is_padding=flags)
                found.append(cut.parts(batch) if batch.num_tokens_after_padding > 1 else [])
        return found


def _part_fields(part: Any, where: Any) -> dict[str, Value]:
    count = part.num_reqs
    starts, lengths = host_copy(part.query_start_loc), host_copy(part.seq_lens)
    fields: dict[str, Value] = {
        "first_token": where.token_slice.start,
        "num_reqs": count,
        "num_reqs_after_padding": part.num_reqs_after_padding,
        "num_tokens": part.num_tokens,
        "num_tokens_after_padding": part.num_tokens_after_padding,
        "row_index": torch.arange(
            where.request_slice.start, where.request_slice.start + count
        ).numpy(),
        "query_start_loc": starts[: count + 1],
        "seq_lens": lengths[:count],
        "padding_rows": padding_rows(starts, lengths, part.num_tokens, count),
    }
    for name in ("input_ids", "positions", "is_padding"):
        fields[name] = host_copy(getattr(part, name))
    if part.dcp_local_seq_lens is not None:
        local = host_copy(part.dcp_local_seq_lens)
        fields["dcp_local_seq_lens"] = local[:count]
        if local[count:].any():
            fields["padding_rows"] = "DCP lengths of padding rows are not 0"
    return fields
