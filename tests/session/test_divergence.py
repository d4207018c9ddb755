"""Where a planted fault is found: exactly at its step, rank, layer and operation."""

from contextlib import nullcontext

import pytest
import torch

from pcpbench.device.host_graph import HostGraphBackend
from pcpbench.engine.worker import Worker
from pcpbench.faults.registry import all_faults
from pcpbench.model import mla
from pcpbench.model.mla import MLAAttention
from pcpbench.request import CompareRequest
from pcpbench.results import Outcome
from pcpbench.session.divergence import locate, make_case
from pcpbench.session.inject import planted_stand
from pcpbench.targets.builtin import BuiltinTarget

SCENARIO = "s2-capture-edges"
CPU = torch.device("cpu")
DCP = {"pcp": 1, "tp": 4, "dcp": 4, "interleave": 2}


class Writes:
    """Spoils what chosen caches are given: rank, layer and, if asked, only in captured graphs."""

    def __init__(self, monkeypatch, rank, layer, factor=1.5, only_captured=False, sizes=(2,)):
        self.owners, self.capturing = {}, False
        self.enabled = True
        init, write, capture = Worker.__init__, mla.kv_cache_write, HostGraphBackend.capture

        def remember(worker, config, *args):
            init(worker, config, *args)
            for number, cache in enumerate(worker.kv_caches):
                size = config.parallel_config.world.size
                self.owners[cache.data_ptr()] = (worker.rank, number, size)

        def faulty(kv, slots, cache):
            owner = self.owners[cache.data_ptr()]
            hit = owner[1] == layer and owner[2] in sizes and self.enabled
            hit = hit and rank in (None, owner[0])
            if hit and (self.capturing or not only_captured):
                kv = kv * factor
            write(kv, slots, cache)

        def flagged(backend, fn, pool):
            self.capturing = True
            try:
                return capture(backend, fn, pool)
            finally:
                self.capturing = False

        monkeypatch.setattr(Worker, "__init__", remember)
        monkeypatch.setattr(mla, "kv_cache_write", faulty)
        monkeypatch.setattr(HostGraphBackend, "capture", flagged)


def find(
    bench,
    fault=None,
    between=lambda: None,
    scenario=SCENARIO,
    candidate="full",
    checks="quick",
    **options,
):
    """The location of the first difference of one failing scenario."""
    trial = bench(scenario, candidate, **options)
    known = None if fault is None else all_faults()[fault]
    planted = nullcontext((trial.stand, None))
    if known is not None:
        planted = planted_stand(known, lambda: bench(scenario, candidate, **options).stand)
    with planted as (stand, _):
        trial.stand = stand
        result = trial.run(checks=checks)
    assert result.outcome is Outcome.FAIL, result.reasons
    request = CompareRequest(
        base="eager",
        candidate=candidate,
        options=trial.options,
        inject=fault,
        checks=checks,
        feed="teacher-forced" if trial.forced else "free-running",
    )
    tokens = trial.trial.tokens
    case = make_case(request, trial.options, result, trial.plan, stand.pairs, tokens)
    between()
    return locate(case, BuiltinTarget(CPU, HostGraphBackend()), CPU)


def test_a_kv_write_that_one_rank_gets_wrong_in_one_layer(bench, monkeypatch):
    Writes(monkeypatch, rank=1, layer=1)
    found = find(bench)
    divergence = found.divergence
    assert divergence.reproduced == "with taps"
    assert (divergence.accusation.arm, divergence.accusation.twin) == ("eager", "reference")
    assert divergence.first.where == (0, 1, 1, "kv_cache_write", "kv_cache")
    kv = divergence.kv
    assert (kv.what, kv.phase, kv.step, kv.rank, kv.layer) == ("wrong", "prefill", 0, 1, 1)
    assert (kv.req_id, kv.position) == ("r0", 0)
    ratio = found.arrays["kv_found"] / found.arrays["kv_expected"]
    assert ratio == pytest.approx(1.5, rel=1e-3)
    assert found.arrays["tap_found"].shape == found.arrays["tap_expected"].shape


@pytest.mark.parametrize("candidate", ["full", "full_and_piecewise"])
def test_a_kv_write_that_is_wrong_in_replays_only(bench, monkeypatch, candidate):
    """PIECEWISE graphs write between segments: the first FULL step is the first wrong one."""
    Writes(monkeypatch, rank=0, layer=1, only_captured=True)
    divergence = find(bench, candidate=candidate).divergence
    accusation = divergence.accusation
    assert (accusation.kind, accusation.arm) == ("capture", candidate)
    assert divergence.tap.where == (1, 0, 1, "kv_cache_write", "kv_cache")
    assert divergence.tap.against == f"eager_padded[{candidate}]"
    assert (divergence.kv.phase, divergence.kv.step, divergence.kv.layer) == ("decode", 1, 1)
    assert divergence.plan.index == 1
    assert divergence.ran_as == "FULL[reqs=8,tokens=8]"
    assert divergence.twin_ran_as == "eager, padded to FULL[reqs=8,tokens=8]"


def test_a_merge_of_partial_attention_is_told_from_attention_itself(bench):
    divergence = find(bench, "partials-averaged", **DCP).divergence
    assert divergence.first.where == (0, 0, 0, "dcp_merge", "out")
    assert divergence.first.against == "reference"
    assert divergence.kv.layer == 1, "the first layer's KV was made before"


def test_tensor_parallel_heads_are_held_against_the_reference_heads(bench, monkeypatch):
    project = MLAAttention.project

    def faulty(self, x, turns):
        q, kv = project(self, x, turns)
        return (q * 1.01 if self.layer == 1 and self.num_heads == 2 else q), kv

    monkeypatch.setattr(MLAAttention, "project", faulty)
    divergence = find(bench, pcp=1, tp=2).divergence
    assert divergence.first.where == (0, 0, 1, "qkv_proj", "q")


def test_a_broken_contract_names_the_metadata_and_no_tap(bench):
    divergence = find(bench, "stale-padded-seq-lens").divergence
    first = divergence.first
    assert first.where == (3, 1, None, "", "seq_lens")
    assert (first.found, first.expected, first.first_index) == (("6",), ("0",), (7,))
    assert divergence.tap is None
    assert divergence.kv is None
    assert divergence.plan.index == 3


def test_metadata_that_matters_gives_the_first_tap_too(bench):
    divergence = find(bench, "positions-buffer-moved").divergence
    assert divergence.metadata.tensor == "rank0.positions"
    assert divergence.tap.where == (1, 0, 0, "qkv_proj", "q")


@pytest.mark.parametrize("only_captured", [True, False])
def test_nan_is_traced_to_the_write_that_brought_it(bench, monkeypatch, only_captured):
    """Also where every arm has it and no two differ."""
    rank, sizes = (0, (2,)) if only_captured else (None, (1, 2))
    Writes(monkeypatch, rank, 1, float("nan"), only_captured=only_captured, sizes=sizes)
    divergence = find(bench).divergence
    assert divergence.accusation.arm == ("full" if only_captured else "reference")
    step, phase = (1, "decode") if only_captured else (0, "prefill")
    kv = divergence.kv
    assert (kv.what, kv.phase, kv.step, kv.rank, kv.layer) == ("non-finite", phase, step, 0, 1)
    assert divergence.tap.where == (step, 0, 1, "kv_cache_write", "kv_cache")
    assert divergence.tap.num_non_finite > 0


def test_a_dummy_run_that_writes_is_named_as_one(bench):
    divergence = find(bench, "idle-replay-writes-kv", scenario="s3-idle-and-reuse").divergence
    kv = divergence.kv
    assert (kv.what, kv.phase, kv.step, kv.layer, kv.slot) == ("unplanned", "dummy", 12, 0, 16)
    assert (kv.block, kv.req_id) == (1, None)


def test_half_precision_is_read_back_too(bench, monkeypatch):
    Writes(monkeypatch, rank=1, layer=0, factor=2.0, only_captured=True)
    divergence = find(bench, dtype="bfloat16").divergence
    assert divergence.tap.where == (1, 1, 0, "kv_cache_write", "kv_cache")


def test_what_taps_hide_is_found_without_them(bench, monkeypatch):
    attend = MLAAttention.attend

    async def faulty(self, q, kv, out, lse, context, index):
        await attend(self, q, kv, out, lse, context, index)
        if context.taps is None and context.pcp.size > 1 and context.metadata is not None:
            out.mul_(1.5)

    monkeypatch.setattr(MLAAttention, "attend", faulty)
    divergence = find(bench).divergence
    assert divergence.reproduced == "without taps"
    assert divergence.tap is None
    assert divergence.first.where == (0, None, None, "restore", "hidden")


def test_what_does_not_show_again_is_told_as_the_judge_saw_it(bench, monkeypatch):
    writes = Writes(monkeypatch, rank=1, layer=1)
    found = find(bench, between=lambda: setattr(writes, "enabled", False))
    divergence = found.divergence
    assert divergence.reproduced == "no"
    assert divergence.first.where == (0, None, None, "", "hidden")
    assert divergence.tap is None
    assert found.arrays == {}


def test_a_step_that_breaks_off_is_run_into_again(bench):
    divergence = find(bench, "layer-skipped-on-one-rank").divergence
    assert divergence.reproduced == "with taps"
    assert divergence.first.tensor == "collectives"


def test_what_a_replay_leaves_out_is_told_as_not_written(bench):
    divergence = find(bench, "padding-branch-baked").divergence
    assert divergence.first.where == (1, 0, 0, "pcp_all_gather", "latent")
    assert divergence.first.message == "not written by full"


def test_what_only_full_checks_show_is_judged_again(bench):
    sharded = {"pcp": 1, "tp": 4, "dcp": 4, "interleave": 2}
    found = find(bench, "logits-in-graph-pool", checks="full", **sharded).divergence
    assert (found.accusation.contract, found.reproduced) == ("C14", "with taps")
    assert found.first.where == (0, None, None, "", "logits")
    assert found.tap is None


def test_free_running_arms_are_run_again_on_their_own_tokens(bench, monkeypatch):
    Writes(monkeypatch, rank=1, layer=1, only_captured=True)
    divergence = find(lambda *a, **k: bench(*a, forced=False, **k)).divergence
    assert divergence.tap.where == (1, 1, 1, "kv_cache_write", "kv_cache")
