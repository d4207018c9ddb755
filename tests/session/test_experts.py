"""Comparisons of a model with MoE layers, end to end: what passes, what is recorded and told."""

import json

import numpy as np
import pytest

from pcpbench import cli
from pcpbench.results import Outcome

GATHER = {"model": "tiny-moe", "expert_parallel": True}
EXCHANGE = {**GATHER, "all2all_backend": "all_to_all"}
WORLDS = {
    "one rank": {"pcp": 1, "model": "tiny-moe"},
    "pcp 2 tp 2": {"pcp": 2, "tp": 2, **EXCHANGE},
    "pcp 2 tp 2, experts divided": {"pcp": 2, "tp": 2, "model": "tiny-moe"},
    "pcp 2, microbatches": {"pcp": 2, "microbatch": True, **GATHER},
    "tp 4 dcp 2": {"pcp": 1, "tp": 4, "dcp": 2, "interleave": 4, **GATHER},
    "pcp 2, drafts": {"pcp": 2, "spec_tokens": 3, **EXCHANGE},
    "pcp 2 tp 2 dcp 4": {"pcp": 2, "tp": 2, "dcp": 4, **GATHER, "model": "tiny-sparse-moe"},
}
PADDED = "moe-padded-ranks"


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_experts_replay_bit_for_bit_and_keep_every_contract(bench, world):
    result = bench(PADDED, "full_and_piecewise", **world).run()
    assert result.outcome is Outcome.PASS, result.reasons
    assert {d.kind: d.worst.outcome for d in result.drifts}["capture"] == "bitwise"
    arms = {arm.arm: arm for arm in result.arms}
    assert arms["full_and_piecewise"].steps_full
    assert arms["full_and_piecewise"].steps_piecewise


@pytest.mark.parametrize("way", [GATHER, EXCHANGE], ids=["gather", "exchange"])
def test_unread_memory_and_padding_may_hold_anything(bench, way):
    result = bench(PADDED, microbatch=way is GATHER, **way).run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_types_stay_within_the_same_budgets(bench, dtype):
    result = bench(PADDED, dtype=dtype, **GATHER).run()
    assert result.outcome is Outcome.PASS, result.reasons


def test_replays_record_what_they_routed(bench):
    trial = bench(PADDED, **GATHER)
    trial.run()
    replayed = [r for r in trial.trial.records if r.arm == "full" and r.num_replays and not r.idle]
    assert len(replayed) > 20
    for record in replayed:
        for rank in record.ranks:
            (routing,) = rank.routing
            assert routing.chosen.shape == (2 * rank.num_tokens_after_padding, 2)
            real = np.concatenate([~peer.is_padding for peer in record.ranks])
            assert ((routing.chosen >= 0).all(1) == real).all()
            assert ((routing.chosen == -1).all(1) == ~real).all()
        assert sum(r.routing[0].num_rows.sum() for r in record.ranks) == 2 * real.sum()


def test_a_dense_model_records_no_routing(bench):
    trial = bench(PADDED)
    trial.run()
    assert all(rank.routing == () for record in trial.trial.records for rank in record.ranks)


def test_the_command_takes_the_options_and_tells(capsys, tmp_path):
    arguments = ["--model", "tiny-moe", "--expert-parallel", "--all2all-backend", "all_to_all"]
    arguments += ["--scenario", PADDED, "--repetitions", "0", "--out", str(tmp_path / "run")]
    assert cli.run(["compare", "eager", "full", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "experts by all_to_all" in printed
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["settings"]["enable_expert_parallel"] is True
    assert manifest["settings"]["all2all_backend"] == "all_to_all"
    rows = (tmp_path / "run" / "summary.csv").read_text().splitlines()
    names = rows[0].split(",")
    by_arm = {row.split(",")[1]: dict(zip(names, row.split(","), strict=False)) for row in rows[1:]}
    assert by_arm["full"]["all2all_backend"] == "all_to_all"
    assert by_arm["reference"]["all2all_backend"] == ""


def test_a_first_difference_is_looked_for_among_the_experts(capsys, tmp_path):
    arguments = ["--model", "tiny-moe", "--expert-parallel", "--inject", "moe-experts-of-next-rank"]
    arguments += ["--scenario", PADDED, "--repetitions", "0", "--out", str(tmp_path / "run")]
    assert cli.run(["compare", "eager", "full", *arguments]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "step 0, rank 0, layer 1, experts -> hidden" in printed
