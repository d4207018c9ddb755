"""The installed vLLM's runner on the stand: judged by the contracts as they are."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from pcpbench.device.backends import resolve_backend
from pcpbench.device.clock import make_clock
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.modes import CUDAGraphMode
from pcpbench.results import Outcome
from pcpbench.scenarios.loader import parse_scenario
from pcpbench.session.ladder import build_ladder
from pcpbench.session.planning import plan_for, plan_scenario
from pcpbench.session.settings import known_differences
from pcpbench.session.stand import StandBuilder
from pcpbench.session.trial import Trial
from pcpbench.targets.choice import make_target
from pcpbench.targets.vllm.engine import GLOBAL_COUNT

CPU = torch.device("cpu")
SCENARIO = """\
name: small
description: Prompts of several lengths, a growing and shrinking batch, a dummy step, slots reused.
limits:
  {max_num_seqs: 4, max_num_batched_tokens: 16, max_model_len: 32, num_blocks: 24, block_size: 4}
requests:
  - {name: nine, prompt_len: 9, output_len: 4}
  - {name: three, prompt_len: 3, output_len: 4}
  - {name: one, prompt_len: 1, output_len: 2, at_step: 1}
  - {name: late, prompt_len: 5, output_len: 2, at_step: 6}
"""


class Bench:
    """The small scenario on vLLM, ready to be judged."""

    def __init__(
        self, candidate="full", base="eager", num_steps=None, scenario=SCENARIO, **options
    ):
        self.options = EngineOptions(target="vllm", **options)
        self.target = make_target("vllm", CPU, resolve_backend("auto", CPU))
        self.plan = plan_for(self.target, parse_scenario(scenario, "small"), self.options)
        if num_steps is not None:
            first = self.plan.steps[:num_steps]
            self.plan = msgspec.structs.replace(self.plan, steps=first, is_cut_short=True)
        ladder = build_ladder(base, candidate)
        builder = StandBuilder(self.target, ladder, self.options, "cpu")
        builder.check(self.plan)
        self.stand = builder.stand_for(self.plan)

    def run(self, checks="quick"):
        self.trial = Trial(
            self.plan,
            self.stand,
            make_clock(CPU),
            dtype="float32",
            teacher_forced=True,
            repetitions=0,
            checks=checks,
        )
        return self.trial.run()


@pytest.fixture
def bench(api):
    return Bench


def audit(result, arm="full"):
    return next(summary.dispatch for summary in result.arms if summary.arm == arm)


def contracts(result):
    return {violation.contract for violation in result.violations}


def test_replicated_decode_passes_and_every_decode_batch_is_served(bench):
    one = bench(pcp=2, dcp=2)
    result = one.run()
    assert result.outcome is Outcome.PASS, result.reasons
    found = audit(result)
    assert found.modes["FULL"] == sum(
        not step.has_prefill for step in one.plan.steps if step.scheduled
    )
    assert found.modes["IDLE"] >= 1
    assert found.never_served == ()
    assert set(found.reasons) == {"batch has a prefill"}


def test_sharded_decode_misses_full_and_the_audit_says_why(bench):
    one = bench(pcp=2)
    result = one.run()
    assert result.outcome is Outcome.FAIL
    assert contracts(result) == {"C10"}  # the finding, and nothing else
    found = audit(result)
    sizes = [len(step.scheduled) for step in one.plan.steps if not step.has_prefill]
    assert found.reasons[GLOBAL_COUNT] == sum(size > 1 for size in sizes) > 0
    assert found.modes["FULL"] == sizes.count(1) > 0
    assert [(b.name, b.wanted, b.ran_as) for b in found.never_served] == [
        ("decode with 2 to 3 requests", "FULL", ("eager",))
    ]
    assert found.never_served[0].why == GLOBAL_COUNT
    messages = [v.message for v in result.violations]
    assert any(
        "ran as NONE although FULL[reqs=1,tokens=1] covers its 1 rows" in m for m in messages
    )
    assert all(drift.ok for drift in result.drifts)


def test_with_full_and_piecewise_the_missed_batches_run_as_piecewise(bench):
    result = bench("full_and_piecewise", pcp=2, capture_sizes="1,2,4,8,16").run()
    assert contracts(result) == {"C10"}
    assert audit(result, "full_and_piecewise").never_served[0].ran_as == ("PIECEWISE",)
    assert all(drift.ok for drift in result.drifts)


def test_the_full_check_poisons_and_replays_vllms_buffers_too(bench):
    result = bench(pcp=2, dcp=2, num_steps=4).run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons


def test_candidates_are_vllms_own(bench):
    stand = bench(pcp=2, dcp=2, capture_sizes="1,2,4").stand
    assert [d.label for d in stand.arms["full"].candidates] == [
        "FULL[reqs=4,tokens=4]", "FULL[reqs=2,tokens=2]", "FULL[reqs=1,tokens=1]",
    ]  # fmt: skip
    uses = stand.arms["full"].addresses
    assert uses
    assert all(use.name for use in uses)  # every buffer that a graph touches is known (C8)


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({}, ["PIECEWISE[tokens=4]", "PIECEWISE[tokens=1]", "FULL[reqs=4,tokens=4]",
              "FULL[reqs=1,tokens=1]"]),
        # 8 would become 9: with 128 for the largest size there would be a graph of it.
        ({"capture_sizes": "1,8,128", "spec_tokens": 2},
         ["PIECEWISE[tokens=8]", "PIECEWISE[tokens=1]", "FULL[reqs=1,tokens=3]"]),
    ],
)  # fmt: skip
def test_sizes_that_no_step_has_room_for_are_told_and_no_fault_of_vllms(bench, options, right):
    """A step of the scenario has 16 tokens."""
    options = {"capture_sizes": "1,4,128", "pcp": 2, "dcp": 2} | options
    one = bench("full_and_piecewise", num_steps=3, **options)
    arm = one.stand.arms["full_and_piecewise"]
    assert [d.label for d in arm.candidates] == right
    result = one.run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert "capture size 128 is not used: a step holds at most 16 tokens." in {
        notice.message for notice in arm.notices
    }


LAST_TOKEN = """\
name: last-token
description: The 15th token of a prompt of 15 stands alone beside two decodes.
limits:
  {max_num_seqs: 4, max_num_batched_tokens: 16, max_model_len: 32, num_blocks: 24, block_size: 4}
requests:
  - {name: one, prompt_len: 3, output_len: 4}
  - {name: two, prompt_len: 3, output_len: 4}
  - {name: long, prompt_len: 15, output_len: 2, at_step: 1}
"""


def test_without_pcp_the_last_token_of_a_prompt_may_run_as_a_decode(bench):
    one = bench("full_and_piecewise", scenario=LAST_TOKEN, num_steps=3, pcp=1)
    last = one.plan.steps[2]
    assert last.has_prefill
    assert {request.num_scheduled_tokens for request in last.scheduled} == {1}
    result = one.run()
    assert result.outcome is Outcome.PASS, result.reasons
    found = audit(result, "full_and_piecewise")
    assert found.modes == {"PIECEWISE": 2, "FULL": 1}
    said = one.target.traits.notices_for(1, 2)
    assert any("a prefill of one token behind a context" in notice.message for notice in said)
    assert not any("behind a context" in n.message for n in one.target.traits.notices_for(2, 1))


WINDOW = """\
name: window
description: A prompt longer than the window, whose first blocks go back before it decodes.
limits:
  {max_num_seqs: 2, max_num_batched_tokens: 48, max_model_len: 64, num_blocks: 32, block_size: 4}
requests:
  - {name: long, prompt_len: 40, output_len: 3}
"""


@pytest.mark.parametrize(
    ("world", "accused"),
    [
        ({"pcp": 1}, set()),
        ({"pcp": 2}, {"C5"}),  # a finding: PCPManager.prepare_attn does not mask
        ({"pcp": 1, "tp": 2, "dcp": 2}, set()),  # given up on purpose, and a notice
    ],
)
def test_blocks_before_a_window_are_out_of_vllms_tables_but_under_pcp(bench, world, accused):
    one = bench("eager", "reference", scenario=WINDOW, num_steps=2, model="tiny-swa", **world)
    result = one.run()
    assert contracts(result) == accused
    if accused:
        assert "the null block for those before its window" in result.violations[0].message
    said = known_differences(one.target.traits, one.options)
    assert any("given back" in notice.message for notice in said) == ("dcp" in world)
    plain = known_differences(one.target.traits, EngineOptions(pcp=1, tp=2, dcp=2))
    assert not any("given back" in notice.message for notice in plain)


@pytest.mark.parametrize(
    ("method", "spoil", "contract"),
    [
        ("prepare_slot_mappings", lambda slots: slots.add_(slots >= 0), "C4"),
        ("partition_batch", lambda batch: batch.seq_lens[-1:].add_(1), "C1"),
        ("partition_batch", lambda batch: batch.input_ids[:1].add_(1), "C3"),
    ],
)
def test_what_is_broken_in_vllm_is_found(bench, api, monkeypatch, method, spoil, contract):
    sound = getattr(api.PCPManager, method)

    def broken(self, *args):
        prepared = sound(self, *args)
        spoil(prepared)
        return prepared

    one = bench("eager", base="reference", num_steps=4, pcp=2, dcp=2)
    monkeypatch.setattr(api.PCPManager, method, broken)
    result = one.run()
    assert result.outcome is Outcome.FAIL
    assert contract in contracts(result)


@pytest.mark.parametrize(("arm", "base"), [("eager", "reference"), ("piecewise", "eager")])
def test_idle_steps_without_a_full_graph_are_looked_at_too(bench, api, monkeypatch, arm, base):
    """vLLM prepares tables and slots for them, and attention runs on these."""
    sound = api.PCPManager.get_dummy_slot_mappings

    def real_slots(self, num_tokens):
        slots = sound(self, num_tokens)
        slots[:, :1] = 5
        return slots

    def real_tables(self, num_reqs):
        return tuple(table[:num_reqs].fill_(1) for table in self._local_block_tables)

    one = bench(arm, base, pcp=2, dcp=2)
    assert audit(one.run(), arm).modes["IDLE"] >= 1
    monkeypatch.setattr(api.PCPManager, "get_dummy_slot_mappings", real_slots)
    monkeypatch.setattr(api.PCPManager, "get_dummy_block_tables", real_tables)
    result = one.run()
    assert contracts(result) == {"C4", "C5", "C9"}


def test_a_piecewise_capture_that_writes_is_found(bench, api, monkeypatch):
    def real_slots(self, num_tokens):
        return self._gathered_kv_slot_mappings.fill_(5)[:, : num_tokens * self.pcp_world_size]

    with monkeypatch.context() as patched:
        patched.setattr(api.PCPManager, "get_dummy_slot_mappings", real_slots)
        one = bench("piecewise", num_steps=2, pcp=2, capture_sizes="4,16")
    assert contracts(one.run()) == {"C9"}


def test_another_ranks_padding_is_looked_at_too(bench, api, monkeypatch):
    """Under PCP vLLM hands its forward pass the flags of all ranks' tokens."""
    sound = api.PCPManager.partition_batch

    def broken(self, *args):
        batch = sound(self, *args)
        batch.is_padding.view(2, -1)[1 - self.pcp_rank].logical_not_()
        return batch

    one = bench("eager", base="reference", num_steps=2, pcp=2)
    monkeypatch.setattr(api.PCPManager, "partition_batch", broken)
    result = one.run()
    assert contracts(result) == {"C3"}
    assert {violation.tensor for violation in result.violations} == {"gathered_is_padding"}


@pytest.mark.parametrize("experts", [{}, {"expert_parallel": True}])
def test_the_model_routes_by_the_flags_that_vllm_hands_over(bench, api, monkeypatch, experts):
    """Those of all ranks' tokens, but with expert parallelism."""
    one = bench("piecewise", num_steps=2, pcp=2, model="tiny-moe", **experts)
    result = one.run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons
    for worker in one.stand.arms["piecewise"].engine.workers:
        assert (worker.local_batch.gathered_is_padding is None) == bool(experts)

    sound = api.PCPManager.partition_batch

    def unflagged(self, *args):
        batch = sound(self, *args)
        batch.is_padding.fill_(False)
        return batch

    monkeypatch.setattr(api.PCPManager, "partition_batch", unflagged)
    result = bench("piecewise", num_steps=2, pcp=2, model="tiny-moe", **experts).run()
    assert {"C3", "C21"} <= contracts(result)


def test_what_vllm_raises_is_a_result_with_its_place(bench, api, monkeypatch):
    one = bench("eager", base="reference", num_steps=4, pcp=2, dcp=2)

    def raising(self, *args):
        raise IndexError("row 7")

    monkeypatch.setattr(api.PCPManager, "prepare_attn", raising)
    result = one.run()
    assert result.outcome is Outcome.FAIL
    assert contracts(result) == {"C0"}
    assert "IndexError: row 7" in result.violations[0].message


def test_a_row_of_a_request_that_the_batch_lacks_breaks_a_contract(bench, api, monkeypatch):
    sound = api.PCPManager.partition_batch

    def of_slot_0(self, *args):
        prepared = sound(self, *args)
        prepared.idx_mapping_np = np.zeros_like(prepared.idx_mapping_np)  # as yet nobody's
        return prepared

    one = bench("eager", base="reference", num_steps=2, pcp=2)
    monkeypatch.setattr(api.PCPManager, "partition_batch", of_slot_0)
    result = one.run()
    assert "C7" in contracts(result)
    assert any("request #-1" in violation.message for violation in result.violations)


def test_steps_are_arranged_as_vllm_sorts_them(api):
    target = make_target("vllm", CPU, resolve_backend("auto", CPU))
    options = EngineOptions(target="vllm")
    plan = plan_scenario(parse_scenario(SCENARIO, "small"), options)
    names = [request.req_id for request in plan.steps[0].scheduled]
    assert names == ["nine", "three"]
    arranged = target.arrange(plan, 1)
    assert [request.req_id for request in arranged.steps[0].scheduled] == ["three", "nine"]
    assert msgspec.structs.replace(arranged.steps[0], scheduled=()) == msgspec.structs.replace(
        plan.steps[0], scheduled=()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatch": True}, "--microbatch with --target vllm"),
        ({"spec_tokens": 2, "dynamic_spec": "step"}, "--dynamic-spec with --target vllm"),
        ({"spec_tokens": 2, "draft_model": "mtp"}, "--draft-model with --target vllm"),
    ],
)
def test_what_the_stand_cannot_drive_is_refused(bench, options, said):
    with pytest.raises(UsageError, match=said):
        bench(pcp=2, **options)


def test_a_generation_that_replicates_all_decodes_is_refused_without_dcp(bench, api, monkeypatch):
    monkeypatch.setattr(type(api), "shards_decodes", False)
    with pytest.raises(
        UsageError, match=rf"--pcp 2 with --dcp 1: in vllm {api.version} every rank"
    ):
        bench(pcp=2)


def test_what_vllm_refuses_is_told_in_its_words(api, monkeypatch):
    target = make_target("vllm", CPU, resolve_backend("auto", CPU))
    options = EngineOptions(pcp=2)
    config = options.engine_config(
        CUDAGraphMode.FULL_DECODE_ONLY,
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        block_size=4,
        num_blocks=8,
    )
    target.check(config)

    def refuse(vllm_config, supports_mm_inputs):
        raise NotImplementedError("not on a Monday.")

    monkeypatch.setattr(api.PCPManager, "validate_config", staticmethod(refuse))
    with pytest.raises(UsageError, match=rf"vllm {api.version} refuses this: not on a Monday"):
        target.check(config)
