"""`compare --inject` and `repro` through the command line: bundles, exit codes, what is printed."""

import json
import shutil

import numpy as np
import pytest

from pcpbench import cli

FAULT = "weight-updated-by-rebinding"
COMPARE = ["compare", "eager", "full", "--scenario", "s2-capture-edges", "--repetitions", "0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "run"
    assert cli.run([*COMPARE, "--inject", FAULT, "--out", str(out)]) == 1
    return out


@pytest.fixture
def run_dir(made, tmp_path):
    """A copy of one failed run, free to be damaged."""
    return shutil.copytree(made, tmp_path / "run")


def edit(run_dir, change):
    file = run_dir / "divergence" / "bundle.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    change(document)
    file.write_text(json.dumps(document), encoding="utf-8")


def words(text):
    return " ".join(text.split())


def test_the_fault_is_in_the_first_lines_the_manifest_and_the_bundle(tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.run([*COMPARE, "--inject", FAULT, "--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert FAULT in "\n".join(printed.splitlines()[:3])
    assert "layer 1, mlp -> hidden" in words(printed)
    assert "pcpbench repro" in printed
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["settings"]["inject"] == FAULT
    assert {"divergence/bundle.json", "divergence/values.npz"} <= set(manifest["files"])
    bundle = json.loads((out / "divergence" / "bundle.json").read_text(encoding="utf-8"))
    assert bundle["case"]["fault"] == FAULT
    assert bundle["finding"]["tap"]["op"] == "mlp"
    with np.load(out / "divergence" / "values.npz") as values:
        assert values["tap_found"].shape == values["tap_expected"].shape
        assert not np.array_equal(values["tap_found"], values["tap_expected"])


def test_json_has_the_divergence(tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.run([*COMPARE, "--inject", FAULT, "--json", "--out", str(out)]) == 1
    document = json.loads(capsys.readouterr().out)
    tap = document["divergence"]["tap"]
    assert [tap[key] for key in ("step", "rank", "layer", "op")] == [1, 0, 1, "mlp"]
    assert document["divergence"]["bundle"] == str(out / "divergence")


@pytest.mark.parametrize("place", ["", "divergence", "divergence/bundle.json"])
def test_it_diverges_again_at_the_same_place(run_dir, capsys, place):
    assert cli.run(["repro", str(run_dir / place)]) == 1
    printed = words(capsys.readouterr().out)
    assert "diverges again, at the same place" in printed
    assert "layer 1, mlp -> hidden" in printed
    assert FAULT in printed


def test_what_was_mended_is_exit_0_in_one_sentence(run_dir, capsys):
    edit(run_dir, lambda document: document["case"].update(fault=""))
    assert cli.run(["repro", str(run_dir)]) == 0
    assert "it does not diverge any more." in words(capsys.readouterr().out)


def test_another_place_than_recorded_is_told(run_dir, capsys):
    edit(run_dir, lambda document: document["case"].update(fault="positions-buffer-moved"))
    assert cli.run(["repro", str(run_dir)]) == 1
    assert "at another place than recorded" in words(capsys.readouterr().out)


def test_repro_as_json(run_dir, capsys):
    assert cli.run(["repro", str(run_dir), "--json"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["diverges"] is True
    assert document["found"]["tap"]["op"] == document["recorded"]["tap"]["op"] == "mlp"
    assert "diverges again" in printed.err


def test_a_version_that_changed_is_told(run_dir, capsys):
    edit(run_dir, lambda document: document["environment"]["versions"].update(torch="0.4"))
    assert cli.run(["repro", str(run_dir)]) == 1
    assert "torch was 0.4, is" in words(capsys.readouterr().out)


BROKEN = {
    "schema": (lambda d: d.update(schema_version=99), "schema version 99"),
    "foreign": (lambda d: d.update(format="something else"), "is no divergence bundle"),
    "field": (lambda d: d["case"].pop("plan"), "is damaged"),
    "type": (lambda d: d["case"]["accusation"].update(step="one"), "is damaged"),
    "step": (lambda d: d["case"]["accusation"].update(last_step=99), "step 99 is not in its plan"),
    "arm": (lambda d: d["case"]["accusation"].update(arm="piecewise"), "no arm of"),
    "tokens": (lambda d: d["case"]["tokens"][1].pop(), "tokens and"),
    "model": (lambda d: d["case"]["options"].update(model="huge"), "--model is 'huge'"),
}


@pytest.mark.parametrize(("change", "said"), BROKEN.values(), ids=BROKEN)
def test_a_bundle_that_is_none_is_exit_2(run_dir, capsys, change, said):
    edit(run_dir, change)
    assert cli.run(["repro", str(run_dir)]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_missing_and_cut_files_are_exit_2(run_dir, capsys):
    values = run_dir / "divergence" / "values.npz"
    values.write_bytes(values.read_bytes()[:100])
    assert cli.run(["repro", str(run_dir)]) == 2
    assert "values.npz next to it cannot be read" in capsys.readouterr().err
    file = run_dir / "divergence" / "bundle.json"
    file.write_bytes(file.read_bytes()[:100])
    assert cli.run(["repro", str(run_dir)]) == 2
    assert cli.run(["repro", str(run_dir / "nowhere")]) == 2
    assert cli.run(["repro", str(run_dir / "manifest.json")]) == 2
    assert cli.run(["repro", str(run_dir.parent)]) == 2


def test_what_cannot_be_run_here_is_exit_3(run_dir, capsys):
    edit(run_dir, lambda document: document["case"].update(fault="of-another-package"))
    assert cli.run(["repro", str(run_dir)]) == 3
    assert "'of-another-package'" in capsys.readouterr().err
    edit(run_dir, lambda d: d["case"]["options"].update(device="cuda:99", backend="accelerator"))
    assert cli.run(["repro", str(run_dir)]) == 3
    assert "cuda:99" in capsys.readouterr().err


def test_a_fault_that_never_acts_is_told(tmp_path, capsys):
    command = [*COMPARE, "--inject", "idle-rank-skips-gather", "--out", str(tmp_path / "run")]
    command[command.index("s2-capture-edges")] = "s4-one-token-prompts"
    code = cli.run([*command, "--pcp", "2"])
    printed = words(capsys.readouterr().out)
    assert (code == 0) == ("never acted here" in printed)


def test_a_clean_run_leaves_no_bundle(tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.run([*COMPARE, "--out", str(out)]) == 0
    assert "Injected" not in capsys.readouterr().out
    assert not (out / "divergence").exists()


def test_of_two_failed_scenarios_the_first_is_located_and_the_other_named(tmp_path, capsys):
    command = [*COMPARE, "--scenario", "s7-same-prompt-twice", "--inject", FAULT]
    assert cli.run([*command, "--out", str(tmp_path / "run")]) == 1
    printed = words(capsys.readouterr().out)
    assert "1 more scenario failed (s7-same-prompt-twice)" in printed
    assert printed.count("Replay it") == 1


def test_a_search_that_breaks_changes_no_verdict(tmp_path, capsys, monkeypatch):
    from pcpbench.session import divergence

    def broken(*_):
        raise IndexError("out of range")

    monkeypatch.setattr(divergence, "locate", broken)
    out = tmp_path / "run"
    assert cli.run([*COMPARE, "--inject", FAULT, "--out", str(out)]) == 1
    assert "was not found" in words(capsys.readouterr().out)
    assert not (out / "divergence").exists()


def test_the_arms_are_fed_the_tokens_of_the_bundle(run_dir, capsys):
    """Same place, other numbers where another token is fed; the same numbers where not."""
    shown = []
    for shift in (0, 1):
        edit(run_dir, lambda d, by=shift: d["case"]["tokens"].__setitem__(
            0, [(token + by) % 256 for token in d["case"]["tokens"][0]]))  # fmt: skip
        assert cli.run(["repro", str(run_dir), "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        shown.append(document["found"]["tap"]["found"] == document["recorded"]["tap"]["found"])
    assert shown == [True, False]
