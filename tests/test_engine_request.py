"""What `compare --target engine` takes, and what it refuses before anything is started."""

import pytest

from pcpbench import cli
from pcpbench.engine_request import EngineRequest

ENGINE = "--target engine"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (f"compare eager fast {ENGINE}", 2, ["arm 'fast' is unknown"]),
        (f"compare eager eager {ENGINE}", 2, ["both arms are 'eager'"]),
        (f"compare eager eager_padded {ENGINE}", 2, ["arm 'eager_padded'", "vLLM pads"]),
        (f"compare reference eager --pcp 1 {ENGINE}", 2, ["'reference' is the arm 'eager'"]),
        (f"compare reference eager --pcp 2 --dcp 2 {ENGINE}", 3, ["--pcp 2 with --dcp 2"]),
        (f"compare reference eager --model tiny-sparse {ENGINE}", 3, ["dense latent attention"]),
        (f"compare reference eager --model small {ENGINE}", 2, ["--model is 'small'", "leave it"]),
        (f"compare reference eager --microbatch {ENGINE}", 2, ["--microbatch is True"]),
        (f"compare reference eager --spec-tokens 2 {ENGINE}", 2, ["--spec-tokens is 2"]),
        (f"compare reference eager --feed free-running {ENGINE}", 2, ["--feed is 'free-running'"]),
        (f"compare reference eager --check full {ENGINE}", 2, ["--check is 'full'"]),
        (f"compare reference eager --device cuda {ENGINE}", 2, ["--device is 'cuda'"]),
        (f"compare reference eager --save-baseline b {ENGINE}", 2, ["--save-baseline is 'b'"]),
        (f"compare reference eager --inject nobody {ENGINE}", 2, ["use hidden-restore or"]),
        (f"compare eager full --pcp 1 --inject kv-writer {ENGINE}", 2, ["with --pcp 1"]),
        (f"compare reference eager --engine-timeout 0 {ENGINE}", 2, ["--engine-timeout is 0"]),
        (f"compare reference eager --engine-timeout nan {ENGINE}", 2, ["--engine-timeout is nan"]),
        (f"compare reference eager --scenario all {ENGINE}", 2, ["one scenario, or none"]),
        (f"compare reference eager --scenario nobody {ENGINE}", 2, ["nobody"]),
        (f"compare reference eager --repetitions -1 {ENGINE}", 2, ["--repetitions is -1"]),
        (f"compare reference eager --pcp 0 {ENGINE}", 2, ["is 0"]),
        (f"compare reference eager --pcp 32 --tp 4 {ENGINE}", 2, ["128 ranks"]),
        (f"capture {ENGINE}", 2, ["--target is 'engine'", "use builtin or vllm"]),
        ("compare reference eager --target gpu", 2, ["--target is 'gpu'"]),
        ("compare reference eager --engine-timeout 5", 2, ["--engine-timeout is '5.0'"]),
        ("compare reference eager --engine-python x", 2, ["--engine-python is 'x'"]),
        (f"compare reference eager --engine-python nowhere {ENGINE}", 2, ["is no file"]),
    ],
)
def test_refusals(arguments, code, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments.split()) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1, told.err
    assert all(word in told.err for word in words), told.err
    assert list(tmp_path.iterdir()) == []


def ladder(base, candidate, **settings):
    arms = EngineRequest(base=base, candidate=candidate, **settings).arms
    return [(arm.label, arm.num_ranks, arm.cudagraph_mode, arm.twin, arm.kind) for arm in arms]


def test_the_ladder_begins_with_one_rank():
    assert ladder("eager", "full", pcp=2, tp=2) == [
        ("reference", 1, "NONE", None, "partition"),
        ("eager", 4, "NONE", "reference", "partition"),
        ("full", 4, "FULL_DECODE_ONLY", "eager", "padding"),
    ]


def test_eager_stands_between_one_rank_and_graphs():
    labels = [rung[0] for rung in ladder("reference", "full_and_piecewise")]
    assert labels == ["reference", "eager", "full_and_piecewise"]


def test_without_ranks_to_split_over_eager_is_the_first():
    assert ladder("eager", "piecewise", pcp=1) == [
        ("eager", 1, "NONE", None, "partition"),
        ("piecewise", 1, "PIECEWISE", "eager", "padding"),
    ]


@pytest.mark.parametrize(
    ("arm", "replays"),
    [
        ("full", ("FULL",)),
        ("piecewise", ("PIECEWISE",)),
        ("full_and_piecewise", ("FULL", "PIECEWISE")),
    ],
)
def test_an_arm_of_graphs_must_replay_what_it_is_named_for(arm, replays):
    assert EngineRequest(base="eager", candidate=arm).arms[-1].replays == replays
