"""What a trial finds on clean engines: arms, ranks, dtypes, graph modes."""

import pytest
import torch

from pcpbench.checks import kv
from pcpbench.engine.engine import Engine
from pcpbench.engine.worker import Worker
from pcpbench.results import Outcome

WORLDS = [
    {"pcp": 2},
    {"pcp": 4},
    {"pcp": 1, "tp": 4, "dcp": 4, "interleave": 2},
    {"pcp": 1, "tp": 2},
    {"pcp": 2, "tp": 2},
    {"pcp": 8},
]


def drift(result, kind):
    return next(d for d in result.drifts if d.kind == kind)


@pytest.mark.parametrize(
    ("world", "candidate"),
    [(world, "full_and_piecewise") for world in WORLDS]
    + [({"pcp": 2}, "full"), ({"pcp": 2}, "piecewise")],
    ids=str,
)
def test_replays_are_bitwise_equal_on_clean_engines(bench, world, candidate):
    result = bench("s14-uneven-ranks", candidate, **world).run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert drift(result, "capture").worst.outcome == "bitwise"
    assert drift(result, "capture").num_steps_compared > 20
    arm = next(a for a in result.arms if a.arm == candidate)
    if candidate == "piecewise":
        assert arm.steps_piecewise > 0
        assert arm.steps_none == 0
    else:
        assert arm.coverable > 0
        assert arm.coverable_full == arm.coverable


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_within_its_budget(bench, dtype):
    result = bench("s4-one-token-prompts", "full_and_piecewise", dtype=dtype).run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert drift(result, "capture").worst.outcome == "bitwise"


def test_free_running_arms_agree_token_by_token_in_float32(bench):
    result = bench("s7-same-prompt-twice", forced=False).run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert drift(result, "capture").token_mismatches == 0


def test_preempted_requests_go_on_with_their_own_tokens(bench):
    result = bench("preemption", forced=False).run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert drift(result, "partition").top1_agreement == 1.0


def test_an_arm_that_never_ran_as_asked_is_not_compared(bench, monkeypatch):
    trial = bench("s1-grow-shrink")
    full = trial.engine("full")
    full.dispatcher.descriptors.clear()
    trial.engine("eager_padded[full]").dispatcher.descriptors.clear()
    result = trial.run()
    assert result.outcome is not Outcome.PASS
    assert result.tpot_ratio is None


def test_times_cover_every_repetition_of_both_arms(bench):
    trial = bench("s2-capture-edges")
    trial.run(repetitions=2)
    steps = {step.index for step in trial.plan.steps}
    for arm in ("eager", "full"):
        for repetition in range(2):
            mine = [t for t in trial.trial.timings if (t.arm, t.repetition) == (arm, repetition)]
            assert {t.step for t in mine} == steps
    floored = {t.step for t in trial.trial.timings if t.kernel_s is not None}
    assert len(floored) == 12


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ("1,2", "no step was served by PIECEWISE, of 1 with a prefill"),
        ("64", "no step was served by FULL, of 32 decode steps; none of them fits"),
    ],
)
def test_a_mixed_mode_of_which_one_routine_never_ran_is_not_compared(bench, sizes, told):
    result = bench("s2-capture-edges", "full_and_piecewise", capture_sizes=sizes).run()
    assert result.outcome is Outcome.NOT_COMPARED
    assert told in result.reasons[0]


def test_an_arm_that_should_have_been_padded_and_never_was_is_not_compared(bench):
    result = bench("s2-capture-edges", "eager_padded", capture_sizes="4096").run()
    assert result.outcome is Outcome.NOT_COMPARED
    assert "none was padded" in result.reasons[0]


def test_a_scenario_that_failed_is_not_timed(bench, sample_the_worst):
    trial = bench("s2-capture-edges")
    sample_the_worst()
    assert trial.run(repetitions=1).outcome is Outcome.FAIL
    assert trial.trial.timings == []


def without_the_teacher(bench):
    """A trial of the last two arms alone on other tokens, and what fed all four before."""
    from dataclasses import replace

    from pcpbench.device.clock import make_clock
    from pcpbench.session.trial import Trial

    trial = bench("s2-capture-edges")
    trial.run()
    stand, names = trial.stand, ("eager_padded[full]", "full")
    pair = replace(
        stand,
        arms={name: stand.arms[name] for name in names},
        setups=tuple(setup for setup in stand.setups if setup.name in names),
        pairs=stand.pairs[-1:],
        base=names[0],
    )
    fed = trial.trial.tokens
    again = Trial(
        trial.plan,
        pair,
        make_clock(torch.device("cpu")),
        dtype="float32",
        teacher_forced=True,
        repetitions=0,
        tokens=[[(token + 1) % 256 for token in each] for each in fed],
    )
    return again, fed


def test_given_tokens_feed_the_arms_and_the_judge(bench, monkeypatch):
    trial, fed = without_the_teacher(bench)
    assert trial.run().outcome is Outcome.PASS
    ids = {int(i) for r in trial.records if r.step == 1 for k in r.ranks for i in k.input_ids}
    assert ids == {(token + 1) % 256 for token in fed[0]}

    from pcpbench.engine.request_state import RequestState

    update = RequestState.post_update

    def another(self, slots, counts, samples, tokens):
        update(self, slots, counts, samples, (tokens + 1) % 256)

    monkeypatch.setattr(RequestState, "post_update", another)
    result = without_the_teacher(bench)[0].run()
    assert {v.contract for v in result.violations} == {"C3"}


def test_drift_is_told_by_step_and_layer(bench):
    made = bench("s2-capture-edges")
    made.run()
    places, steps = made.trial.place_drifts, made.trial.step_drifts
    layers = range(made.stand.arms["full"].num_layers)
    for kind in ("partition", "padding", "capture"):
        mine = [place for place in places if place.kind == kind]
        assert {place.layer for place in mine} == {*layers, None}
        assert {place.worst.tensor for place in mine if place.layer is not None} == {"kv_cache"}
        assert {p.step for p in mine} == {s.step for s in steps if s.kind == kind}
    assert all(p.worst.outcome == "bitwise" for p in places if p.kind == "capture")
    assert any(p.worst.relative for p in places if p.kind == "partition")


def test_only_arms_that_capture_have_a_cost(bench):
    arms = {arm.arm: arm for arm in bench("s2-capture-edges").run().arms}
    assert arms["full"].capture_s > 0
    assert arms["full"].num_graphs > 0
    assert arms["eager"].capture_s is None
    assert arms["eager"].num_graphs == 0


def test_old_positions_are_compared_once_behind_the_last_step_that_computes(bench, monkeypatch):
    """Every plan ends in an idle step, behind which nothing is expected of anybody."""
    compare, looks = kv.compare_kv_by_position, []

    def note(*arguments):
        step, kind, scope = arguments[3], arguments[6], arguments[8]
        found = list(compare(*arguments))
        if scope == "all":
            looks.append((step.index, kind, bool(found)))
        return found

    monkeypatch.setattr(kv, "compare_kv_by_position", note)
    trial = bench("s2-capture-edges")
    assert trial.run().outcome is Outcome.PASS
    last = [step.index for step in trial.plan.steps if step.scheduled][-1]
    assert trial.plan.steps[-1].idle
    assert looks == [(last, "partition", True), (last, "padding", True)]


def test_a_buffer_that_is_another_only_within_a_step_is_seen(bench, monkeypatch):
    """Its contents are the same, so that numbers do not tell; with other contents they would."""
    made = bench("s1-grow-shrink")
    full, run, prepare = made.engine("full"), Engine._run, Worker.prepare_attention
    buffers = full.workers[1].local_buffers
    own, lending = buffers.positions, []

    def lent(self, *arguments):
        lending.append(self)
        try:
            return run(self, *arguments)
        finally:
            lending.clear()
            buffers.positions = own

    def prepared(self, *arguments):
        prepare(self, *arguments)
        if full in lending and self is full.workers[1]:
            buffers.positions = own.clone()

    monkeypatch.setattr(Engine, "_run", lent)
    monkeypatch.setattr(Worker, "prepare_attention", prepared)
    result = made.run()
    assert {found.contract for found in result.violations} == {"C8"}
    assert "rank1.positions" in result.violations[0].message
