"""One PCP rank's rows of a step, as host arrays, and the rank-local batch that is made of them.

Owns what the host knows of a rank-local batch (SPEC 5). Writes no buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pcpbench.engine.input_batch import BufferViews, InputBatch
from pcpbench.pcp_partition import Layout
from pcpbench.records import IntArray


class LocalRows(NamedTuple):
    """Rows of one rank (N of them, at least one; padded to num_reqs_padded). Read-only arrays.

    request, start, length [N]: which tokens of which global row. A rank with nothing to do holds
    one row of zero tokens, of request 0, whose start is -1. tokens_after [N]: tokens of the global
    row's query past this row. tokens_before [N]: those ahead of it. gather_idx [num_tokens]: global
    token at each place. query_start_loc [num_reqs_padded + 1], padded entries equal num_tokens.
    """

    request: IntArray
    start: IntArray
    length: IntArray
    tokens_before: IntArray
    tokens_after: IntArray
    gather_idx: IntArray
    query_start_loc: IntArray
    num_reqs: int
    num_reqs_padded: int
    num_tokens: int
    num_tokens_padded: int

    def batch(
        self,
        source: InputBatch,
        views: BufferViews,
        idx_mapping: Tensor,
        slots: IntArray,
        no_logits: Tensor,
    ) -> InputBatch:
        """The rank-local batch of a global one, on these views of its buffers.

        Lengths run through each row's last token: a chunk [4:6] of a query of 7 behind 10 computed
        tokens has seq_len 16, the whole query's 17 less the 1 token after it.
        """
        request = self.request
        bound = np.zeros(self.num_reqs_padded, dtype=np.int32)
        if self.num_tokens:
            whole = source.seq_lens_cpu_upper_bound.numpy()
            bound[: self.num_reqs] = whole[request] - self.tokens_after
        prefill_len = source.prefill_len_np[request]
        computed = source.num_computed_tokens_np[request] + self.tokens_before
        return InputBatch(
            req_ids=np.array(source.req_ids, dtype=object)[request].tolist(),
            num_reqs=self.num_reqs,
            num_reqs_after_padding=self.num_reqs_padded,
            idx_mapping=idx_mapping,
            idx_mapping_np=slots,
            num_scheduled_tokens=self.length.copy(),
            num_tokens=self.num_tokens,
            num_tokens_after_padding=self.num_tokens_padded,
            query_start_loc=views.query_start_loc,
            query_start_loc_np=self.query_start_loc.copy(),
            seq_lens=views.seq_lens,
            seq_lens_cpu_upper_bound=torch.from_numpy(bound),
            num_computed_tokens_np=computed,
            prefill_len_np=prefill_len,
            num_computed_prefill_tokens_np=np.minimum(computed, prefill_len),
            is_prefilling_np=source.is_prefilling_np[request],
            has_prefill=source.has_prefill,
            input_ids=views.input_ids,
            positions=views.positions,
            is_padding=views.is_padding,
            logits_indices=no_logits,
            max_query_len=source.max_query_len,
        )


def local_rows(
    layout: Layout, rank: int, num_scheduled_tokens: IntArray, num_reqs_padded: int | None
) -> LocalRows:
    """Cut one rank's rows out of a layout; num_reqs_padded: its own rows when None."""
    (columns,) = layout.length[rank].nonzero()
    request, start = layout.request[rank][columns], layout.start[rank][columns]
    length = layout.length[rank][columns]
    if not len(columns):
        request, start, length = np.array([[0], [-1], [0]], dtype=np.int64)
    num_reqs, num_tokens = len(request), int(layout.tokens_per_rank[rank])
    num_rows = num_reqs if num_reqs_padded is None else num_reqs_padded
    starts = np.empty(num_rows + 1, dtype=np.int32)
    starts[0] = 0
    starts[num_reqs + 1 :] = num_tokens
    length.cumsum(out=starts[1 : num_reqs + 1])
    begin = rank * layout.num_tokens_padded
    rows = LocalRows(
        request=request,
        start=start,
        length=length,
        tokens_before=start.clip(min=0),
        tokens_after=num_scheduled_tokens[request] - start - length,
        gather_idx=layout.padded_gather_idx[begin : begin + num_tokens],
        query_start_loc=starts,
        num_reqs=num_reqs,
        num_reqs_padded=num_rows,
        num_tokens=num_tokens,
        num_tokens_padded=layout.num_tokens_padded,
    )
    for array in rows[:7]:
        array.setflags(write=False)
    return rows
