"""Continuous batching: who runs in a step, with how many tokens, on which KV blocks.

Owns the queue, the running requests and the decisions of one step; plan_steps.py turns a scenario
into steps with it. Lengths decide everything: there is no EOS, and nothing here depends on what a
model outputs, so one plan serves every arm. How many draft tokens a verification accepts is drawn,
too: the drafts are chosen later so that it comes true. Imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pcpbench.engine.block_pool import BlockPool
from pcpbench.kv_groups import ONE_GROUP, KVGroup
from pcpbench.plan import NewRequest, ScheduledRequest, StepPlan
from pcpbench.scenarios.limits import blocks_for
from pcpbench.scenarios.schema import Limits


@dataclass(eq=False)
class Request:
    """What the scheduler knows of one request.

    prefill_len: tokens known at its last admission, to be prefilled before it decodes.
    num_computed_tokens: tokens with KV in the cache. num_output_tokens: tokens sampled so far.
    block_ids: one list a KV group, of the blocks that it holds; num_freed: how many before these it
    held and gave back, one entry a group.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    prefill_len: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    num_freed: list[int] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens are left to prefill."""
        return self.num_computed_tokens < self.prefill_len


@dataclass
class _Step:
    """The step being put together: its place in the plan, and tokens that may still be scheduled.

    scheduled keeps the order of scheduling: decodes, running prefills, then admissions.
    """

    index: int
    budget: int
    scheduled: dict[str, tuple[Request, ScheduledRequest]] = field(default_factory=dict)
    admitted: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    freed_block_ids: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)


class Scheduler:
    """Decides steps one after the other.

    A step holds the decodes, then the prefills, each in order of admission; prefills are cut to the
    tokens that are left. When blocks run out, the request admitted last gives its own back and
    waits at the head of the queue, to be prefilled again from its tokens so far. Blocks that lie
    before a sliding window for good are free from the next step on, while their request runs.
    groups_and_spans: each KV group and how many positions one of its block ids stands for.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        kv_groups: Sequence[KVGroup] = ONE_GROUP,
        dcp_size: int = 1,
        num_speculative_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        accepts: Callable[[Request, int], int] = lambda request, num_drafts: num_drafts,
        drafts: Callable[[Request, int], int] | None = None,
    ) -> None:
        """dcp_size: ranks that share the positions of a sharded KV group.

        num_speculative_tokens: draft tokens of a decode. num_lookahead_tokens: see ScenarioPlan.

        accepts: how many of its draft tokens a request accepts in its next step. drafts: how many a
        request verifies in the step of this index; all by default.
        """
        self._limits = limits
        self.groups_and_spans = tuple(
            (group, group.span(limits.block_size, dcp_size)) for group in kv_groups
        )
        self._accepts, self._num_lookahead_tokens = accepts, num_lookahead_tokens
        self._drafts = drafts or (lambda request, index: num_speculative_tokens)
        self._pool = BlockPool(limits.num_blocks)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._finished: list[str] = []

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request; it must fit the KV cache alone (`limits.request_problem`)."""
        self._waiting.append(request)

    def schedule(self, index: int, time_s: float) -> StepPlan:
        """The next step, taken as done: its tokens count as computed and sampled afterwards."""
        step = _Step(index, budget=self._limits.max_num_batched_tokens)
        finished, self._finished = self._finished, []
        for request in self._running:
            self._recycle(request, step)
        self._schedule_running(step)
        if not step.preempted:
            self._admit(step)
        plan = StepPlan(
            index=index,
            scheduled=tuple(share for _, share in step.scheduled.values()),
            new_requests=tuple(step.admitted),
            new_block_ids=step.new_block_ids,
            freed_block_ids=step.freed_block_ids,
            finished_req_ids=tuple(finished),
            preempted_req_ids=tuple(step.preempted),
            idle=not step.scheduled,
            time_s=time_s,
        )
        self._advance(step)
        return plan

    def _schedule_running(self, step: _Step) -> None:
        """Decodes first, which is the order of admission.

        The next request is admitted only with tokens that those before it had no use for, so all
        running ones but the last have been prefilled to the end. max_num_batched_tokens >=
        max_num_seqs x (1 + num_speculative_tokens) leaves each decode its tokens.
        """
        for request in list(self._running):
            num_tokens = min(self._num_wanted(request, index=step.index), step.budget)
            if request in self._running and num_tokens:
                self._make_room(request, num_tokens, step)
            if request in self._running and num_tokens:
                self._take(request, num_tokens, step)

    def _num_wanted(self, request: Request, index: int) -> int:
        """A decode takes one token and its drafts, fewer of them where the sequence must end."""
        if request.is_prefilling:
            return request.prefill_len - request.num_computed_tokens
        room = self._limits.max_model_len - request.num_computed_tokens
        return min(1 + self._drafts(request, index), room)

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> None:
        """Preempt from the end of the admission order until `request` fits; it may be itself.

        Nobody admitted after `request` has got anything in this step yet.
        """
        while sum(self._missing_blocks(request, num_tokens)) > self._pool.num_free:
            victim = self._running.pop()
            self._preempt(victim, step)
            if victim is request:
                return

    def _preempt(self, victim: Request, step: _Step) -> None:
        """All KV of the victim is lost, its outputs are kept."""
        step.preempted.append(victim.req_id)
        step.freed_block_ids.pop(victim.req_id, None)  # all of its blocks go back
        self._release(victim)
        victim.num_computed_tokens = 0
        self._waiting.appendleft(victim)

    def _admit(self, step: _Step) -> None:
        """First come, first served, while requests, tokens and blocks last."""
        while self._waiting and step.budget and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            request.prefill_len = request.prompt_len + request.num_output_tokens
            num_tokens = min(request.prefill_len, step.budget)
            if sum(self._missing_blocks(request, num_tokens)) > self._pool.num_free:
                return
            self._running.append(self._waiting.popleft())
            request.block_ids = [[] for _ in self.groups_and_spans]
            request.num_freed = [0 for _ in self.groups_and_spans]
            step.admitted.append(
                NewRequest(
                    req_id=request.req_id,
                    prompt_token_ids=request.prompt_token_ids,
                    max_tokens=request.max_tokens,
                    num_generated=request.num_output_tokens,
                )
            )
            self._take(request, num_tokens, step)

    def _take(self, request: Request, num_tokens: int, step: _Step) -> None:
        """Give tokens and the blocks for their KV; the room has been made."""
        missing = self._missing_blocks(request, num_tokens)
        if any(missing):
            new_ids = tuple(self._pool.take(count) for count in missing)
            step.new_block_ids[request.req_id] = new_ids
            for ids, new in zip(request.block_ids, new_ids, strict=True):
                ids.extend(new)
        step.scheduled[request.req_id] = (request, self._share(request, num_tokens))
        step.budget -= num_tokens

    def _share(self, request: Request, num_tokens: int) -> ScheduledRequest:
        """The last output has no drafts behind it that could still be accepted."""
        num_drafts = 0 if request.is_prefilling else num_tokens - 1
        num_left = request.max_tokens - request.num_output_tokens - 1
        accepted = min(self._accepts(request, num_drafts), num_left) if num_drafts else 0
        return ScheduledRequest(
            req_id=request.req_id,
            num_scheduled_tokens=num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            prefill_len=request.prefill_len,
            prompt_len=request.prompt_len,
            num_draft_tokens=num_drafts,
            num_accepted_tokens=accepted,
        )

    def _missing_blocks(self, request: Request, num_tokens: int) -> list[int]:
        """Blocks to get, one number a group; span 16, 15 computed + 2 scheduled: 2 - 1 = 1."""
        num_positions = min(
            request.num_computed_tokens + num_tokens + self._num_lookahead_tokens,
            self._limits.max_model_len,
        )
        needed = [blocks_for(num_positions, span) for _, span in self.groups_and_spans]
        if not request.block_ids:
            return needed
        held = map(len, request.block_ids)
        return [n - h - f for n, h, f in zip(needed, held, request.num_freed, strict=True)]

    def _recycle(self, request: Request, step: _Step) -> None:
        """Give back the blocks that no query of this step or a later one sees.

        The next query stands at num_computed_tokens, rejected drafts being taken off already: with
        40 computed and a window of 24, positions 0 .. 16 are unseen, which is one block of 16.
        """
        freed = []
        for index, (group, span) in enumerate(self.groups_and_spans):
            num_unseen = group.num_unseen(request.num_computed_tokens) // span
            count = num_unseen - request.num_freed[index]
            freed.append(tuple(request.block_ids[index][:count]))
            del request.block_ids[index][:count]
            request.num_freed[index] += count
            self._pool.give_back(list(freed[-1]))
        if any(freed):
            step.freed_block_ids[request.req_id] = tuple(freed)

    def _release(self, request: Request) -> None:
        for ids in request.block_ids:
            self._pool.give_back(ids)
        request.block_ids, request.num_freed = [], []

    def _advance(self, step: _Step) -> None:
        """Count the step as done; requests with all their outputs leave and free their blocks."""
        for request, share in step.scheduled.values():
            request.num_computed_tokens += share.num_scheduled_tokens - share.num_rejected_tokens
            if not share.samples:
                continue
            request.num_output_tokens += share.num_output_tokens
            if request.num_output_tokens == request.max_tokens:
                self._running.remove(request)
                self._release(request)
                self._finished.append(request.req_id)
