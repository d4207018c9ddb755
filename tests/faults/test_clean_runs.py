"""`pcpbench faults clean`: an even draw of settings, no alarm without a fault, one with it."""

from collections import Counter

import pytest
from msgspec.structs import replace

from pcpbench import cli
from pcpbench.engine_options import EngineOptions
from pcpbench.fault_results import CleanOutcome, CleanResult, CleanRun
from pcpbench.scenarios.loader import shipped_names
from pcpbench.session import clean_runs
from pcpbench.session.clean_runs import WORLDS, Draw, draw_runs


def world_of(draw):
    """A world's sizes and attention, whatever its MLP is."""
    o = draw.options
    return o.pcp, o.tp, o.dcp, o.interleave, o.dcp_backend, o.preset.removesuffix("-moe")


def test_every_setting_is_drawn_equally_often_with_seeds_of_its_own():
    draws = draw_runs(200, 7, "cpu")
    assert len({draw.options.seed for draw in draws}) == 200
    for values, count in (
        ([draw.scenario for draw in draws], len(shipped_names())),
        ([world_of(draw) for draw in draws], len(WORLDS)),
        ([(draw.base, draw.candidate) for draw in draws], 5),
        ([draw.options.dtype for draw in draws], 3),
        ([draw.feed for draw in draws], 2),
        ([draw.options.microbatch for draw in draws], 2),
    ):
        times = Counter(values)
        assert len(times) == count
        assert max(times.values()) - min(times.values()) <= 1
    assert draw_runs(200, 7, "cpu") == draws
    assert draw_runs(200, 8, "cpu") != draws
    for draw in draws:
        assert ("--microbatch" in draw.command) == draw.options.microbatch


@pytest.fixture
def one_draw(monkeypatch):
    draw = next(
        draw
        for draw in draw_runs(2000, 0, "cpu")
        if draw.candidate == "full" and draw.options.pcp == 2 and draw.scenario.startswith("s2")
    )
    monkeypatch.setattr(clean_runs, "draw_runs", lambda *arguments: [draw])
    return draw


def test_sound_engines_are_not_accused(one_draw: Draw, capsys):
    assert cli.run(["faults", "clean", "--runs", "1"]) == 0
    assert "0 false alarms over 1 clean run" in " ".join(capsys.readouterr().out.split())


def test_an_accusation_is_exit_1_with_the_command_that_repeats_it(
    one_draw: Draw, sample_the_worst, capsys
):
    sample_the_worst()
    assert cli.run(["faults", "clean", "--runs", "1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 false alarm over 1 clean run" in printed
    assert one_draw.command in printed
    assert cli.run([*one_draw.command.split()[1:], "--json"]) == 1


def draws(monkeypatch, *chosen):
    monkeypatch.setattr(clean_runs, "draw_runs", lambda *arguments: list(chosen))


def test_a_run_that_compares_nothing_is_no_alarm_and_no_pass(one_draw, monkeypatch, capsys):
    """Microbatches were asked for, and no step of this scenario is large enough to be cut."""
    options = EngineOptions(pcp=8, microbatch=True)
    uncut = Draw(scenario="small-steps", options=options, base="eager", candidate="full",
                 feed="teacher-forced")  # fmt: skip
    draws(monkeypatch, uncut, one_draw)
    assert cli.run(["faults", "clean"]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "NOT COMPARED 0 false alarms over 1 clean run, 1 without a verdict" in printed
    assert "Not compared" in printed
    assert uncut.command in printed


def test_a_run_that_no_memory_was_left_for_leaves_the_others(
    one_draw, no_memory_at_first, monkeypatch, capsys
):
    draws(monkeypatch, one_draw, one_draw)
    assert cli.run(["faults", "clean"]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "0 false alarms over 1 clean run, 1 without a verdict" in printed
    assert "No memory there is not enough memory: std::bad_alloc" in printed


@pytest.mark.parametrize(
    ("outcomes", "exit_code"),
    [
        ((), 3),
        ((CleanOutcome.CLEAN,), 0),
        ((CleanOutcome.CLEAN, CleanOutcome.NO_MEMORY), 3),
        ((CleanOutcome.CLEAN, CleanOutcome.NOT_COMPARED), 3),
        ((CleanOutcome.ACCUSED, CleanOutcome.NO_MEMORY), 1),
    ],
)
def test_an_alarm_is_exit_1_whatever_could_not_be_judged(outcomes, exit_code):
    runs = tuple(
        CleanRun(world="w", scenario="s", outcome=outcome,
                 accused=("C1",) if outcome is CleanOutcome.ACCUSED else ())
        for outcome in outcomes
    )  # fmt: skip
    assert CleanResult(runs=runs).exit_code == exit_code


def test_full_checks_are_made_and_are_in_the_command_that_repeats_a_run(monkeypatch, capsys):
    asked, checks = draw_runs(3, 7, "cpu", "full"), []

    class Judged(clean_runs.Trial):
        def __init__(self, *arguments, **named):
            checks.append(named["checks"])
            super().__init__(*arguments, **{**named, "checks": "quick"})

    monkeypatch.setattr(clean_runs, "Trial", Judged)
    assert all("--check full" in draw.command for draw in asked)
    assert not any("--check" in draw.command for draw in draw_runs(3, 7, "cpu"))
    small = Draw(scenario="s2-capture-edges", options=EngineOptions(), base="eager",
                 candidate="full", feed="teacher-forced")  # fmt: skip
    monkeypatch.setattr(clean_runs, "draw_runs", lambda *given: [replace(small, checks=given[-1])])
    assert cli.run(["faults", "clean", "--runs", "1", "--check", "full"]) == 0
    assert checks == ["full"]


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--seed", "-1"], ["--check", "slow"]])
def test_bad_input_is_exit_2(arguments, capsys):
    assert cli.run(["faults", "clean", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
