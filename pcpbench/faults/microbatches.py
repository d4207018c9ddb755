"""Faults of microbatches: what two halves share, or misread of the batch that was cut (K27).

With them the K21 of a rank that does not cut with the others, and the K22 of a half that keeps the
batch's DCP lengths. All but one hit eager and replayed arms alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from pcpbench.engine import microbatch
from pcpbench.engine.dispatcher import BatchCounts
from pcpbench.engine.microbatch import Microbatches
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import shipped
from pcpbench.faults.fault import PARTITION_DRIFT, Setting, Site
from pcpbench.model import mla
from pcpbench.plan import StepPlan

CUT: Final = Setting(microbatch=True, scenario="s16-microbatch-cut")
# Decodes alone: what a prefill left behind a half's rows would make the graph raise.
CUT_EDGES: Final = replace(CUT, scenario="s2-capture-edges")
CUT_DCP: Final = replace(CUT, pcp=1, tp=4, dcp=2, interleave=4)


def seq_lens_aliased(site: Site) -> None:
    """Both microbatches are given one buffer for their lengths."""

    def faulty(init: Callable[..., None], self: Microbatches, *args: Any) -> None:
        init(self, *args)
        self.buffers[1].seq_lens = self.buffers[0].seq_lens
        site.hit()

    site.wrap(Microbatches, "__init__", faulty)


def lengths_not_shortened(site: Site) -> None:
    """A request across the cut keeps its whole length in the first half."""

    def faulty(cut_rows: Callable[..., Any], *args: Any) -> Any:
        cut = cut_rows(*args)
        if cut.tokens_after.any():
            site.hit()
        return replace(cut, tokens_after=np.zeros_like(cut.tokens_after))

    site.wrap(microbatch, "cut_rows", faulty)


def half_of_padding_keeps_rows(site: Site) -> None:
    """Lengths and tables of a half without real tokens are those of the step before."""

    def faulty(stage: Callable[..., Any], self: Microbatches, *args: Any) -> Any:
        cut, buffers = args[2], args[4]
        kept = (buffers.seq_lens, *buffers.block_tables)
        before = [tensor.clone() for tensor in kept]
        part = stage(self, *args)
        if cut.num_tokens == 0:
            for tensor, stale in zip(kept, before, strict=True):
                if not tensor.equal(stale):
                    site.hit()
                tensor.copy_(stale)
        return part

    site.wrap(Microbatches, "_stage", faulty)


def rows_not_padded(site: Site) -> None:
    """A half keeps its real rows only where a FULL graph reads as many as it was captured with."""

    def faulty(stage: Callable[..., Any], self: Microbatches, *args: Any) -> Any:
        batch, metadata, cut, num_rows, buffers = args
        if num_rows != len(cut.rows):
            site.hit()
        return stage(self, batch, metadata, cut, len(cut.rows), buffers)

    site.wrap(Microbatches, "_stage", faulty)


def slots_in_one_run(site: Site) -> None:
    """A half takes one run of the gathered slots, where each rank's share has a run for it."""

    def faulty(prepare: Callable[..., Any], self: Microbatches, *args: Any) -> Any:
        own, whole, first = prepare(self, *args), args[1].slot_mappings, args[2].first_token
        begin, count = first * self.context.pcp.size, own.slot_mappings.shape[1]
        run = whole[:, begin : begin + count]
        if not run.equal(own.slot_mappings):
            site.hit()
        own.slot_mappings.copy_(run)
        return own

    site.wrap(Microbatches, "_metadata", faulty)


def tables_of_first_rows(site: Site) -> None:
    """Each half takes the batch's first block-table rows for its own."""

    def faulty(prepare: Callable[..., Any], self: Microbatches, *args: Any) -> Any:
        own, whole, count = prepare(self, *args), args[1].block_tables, len(args[2].rows)
        for table, of_batch in zip(own.block_tables, whole, strict=True):
            if not table[:count].equal(of_batch[:count]):
                site.hit()
            table[:count].copy_(of_batch[:count])
        return own

    site.wrap(Microbatches, "_metadata", faulty)


def read_before_written(site: Site) -> None:
    """A half attends before the other half has written its KV."""

    def faulty(hand_over: Callable[..., Any], rank: int) -> Any:
        async def goes_on() -> None:
            site.hit()

        return goes_on()

    site.wrap(mla, "hand_over", faulty)


def runs_whole(site: Site) -> None:
    """Every fifth step that is to be cut is not; what replays reads the halves of an older step."""
    calls: Counter[int] = Counter()

    def faulty(cut: Callable[..., None], self: Microbatches, count: int, *args: Any) -> None:
        calls[id(self)] += count > 1
        if count > 1 and calls[id(self)] % 5 == 0:
            site.hit()
            count = 1
        cut(self, count, *args)

    site.wrap(Microbatches, "cut", faulty)


def batch_dcp_lengths(site: Site) -> None:
    """A half's DCP-local lengths are rows of the batch's, whatever its own lengths are."""

    def faulty(stage: Callable[..., Any], self: Microbatches, *args: Any) -> Any:
        batch, cut, buffers = args[0], args[2], args[4]
        part = stage(self, *args)
        if batch.dcp_local_seq_lens is not None:
            rows = batch.dcp_local_seq_lens[cut.rows.tolist()]
            own = buffers.dcp_local_seq_lens[: len(rows)]
            if not own.equal(rows):
                site.hit()
            own.copy_(rows)
        return part

    site.wrap(Microbatches, "_stage", faulty)


def one_rank_runs_whole(site: Site) -> None:
    """Rank 1 leaves a step whole that the others cut."""

    def faulty(prepare: Callable[..., BatchCounts], self: Worker, plan: StepPlan) -> BatchCounts:
        counts = prepare(self, plan)
        if self.rank != 1 or counts.num_ubatches == 1:
            return counts
        site.hit()
        return replace(counts, num_ubatches=1)

    site.wrap(Worker, "prepare_inputs", faulty)


FAULTS: Final = (
    shipped("K27", "ubatch-seq-lens-aliased", "Both microbatches have one seq_lens buffer.",
            seq_lens_aliased, "C12", setting=CUT, at_capture=True),
    shipped("K27", "ubatch-lengths-not-shortened", "A request across the cut keeps its whole "
            "seq_len in the first microbatch.", lengths_not_shortened, "C1", "C12", setting=CUT),
    shipped("K27", "ubatch-of-padding-stale", "A microbatch of padding keeps the seq_lens and "
            "block tables of the step before.", half_of_padding_keeps_rows, "C1", "C5", "C12",
            setting=CUT),
    shipped("K27", "ubatch-rows-not-padded", "Rows of a microbatch are not padded to those that "
            "its FULL graph reads.", rows_not_padded, "C12", setting=CUT_EDGES),
    shipped("K27", "ubatch-slots-in-one-run", "A microbatch takes one run of the gathered slots, "
            "not one from each rank's share.", slots_in_one_run, "C4", "C12", setting=CUT),
    shipped("K27", "ubatch-tables-of-first-rows", "Each microbatch takes the batch's first "
            "block-table rows.", tables_of_first_rows, "C5", setting=CUT),
    shipped("K27", "ubatch-reads-before-written", "A microbatch attends before the other one has "
            "written its KV.", read_before_written, PARTITION_DRIFT, setting=CUT,
            at_capture=True, max_dcp=1),
    shipped("K27", "ubatch-cut-left-out", "Every fifth cut is left out, and graphs read the halves "
            "of an older step.", runs_whole, "C12", setting=CUT),
    shipped("K22", "ubatch-keeps-batch-dcp-lengths", "A microbatch keeps the batch's DCP-local "
            "lengths after the cut.", batch_dcp_lengths, "C6", "C12", setting=CUT_DCP),
    shipped("K21", "one-rank-runs-whole", "One rank does not cut a step that the others cut.",
            one_rank_runs_whole, "C10", setting=CUT),
)  # fmt: skip
