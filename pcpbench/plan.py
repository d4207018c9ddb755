"""What the scheduler decided for one step: what engine and judge share.

Owns the frozen records of a plan. A plan is made once for a scenario and fed to every arm, so that
all arms run the same steps. It holds no tensor and knows no engine; `checks/` audits it and
rebuilds all metadata of a step from it.
"""

from __future__ import annotations

from typing import Final

import msgspec

PLAN: Final = "plan"
"""The arm of a violation that all arms share: the plan itself is at fault (contract C19)."""


def has_arrived(arrival_s: float, time_s: float) -> bool:
    """Whether a step that starts at time_s sees an arrival, both on the scenario's clock.

    The slack is for products of steps and seconds: 0.14 s has arrived by step 7 of 0.02 s, which
    begins at 0.14 or, as floats multiply, a hair before it.
    """
    return time_s >= arrival_s * (1.0 - 1e-15)


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request's share of one step.

    req_id: its name. num_scheduled_tokens: tokens this step (0 never occurs).
    num_computed_tokens: tokens whose KV is in the cache before the step.
    prefill_len: tokens known when the request was (re)admitted: the prompt, plus what had been
    generated before a preemption. prompt_len: tokens of the prompt.
    num_draft_tokens: draft tokens among the scheduled ones (speculative decoding).
    num_accepted_tokens: those of them that verification is to accept: the plan fixes it, and the
    drafts are chosen so that it comes true.
    """

    req_id: str
    num_scheduled_tokens: int
    num_computed_tokens: int
    prefill_len: int
    prompt_len: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def is_prefilling(self) -> bool:
        """A phase is what the request has left to prefill, never the shape of its query."""
        return self.num_computed_tokens < self.prefill_len

    @property
    def samples(self) -> bool:
        """Whether the step ends with the request's next token being sampled."""
        return self.num_computed_tokens + self.num_scheduled_tokens >= self.prefill_len

    @property
    def num_logits(self) -> int:
        """Rows of logits: one for each draft token and one for the token after them, or none."""
        return 1 + self.num_draft_tokens if self.samples else 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the step adds to the request: accepted drafts and the one after them."""
        return 1 + self.num_accepted_tokens if self.samples else 0

    @property
    def num_rejected_tokens(self) -> int:
        """Draft tokens whose KV is written and will be overwritten."""
        return self.num_draft_tokens - self.num_accepted_tokens


class NewRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that enters the worker with this step (or re-enters it after a preemption).

    prompt_token_ids: the prompt. max_tokens: tokens to generate. num_generated: tokens generated
    before a preemption; the worker appends that many of its own earlier outputs to the prompt.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    num_generated: int = 0


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step.

    index: position in the scenario, from 0.
    scheduled: requests with tokens in this step, decodes first, then prefills, each in order of
    admission. new_requests: entered with this step.
    new_block_ids: req_id -> one tuple of new block ids for each KV group, in the order they extend
    the request's table.
    freed_block_ids: req_id -> for each KV group the blocks at the front of the request's table that
    lie before the sliding window of its next query: given back before this step, and perhaps handed
    out again in it. Their table columns are not used again.
    finished_req_ids, preempted_req_ids: left the worker before this step; their blocks may be
    handed out again in the same step.
    idle: nothing is scheduled and the ranks run a dummy step.
    time_s: the scenario's clock when the step starts.
    """

    index: int
    scheduled: tuple[ScheduledRequest, ...]
    new_requests: tuple[NewRequest, ...] = ()
    new_block_ids: dict[str, tuple[tuple[int, ...], ...]] = {}
    freed_block_ids: dict[str, tuple[tuple[int, ...], ...]] = {}
    finished_req_ids: tuple[str, ...] = ()
    preempted_req_ids: tuple[str, ...] = ()
    idle: bool = False
    time_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Scheduled tokens over all requests."""
        return sum(request.num_scheduled_tokens for request in self.scheduled)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens over all requests."""
        return sum(request.num_draft_tokens for request in self.scheduled)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the step adds to its requests."""
        return sum(request.num_output_tokens for request in self.scheduled)

    @property
    def has_prefill(self) -> bool:
        """Whether any request still prefills."""
        return any(request.is_prefilling for request in self.scheduled)


class ScenarioPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All steps of one scenario with the limits they were made under.

    num_blocks includes the null block 0, which is never handed out.
    block_sizes: token positions that one block id stands for, one entry a KV group
    (block_size x dcp where the group is sharded). sliding_windows: how many positions a query of
    each group sees, its own among them, 0 for all; empty where all groups see all.
    arrivals_s: req_id -> arrival on the scenario's clock.
    requests: every request as the scenario asks for it, whatever the scheduler made of it.
    is_cut_short: these are a scenario's first steps only; what it asks for besides comes later.
    num_lookahead_tokens: positions behind a request's last scheduled token that it has blocks for,
    as far as max_model_len allows: a draft model writes there.
    num_speculative_tokens: drafts that a decode verifies, or the most where dynamic_spec is not
    `off`; None where nobody said, as in bundles of older versions.
    """

    scenario: str
    steps: tuple[StepPlan, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_sizes: tuple[int, ...]
    vocab_size: int
    arrivals_s: dict[str, float] = {}
    requests: tuple[NewRequest, ...] = ()
    is_cut_short: bool = False
    sliding_windows: tuple[int, ...] = ()
    num_lookahead_tokens: int = 0
    num_speculative_tokens: int | None = None
    dynamic_spec: str = "off"

    def sliding_window(self, group: int) -> int:
        """The window of one KV group, 0 for none."""
        return self.sliding_windows[group] if self.sliding_windows else 0
