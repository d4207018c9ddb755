"""`pcpbench faults run`: verdicts, exit codes, and faults of several classes end to end."""

import json
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest

from pcpbench import cli
from pcpbench.engine.engine import Engine
from pcpbench.errors import NothingToDamage
from pcpbench.fault_results import CleanOutcome, CleanRun, FaultRun, FaultsResult, Verdict
from pcpbench.faults import registry
from pcpbench.faults.fault import Setting, planted
from pcpbench.session import faults as session
from pcpbench.session.faults import info_of, verdict_of
from pcpbench.session.faults_request import FaultsRequest

KNOWN = {fault.name: fault for fault in registry.SHIPPED}
SOUND = KNOWN["stale-padded-seq-lens"]
SEVERAL = (
    "stale-padded-seq-lens",
    "stale-block-rows",
    "positions-buffer-moved",
    "weight-updated-by-rebinding",
    "new-blocks-late",
    "global-count-for-dispatch",
    "layer-skipped-on-one-rank",
    "restore-index-off-by-one",
)


def run_with(monkeypatch, *faults, arguments=()):
    monkeypatch.setattr(session, "choose_faults", lambda names, target: list(faults))
    return cli.run(["faults", "run", *arguments])


def harmless(site):
    site.hit()


def broken(site):
    site.hit()
    raise RuntimeError("this injection does not fit")


def test_faults_of_eight_classes_are_caught_on_one_stand(capsys):
    arguments = [part for name in SEVERAL for part in ("--fault", name)]
    assert cli.run(["faults", "run", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "8 of 8 faults caught (100 %); 0 false alarms over 2 clean runs" in printed


def test_a_fault_that_only_dcp_has_is_caught(capsys):
    assert cli.run(["faults", "run", "--fault", "interleave-off-by-one"]) == 0
    assert "1 of 1 fault caught" in " ".join(capsys.readouterr().out.split())


def test_faults_of_plans_captures_and_idle_steps_are_caught(capsys):
    names = ("null-block-handed-out", "output-forgotten", "largest-batch-not-captured",
             "dummy-keeps-tables")  # fmt: skip
    arguments = [part for name in names for part in ("--fault", name)]
    assert cli.run(["faults", "run", *arguments]) == 0
    assert "4 of 4 faults caught" in " ".join(capsys.readouterr().out.split())


def test_faults_of_microbatches_are_caught(capsys):
    names = [f.name for f in registry.SHIPPED if f.needs_microbatch and not f.at_capture]
    assert len(names) >= 6
    arguments = [part for name in names for part in ("--fault", name)]
    assert cli.run(["faults", "run", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{len(names)} of {len(names)} faults caught (100 %); 0 false alarms" in printed


def test_a_fault_of_whole_passes_acts_on_the_parts_of_a_cut_step(capsys):
    world = ["--pcp", "2", "--spec-tokens", "1", "--microbatch"]
    assert cli.run(["faults", "run", *world, "--fault", "idle-rank-skips-gather"]) == 0
    assert "1 of 1 fault caught" in " ".join(capsys.readouterr().out.split())


def test_every_fault_can_be_run_with_microbatches_and_some_only_so():
    (setting,) = FaultsRequest(microbatch=True).settings(SOUND)
    assert setting == replace(SOUND.setting, microbatch=True)
    assert SOUND.lacks(setting) == ""
    fault = KNOWN["ubatch-lengths-not-shortened"]
    assert fault.lacks(replace(fault.setting, microbatch=False)) == "needs --microbatch"


def test_a_fault_that_escapes_is_exit_1_and_is_named(monkeypatch, capsys):
    fault = replace(SOUND, name="no-effect", inject=planted(harmless))
    assert run_with(monkeypatch, fault) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Escaped no-effect" in printed
    assert "0 of 1 fault caught" in printed


def test_an_injection_that_breaks_is_a_crash_and_the_next_one_still_runs(monkeypatch, capsys):
    fault = replace(SOUND, name="broken", inject=planted(broken))
    assert run_with(monkeypatch, fault, SOUND, arguments=["--markdown"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("`broken`" in line and line.endswith("| crashed |") for line in lines)
    assert any(f"`{SOUND.name}`" in line and line.endswith("| caught |") for line in lines)


def test_a_fault_that_no_memory_was_left_for_keeps_the_run_from_a_pass(monkeypatch, capsys):
    def starve(site):
        def faulty(execute, *arguments, **named):
            raise RuntimeError("std::bad_alloc")

        site.wrap(Engine, "execute", faulty)

    no_memory = replace(SOUND, name="full", inject=planted(starve))
    assert run_with(monkeypatch, no_memory, SOUND) == 3
    assert "1 without a verdict" in " ".join(capsys.readouterr().out.split())
    harmless_one = replace(SOUND, name="no-effect", inject=planted(harmless))
    assert run_with(monkeypatch, no_memory, harmless_one) == 1


def test_a_clean_run_that_no_memory_was_left_for_is_a_row_and_the_faults_still_run(
    no_memory_at_first, monkeypatch, capsys
):
    assert run_with(monkeypatch, SOUND, arguments=["--json"]) == 3
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [run["outcome"] for run in found["clean"]] == ["no memory", "clean"]
    assert [run["verdict"] for run in found["runs"]] == ["caught"]
    assert "No memory there is not enough memory: std::bad_alloc" in " ".join(printed.err.split())
    no_memory_at_first.clear()
    assert run_with(monkeypatch, replace(SOUND, name="no", inject=planted(harmless))) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "0 false alarms over 1 clean run" in printed
    assert "No memory there is not enough memory" in printed


def test_a_clean_run_that_compares_nothing_is_no_false_alarm(capsys):
    """Microbatches were asked for, and no step of this scenario is large enough to be cut."""
    world = ["--pcp", "8", "--microbatch", "--scenario", "small-steps"]
    assert cli.run(["faults", "run", "--fault", SOUND.name, *world, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert {run["outcome"] for run in found["clean"]} == {"not compared"}
    assert found["num_false_alarms"] == 0


def test_dtype_and_seed_are_those_of_every_run(monkeypatch):
    built, judged = [], []

    class Builder(session.StandBuilder):
        def __init__(self, target, ladder, options, *rest):
            built.append((options.dtype, options.seed))
            super().__init__(target, ladder, options, *rest)

    class Judged(session.Trial):
        def __init__(self, *arguments, **named):
            judged.append(named["dtype"])
            super().__init__(*arguments, **named)

    monkeypatch.setattr(session, "StandBuilder", Builder)
    monkeypatch.setattr(session, "Trial", Judged)
    asked = ["--dtype", "bfloat16", "--seed", "7"]
    assert cli.run(["faults", "run", "--fault", SOUND.name, *asked]) == 0
    assert set(built) == {("bfloat16", 7)}
    assert set(judged) == {"bfloat16"}


def test_a_fault_that_the_code_at_hand_cannot_have_is_not_run(monkeypatch, capsys):
    def absent(site):
        raise NothingToDamage("captures of this version set no context")

    fault = replace(SOUND, name="absent", inject=planted(absent))
    assert run_with(monkeypatch, fault, SOUND, arguments=["--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["verdict"] for run in runs] == ["not run", "caught"]
    words = "the fault absent cannot be planted: captures of this version set no context."
    assert runs[0]["detail"] == words
    assert run_with(monkeypatch, fault) == 3
    assert "1 cannot be where it was to be run" in " ".join(capsys.readouterr().out.split())


def never(site):
    """An injection that does nothing and says so."""


def theirs(monkeypatch, *faults):
    point = SimpleNamespace(name="x", value="their:FAULTS", load=lambda: faults,
                            dist=SimpleNamespace(name="their-faults"))  # fmt: skip
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if group == registry.GROUP else []
    )


def test_an_unusable_fault_is_a_row_and_the_others_run(monkeypatch, capsys):
    refused = replace(SOUND.setting, dcp=3)  # whole numbers, and no world
    theirs(
        monkeypatch,
        replace(SOUND, name="of-no-scenario", setting=replace(SOUND.setting, scenario="zzz")),
        replace(SOUND, name="of-no-world", setting=refused),
    )
    names = (SOUND.name, "of-no-scenario", "of-no-world")
    arguments = [part for name in names for part in ("--fault", name)]
    assert cli.run(["faults", "run", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 fault caught (100 %), 2 without a verdict" in printed
    assert "Unusable of-no-scenario: package their-faults, entry point 'x': its setting" in printed
    assert "of-no-world: package their-faults, entry point 'x': the engine refuses its" in printed
    assert cli.run(["faults", "run", "--fault", "of-no-world"]) == 3
    assert "no fault was judged: 1 cannot be used." in " ".join(capsys.readouterr().out.split())
    command = ["compare", "eager", "full", "--inject", "of-no-scenario"]
    assert cli.run(command) == 2
    assert "which cannot be used (package their-faults" in capsys.readouterr().err


def test_a_fault_that_never_acted_is_told_as_that(monkeypatch, capsys):
    theirs(monkeypatch, replace(SOUND, name="never", inject=planted(never)))
    assert cli.run(["faults", "run", "--fault", "never", "--scenario", "s2-capture-edges"]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "no fault was judged: 1 never acted where it was run." in printed
    assert "Not triggered never: it never acted in this world and scenario" in printed


def test_compare_with_an_injection_that_breaks_names_it_and_its_package(
    monkeypatch, capsys, tmp_path
):
    for name, inject in (("broken", planted(broken)), ("no-guard", never)):
        theirs(monkeypatch, replace(SOUND, name=name, inject=inject))
        command = f"compare eager full --scenario s2-capture-edges --inject {name} --out"
        assert cli.run([*command.split(), str(tmp_path / name)]) == 3
        said = capsys.readouterr().err
        assert f"the fault {name} (package their-faults, entry point 'x') raised " in said
        assert "when it was planted: nothing was measured." in said
        assert "Traceback" not in said


def test_what_must_not_be_reported_and_is_makes_exit_1(monkeypatch, capsys):
    noise = replace(SOUND, name="noise", class_id="K30", contracts=frozenset())
    assert run_with(monkeypatch, noise) == 1
    assert "1 false alarm over" in " ".join(capsys.readouterr().out.split())


def test_nothing_that_the_world_can_hold_is_exit_3(capsys):
    assert cli.run(["faults", "run", "--fault", "interleave-off-by-one", "--pcp", "2"]) == 3
    assert "needs dcp 2 or more" in " ".join(capsys.readouterr().out.split())


def test_a_world_that_the_engine_refuses_is_exit_2_before_anything_runs(capsys):
    arguments = ["--fault", SOUND.name, "--pcp", "2", "--tp", "3"]
    assert cli.run(["faults", "run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--tp is 3" in captured.err


def test_full_checks_fire_what_quick_ones_do_not_look_for(capsys):
    arguments = ["--fault", "unseen-keys-from-null-block", "--markdown"]
    fired = {}
    for check in ("quick", "full"):
        assert cli.run(["faults", "run", *arguments, "--check", check]) == 0
        (row,) = [r for r in capsys.readouterr().out.splitlines() if r.startswith("| `unseen")]
        fired[check] = row.split("|")[6].strip()
    assert fired == {"quick": "C9, C13", "full": "C9, C13, C16"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--spec-tokens", "-2"],
        ["--pcp", "0"],
        ["--dcp", "-1"],
        ["--dtype", "int8"],
        ["--seed", "-1"],
    ],
)
def test_bad_input_is_exit_2_also_where_the_fault_would_not_fit(capsys, arguments):
    assert cli.run(["faults", "run", "--fault", "one-draft-too-many", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_json_is_all_of_stdout_and_names_what_was_missed(monkeypatch, capsys):
    escaped = replace(SOUND, name="no-effect", inject=planted(harmless))
    assert run_with(monkeypatch, SOUND, escaped, arguments=["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["exit_code"], found["num_faults"], found["num_caught"]) == (1, 2, 1)
    assert found["missed"] == ["no-effect escaped"]
    assert [run["verdict"] for run in found["runs"]] == ["caught", "escaped"]


def test_an_unknown_check_is_exit_2(capsys):
    assert cli.run(["faults", "run", "--check", "most"]) == 2
    assert "--check is 'most'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fired", "num_hits", "verdict"),
    [
        (("C1", "C5"), 1, Verdict.CAUGHT),
        (("C5",), 1, Verdict.MISNAMED),
        ((), 1, Verdict.ESCAPED),
        (("C1",), 0, Verdict.NOT_TRIGGERED),
    ],
)
def test_a_verdict_needs_an_expected_finding_and_an_injection_that_acted(fired, num_hits, verdict):
    assert SOUND.contracts == {"C1"}
    assert verdict_of(SOUND, fired, num_hits) is verdict


def test_what_a_sound_engine_is_accused_of_catches_nothing(monkeypatch, capsys):
    assert verdict_of(SOUND, ("C1", "C10"), 1, {"C1"}) is Verdict.MISNAMED
    assert verdict_of(SOUND, ("C1",), 1, {"C10"}) is Verdict.CAUGHT
    accused = (CleanOutcome.ACCUSED, ("C1",), "seq_lens")
    monkeypatch.setattr(session, "judged_clean", lambda run: accused)
    assert run_with(monkeypatch, SOUND, arguments=["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["missed"] == [f"{SOUND.name} misnamed"]


def test_a_named_world_is_named_whole_and_scenarios_multiply():
    request = FaultsRequest(pcp=4, scenarios=("s1-grow-shrink", "preemption"))
    assert request.settings(KNOWN["interleave-off-by-one"]) == [
        Setting(pcp=4, scenario="s1-grow-shrink"),
        Setting(pcp=4, scenario="preemption"),
    ]


@pytest.mark.parametrize(
    ("verdicts", "outcome", "exit_code"),
    [
        ([Verdict.CAUGHT, Verdict.NOT_RUN], CleanOutcome.CLEAN, 0),
        ([Verdict.CAUGHT, Verdict.MISNAMED], CleanOutcome.CLEAN, 1),
        ([Verdict.CAUGHT], CleanOutcome.ACCUSED, 1),
        ([Verdict.NOT_RUN, Verdict.NOT_TRIGGERED], CleanOutcome.CLEAN, 3),
        ([Verdict.NOT_RUN], CleanOutcome.ACCUSED, 1),
        ([Verdict.CAUGHT, Verdict.NO_MEMORY], CleanOutcome.CLEAN, 3),
        ([Verdict.CAUGHT], CleanOutcome.NOT_COMPARED, 3),
        ([Verdict.CAUGHT], CleanOutcome.NO_MEMORY, 3),
        ([Verdict.ESCAPED, Verdict.NO_MEMORY], CleanOutcome.NOT_COMPARED, 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst(verdicts, outcome, exit_code):
    runs = tuple(
        FaultRun(
            fault=info_of(SOUND), world="pcp 2", scenario="s", fired=(), verdict=verdict, detail=""
        )
        for verdict in verdicts
    )
    accused = ("C4",) if outcome is CleanOutcome.ACCUSED else ()
    clean = (CleanRun(world="pcp 2", scenario="s", outcome=outcome, accused=accused),)
    result = FaultsResult(runs=runs, clean=clean)
    assert result.exit_code == exit_code
    assert result.num_false_alarms == len(accused)
