"""Sparse MLA end to end: PCP with DCP, over TP x PCP, a2a, cut steps, drafts; what is told."""

import json

import pytest

from pcpbench import cli
from pcpbench.results import Outcome

WORLDS = {
    "pcp 2 dcp 2": {"pcp": 2, "dcp": 2},
    "pcp 2 tp 2 dcp 4": {"pcp": 2, "tp": 2, "dcp": 4, "interleave": 2},
    "tp 4 dcp 2": {"pcp": 1, "tp": 4, "dcp": 2, "interleave": 4, "model": "tiny-sparse"},
}
CONTEXT = "s13-prefill-context"


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_every_border_is_the_one_rank_reference_and_replays_bit_for_bit(bench, world):
    result = bench(CONTEXT, "full_and_piecewise", **world).run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert {d.kind: d.worst.outcome for d in result.drifts}["capture"] == "bitwise"


def test_without_dcp_pcp_ranks_hold_all_keys(bench):
    result = bench("s14-uneven-ranks", "full_and_piecewise", pcp=2, model="tiny-sparse").run()
    assert result.outcome is Outcome.PASS, result.reasons


@pytest.mark.parametrize("model", ["tiny", "tiny-sparse"])
def test_partial_outputs_can_be_exchanged_instead(bench, model):
    world = {"pcp": 1, "tp": 2, "dcp": 2, "interleave": 2, "model": model}
    made = bench("s13-dcp-lengths", dcp_backend="a2a", **world)
    result = made.run()
    assert result.outcome is Outcome.PASS, result.reasons
    records = [record for record in made.trial.records if record.arm == "eager"]
    kinds = {call[0] for record in records for call in record.ranks[0].collectives}
    assert "all_to_all" in kinds
    assert "reduce_scatter" not in kinds


def test_unread_memory_may_hold_anything(bench):
    result = bench("s4-one-token-prompts", pcp=2, dcp=2).run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons


def test_steps_in_microbatches(bench):
    world = {"pcp": 2, "dcp": 2, "microbatch": True}
    result = bench("chunked-prefill", "full_and_piecewise", **world).run()
    assert result.outcome is Outcome.PASS, result.reasons


def test_drafts(bench):
    result = bench("s13-dcp-lengths", pcp=2, dcp=2, interleave=2, spec_tokens=2).run()
    assert result.outcome is Outcome.PASS, result.reasons


def test_ranks_of_a_step_with_context_gather_it_and_those_without_do_not(bench):
    made = bench(CONTEXT, pcp=2, dcp=2, interleave=4)
    engine, counts = made.engine("eager"), {}
    engine.start(made.plan)
    for step in made.plan.steps:
        engine.execute(step)
        prefills = [r for r in step.scheduled if r.is_prefilling]
        if prefills:
            context = any(r.num_computed_tokens for r in prefills)
            decodes = len(prefills) < len(step.scheduled)
            calls = len(engine.workers[0].groups.log)
            counts.setdefault((context, decodes), set()).add(calls)
    # Two gathers more in each of two layers, the same on every step of a kind.
    (with_context,), (without,) = counts[True, True], counts[False, True]
    assert with_context == without + 4


def test_the_default_model_follows_the_sizes_and_says_so(capsys, tmp_path):
    arguments = ["--scenario", "s2-capture-edges", "--repetitions", "0"]
    for name, sizes, model in (
        ("both", ["--pcp", "2", "--dcp", "2"], "tiny-sparse"),
        ("pcp", ["--pcp", "2"], "tiny"),
    ):
        out = tmp_path / name
        assert cli.run(["compare", "eager", "full", *sizes, *arguments, "--out", str(out)]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        told = "model: tiny-sparse is the default with --pcp and --dcp above 1"
        assert (told in printed) == (name == "both")
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["settings"]["model"] == model


def test_a_finding_names_the_cache_of_index_keys(bench):
    made = bench("s2-capture-edges", pcp=2, dcp=2)
    engine = made.engine("eager")
    cache = engine.workers[1].kv_caches[3]
    compute = engine._forward

    def forward(descriptor):
        cache[-1, 0].fill_(2.0)
        return compute(descriptor)

    engine._forward = forward
    result = made.run()
    assert result.outcome is Outcome.FAIL
    (violation, *_) = [v for v in result.violations if v.contract == "C15"]
    assert (violation.rank, violation.tensor) == (1, "index_cache")
    assert "layer 1 index cache, slot" in violation.message
