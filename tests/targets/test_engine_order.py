"""What an engine is ordered to do."""

import json
from pathlib import Path

import numpy as np
import pytest

from pcpbench.engine_request import EngineRequest
from pcpbench.engine_results import Probe
from pcpbench.errors import UsageError
from pcpbench.targets.engine.checkpoint import CONFIG, write_checkpoint
from pcpbench.targets.engine.order import load_of, order_of


def order(base, candidate, arm, platform="cuda", **settings):
    request = EngineRequest(base=base, candidate=candidate, **settings)
    return order_of(
        next(each for each in request.arms if each.label == arm),
        load_of(request.scenario, request.seed),
        Probe(python="3.11", platform=platform),
        checkpoint=Path("checkpoint"),
        dtype=request.dtype,
        repetitions=2,
        capture_sizes=request.capture_sizes,
        fault=request.inject or "",
    )


def test_the_ladder_differs_in_ranks_and_graph_mode_only():
    by_arm = {
        arm: order("eager", "full", arm, pcp=2, capture_sizes=(1, 2))
        for arm in ("reference", "eager", "full")
    }
    engines = {arm: dict(each.pop("engine")) for arm, each in by_arm.items()}
    assert by_arm["reference"] == by_arm["eager"] == by_arm["full"]
    sizes = [e.pop("prefill_context_parallel_size") for e in engines.values()]
    assert sizes == [1, 2, 2]
    modes = [e.pop("compilation_config") for e in engines.values()]
    assert modes == [
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]},
    ]
    assert [e.pop("enforce_eager", False) for e in engines.values()] == [True, True, False]
    assert engines["reference"] == engines["eager"] == engines["full"]


def test_the_wrong_rotary_op_is_left_out_on_a_cpu_only():
    on_cpu = order("reference", "eager", "eager", "cpu")["engine"]
    assert on_cpu["compilation_config"]["custom_ops"] == ["none"]
    on_gpu = order("reference", "eager", "eager")["engine"]
    assert "custom_ops" not in on_gpu["compilation_config"]


def test_a_fault_goes_where_there_is_a_pcp_manager():
    assert order("reference", "eager", "eager", inject="kv-writer")["fault"] == "kv-writer"
    assert order("reference", "eager", "reference", inject="kv-writer")["fault"] == ""


def test_a_seed_has_prompts_of_its_own():
    first, same, other = (
        load_of(EngineRequest(base="reference", candidate="eager", seed=s).scenario, s)
        for s in (0, 0, 1)
    )
    assert first == same != other


def test_a_scenario_is_its_requests():
    request = EngineRequest(base="reference", candidate="eager", scenarios=("s14-uneven-ranks",))
    load = load_of(request.scenario, 0)
    assert len(load.prompts) == request.scenario.num_requests
    assert load.output_lens[0] == 40


def test_a_request_too_long_for_the_checkpoint_is_refused(tmp_path):
    file = tmp_path / "long.yaml"
    file.write_text(
        "name: long\ndescription: d\nlimits: {max_model_len: 4096, num_blocks: 999}\n"
        "requests: [{prompt_len: 600, output_len: 5}]\n"
    )
    request = EngineRequest(base="reference", candidate="eager", scenarios=(str(file),))
    with pytest.raises(UsageError, match="goes up to 512"):
        load_of(request.scenario, 0)


def read(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    header.pop("__metadata__")
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
        for name, entry in header.items()
    }, len(body)


def test_a_checkpoint_is_complete_and_its_logits_are_not_flat(tmp_path):
    write_checkpoint(tmp_path, 0)
    tensors, num_bytes = read(tmp_path / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == num_bytes
    assert tensors["model.layers.1.mlp.gate.weight"].shape == (CONFIG["n_routed_experts"], 128)
    kv_b = tensors["model.layers.0.self_attn.kv_b_proj.weight"]
    assert kv_b.shape == (4 * (32 + 32), CONFIG["kv_lora_rank"])
    hidden = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    logits = hidden @ tensors["lm_head.weight"].T
    assert 2.5 < float(np.sqrt(np.square(logits).mean())) < 3.5
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 256


def test_a_seed_is_one_checkpoint(tmp_path):
    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()
    digests = [write_checkpoint(p, s) for p, s in zip(places, (0, 0, 1), strict=True)]
    assert digests[0] == digests[1] != digests[2]
    same = [(p / "model.safetensors").read_bytes() for p in places]
    assert same[0] == same[1] != same[2]


def test_safetensors_reads_what_was_written(tmp_path):
    load_file = pytest.importorskip(
        "safetensors.numpy", reason="needs the safetensors package, which vLLM brings"
    ).load_file
    write_checkpoint(tmp_path, 3)
    ours, _ = read(tmp_path / "model.safetensors")
    theirs = load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
