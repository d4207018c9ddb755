"""vLLM's block tables behind a memory of what their kernels gave, for `check partition`.

Owns which kernel calls are made. A case that is run whole runs them as they are. For the others a
kernel's answer to the same rows is given again: the program of one row reads that row alone, so
that a row's slots follow from its request slot and positions, and a table's from its slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pcpbench.targets.vllm.api import VllmApi

PAD = -1
LENGTHS = 128
"""Lengths whose share is asked for in one call."""


class RememberedTables:
    """Stands where a PCPManager expects BlockTables; everything else is the real tables'.

    is_whole: run every kernel on the batch at hand. num_whole, num_rows: calls for one batch alone,
    and distinct rows that were run for the others.
    """

    def __init__(self, tables: Any) -> None:
        self.tables = tables
        self.is_whole = True
        self.num_whole = self.num_rows = 0
        self._rows: tuple[Tensor, ...] = ()
        self._slots: dict[tuple[int, int, int], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tables, name)

    def gather_block_tables(
        self,
        idx_mapping: Tensor,
        num_reqs_padded: int,
        out: tuple[Tensor, ...] | None = None,
        out_ptrs: Tensor | None = None,
        **named: Any,
    ) -> tuple[Tensor, ...]:
        """As BlockTables.gather_block_tables; see the module."""
        if self.is_whole:
            self.num_whole += 1
            views: tuple[Tensor, ...] = self.tables.gather_block_tables(
                idx_mapping, num_reqs_padded, out=out, out_ptrs=out_ptrs, **named
            )
            return views
        if not self._rows:
            every = self.tables.gather_block_tables(
                torch.arange(self.tables.max_num_reqs, device=self.tables.device),
                self.tables.max_num_reqs,
            )
            self._rows = tuple(table.clone() for table in every)
            self.num_rows += self.tables.max_num_reqs
        num_reqs = idx_mapping.shape[0]
        target = self.tables.input_block_tables if out is None else out
        for table, rows in zip(target, self._rows, strict=True):
            torch.index_select(rows, 0, idx_mapping, out=table[:num_reqs])
            table[num_reqs:num_reqs_padded].zero_()
        return tuple(table[:num_reqs_padded] for table in target)

    def compute_slot_mappings(
        self,
        idx_mapping: Tensor,
        query_start_loc: Tensor,
        positions: Tensor,
        num_tokens_padded: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """As BlockTables.compute_slot_mappings; see the module."""
        if self.is_whole:
            self.num_whole += 1
            slots: Tensor = self.tables.compute_slot_mappings(
                idx_mapping, query_start_loc, positions, num_tokens_padded, out=out
            )
            return slots
        keys, starts = [], query_start_loc.tolist()
        where = positions.tolist()
        for row, slot in enumerate(idx_mapping.tolist()):
            first, last = starts[row], starts[row + 1]
            if last > first:
                keys.append((slot, where[first], last - first))
        self.learn(keys)
        count = starts[idx_mapping.shape[0]]
        target: Tensor = self.tables.slot_mappings if out is None else out
        torch.cat([self._slots[key] for key in keys], dim=1, out=target[:, :count])
        target[:, count:].fill_(PAD)
        return target[:, :num_tokens_padded]

    def learn(self, keys: Iterable[tuple[int, int, int]]) -> None:
        """Run the slot kernel on rows that were not met yet, in one call.

        keys: (request slot, first position, tokens) of each.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._slots]
        if not missing:
            return
        self.num_rows += len(missing)
        device = self.tables.device
        lengths = torch.tensor([0, *(count for _, _, count in missing)], device=device)
        starts = lengths.cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(f, f + n, device=device) for _, f, n in missing])
        total = int(starts[-1])
        shape = (self.tables.num_kv_cache_groups, total + 1)
        out = torch.empty(shape, dtype=torch.int64, device=device)
        slots = torch.tensor([slot for slot, _, _ in missing], device=device)
        self.tables.compute_slot_mappings(slots, starts, positions, total, out=out)
        for row, key in enumerate(missing):
            self._slots[key] = out[:, int(starts[row]) : int(starts[row + 1])].clone()


class Shares:
    """DCP-local lengths of one rank; every length is asked of vLLM's kernel once.

    out: the buffer that a step's lengths are written to.
    """

    def __init__(
        self, api: VllmApi, dcp_size: int, dcp_rank: int, interleave: int, out: Tensor
    ) -> None:
        self._api, self._out = api, out
        self._where = (dcp_size, dcp_rank, interleave)
        self._known: Tensor | None = None
        self.num_whole = 0

    def of(
        self, seq_lens: Tensor, num_reqs: int, num_reqs_padded: int, is_whole: bool
    ) -> Tensor | None:
        """prepare_dcp_local_seq_lens of one batch; None without DCP."""
        if self._where[0] == 1:
            return None
        if is_whole:
            self.num_whole += 1
            return self._api.dcp_local_seq_lens(
                self._out, seq_lens, num_reqs, *self._where, num_reqs_padded=num_reqs_padded
            )
        if self._known is None:
            every = torch.arange(LENGTHS, dtype=torch.int32, device=self._out.device)
            kept = torch.empty_like(every)
            self._api.dcp_local_seq_lens(kept, every, LENGTHS, *self._where)
            self._known = kept
        torch.index_select(self._known, 0, seq_lens[:num_reqs].long(), out=self._out[:num_reqs])
        self._out[num_reqs:].zero_()
        return self._out[:num_reqs_padded]
