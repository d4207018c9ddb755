"""A step of the plan as vLLM's scheduler would order it.

Owns the translation of StepPlan into SchedulerOutput, and the order in which vLLM's runner puts a
step's requests. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from pcpbench.plan import ScenarioPlan, ScheduledRequest, StepPlan
from pcpbench.targets.vllm.api import VllmApi


def arrange(api: VllmApi, plan: ScenarioPlan, decode_query_len: int) -> ScenarioPlan:
    """The plan with each step's requests as vLLM's runner sorts them.

    It wants decodes first, which the plan has, and shorter queries before longer ones: prefills of
    9 and 4 tokens change places. Rows of records are compared in this order.
    """
    sort = api.function("sort_batch_req_ids")
    steps = tuple(_arranged(step, sort, decode_query_len) for step in plan.steps)
    return msgspec.structs.replace(plan, steps=steps)


def _arranged(step: StepPlan, sort: Callable[..., list[str]], query_len: int) -> StepPlan:
    by_id = {request.req_id: request for request in step.scheduled}
    order = sort(_num_tokens(step.scheduled), _drafts(step.scheduled), query_len)
    return msgspec.structs.replace(step, scheduled=tuple(by_id[req_id] for req_id in order))


def scheduler_output(
    api: VllmApi,
    plan: StepPlan,
    tokens: dict[str, list[int]],
    *,
    again: bool = False,
    late: Mapping[str, int] | None = None,
) -> Any:
    """The SchedulerOutput of a step.

    tokens: req_id -> prompt and what was generated before a preemption, for each request that
    enters. again: the step is prepared once more; whoever entered with it is known by now. late: by
    how much a request's cursor is too large, since vLLM's scheduler, running ahead of the device,
    takes the step before to have kept all its drafts (`rejected_in`).
    """
    output_module: Any = api.modules["sched_output"]
    output = output_module.SchedulerOutput.make_empty()
    output.num_scheduled_tokens = _num_tokens(plan.scheduled)
    output.total_num_scheduled_tokens = plan.num_tokens
    output.scheduled_spec_decode_tokens = _drafts(plan.scheduled)
    fresh = set() if again else {request.req_id for request in plan.new_requests}
    if not again:
        output.finished_req_ids = set(plan.finished_req_ids)
        output.preempted_req_ids = set(plan.preempted_req_ids)
        output.scheduled_new_reqs = [
            output_module.NewRequestData(
                req_id=request.req_id,
                prompt_token_ids=list(request.prompt_token_ids),
                mm_features=[],
                sampling_params=SimpleNamespace(max_tokens=request.max_tokens),
                pooling_params=None,
                block_ids=_block_ids(plan, request.req_id),
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=tokens[request.req_id],
            )
            for request in plan.new_requests
        ]
    cached = [request for request in plan.scheduled if request.req_id not in fresh]
    more = () if again else plan.new_block_ids
    data = output_module.CachedRequestData.make_empty()
    data.req_ids = [request.req_id for request in cached]
    behind = late or {}
    data.num_computed_tokens = [
        request.num_computed_tokens + behind.get(request.req_id, 0) for request in cached
    ]
    data.num_output_tokens = [0] * len(cached)
    data.new_block_ids = [
        _block_ids(plan, request.req_id) if request.req_id in more else None for request in cached
    ]
    output.scheduled_cached_reqs = data
    return output


def rejected_in(plan: StepPlan) -> dict[str, int]:
    """Drafts that a step rejects, of each request that has any."""
    return {r.req_id: r.num_rejected_tokens for r in plan.scheduled if r.num_rejected_tokens}


def _num_tokens(scheduled: Sequence[ScheduledRequest]) -> dict[str, int]:
    return {request.req_id: request.num_scheduled_tokens for request in scheduled}


def _drafts(scheduled: Sequence[ScheduledRequest]) -> dict[str, list[int]]:
    """Places of draft tokens: vLLM's runner counts them, the tokens themselves are the device's."""
    return {r.req_id: [-1] * r.num_draft_tokens for r in scheduled if r.num_draft_tokens}


def _block_ids(plan: StepPlan, req_id: str) -> tuple[list[int], ...]:
    return tuple(list(group) for group in plan.new_block_ids.get(req_id, ()))
