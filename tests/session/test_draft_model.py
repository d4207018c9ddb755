"""A draft model behind the target model, end to end: passes, graphs, drifts, refusals."""

from itertools import count

import numpy as np
import pytest

from pcpbench import cli
from pcpbench.engine.draft_model import DraftWorker
from pcpbench.engine.draft_runner import DraftRunner
from pcpbench.faults.fault import Site
from pcpbench.faults.registry import all_faults
from pcpbench.model.mtp import MTPModule
from pcpbench.modes import CUDAGraphMode
from pcpbench.results import Outcome
from pcpbench.session.clean_runs import draw_runs
from pcpbench.session.faults import findings
from pcpbench.session.inject import planted

SMALL = """
name: small
description: a few requests that come and go, with an idle step between
limits: {max_num_seqs: 4, max_num_batched_tokens: 24, block_size: 8, max_model_len: 48}
requests:
  - {prompt_len: 11, output_len: 9, count: 3}
  - {prompt_len: 4, output_len: 6, at_step: 2}
  - {prompt_len: 6, output_len: 4, at_step: 14}
"""
FULL = CUDAGraphMode.FULL
WORLDS = {
    "pcp 2": {"pcp": 2},
    "pcp 2 dcp 2": {"pcp": 2, "dcp": 2, "interleave": 2},
    "tp 4 dcp 4": {"pcp": 1, "tp": 4, "dcp": 4},
    "pcp 2 moe": {"pcp": 2, "model": "tiny-moe", "expert_parallel": True},
}


@pytest.fixture
def small(bench, tmp_path):
    """A small scenario on a stand, with a draft model."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)

    def make(candidate="full", k=3, draft_model="mtp", **options):
        return bench(str(path), candidate, spec_tokens=k, draft_model=draft_model, **options)

    return make


def passes_of(made, arm):
    return [
        (record, rank, rank.draft_passes)
        for record in made.trial.records
        if record.arm == arm
        for rank in record.ranks
    ]


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_passes_replay_bit_for_bit_and_are_what_the_plan_says(small, world):
    made = small(**world)
    result = made.run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert {d.kind: d.worst.outcome for d in result.drifts}["capture"] == "bitwise"
    compared = {(p.kind, p.worst.tensor) for p in made.trial.place_drifts}
    for kind in ("capture", "padding", "partition"):
        assert {(kind, "draft_logits"), (kind, "proposed"), (kind, "draft_kv_cache")} <= compared
    ran = [(number, one) for *_, passes in passes_of(made, "full") for number, one in
           enumerate(passes)]  # fmt: skip
    assert {n for n, one in ran if one.descriptor.cg_mode is FULL and one.num_replays} == {0, 1, 2}
    assert all(
        not one.num_replays for *_, ps in passes_of(made, "eager_padded[full]") for one in ps
    )


def test_dcp_lengths_are_those_of_each_pass_and_not_the_targets(small):
    made = small(pcp=1, tp=2, dcp=2, interleave=4)
    assert made.run().outcome is Outcome.PASS
    differing = 0
    for record, rank, passes in passes_of(made, "full"):
        if record.idle:
            continue
        for number, one in enumerate(passes[1:], start=1):
            rows = slice(0, one.num_reqs)
            laps, rest = np.divmod(one.seq_lens[rows], 8)
            share = laps * 4 + np.clip(rest - 4 * rank.rank, 0, 4)
            assert one.dcp_local_seq_lens[rows].tolist() == share.tolist()
            assert not one.dcp_local_seq_lens[one.num_reqs :].any()
            if len(rank.dcp_local_seq_lens) >= one.num_reqs:
                differing += (rank.dcp_local_seq_lens[rows] != share).any()
            before = passes[number - 1]
            assert number == 1 or (one.seq_lens[rows] >= before.seq_lens[rows]).all()
    assert differing > 4


def test_idle_steps_run_dummy_passes_with_dcp_context(small):
    made = small(pcp=2, dcp=2, interleave=2)
    assert made.run().outcome is Outcome.PASS
    idle = [passes for record, _, passes in passes_of(made, "full") if record.idle]
    assert len(idle) >= 2
    for first, following in idle:
        assert first.seq_lens.tolist() == [4 + 4] * first.num_reqs
        assert following.seq_lens.tolist() == [1 + 4] * following.num_reqs
        assert (following.slot_mappings == -1).all()


def test_the_target_model_does_what_it_does_without(small):
    """Same steps, same tokens: what is proposed is never verified."""

    def sampled(**options):
        made = small(k=2, **options)
        assert made.run().outcome is Outcome.PASS
        return [r.sampled.tolist() for r in made.trial.records if r.arm == "full"]

    assert sampled() == sampled(draft_model="planned")


def test_poison_and_second_looks_find_nothing(small):
    result = small(pcp=2, dcp=2, capture_sizes="4,16").run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons


def test_a_pass_that_reads_what_it_did_not_write_is_poisoned(small, monkeypatch):
    """A row of its output buffer that no pass of the step has written, times zero."""
    stage = DraftWorker.stage_next

    def faulty(self, drafts, hidden):
        stage(self, drafts, hidden)
        self.hidden_states[: len(hidden)].add_(self.drafted_states[-1] * 0)

    monkeypatch.setattr(DraftWorker, "stage_next", faulty)
    result = small(k=2, capture_sizes="4,8").run(checks="full")
    assert "C16" in findings(result)


def test_with_one_draft_there_are_graphs_of_the_first_pass_alone(small):
    made = small(k=1, capture_sizes="4,8")
    result = made.run()
    assert result.outcome is Outcome.PASS, result.reasons
    labels = [graph.descriptor for graph in made.stand.arms["full"].draft_captured]
    assert labels == ["draft first FULL[reqs=4,tokens=8]", "draft first FULL[reqs=2,tokens=4]"]


@pytest.mark.parametrize("dynamic", ["step", "request"])
def test_counts_of_drafts_may_vary(small, dynamic):
    options = {"dynamic_spec": dynamic, "capture_sizes": "4,16,24"}
    result = small("full_and_piecewise", **options).run()
    assert result.outcome is Outcome.PASS, result.reasons


def test_half_precision_stays_within_its_budget(small):
    result = small(dtype="bfloat16").run()
    assert result.outcome is Outcome.PASS, result.reasons


def test_timed_steps_keep_no_copies_of_passes(small, monkeypatch):
    made, kept = small(), []
    keep = DraftWorker.kept
    monkeypatch.setattr(DraftWorker, "kept", lambda self: kept.append(1) or keep(self))
    made.run()
    judged = len(kept)
    result = made.run(repetitions=1)
    assert result.outcome is Outcome.PASS, result.reasons  # C14: timed runs sample the same
    assert judged
    assert len(kept) == 2 * judged


def test_a_trace_shows_its_passes_as_one_phase(small):
    made = small(k=2)
    arm, ticks = made.stand.arms["full"], count()
    arm.start(made.plan)
    for step in made.plan.steps[:3]:
        names = [name for name, *_ in arm.execute_watched(step, None, None, ticks.__next__)]
        assert names.count("draft") == 1
        assert names[-1] == "draft"


def test_without_a_draft_model_nothing_of_it_runs(small, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("no draft model was asked for")

    monkeypatch.setattr(DraftRunner, "__init__", forbidden)
    made = small(draft_model="planned")
    assert made.run().outcome is Outcome.PASS
    assert {r.draft_logits is None for r in made.trial.records} == {True}
    assert made.plan.num_lookahead_tokens == 0


CAUGHT = {
    "draft-lengths-not-advanced": {"C22"},
    "draft-behind-rejected-tokens": {"C15", "C22"},
    "draft-fed-first-hidden": {"C22"},
    "draft-positions-moved": {"C8", "C13"},
    "draft-weight-rebound": {"C8"},
}


def test_faults_that_leave_the_target_alone_are_accused_by_name(small):
    made = small()
    engines = {label: arm.engine for label, arm in made.stand.arms.items()}
    for name, contracts in CAUGHT.items():
        site = Site(engines)
        with planted(all_faults()[name], site):
            assert contracts <= set(findings(made.run())), name
        assert site.num_hits
    assert made.run().outcome is Outcome.PASS


def test_a_module_that_is_wrong_on_every_arm_alike_is_not_its_dense_forward(small, monkeypatch):
    join = MTPModule.join
    monkeypatch.setattr(MTPModule, "join", staticmethod(lambda a, b: join(b, a)))
    result = small(candidate="eager", base="reference").run()
    assert findings(result) == ("C18",)
    assert "draft_logits of request r0." in result.reasons[0]


REFUSED = {
    "no drafts": ([], "--draft-model is mtp without draft tokens"),
    "microbatches": (["--spec-tokens", "2", "--microbatch"], "--draft-model is mtp with --micro"),
    "groups": (["--spec-tokens", "2", "--model", "tiny-swa"], "which has several KV groups"),
}


@pytest.mark.parametrize(("flags", "said"), REFUSED.values(), ids=REFUSED)
def test_where_none_can_run_is_refused(capsys, flags, said):
    assert cli.run(["compare", "eager", "full", "--draft-model", "mtp", *flags]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_unknown_draft_model_is_refused(capsys):
    assert cli.run(["capture", "--spec-tokens", "1", "--draft-model", "eagle"]) == 2
    assert "--draft-model is 'eagle': use one of planned, mtp" in " ".join(
        capsys.readouterr().err.split()
    )


def test_capture_lists_its_graphs(capsys, tmp_path):
    flags = ["--spec-tokens", "2", "--draft-model", "mtp", "--max-num-seqs", "4"]
    assert cli.run(["capture", *flags, "--json", "--out", str(tmp_path / "run")]) == 0
    assert "draft next FULL[reqs=3,tokens=3]" in capsys.readouterr().out
    assert "draft first FULL[reqs=4,tokens=12]" in (tmp_path / "run" / "capture.csv").read_text()


def test_clean_runs_draw_it_where_it_can_run():
    draws = [draw for draw in draw_runs(200, 3, "cpu") if draw.options.draft_model == "mtp"]
    assert len(draws) > 10
    for draw in draws:
        draw.options.check()
        assert "--draft-model mtp" in draw.command


def test_a_buffer_that_is_another_only_within_a_pass_is_seen(small, monkeypatch):
    made = small(k=1)
    drafts, stage, propose = (
        made.engine("full").drafts, DraftWorker.stage_first, DraftRunner.propose
    )  # fmt: skip
    buffers, lending = drafts.ranks[0].input_buffers, []
    own = buffers.positions

    def lent(self, *arguments):
        lending.append(self)
        try:
            return propose(self, *arguments)
        finally:
            lending.clear()
            buffers.positions = own

    def staged(self, *arguments, **named):
        stage(self, *arguments, **named)
        if drafts in lending and self is drafts.ranks[0]:
            buffers.positions = own.clone()

    monkeypatch.setattr(DraftRunner, "propose", lent)
    monkeypatch.setattr(DraftWorker, "stage_first", staged)
    result = made.run()
    assert {found.contract for found in result.violations} == {"C8"}
    assert "rank0.draft.positions" in result.violations[0].message
