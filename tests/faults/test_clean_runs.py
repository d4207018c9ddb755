"""`pcpbench faults clean`: an even draw of settings, no alarm without a fault, one with it."""

from collections import Counter

import pytest

from pcpbench import cli
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


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--seed", "-1"], ["--check", "slow"]])
def test_bad_input_is_exit_2(arguments, capsys):
    assert cli.run(["faults", "clean", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
