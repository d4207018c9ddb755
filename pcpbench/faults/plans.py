"""Faults of the scheduler: plans that cannot be (K36). Every arm runs the same one and agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import msgspec

from pcpbench.engine import scheduler
from pcpbench.engine.block_pool import BlockPool
from pcpbench.engine.kv_cache import NULL_BLOCK_ID
from pcpbench.engine.scheduler import Request, Scheduler
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.plan import StepPlan

LONG: Final = replace(PCP, scenario="s11-long-kv")
MIXED: Final = replace(PCP, scenario="steady-mixed")
DRAFTS: Final = replace(PCP, spec_tokens=3)
PREEMPTED: Final = replace(PCP, scenario="preemption")


def null_block_handed_out(site: Site) -> None:
    """The null block is among the free ones."""

    def faulty(make: Callable[..., None], self: BlockPool, num_blocks: int) -> None:
        make(self, num_blocks)
        self._free.append(NULL_BLOCK_ID)
        site.hit()

    site.wrap(BlockPool, "__init__", faulty)


def blocks_freed_twice(site: Site) -> None:
    """Blocks that are given back are free twice, and go to two requests."""

    def faulty(free: Callable[..., None], self: BlockPool, block_ids: list[int]) -> None:
        free(self, block_ids)
        free(self, block_ids)
        site.hit()

    site.wrap(BlockPool, "give_back", faulty)


def next_block_late(site: Site) -> None:
    """A decode's next block is counted as needed one token too late."""

    def faulty(blocks_for: Callable[..., int], num_positions: int, span: int) -> int:
        late: int = blocks_for(max(1, num_positions - 1), span)
        if late != blocks_for(num_positions, span):
            site.hit()
        return late

    site.wrap(scheduler, "blocks_for", faulty)


def blocks_freed_early(site: Site) -> None:
    """Blocks of a request are free within the step of its last output."""

    def faulty(take: Callable[..., None], self: Scheduler, request: Request, *args: Any) -> None:
        take(self, request, *args)
        if not request.is_prefilling and request.num_output_tokens + 1 == request.max_tokens:
            self._release(request)
            site.hit()

    site.wrap(Scheduler, "_take", faulty)


def one_output_too_many(site: Site) -> None:
    """Requests leave an output too late."""

    def faulty(advance: Callable[..., None], self: Scheduler, step: Any) -> None:
        requests = [request for request, _ in step.scheduled.values()]
        for request in requests:
            request.max_tokens += 1
        advance(self, step)
        for request in requests:
            request.max_tokens -= 1
        site.hit()

    site.wrap(Scheduler, "_advance", faulty)


def output_forgotten(site: Site) -> None:
    """A request comes back from a preemption with an output fewer than it has generated."""

    def faulty(schedule: Callable[..., StepPlan], self: Scheduler, *args: Any) -> StepPlan:
        plan = schedule(self, *args)
        new = tuple(
            msgspec.structs.replace(one, num_generated=max(0, one.num_generated - 1))
            for one in plan.new_requests
        )
        if new != plan.new_requests:
            site.hit()
        return msgspec.structs.replace(plan, new_requests=new)

    site.wrap(Scheduler, "schedule", faulty)


def request_lost(site: Site) -> None:
    """The second request of a scenario is never queued."""
    seen: list[str] = []

    def faulty(add: Callable[..., None], self: Scheduler, request: Request) -> None:
        if len(seen) == 1 and request.req_id not in seen:
            site.hit()
        else:
            add(self, request)
        seen.append(request.req_id)

    site.wrap(Scheduler, "add", faulty)


def decode_left_out(site: Site) -> None:
    """Every fifth step with several decodes leaves the second of them without a token."""

    def faulty(wanted: Callable[..., int], self: Scheduler, request: Request, index: int) -> int:
        num_tokens = wanted(self, request, index=index)
        if request.is_prefilling or index % 5 or request not in self._running[1:2]:
            return num_tokens
        site.hit()
        return 0

    site.wrap(Scheduler, "_num_wanted", faulty)


def fewer_drafts(site: Site) -> None:
    """Decodes verify one draft fewer than they are to."""

    def faulty(wanted: Callable[..., int], self: Scheduler, request: Request, index: int) -> int:
        num_tokens = wanted(self, request, index=index)
        if request.is_prefilling or num_tokens < 2:
            return num_tokens
        site.hit()
        return num_tokens - 1

    site.wrap(Scheduler, "_num_wanted", faulty)


def newcomers_first(site: Site) -> None:
    """Who was preempted waits behind those that have yet to run."""

    def faulty(preempt: Callable[..., None], self: Scheduler, *args: Any) -> None:
        preempt(self, *args)
        if len(self._waiting) > 1:
            site.hit()
        self._waiting.rotate(-1)

    site.wrap(Scheduler, "_preempt", faulty)


FAULTS: Final = (
    shipped("K36", "null-block-handed-out", "The scheduler hands the null block to a request.",
            null_block_handed_out, "C19"),
    shipped("K36", "blocks-freed-twice", "Blocks are freed twice and go to two requests.",
            blocks_freed_twice, "C19"),
    shipped("K36", "next-block-late", "A request gets its next block a step after its first token "
            "in it.", next_block_late, "C19", setting=LONG),
    shipped("K36", "blocks-freed-early", "A request's blocks go to a newcomer in the step that "
            "still computes its last output.", blocks_freed_early, "C19", setting=MIXED),
    shipped("K36", "one-output-too-many", "Requests generate a token more than they were asked "
            "for.", one_output_too_many, "C19"),
    shipped("K36", "output-forgotten", "A request comes back from a preemption with one generated "
            "token fewer.", output_forgotten, "C19", setting=PREEMPTED),
    shipped("K36", "decode-left-out", "A running decode gets no token in some steps.",
            decode_left_out, "C19"),
    shipped("K36", "one-draft-fewer", "Decodes verify a draft fewer than they are to.",
            fewer_drafts, "C19", setting=DRAFTS),
    shipped("K36", "newcomers-first", "Who was preempted waits behind those that have yet to run.",
            newcomers_first, "C19", setting=PREEMPTED),
    shipped("K36", "request-lost", "A request of the scenario never runs.", request_lost, "C19"),
)  # fmt: skip
