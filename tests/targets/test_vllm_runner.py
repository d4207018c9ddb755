"""One rank's runner: what it asks of the stand, and what it hands to dispatch."""

from __future__ import annotations

import functools

import pytest
import torch

from pcpbench.engine_options import EngineOptions
from pcpbench.errors import CannotMeasure, EngineError
from pcpbench.modes import CUDAGraphMode
from pcpbench.plan import NewRequest, ScheduledRequest, StepPlan
from pcpbench.targets.vllm.orders import scheduler_output
from pcpbench.targets.vllm.runner import Nothing, RankRunner
from pcpbench.targets.vllm.settings import Settings, vllm_config

CPU = torch.device("cpu")


def config_of(pcp, dcp, mode=CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=8):
    return EngineOptions(pcp=pcp, dcp=dcp, capture_sizes="1,2,4,8").engine_config(
        mode,
        device="cpu",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_model_len=16,
        block_size=4,
        num_blocks=64,
    )


def runner_of(api, pcp, dcp, rank=0, **options):
    from pcpbench.model.presets import model_shape

    config = config_of(pcp, dcp, **options)
    groups = model_shape(config.model_config.preset).kv_groups
    return RankRunner(api, config, rank, CPU, 64, groups)


def enter(num_reqs):
    """All requests enter with a prompt of one token."""
    names = [f"r{i}" for i in range(num_reqs)]
    return StepPlan(
        index=0,
        scheduled=tuple(
            ScheduledRequest(
                req_id=name,
                num_scheduled_tokens=1,
                num_computed_tokens=0,
                prefill_len=1,
                prompt_len=1,
            )
            for name in names
        ),
        new_requests=tuple(
            NewRequest(req_id=name, prompt_token_ids=(7,), max_tokens=4) for name in names
        ),
        new_block_ids={name: ((i + 1,),) for i, name in enumerate(names)},
    )


def decode(num_reqs):
    """All of them decode one token."""
    return StepPlan(
        index=1,
        scheduled=tuple(
            ScheduledRequest(
                req_id=f"r{i}",
                num_scheduled_tokens=1,
                num_computed_tokens=1,
                prefill_len=1,
                prompt_len=1,
            )
            for i in range(num_reqs)
        ),
    )


def dispatched(runner, num_reqs):
    """What a decode batch hands to dispatch: (requests, tokens, label of what it got)."""
    plan = enter(num_reqs)
    tokens = {request.req_id: [7] for request in plan.new_requests}
    runner.step(scheduler_output(runner.api, plan, tokens))
    ready = runner.step(scheduler_output(runner.api, decode(num_reqs), {}))
    for request in plan.new_requests:
        runner.request_state.remove_request(request.req_id)
    asked = ready.dispatched
    label = runner.api.our_descriptor(asked.descriptor).label
    return asked.num_reqs, asked.num_tokens, label


def test_sharded_decodes_are_counted_over_all_ranks_and_tokens_on_one(api):
    """vLLM 0.33.0: of the decode batches of 1 to 8 requests only that of one is served."""
    runner = runner_of(api, pcp=2, dcp=1)
    found = {n: dispatched(runner, n) for n in range(1, 9)}
    assert {n: asked[:2] for n, asked in found.items()} == {n: (n, -(-n // 2)) for n in range(1, 9)}
    served = [n for n, (_, _, label) in found.items() if label.startswith("FULL")]
    assert served == [1]


def test_replicated_decodes_are_served(api):
    runner = runner_of(api, pcp=2, dcp=2)
    found = {n: dispatched(runner, n) for n in range(1, 9)}
    assert all(asked[:2] == (n, n) for n, asked in found.items())
    assert found[3][2] == "FULL[reqs=4,tokens=4]"
    assert all(label.startswith("FULL") for _, _, label in found.values())


def test_a_step_without_tokens_updates_states_and_ends(api):
    runner = runner_of(api, pcp=1, dcp=1)
    runner.step(scheduler_output(api, enter(2), {"r0": [7], "r1": [7]}))
    done = StepPlan(index=1, scheduled=(), finished_req_ids=("r0",), idle=True)
    assert runner.step(scheduler_output(api, done, {})) is None
    assert set(runner.request_state.req_id_to_index) == {"r1"}


def test_a_dummy_step_is_dispatched_and_owns_no_slot(api):
    ready = runner_of(api, pcp=2, dcp=1).dummy_step()
    assert ready.dispatched.num_reqs == 1
    assert bool((ready.slots == -1).all())
    assert not any(bool(table.any()) for table in ready.tables)


def test_what_a_newer_vllm_asks_for_is_named_and_is_no_fault_of_its_own(api):
    runner = runner_of(api, pcp=1, dcp=1).runner
    with pytest.raises(
        CannotMeasure, match=rf"vllm {api.version} asks for the runner's fresh_part"
    ):
        runner.fresh_part  # noqa: B018
    settings = vllm_config(api, config_of(2, 1))
    with pytest.raises(CannotMeasure, match=r"asks for parallel_config\.fresh_size"):
        settings.parallel_config.fresh_size  # noqa: B018
    assert not hasattr(settings.parallel_config, "fresh_size")
    assert settings.parallel_config.pcp_shard_decode_requests


def test_parts_that_are_not_on_the_stand_do_nothing():
    part = Nothing(known=3)
    assert part.known == 3
    assert part.anything(1, two=2) is None
    assert not hasattr(Settings("x", "1"), "__iter__")


def test_a_step_prepared_again_admits_nobody(api):
    plan = enter(2)
    again = scheduler_output(api, plan, {"r0": [7], "r1": [7]}, again=True)
    assert again.scheduled_new_reqs == []
    assert again.scheduled_cached_reqs.req_ids == ["r0", "r1"]
    assert again.scheduled_cached_reqs.new_block_ids == [None, None]


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_manager_that_flags_the_wrong_tokens_is_a_failure(api, monkeypatch, expert_parallel):
    """Without expert parallelism a rank routes all ranks' tokens, with it its own."""
    if api.generation != "0.33":
        pytest.skip(f"tried with vllm 0.33, and this is {api.version}")
    from pcpbench.model.presets import model_shape

    options = EngineOptions(pcp=2, model="tiny-moe", expert_parallel=expert_parallel)
    config = options.engine_config(
        CUDAGraphMode.FULL_DECODE_ONLY, device="cpu", max_num_seqs=8, max_num_batched_tokens=16,
        max_model_len=16, block_size=4, num_blocks=64,
    )  # fmt: skip
    groups = model_shape("tiny-moe").kv_groups
    RankRunner(api, config, 0, CPU, 64, groups)
    build = api.PCPManager.__init__

    @functools.wraps(build)
    def flipped(self, *args, moe_gathers_tokens=False, **named):
        build(self, *args, moe_gathers_tokens=not moe_gathers_tokens, **named)

    monkeypatch.setattr(api.PCPManager, "__init__", flipped)
    with pytest.raises(
        EngineError, match=f"expert parallelism {'on' if expert_parallel else 'off'}"
    ):
        RankRunner(api, config, 0, CPU, 64, groups)
