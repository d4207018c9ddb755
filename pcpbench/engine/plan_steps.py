"""A scenario as the steps that the scheduler makes of it.

Owns limits, arrivals and the nominal clock. Knows no model and imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from pcpbench.engine.plan_limits import flag, resolve_limits
from pcpbench.engine.scheduler import Request, Scheduler
from pcpbench.errors import UsageError
from pcpbench.kv_groups import ONE_GROUP, KVGroup
from pcpbench.plan import NewRequest, ScenarioPlan, StepPlan
from pcpbench.scenarios.acceptance import num_accepted, num_drafts
from pcpbench.scenarios.limits import request_problem
from pcpbench.scenarios.prompts import prompt_token_ids
from pcpbench.scenarios.schema import RequestSpec, Scenario

MAX_STEPS: Final = 50_000
MAX_PROMPT_TOKENS: Final = 1 << 24


def make_plan(
    scenario: Scenario,
    *,
    vocab_size: int,
    dcp_size: int = 1,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
    block_size: int | None = None,
    seed: int = 0,
    kv_groups: Sequence[KVGroup] = ONE_GROUP,
    num_speculative_tokens: int = 0,
    dynamic_spec: str = "off",
    num_lookahead_tokens: int = 0,
) -> ScenarioPlan:
    """All steps of a scenario; a limit that is given wins over the scenario's own.

    With max_num_seqs alone given, a smaller token budget of the scenario is raised to it.
    One block id of a sharded KV group stands for block_size x dcp_size positions and `num_blocks`
    stays as it is, so DCP multiplies the capacity, as it does in a deployment. Where blocks are not
    scarce the steps are the same for every dcp_size; only the block ids differ. The KV groups share
    one pool: no two groups ever hold the same id. The last step is idle and hands back the requests
    that finished before it, so a worker ends empty. num_speculative_tokens: draft tokens that every
    decode verifies; the token budget is raised where it has no room for them. dynamic_spec: whether
    decodes verify fewer of them (`acceptance.num_drafts`). num_lookahead_tokens: positions that a
    draft model needs behind those of a step (see ScenarioPlan). Raises UsageError for
    limits that exclude each other and for a request that could never finish under them.
    """
    query_len = 1 + num_speculative_tokens
    limits = resolve_limits(
        scenario.limits,
        {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "num_blocks": num_blocks,
            "block_size": block_size,
        },
        query_len,
    )
    specs = sorted(scenario.expand(), key=lambda spec: spec.arrival_step)
    num_tokens = sum(spec.prompt_len for spec in specs)
    if num_tokens > MAX_PROMPT_TOKENS:
        raise UsageError(
            f"scenario {scenario.name!r} has prompts of {num_tokens:,} tokens in all: at most "
            f"{MAX_PROMPT_TOKENS:,} are planned at once: ask for fewer requests, or shorter ones."
        )
    for spec in specs:
        problem = request_problem(
            spec.prompt_len,
            spec.output_len,
            limits,
            dcp_size,
            kv_groups,
            num_speculative_tokens + num_lookahead_tokens,
        )
        if problem is not None:
            raise UsageError(
                f"{flag(problem.field)} {problem.reason} (request {spec.req_id!r} of scenario "
                f"{scenario.name!r})."
            )
    scheduler = Scheduler(
        limits,
        kv_groups=kv_groups,
        dcp_size=dcp_size,
        num_speculative_tokens=num_speculative_tokens,
        num_lookahead_tokens=num_lookahead_tokens,
        accepts=lambda request, count: num_accepted(
            scenario.name, request.req_id, request.num_output_tokens, count, seed
        ),
        drafts=lambda request, index: num_drafts(
            scenario.name,
            request.req_id,
            request.num_output_tokens,
            num_speculative_tokens,
            dynamic_spec,
            index,
            seed,
        ),
    )
    arrivals = deque(
        (spec.arrival_step, _request(scenario.name, spec, vocab_size, seed)) for spec in specs
    )
    return ScenarioPlan(
        scenario=scenario.name,
        steps=tuple(_run_clock(scenario, scheduler, arrivals)),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_blocks=limits.num_blocks,
        block_sizes=tuple(group.span(limits.block_size, dcp_size) for group in kv_groups),
        vocab_size=vocab_size,
        arrivals_s={spec.req_id: spec.arrival_s for spec in specs},
        requests=tuple(_asked(scenario, vocab_size, seed)),
        sliding_windows=_windows(kv_groups),
        num_lookahead_tokens=num_lookahead_tokens,
        num_speculative_tokens=num_speculative_tokens,
        dynamic_spec=dynamic_spec,
    )


def _windows(kv_groups: Sequence[KVGroup]) -> tuple[int, ...]:
    windows = tuple(group.sliding_window for group in kv_groups)
    return windows if any(windows) else ()


def _run_clock(
    scenario: Scenario, scheduler: Scheduler, arrivals: deque[tuple[int, Request]]
) -> list[StepPlan]:
    """Steps from the first arrival to the last output, and the idle one that hands back.

    The nominal clock counts steps. While nothing runs it still advances, at most `max_idle_steps`
    dummy steps long; then it jumps to the next arrival. It ends: the oldest running request gets a
    token in every step, and MAX_STEPS bounds what a file may ask for.
    """
    steps: list[StepPlan] = []
    clock = num_idle = 0
    while arrivals or scheduler.has_work:
        if not scheduler.has_work and num_idle >= scenario.max_idle_steps:
            clock = max(clock, arrivals[0][0])
        while arrivals and arrivals[0][0] <= clock:
            scheduler.add(arrivals.popleft()[1])
        if len(steps) >= MAX_STEPS:
            raise UsageError(
                f"scenario {scenario.name!r} takes more than {MAX_STEPS:,} steps: ask for fewer "
                "requests or outputs, or raise --max-num-seqs."
            )
        steps.append(scheduler.schedule(len(steps), clock * scenario.step_time_s))
        num_idle = num_idle + 1 if steps[-1].idle else 0
        clock += 1
    steps.append(scheduler.schedule(len(steps), clock * scenario.step_time_s))
    return steps


def _request(scenario: str, spec: RequestSpec, vocab_size: int, seed: int) -> Request:
    prompt = prompt_token_ids(
        scenario, spec.prompt_key, spec.prompt_len, vocab_size=vocab_size, seed=seed
    )
    return Request(req_id=spec.req_id, prompt_token_ids=prompt, max_tokens=spec.output_len)


def _asked(scenario: Scenario, vocab_size: int, seed: int) -> Iterator[NewRequest]:
    """The requests straight from the scenario, for an audit of what became of them."""
    for spec in scenario.expand():
        prompt = prompt_token_ids(
            scenario.name, spec.prompt_key, spec.prompt_len, vocab_size=vocab_size, seed=seed
        )
        yield NewRequest(req_id=spec.req_id, prompt_token_ids=prompt, max_tokens=spec.output_len)
