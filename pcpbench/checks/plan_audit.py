"""C19: the plan is a possible one, over all its steps (SPEC 9; docs/scenarios.md).

Every other contract takes the plan for the truth. Owns the audit of that truth: requests come and
go as the scenario asks, progress adds up, blocks have one owner. Blocks are in plan_blocks.py, and
whose turn it is in plan_queue.py. Knows no arm and no record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pcpbench.checks.plan_blocks import BlockAudit
from pcpbench.checks.plan_queue import QueueAudit
from pcpbench.plan import PLAN, NewRequest, ScenarioPlan, ScheduledRequest, StepPlan, has_arrived
from pcpbench.records import Violation

Finding = tuple[str, str]
"""A field of the step plan, and a sentence that names request and block."""


def plan_violations(plan: ScenarioPlan) -> Iterator[Violation]:
    """C19 over a whole plan; where a step breaks it, later ones are judged from what it says."""
    audit = _PlanAudit(plan)
    for place, step in enumerate(plan.steps):
        for field, message in audit.step(place, step):
            yield _violation(plan, step.index, field, message)
    last = plan.steps[-1].index if plan.steps else 0
    for field, message in () if plan.is_cut_short else audit.end():
        yield _violation(plan, last, field, message)


def _violation(plan: ScenarioPlan, step: int, field: str, message: str) -> Violation:
    return Violation(
        contract="C19",
        arm=PLAN,
        scenario=plan.scenario,
        step=step,
        rank=None,
        tensor=field,
        message=message,
    )


@dataclass
class _Progress:
    """One request so far: known tokens at its last admission, tokens in the cache, outputs."""

    is_running: bool = False
    is_back: bool = False
    prefill_len: int = 0
    num_computed: int = 0
    num_generated: int = 0


class _PlanAudit:
    """Follows a plan step by step, as a worker would."""

    def __init__(self, plan: ScenarioPlan) -> None:
        self._plan = plan
        self._asked = {request.req_id: request for request in plan.requests}
        self._progress: dict[str, _Progress] = {}
        self._blocks = BlockAudit(plan.num_blocks, plan.block_sizes, plan.sliding_windows)
        self._queue = QueueAudit(plan)
        self._time_s = 0.0

    def step(self, place: int, step: StepPlan) -> Iterator[Finding]:
        """Findings of one step: who leaves, who enters, blocks, then what is scheduled."""
        if step.index != place:
            yield "index", f"step {place} of the plan calls itself {step.index}"
        if step.time_s < self._time_s:
            yield "time_s", f"the clock runs back from {self._time_s:g} s to {step.time_s:g} s"
        self._time_s = step.time_s
        yield from self._come_and_go(step)
        running = {name for name, request in self._progress.items() if request.is_running}
        if len(running) > self._plan.max_num_seqs:
            yield "new_requests", f"{len(running)} requests run, at most {self._plan.max_num_seqs}"
        for message in self._blocks.hand_out(step.new_block_ids, running):
            yield "new_block_ids", message
        for message in self._schedule(step, running):
            yield "scheduled", message
        if step.idle is bool(step.scheduled):
            yield "idle", f"idle is {step.idle} in a step of {len(step.scheduled)} requests"
        for message in self._blocks.missing():
            yield "new_block_ids", message

    def end(self) -> Iterator[Finding]:
        """What the scenario asks for and no step did."""
        if not self._plan.requests:
            yield "requests", "the plan does not say which requests its scenario has"
        for asked in self._plan.requests:
            name, request = f"request {asked.req_id}", self._progress.get(asked.req_id)
            if request is None:
                yield "new_requests", f"{name} of the scenario is never admitted"
            elif request.num_generated < asked.max_tokens:
                outputs = f"{request.num_generated} of its {asked.max_tokens} outputs"
                yield "scheduled", f"{name} ends with {outputs}"
            elif not request.is_back:
                yield "finished_req_ids", f"{name} has all its outputs and never leaves"

    def _come_and_go(self, step: StepPlan) -> Iterator[Finding]:
        """Who leaves, what goes back before a window, who enters."""
        yield from self._leave(step)
        for message in self._queue.leave(step):
            yield "preempted_req_ids", message
        yield from self._recycle(step)
        for new in step.new_requests:
            for message in self._enter(step, new):
                yield "new_requests", f"request {new.req_id} {message}"
        for name, message in self._queue.admit(step):
            yield "new_requests", f"request {name} {message}"

    def _leave(self, step: StepPlan) -> Iterator[Finding]:
        """Requests with all outputs leave before the next step, others only by preemption."""
        for field, names in (
            ("finished_req_ids", step.finished_req_ids),
            ("preempted_req_ids", step.preempted_req_ids),
        ):
            for req_id in names:
                request = self._progress.get(req_id)
                if request is None or not request.is_running:
                    yield field, f"request {req_id} leaves and does not run"
                    continue
                is_finished = field == "finished_req_ids"
                if self._is_done(req_id) is not is_finished:
                    how = "leaves as finished" if is_finished else "is preempted"
                    outputs = f"{request.num_generated} of {self._wanted(req_id)} outputs"
                    yield field, f"request {req_id} {how} with {outputs}"
                request.is_running, request.is_back = False, is_finished
                self._blocks.give_back(req_id)
        for req_id, request in self._progress.items():
            if request.is_running and self._is_done(req_id):
                outputs = f"all its {self._wanted(req_id)} outputs"
                yield "finished_req_ids", f"request {req_id} has {outputs} and keeps its place"

    def _recycle(self, step: StepPlan) -> Iterator[Finding]:
        """Blocks before a window go back before anybody enters and new ones are handed out."""
        computed = {
            name: request.num_computed
            for name, request in self._progress.items()
            if request.is_running
        }
        for message in self._blocks.recycle(step.freed_block_ids, computed):
            yield "freed_block_ids", message

    def _enter(self, step: StepPlan, new: NewRequest) -> Iterator[str]:
        if new.req_id not in self._asked and self._plan.requests:
            yield "is admitted and not in the scenario"
        asked = self._asked.setdefault(new.req_id, new)
        request = self._progress.setdefault(new.req_id, _Progress())
        if request.is_running or request.is_back:
            yield f"is admitted and {'runs already' if request.is_running else 'has finished'}"
        arrival = self._plan.arrivals_s.get(new.req_id, 0.0)
        if not has_arrived(arrival, step.time_s):
            yield f"is admitted at {step.time_s:.15g} s and arrives at {arrival:.15g} s"
        found, right = len(new.prompt_token_ids), len(asked.prompt_token_ids)
        if found != right:
            yield f"enters with a prompt of {found} tokens, the scenario says {right}"
        elif new.prompt_token_ids != asked.prompt_token_ids:
            yield "enters with another prompt than the scenario's"
        if new.max_tokens != asked.max_tokens:
            yield f"is to generate {new.max_tokens} tokens, the scenario says {asked.max_tokens}"
        if new.num_generated != request.num_generated:
            yield (
                f"enters with {new.num_generated} generated tokens and has generated "
                f"{request.num_generated}"
            )
        request.is_running, request.num_computed = True, 0
        request.prefill_len = found + request.num_generated
        self._blocks.enter(new.req_id)

    def _schedule(self, step: StepPlan, running: set[str]) -> Iterator[str]:
        names = [share.req_id for share in step.scheduled]
        decoding = {name for name in running if self._decodes(name)}
        for place, share in enumerate(step.scheduled):
            if share.req_id not in running:
                yield f"request {share.req_id} is scheduled and does not run"
            elif share.req_id in names[:place]:
                yield f"request {share.req_id} is scheduled twice"
            else:
                for message in self._share(share):
                    yield f"request {share.req_id} {message}"
        if running and not names:
            yield f"nothing is scheduled although request {min(running)} runs"
        elif names:
            for name in sorted(decoding.difference(names)):
                yield f"request {name} decodes and gets no token"
        yield from self._unequal_drafts(step)
        if step.num_tokens > self._plan.max_num_batched_tokens:
            limit = self._plan.max_num_batched_tokens
            yield f"{step.num_tokens} tokens are scheduled, at most {limit}"
        phases = [share.is_prefilling for share in step.scheduled]
        if phases != sorted(phases):
            yield f"request {names[phases.index(True)]} prefills and stands before a decode"

    def _decodes(self, req_id: str) -> bool:
        """Whether a request runs, has its prefill behind it and outputs ahead of it."""
        request = self._progress[req_id]
        return request.num_computed >= request.prefill_len and not self._is_done(req_id)

    def _drafts(self, share: ScheduledRequest) -> Iterator[str]:
        """A decode has as many drafts as were asked for, and as max_model_len has room for.

        With 3 drafts and max_model_len 32 a decode with 30 tokens computed has 1.
        """
        most = self._plan.num_speculative_tokens
        if most is None or share.is_prefilling:
            return
        count, due = share.num_draft_tokens, min(most, self._room(share))
        if self._plan.dynamic_spec == "off" and count != due:
            yield f"verifies {count} drafts, {due} are due"
        elif count > due:
            yield f"verifies {count} drafts, at most {due}"

    def _room(self, share: ScheduledRequest) -> int:
        return max(0, self._plan.max_model_len - share.num_computed_tokens - 1)

    def _unequal_drafts(self, step: StepPlan) -> Iterator[str]:
        """Where each step has a number of drafts, its decodes have all of them, or fill up."""
        if self._plan.dynamic_spec != "step":
            return
        decodes = [share for share in step.scheduled if not share.is_prefilling]
        count = max((share.num_draft_tokens for share in decodes), default=0)
        for share in decodes:
            due = min(count, self._room(share))
            if share.num_draft_tokens < due:
                drafts = f"{share.num_draft_tokens} drafts in a step of {count} each"
                yield f"request {share.req_id} verifies {drafts}"

    def _share(self, share: ScheduledRequest) -> Iterator[str]:
        """What is wrong with the share of a running request; it has then advanced by it."""
        request = self._progress[share.req_id]
        prompt_len = len(self._asked[share.req_id].prompt_token_ids)
        for name, found, right in (
            ("computed", share.num_computed_tokens, request.num_computed),
            ("prefill", share.prefill_len, request.prefill_len),
            ("prompt", share.prompt_len, prompt_len),
        ):
            if found != right:
                yield f"is said to have {found} {name} tokens and has {right}"
        num_tokens, num_drafts = share.num_scheduled_tokens, share.num_draft_tokens
        left = share.prefill_len - share.num_computed_tokens
        if share.is_prefilling and (num_drafts or not 1 <= num_tokens <= left):
            yield f"prefills {num_tokens} tokens with {num_drafts} drafts, {left} are left"
        elif not share.is_prefilling and num_tokens != 1 + num_drafts:
            yield f"decodes {num_tokens} tokens with {num_drafts} drafts"
        end = share.num_computed_tokens + share.num_scheduled_tokens
        if end > self._plan.max_model_len:
            yield f"reaches {end} tokens, at most {self._plan.max_model_len}"
        if not 0 <= share.num_accepted_tokens <= num_drafts:
            yield f"accepts {share.num_accepted_tokens} of {num_drafts} drafts"
        yield from self._drafts(share)
        request.num_computed = end - share.num_rejected_tokens
        request.prefill_len = share.prefill_len
        request.num_generated += share.num_output_tokens
        if request.num_generated > self._wanted(share.req_id):
            yield f"generates token {request.num_generated} of {self._wanted(share.req_id)}"
        ahead = end + self._plan.num_lookahead_tokens
        self._blocks.need(share.req_id, max(end, min(ahead, self._plan.max_model_len)))

    def _wanted(self, req_id: str) -> int:
        return self._asked[req_id].max_tokens

    def _is_done(self, req_id: str) -> bool:
        return self._progress[req_id].num_generated >= self._wanted(req_id)
