"""Speculative decode end to end: drafts verified, rejected and fed again, in every graph mode."""

import numpy as np
import pytest

from pcpbench import cli
from pcpbench.engine.engine import Engine
from pcpbench.engine.request_state import RequestState
from pcpbench.engine.worker import Worker
from pcpbench.modes import CUDAGraphMode
from pcpbench.results import Outcome

WORLDS = [
    {"pcp": 2},
    {"pcp": 4},
    {"pcp": 1, "tp": 4, "dcp": 2, "interleave": 4},
    {"pcp": 2, "tp": 2},
]


def drift(result, kind):
    return next(d for d in result.drifts if d.kind == kind)


def arm_of(result, name):
    return next(arm for arm in result.arms if arm.arm == name)


def check(result, candidate):
    assert result.outcome is Outcome.PASS, result.reasons
    assert drift(result, "capture").worst.outcome == "bitwise"
    arm = arm_of(result, candidate)
    assert 0 < arm.num_accepted_tokens < arm.num_draft_tokens
    assert arm.coverable_full == arm.coverable
    return arm


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize(
    ("scenario", "candidate", "k"),
    [
        ("s4-draft-length-prompts", "full_and_piecewise", 3),
        ("s13-dcp-lengths", "full", 3),
        ("preemption", "full", 1),
    ],
)
def test_replays_are_bitwise_equal_and_contracts_hold(bench, scenario, candidate, k, world):
    arm = check(bench(scenario, candidate, spec_tokens=k, **world).run(), candidate)
    assert arm.coverable > 10
    if candidate == "full_and_piecewise":
        assert arm.steps_piecewise > 0


def test_poison_reaches_nothing_though_rejected_drafts_left_kv(bench):
    """Full checks: slots that rejected drafts wrote count as unread until they are overwritten."""
    check(bench("s13-dcp-lengths", spec_tokens=3).run(checks="full"), "full")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_within_its_budget(bench, dtype):
    result = bench("s1-grow-shrink", "full_and_piecewise", spec_tokens=2, dtype=dtype).run()
    check(result, "full_and_piecewise")


def test_a_batch_that_is_not_uniform_misses_full_and_says_why(bench):
    made = bench("s4-draft-length-prompts", spec_tokens=3)
    result = made.run()
    assert result.outcome is Outcome.PASS, result.reasons
    uneven = {
        step.index
        for step in made.plan.steps
        if step.scheduled
        and not step.has_prefill
        and len({r.num_scheduled_tokens for r in step.scheduled}) > 1
    }
    assert uneven
    records = [r for r in made.trial.records if r.arm == "full" and r.step in uneven]
    assert {r.miss_reason for r in records} == {"queries are not uniform"}
    assert arm_of(result, "full").miss_reasons["queries are not uniform"] == len(uneven)


def test_all_arms_verify_the_same_drafts_and_a_timed_run_repeats_them(bench, monkeypatch):
    made = bench("s7-same-prompt-twice", spec_tokens=3)
    find, found_by = Engine._find_drafts, []

    def counted(self, plan):
        found_by.append((self, plan.index))
        return find(self, plan)

    monkeypatch.setattr(Engine, "_find_drafts", counted)
    result = made.run(repetitions=1)
    # Only the reference looks for drafts, once a step: timed runs and other arms are given them.
    assert {engine for engine, _ in found_by} == {made.engine("reference")}
    assert len(found_by) == len({index for _, index in found_by})
    assert result.outcome is Outcome.PASS, result.reasons  # C14: timed runs sample the same
    drafts = {}
    for record in made.trial.records:
        if record.draft_tokens is not None:
            drafts.setdefault(record.step, []).append(record.draft_tokens.tolist())
    assert len(drafts) > 20
    assert all(len(found) == 4 and found.count(found[0]) == 4 for found in drafts.values())
    arm = arm_of(result, "full")
    new = {new.req_id: new.max_tokens for step in made.plan.steps for new in step.new_requests}
    assert arm.num_output_tokens == sum(new.values())
    assert arm.itl.num_samples < arm.num_output_tokens - arm.num_requests


def test_what_is_generated_is_what_one_token_a_step_generates(bench):
    """Greedy verification changes how often the model runs, never what it says."""

    def texts(**options):
        made = bench("s2-capture-edges", base="reference", candidate="eager", **options)
        assert made.run().outcome is Outcome.PASS
        found = {}
        for record in made.trial.records:
            if record.arm != "reference":
                continue
            step = made.plan.steps[record.step]
            row = 0
            for request in step.scheduled:
                tokens = record.sampled[row : row + request.num_output_tokens].tolist()
                found.setdefault(request.req_id, []).extend(tokens)
                row += request.num_logits
        return found

    plain = texts()
    assert plain == texts(spec_tokens=1) == texts(spec_tokens=3)
    assert min(len(set(text)) for text in plain.values()) > 1  # no text of one token


def test_without_drafts_nothing_of_it_runs(bench, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a step without drafts verifies nothing")

    monkeypatch.setattr(RequestState, "post_verify", forbidden)
    monkeypatch.setattr(RequestState, "set_drafts", forbidden)
    monkeypatch.setattr(Engine, "_find_drafts", forbidden)
    made = bench("s2-capture-edges")
    result = made.run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert arm_of(result, "full").num_draft_tokens == 0
    ranks = [rank for record in made.trial.records for rank in record.ranks]
    assert {rank.num_accepted is None for rank in ranks} == {True}
    assert {record.draft_tokens is None for record in made.trial.records} == {True}


def test_default_capture_sizes_are_multiples_of_a_decode(bench):
    made = bench("s2-capture-edges", "full_and_piecewise", spec_tokens=2)
    shapes = made.engine("full_and_piecewise").candidates.descriptors
    assert shapes
    # 64 tokens, the budget, are there for prefills alone.
    assert {d.num_tokens for d in shapes if d.num_tokens % 3} == {64}
    assert {d.uniform_token_count for d in shapes if d.num_reqs} == {3}
    tokens = np.array([d.num_tokens for d in shapes if d.num_reqs])
    assert tokens.max() == 48  # 16 requests of 3


def test_a_size_that_is_no_multiple_is_told_and_used_rounded_up(bench):
    made = bench("s2-capture-edges", spec_tokens=2, capture_sizes="1,4,8,16,48")
    shapes = {(d.num_tokens, d.num_reqs) for d in made.engine("full").candidates.descriptors}
    assert shapes == {(3, 1), (6, 2), (9, 3), (18, 6), (48, 16)}
    told = [n.message for n in made.engine("full").candidates.notices]
    assert sum("is not a multiple of the decode query length 3" in text for text in told) == 4
    check(made.run(), "full")


DYNAMIC_WORLDS = {
    "pcp 2": {"pcp": 2},
    "tp 2 dcp 2": {"pcp": 1, "tp": 2, "dcp": 2, "interleave": 2, "microbatch": True},
}


@pytest.mark.parametrize("dynamic", ["step", "request"])
@pytest.mark.parametrize("world", DYNAMIC_WORLDS.values(), ids=DYNAMIC_WORLDS)
def test_drafts_that_vary_replay_by_length_and_else_by_the_varlen_graph(bench, world, dynamic):
    sizes = {"capture_sizes": "4,16,32"}
    made = bench("s7-same-prompt-twice", spec_tokens=3, dynamic_spec=dynamic, **sizes, **world)
    result = made.run()
    check(result, "full")
    chosen = {r.descriptor for r in made.trial.records if r.arm == "full" and not r.idle}
    full = {d for d in chosen if d.cg_mode is CUDAGraphMode.FULL}
    assert len({d.uniform_token_count for d in full if d.uniform_token_count}) >= 2
    if dynamic == "request":
        assert any(d.max_query_len is not None for d in full)
    assert "queries are not uniform" not in arm_of(result, "full").miss_reasons


def test_the_host_learns_of_rejected_drafts_also_before_a_step_without_any(bench, monkeypatch):
    original, seen = Worker.post_update, []

    def watched(self, plan, tokens):
        found = original(self, plan, tokens)
        if not plan.num_draft_tokens:
            slots = self.global_batch.idx_mapping_np
            state = self.request_state
            seen.append(state.num_computed_tokens[slots].tolist())
            assert state.num_computed_tokens_np[slots].tolist() == seen[-1]
        return found

    monkeypatch.setattr(Worker, "post_update", watched)
    bench("s7-same-prompt-twice", spec_tokens=3, dynamic_spec="step", capture_sizes="4").run()
    assert len(seen) > 10


def test_dynamic_drafts_without_drafts_are_refused(capsys):
    assert cli.run(["compare", "eager", "full", "--dynamic-spec", "step"]) == 2
    assert "--dynamic-spec is step without draft tokens" in " ".join(
        capsys.readouterr().err.split()
    )
    assert cli.run(["capture", "--dynamic-spec", "often", "--spec-tokens", "2"]) == 2
    assert "--dynamic-spec is 'often'" in capsys.readouterr().err
