"""`compare --inject` and `repro` through the command line: bundles, exit codes, what is printed."""

import json
import shutil

import numpy as np
import pytest

from pcpbench import cli
from pcpbench.engine.engine import Engine
from pcpbench.errors import CannotMeasure, EngineError
from pcpbench.report.compare_files import CompareFiles
from pcpbench.targets.builtin import BuiltinArm

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


@pytest.mark.parametrize("draft_model", ["planned", "mtp"])
def test_drafts_are_fed_as_they_were_and_accuse_nobody(tmp_path, capsys, draft_model):
    """A pair is run again without the reference: what fed the arms is all that the judge has."""
    out, drafts = tmp_path / "run", ["--spec-tokens", "3", "--draft-model", draft_model]
    scenario = ["--scenario", "s3-idle-and-reuse", "--repetitions", "0", "--out", str(out)]
    assert cli.run(["compare", "eager", "full", *scenario, *drafts, "--inject", FAULT]) == 1
    bundle = json.loads((out / "divergence" / "bundle.json").read_text(encoding="utf-8"))
    assert "w_down" in bundle["finding"]["metadata"]["tensor"]
    assert bundle["finding"]["tap"]["op"] == "mlp"
    capsys.readouterr()
    assert cli.run(["repro", str(out)]) == 1
    assert "at the same place" in words(capsys.readouterr().out)
    edit(out, lambda document: document["case"].update(fault=""))
    assert cli.run(["repro", str(out)]) == 0


def test_what_was_mended_is_exit_0_in_one_sentence(run_dir, capsys):
    edit(run_dir, lambda document: document["case"].update(fault=""))
    assert cli.run(["repro", str(run_dir)]) == 0
    printed = words(capsys.readouterr().out)
    assert "it does not diverge any more." in printed
    assert f"Injected nothing; when the bundle was made it was the fault {FAULT}" in printed


def test_what_never_showed_in_a_run_of_two_arms_is_not_mended_by_not_showing(run_dir, capsys):
    def never_reproduced(document):
        sound(document)
        document["finding"].update(reproduced="no", tap=None)

    edit(run_dir, never_reproduced)
    assert cli.run(["repro", str(run_dir), "--json"]) == 3
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["exit_code"], document["diverges"]) == (3, False)
    assert words(printed.err).startswith("NOT COMPARED")
    assert "it never showed in a run of the two arms alone" in words(printed.err)


def test_a_planted_fault_that_never_acts_in_the_bundle_says_nothing(run_dir, capsys):
    edit(run_dir, lambda document: document["case"].update(fault="appended-behind-last-tenant"))
    assert cli.run(["repro", str(run_dir)]) == 3
    printed = words(capsys.readouterr().out)
    assert "the planted fault appended-behind-last-tenant never acted in this run" in printed


def test_what_only_the_last_timed_repetition_shows_is_run_into_again(tmp_path, capsys, monkeypatch):
    start, sampled, starts = BuiltinArm.start, BuiltinArm.sampled, {}
    last = 1 + 1 + 3  # judged, recorded, timed

    def counted(self, plan):
        starts[id(self)] = starts.get(id(self), 0) + 1
        start(self, plan)

    def faulty(self):
        late = self.label == "full" and starts[id(self)] == last
        return [token + late for token in sampled(self)]

    monkeypatch.setattr(BuiltinArm, "start", counted)
    monkeypatch.setattr(BuiltinArm, "sampled", faulty)
    out = tmp_path / "run"
    command = [*COMPARE, "--out", str(out)]
    command[command.index("--repetitions") + 1] = "3"
    assert cli.run(command) == 1
    assert "Not reproduced" not in capsys.readouterr().out
    bundle = json.loads((out / "divergence" / "bundle.json").read_text(encoding="utf-8"))
    assert bundle["case"]["accusation"]["contract"] == "C14"
    assert bundle["case"]["repetitions"] == 3
    starts.clear()
    assert cli.run(["repro", str(out)]) == 1
    assert "at the same place" in words(capsys.readouterr().out)


def test_an_engine_that_raises_in_a_timed_run_alone_is_run_into_again(
    tmp_path, capsys, monkeypatch
):
    execute = BuiltinArm.execute

    def faulty(self, step, *given):
        if self.label == "full" and step.index == 2 and not self.engine.keeps_evidence:
            raise EngineError("the engine raised KeyError: 'slot' (at a/b.py:1)")
        return execute(self, step, *given)

    monkeypatch.setattr(BuiltinArm, "execute", faulty)
    out = tmp_path / "run"
    command = [*COMPARE, "--out", str(out)]
    command[command.index("--repetitions") + 1] = "1"
    assert cli.run(command) == 1
    assert "Not reproduced" not in capsys.readouterr().out
    assert cli.run(["repro", str(out)]) == 1
    assert "KeyError: 'slot'" in words(capsys.readouterr().out)


def test_an_engine_that_raises_is_what_was_found(run_dir, capsys, monkeypatch):
    """Its own error and place, as in `compare`; never the numbers of the recorded difference."""
    prepare = Engine.execute

    def faulty(self, step, *fed):
        if step.index == 1 and self.graphs is not None:
            [][step.index]
        return prepare(self, step, *fed)

    monkeypatch.setattr(Engine, "execute", faulty)
    edit(run_dir, sound)
    assert cli.run(["repro", str(run_dir)]) == 1
    printed = words(capsys.readouterr().out)
    said = "the engine raised IndexError: list index out of range (at session/test_repro.py:"
    assert printed.count(said) == 2  # in the verdict and as the first difference
    assert "it broke off: C0, full, step 1" in printed
    assert "values differ" not in printed
    assert cli.run(["repro", str(run_dir), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["found"]
    assert found["accusation"]["contract"] == "C0"
    assert said in found["accusation"]["message"]
    assert said in found["judged"]["message"]
    assert found["tap"] is None


def test_an_engine_that_raises_after_the_difference_is_told_beside_it(run_dir, capsys, monkeypatch):
    dispatch = Engine.execute

    def faulty(self, step, *fed):
        output = dispatch(self, step, *fed)
        if step.index == 1 and self.graphs is not None:
            raise ZeroDivisionError("by nothing")
        return output

    monkeypatch.setattr(Engine, "execute", faulty)
    assert cli.run(["repro", str(run_dir)]) == 1
    assert "it broke off: C0, full, step 1: the engine raised ZeroDivisionError" in words(
        capsys.readouterr().out
    )


def test_an_engine_that_raises_at_capture_is_told(run_dir, capsys, monkeypatch):
    def faulty(*_):
        raise LookupError("no such graph")

    monkeypatch.setattr(Engine, "capture", faulty)
    assert cli.run(["repro", str(run_dir)]) == 1
    said = words(capsys.readouterr().out)
    assert "it broke off: C0" in said
    assert "step 0: in capture: the engine raised LookupError: no such graph" in said


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
    "base": (lambda d: d["case"].update(base="foo"), "'foo' is no arm"),
    "one arm": (lambda d: d["case"].update(base="full"), "both its arms are 'full'"),
    "below 0": (lambda d: d["case"]["accusation"].update(step=-1), "step -1 is not in its plan"),
    "contract": (lambda d: d["case"]["accusation"].update(contract="C99"), "contract 'C99'"),
    "pair": (lambda d: d["case"]["accusation"].update(twin="reference"), "not held against"),
    "kind": (lambda d: d["case"]["accusation"].update(kind="foo"), "for 'foo'"),
    "found of": (lambda d: d["finding"].update(scenario="\x1b[31m"), "its finding is of scenario"),
    "found at": (lambda d: d["finding"]["tap"].update(step=99), "is at step 99"),
    "found how": (lambda d: d["finding"].update(reproduced="maybe"), "was reproduced 'maybe'"),
    "not fed": (lambda d: d["case"].update(tokens=[]), "0 of its 2 steps are given tokens"),
    "free": (lambda d: d["case"].update(feed="free-running"), "2 of its 2 steps are given tokens"),
    "whole": (lambda d: plan_of(d).update(is_cut_short=False), "its plan cannot be"),
    "scenario": (lambda d: plan_of(d).update(scenario="../x\n"), "its scenario is '../x"),
    "no block": (lambda d: plan_of(d).update(num_blocks=1), "its num_blocks is 1"),
    "few blocks": (lambda d: plan_of(d).update(num_blocks=2), "num_blocks is 2"),
    "blocks below 0": (lambda d: plan_of(d).update(num_blocks=-1), "its num_blocks is -1"),
    "many blocks": (lambda d: plan_of(d).update(num_blocks=10**12), "its num_blocks is 10000"),
    "size 0": (lambda d: plan_of(d).update(block_sizes=[0]), "its block_sizes are [0]"),
    "no size": (lambda d: plan_of(d).update(block_sizes=[]), "its block_sizes are []"),
    "sizes": (lambda d: plan_of(d).update(block_sizes=[16, 16]), "its block_sizes are [16, 16]"),
    "length": (lambda d: plan_of(d).update(max_model_len=1), "its max_model_len is 1"),
    "budget": (
        lambda d: plan_of(d).update(max_num_batched_tokens=1),
        "max_num_batched_tokens is 1",
    ),
    "huge": (lambda d: plan_of(d).update(max_num_batched_tokens=10**12), "max_num_batched_tokens"),
    "no seqs": (lambda d: plan_of(d).update(max_num_seqs=0), "its max_num_seqs is 0"),
    "vocabulary": (lambda d: plan_of(d).update(vocab_size=10), "its vocab_size is 10"),
    "ghost": (lambda d: first(d)["scheduled"][0].update(req_id="ghost"), "ghost is scheduled"),
    "prompt": (
        lambda d: first(d)["new_requests"][0].update(prompt_token_ids=[10**6] * 4),
        "a token outside the vocabulary",
    ),
    "other prompt": (
        lambda d: first(d)["new_requests"][0].update(prompt_token_ids=[1] * 4),
        "prompt",
    ),
    "nothing": (lambda d: first(d)["scheduled"][0].update(num_scheduled_tokens=0), "prefills 0"),
    "no blocks": (lambda d: first(d).update(new_block_ids={}), "holds 0 blocks"),
    "never timed": (lambda d: d["case"].update(repetitions=-1), "its repetitions are -1"),
    "timed for ever": (lambda d: d["case"].update(repetitions=1001), "its repetitions are 1001"),
    "name": (lambda d: plan_of(d)["requests"][0].update(req_id="\x1b[2J"), "is called '\\x1b[2J'"),
}


def sound(document):
    document["case"].update(fault="")
    document["finding"].update(fault="")


def plan_of(document):
    sound(document)
    return document["case"]["plan"]


def first(document):
    return plan_of(document)["steps"][0]


@pytest.mark.parametrize(("change", "said"), BROKEN.values(), ids=BROKEN)
def test_a_bundle_that_is_none_is_exit_2(run_dir, capsys, change, said):
    edit(run_dir, change)
    assert cli.run(["repro", str(run_dir)]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_json_that_is_nested_without_end_is_exit_2(run_dir, capsys):
    (run_dir / "divergence" / "bundle.json").write_text("[" * 200_000, encoding="utf-8")
    assert cli.run(["repro", str(run_dir)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_finding_that_accuses_another_step_is_another_place(run_dir, capsys):
    edit(run_dir, lambda document: document["finding"]["accusation"].update(step=0))
    assert cli.run(["repro", str(run_dir)]) == 1
    assert "at another place than recorded" in words(capsys.readouterr().out)


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


NO_BILL = {
    "never acted": ("eager full", "appended-behind-last-tenant", "s2-capture-edges",
                    "never acted here, so this proves nothing; it does in `compare eager full"),
    "not looked for": ("eager full", "tokens-in-output-buffer", "s2-capture-edges",
                       "shows only with --check full"),
    "not there": ("eager eager_padded", FAULT, "s2-capture-edges",
                  "acted 3 times and nothing was found of it; it is found in `compare eager full"),
}  # fmt: skip


@pytest.mark.parametrize(("arms", "fault", "scenario", "said"), NO_BILL.values(), ids=NO_BILL)
def test_a_planted_fault_that_is_not_found_is_no_pass(
    tmp_path, capsys, arms, fault, scenario, said
):
    out = str(tmp_path / "run")
    command = f"compare {arms} --scenario {scenario} --repetitions 0 --inject {fault} --out {out}"
    assert cli.run(command.split()) == 3
    printed = words(capsys.readouterr().out)
    assert printed.startswith("NOT COMPARED")
    assert "PASS" not in printed
    assert said in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["scenarios"][0]["outcome"] == "not compared"


def test_what_is_no_fault_passes_and_the_verdict_says_what_was_planted(tmp_path, capsys):
    name = "another-kernel-for-padded-size"
    assert cli.run([*COMPARE, "--inject", name, "--out", str(tmp_path / "run")]) == 0
    assert f"as it must be with {name} planted, which is no fault." in words(
        capsys.readouterr().out
    )


def test_a_fault_of_the_scheduler_is_planted_before_the_plan_is_made(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert cli.run([*COMPARE, "--inject", "request-lost", "--out", out]) == 1
    printed = words(capsys.readouterr().out)
    assert "C19" in printed
    assert "the plan of s2-capture-edges is broken (C19) before any arm leaves its twin" in printed
    assert cli.run(["repro", out]) == 2  # there is no bundle


def test_a_bundle_keeps_what_the_audit_said_of_its_plan(tmp_path, capsys):
    out = tmp_path / "run"
    command = [*COMPARE, "--inject", "blocks-freed-early", "--out", str(out)]
    command[command.index("s2-capture-edges")] = "steady-mixed"
    assert cli.run(command) == 1
    assert cli.run(["repro", str(out)]) == 1
    assert "at the same place" in words(capsys.readouterr().out)
    edit(out, lambda document: document["case"].update(plan_findings=[]))
    assert cli.run(["repro", str(out)]) == 2
    assert "its plan cannot be: step" in capsys.readouterr().err


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


def test_a_bundle_that_cannot_be_written_changes_no_verdict(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise CannotMeasure("'values.npz' cannot be written (No space left on device): make room.")

    monkeypatch.setattr(CompareFiles, "add_files", full)
    assert cli.run([*COMPARE, "--inject", FAULT, "--out", str(tmp_path / "run")]) == 1
    printed = words(capsys.readouterr().out)
    assert printed.startswith("FAIL")
    assert "s2-capture-edges has no bundle to replay: 'values.npz' cannot be written" in printed
    assert "layer 1, mlp -> hidden" in printed
    assert "Replay it" not in printed


@pytest.mark.parametrize("said", ["this pool overlaps", "std::bad_alloc"])
def test_a_search_that_taps_break_goes_on_without_them(tmp_path, capsys, monkeypatch, said):
    """Taps change how a graph's pool is laid out; a broken pool may then not even be captured.

    And they need memory, of which there may be enough for engines without them.
    """
    capture = Engine.capture

    def faulty(self, *arguments):
        if self.workers[0].taps is not None and self.graphs is not None:
            raise RuntimeError(said)
        return capture(self, *arguments)

    monkeypatch.setattr(Engine, "capture", faulty)
    out = tmp_path / "run"
    assert cli.run([*COMPARE, "--inject", FAULT, "--out", str(out)]) == 1
    assert "with taps it did not show again; it did in a run" in words(capsys.readouterr().out)
    assert cli.run(["repro", str(out)]) == 1
    assert "at the same place" in words(capsys.readouterr().out)


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
