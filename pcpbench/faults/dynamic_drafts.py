"""Faults of draft counts that vary: dispatch (K21), graphs (K37), cursors and rows (K34)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pcpbench.engine import dispatcher, engine
from pcpbench.engine import worker as worker_module
from pcpbench.engine.dispatcher import BatchCounts, Candidates
from pcpbench.engine.input_batch import InputBatch
from pcpbench.engine.request_state import RequestState
from pcpbench.engine.worker import Worker
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.modes import BatchExecutionDescriptor
from pcpbench.plan import StepPlan
from pcpbench.records import IntArray

BY_STEP: Final = replace(PCP, spec_tokens=3, dynamic_spec="step")
BY_REQUEST: Final = replace(PCP, spec_tokens=3, dynamic_spec="request")


def longer_queries_cover(site: Site) -> None:
    """A graph of one query length is taken for shorter queries, too."""

    def faulty(
        covers: Callable[..., bool],
        descriptor: BatchExecutionDescriptor,
        num_reqs: int,
        num_tokens: int,
        uniform: int | None,
        *rest: Any,
    ) -> bool:
        sound = covers(descriptor, num_reqs, num_tokens, uniform, *rest)
        length = descriptor.uniform_token_count
        if sound or uniform is None or length is None or uniform > length:
            return sound
        found = covers(descriptor, num_reqs, num_tokens, length, *rest)
        if found:
            site.hit()
        return found

    site.wrap(dispatcher, "covers", faulty)


def varlen_before_uniform(site: Site) -> None:
    """The varlen graph is taken where one of the same size fits the queries' length."""
    for one in site.engines.values():
        chosen = one.dispatcher.descriptors
        varlen = [d for d in chosen if d.max_query_len is not None]
        if varlen:
            site.hit()
        rest = [d for d in chosen if d.max_query_len is None]
        site.set(one.dispatcher, "descriptors", varlen + rest)


def uniform_by_longest(site: Site) -> None:
    """Queries count as equal, of the length of the longest."""

    def faulty(prepare: Callable[..., BatchCounts], self: Worker, plan: StepPlan) -> BatchCounts:
        counts = prepare(self, plan)
        if counts.has_prefill or counts.uniform_token_count == counts.max_query_len:
            return counts
        site.hit()
        return replace(counts, uniform_token_count=counts.max_query_len)

    site.wrap(Worker, "prepare_inputs", faulty)


def _candidates(site: Site, keep: Callable[[BatchExecutionDescriptor, int], bool]) -> None:
    def faulty(build: Callable[..., Candidates], *args: Any, **kw: Any) -> Candidates:
        sound = build(*args, **kw)
        kept = tuple(d for d in sound.descriptors if keep(d, kw["decode_query_len"]))
        if kept != sound.descriptors:
            site.hit()
        return replace(sound, descriptors=kept)

    site.wrap(engine, "build_candidates", faulty)


def longest_length_only(site: Site) -> None:
    """Of the query lengths only the longest is captured."""
    _candidates(site, lambda d, longest: d.uniform_token_count in (None, longest))


def no_varlen_graphs(site: Site) -> None:
    """No graph takes queries of unequal lengths."""
    _candidates(site, lambda d, _: d.max_query_len is None)


def drafts_as_if_all_had_most(site: Site) -> None:
    """Drafts are dealt out as if each request had the largest number of them."""

    def faulty(give: Callable[..., None], self: Worker, plan: StepPlan, drafts: Any) -> None:
        counts = [r.num_draft_tokens for r in plan.scheduled if r.num_draft_tokens]
        most = self.request_state.num_speculative_steps
        padded = [*drafts, *[0] * (most * len(counts))]
        if min(counts) < most:
            site.hit()
        wrong = [padded[most * row + at] for row, n in enumerate(counts) for at in range(n)]
        give(self, plan, wrong)

    site.wrap(Worker, "set_drafts", faulty)


def rejected_of_the_most(site: Site) -> None:
    """Cursors go back by what was not accepted of the largest number of drafts."""

    def faulty(
        verify: Callable[..., Tensor],
        self: RequestState,
        slots: IntArray,
        num_scheduled: IntArray,
        computed: IntArray,
        num_logits: IntArray,
        targets: Tensor,
    ) -> Tensor:
        accepted = verify(self, slots, num_scheduled, computed, num_logits, targets)
        missing = np.where(num_logits > 0, self.num_speculative_steps + 1 - num_logits, 0)
        if missing.any():
            site.hit()
        index = torch.from_numpy(slots.astype(np.int64))
        self.num_computed_tokens[index] -= torch.from_numpy(missing).to(torch.int32)
        return accepted

    site.wrap(RequestState, "post_verify", faulty)


def rows_of_the_longest(site: Site) -> None:
    """Logits are computed behind as many tokens of each request as of the one with most."""

    def faulty(rows: Callable[..., IntArray], batch: InputBatch, plan: StepPlan) -> IntArray:
        sound, drafts = rows(batch, plan), batch.num_draft_tokens_per_req
        if drafts is None or not batch.num_draft_tokens:
            return sound
        wrong: IntArray = np.maximum(sound - (int(drafts.max()) - np.repeat(drafts, 1 + drafts)), 0)
        if len(wrong) != len(sound) or (wrong == sound).all():
            return sound
        site.hit()
        return wrong

    site.wrap(worker_module, "logits_rows", faulty)


FAULTS: Final = (
    shipped("K21", "longer-queries-cover", "A graph of one query length is chosen for shorter "
            "queries.", longer_queries_cover, "C10", setting=BY_STEP),
    shipped("K21", "varlen-before-uniform", "A varlen graph is chosen where one for the queries' "
            "length is as small.", varlen_before_uniform, "C10", setting=BY_STEP),
    shipped("K21", "uniform-by-longest", "Unequal queries are dispatched as if all had the "
            "longest one's length.", uniform_by_longest, "C10", setting=BY_REQUEST),
    shipped("K37", "longest-query-length-only", "With draft counts that vary, graphs of the "
            "longest queries only are captured.", longest_length_only, "C10", setting=BY_STEP,
            at_capture=True),
    shipped("K37", "no-varlen-graphs", "With draft counts that vary, no graph takes unequal "
            "queries.", no_varlen_graphs, "C10", setting=BY_REQUEST, at_capture=True),
    shipped("K34", "drafts-as-if-all-had-most", "Drafts are dealt out as if every request had as "
            "many.", drafts_as_if_all_had_most, "C3", "C17", setting=BY_REQUEST),
    shipped("K34", "rejected-of-the-most", "Cursors go back by what the largest number of drafts "
            "would leave.", rejected_of_the_most, "C17", setting=BY_REQUEST),
    shipped("K34", "logits-rows-of-the-longest", "Logits come from rows counted by the longest "
            "query.", rows_of_the_longest, "C7", setting=BY_REQUEST),
)  # fmt: skip
