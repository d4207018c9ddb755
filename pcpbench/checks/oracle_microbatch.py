"""What each microbatch of a cut step should hold, from the expectation of the whole step (SPEC 8).

Owns the judge's own cut: one loop over rows, one over microbatches. Knows no record.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from pcpbench.checks.oracle import RankExpectation, StepExpectation, dcp_lengths
from pcpbench.checks.oracle_partition import Row
from pcpbench.checks.setup import ArmSetup
from pcpbench.records import IntArray


def cut_bounds(num_tokens: int, num_ubatches: int) -> list[tuple[int, int]]:
    """Tokens [first, last) of each microbatch of a padded batch: 5 of them give (0, 2), (2, 5)."""
    places = [num_tokens * i // num_ubatches for i in range(num_ubatches + 1)]
    return list(pairwise(places))


def cut_expectation(
    whole: StepExpectation, setup: ArmSetup, num_ubatches: int, pads_rows: bool
) -> list[StepExpectation]:
    """The expectation of each microbatch, shaped like that of the step.

    pads_rows: the step runs as FULL, which pads the rows of a microbatch to its tokens, or to the
    whole batch's rows where those are fewer.
    """
    steps = []
    for index in range(num_ubatches):
        ranks = tuple(
            _cut_rank(rank, setup, index, num_ubatches, pads_rows) for rank in whole.ranks
        )
        steps.append(replace(whole, ranks=ranks))
    return steps


def _cut_rank(
    whole: RankExpectation, setup: ArmSetup, index: int, num_ubatches: int, pads_rows: bool
) -> RankExpectation:
    total = whole.num_tokens_after_padding
    first, last = cut_bounds(total, num_ubatches)[index]
    kept = _kept_rows(whole, first, last, setup.world.pcp_size == 1)
    num_reqs = max(1, len(kept))
    num_rows = num_reqs
    if pads_rows:
        num_rows = max(num_reqs, min(whole.num_reqs_after_padding, last - first))
    count = sum(row.num_tokens for _, row, _ in kept)
    starts = np.full(num_rows + 1, count, dtype=np.int64)
    starts[0] = 0
    seq_lens = np.zeros(num_rows, dtype=np.int64)
    for place, (_, row, length) in enumerate(kept):
        starts[place + 1] = starts[place] + row.num_tokens
        seq_lens[place] = length
    return RankExpectation(
        rank=whole.rank,
        rows=tuple(row for _, row, _ in kept),
        num_reqs=num_reqs,
        num_reqs_after_padding=num_rows,
        num_tokens=count,
        num_tokens_after_padding=last - first,
        input_ids=whole.input_ids[first:last],
        positions=whole.positions[first:last],
        query_start_loc=starts,
        seq_lens=seq_lens,
        dcp_local_seq_lens=dcp_lengths(seq_lens, setup, whole.rank),
        block_ids=tuple(tuple(group[at] for at, _, _ in kept) for group in whole.block_ids),
        slot_mappings=_columns(whole.slot_mappings, total, first, last),
        gathered_token=_columns(whole.gathered_token[None], total, first, last)[0],
        write_mask=None,
    )


def _kept_rows(
    whole: RankExpectation, first: int, last: int, same_everywhere: bool
) -> list[tuple[int, Row, int]]:
    """(row of the whole batch, its part in [first, last), length through that part) for each.

    A request across the end of the range loses from its length what lies past it. Without a real
    token in the range the last row is kept with none, and its whole length; a rank without rows has
    none to keep. same_everywhere: all ranks hold equal batches, so that a part is replicated like
    its row.
    """
    kept = []
    place = 0
    for at, row in enumerate(whole.rows):
        begin, end = max(first, place), min(last, place + row.num_tokens)
        if begin < end:
            part = Row(
                req_index=row.req_index,
                start=row.start + begin - place,
                num_tokens=end - begin,
                replicated=row.replicated and same_everywhere,
            )
            kept.append((at, part, int(whole.seq_lens[at]) - (place + row.num_tokens - end)))
        place += row.num_tokens
    if not kept and whole.rows:
        at, row = len(whole.rows) - 1, whole.rows[-1]
        empty = Row(row.req_index, row.start + row.num_tokens, 0, row.replicated)
        kept.append((at, replace(empty, replicated=False), int(whole.seq_lens[at])))
    return kept


def _columns(gathered: IntArray, total: int, first: int, last: int) -> IntArray:
    """Columns [first, last) of each rank's share of a gathered batch [groups, total * ranks].

    Two ranks of 4 tokens cut at 2: the first microbatch has columns 0, 1, 4, 5.
    """
    num_ranks = gathered.shape[1] // total
    columns = [rank * total + at for rank in range(num_ranks) for at in range(first, last)]
    return gathered[:, columns]
