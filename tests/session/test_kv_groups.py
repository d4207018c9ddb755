"""Comparisons of a model with two KV groups, one of them with a sliding window, end to end."""

import pytest

from pcpbench import cli
from pcpbench.results import Outcome

WORLDS = {
    "pcp 2": {"pcp": 2},
    "pcp 4": {"pcp": 4, "microbatch": True},
    "tp 4 dcp 2 interleave 2": {"pcp": 1, "tp": 4, "dcp": 2, "interleave": 2},
    "pcp 2 drafts": {"pcp": 2, "spec_tokens": 3},
    "tp 2 dcp 2 drafts": {"pcp": 1, "tp": 2, "dcp": 2, "spec_tokens": 2, "microbatch": True},
}
SCENARIO = """
name: window
description: A long decode frees blocks that two guests take.
limits: {num_blocks: 13, max_model_len: 96, max_num_seqs: 4, max_num_batched_tokens: 32}
requests:
  - {prompt_len: 36, output_len: 9}
  - {prompt_len: 5, output_len: 8}
  - {prompt_len: 29, output_len: 3, at_step: 5}
"""


@pytest.fixture
def window(tmp_path):
    path = tmp_path / "window.yaml"
    path.write_text(SCENARIO)
    return str(path)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_replays_are_bitwise_equal_and_every_contract_holds(bench, window, world):
    one = bench(window, "full_and_piecewise", model="tiny-swa", capture_sizes="4,16", **world)
    assert any(step.freed_block_ids for step in one.plan.steps)
    result = one.run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons
    assert {d.kind: d.worst.outcome for d in result.drifts}["capture"] == "bitwise"
    for arm in one.stand.arms.values():
        assert arm.kv_groups == (1, 0, 1)


def test_a_group_that_is_not_sharded_is_whole_on_every_rank(bench, window):
    one = bench(window, model="tiny-swa", pcp=1, tp=2, dcp=2)
    assert one.run().outcome is Outcome.PASS
    eager = one.engine("eager")
    sizes = [[cache.shape[1] for cache in worker.kv_caches] for worker in eager.workers]
    assert sizes == [[16, 16, 16]] * 2
    (reference,) = one.engine("reference").workers
    assert [cache.shape[1] for cache in reference.kv_caches] == [16, 32, 16]
    first, second = eager.workers
    assert first.kv_caches[0].equal(second.kv_caches[0])
    assert not first.kv_caches[1].equal(second.kv_caches[1])
    assert first.block_tables.block_tables[0].shape[1] == 3
    assert first.block_tables.block_tables[1].shape[1] == 6


@pytest.mark.parametrize(("fault", "world"), [
    ("window-one-too-wide", ["--pcp", "2"]),
    ("local-lengths-for-whole-group", ["--pcp", "1", "--tp", "2", "--dcp", "2"]),
])  # fmt: skip
def test_a_planted_fault_is_found_and_placed(capsys, tmp_path, window, fault, world):
    arguments = ["--scenario", window, "--repetitions", "0", "--out", str(tmp_path / "run")]
    arguments += ["--model", "tiny-swa", "--inject", fault, *world]
    assert cli.run(["compare", "eager", "full", *arguments]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "was not found" not in printed


def test_a_fault_that_needs_a_second_group_says_so(capsys):
    arguments = ["--inject", "window-ignored", "--repetitions", "0"]
    assert cli.run(["compare", "eager", "full", *arguments]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "needs a model with several KV groups, such as tiny-swa" in told
    assert "--model tiny-swa" in told
