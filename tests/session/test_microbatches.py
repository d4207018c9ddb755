"""Comparisons with --microbatch, end to end: what passes, what is told."""

import pytest

from pcpbench import cli
from pcpbench.results import Outcome

WORLDS = {
    "pcp 2": {"pcp": 2},
    "pcp 4": {"pcp": 4},
    "tp 4 dcp 2": {"pcp": 1, "tp": 4, "dcp": 2, "interleave": 4},
}
S16 = "s16-microbatch-cut"


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_cut_steps_replay_bit_for_bit_and_keep_every_contract(bench, world):
    result = bench(S16, "full_and_piecewise", microbatch=True, **world).run()
    assert result.outcome is Outcome.PASS, result.reasons
    arms = {arm.arm: arm for arm in result.arms}
    assert arms["reference"].steps_cut == 0
    assert arms["full_and_piecewise"].steps_cut == arms["eager"].steps_cut >= 8
    assert {d.kind: d.worst.outcome for d in result.drifts}["capture"] == "bitwise"


def test_unread_memory_of_microbatches_may_hold_anything(bench):
    result = bench(S16, microbatch=True).run(checks="full")
    assert result.outcome is Outcome.PASS, result.reasons


def test_the_command_takes_the_option_and_tells(capsys, tmp_path):
    arguments = ["--scenario", S16, "--repetitions", "0", "--out", str(tmp_path / "run")]
    assert cli.run(["compare", "eager", "full", "--microbatch", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "interleave 1, microbatches" in printed
    assert "In microbatches" in printed


def test_capture_shows_the_twins_and_their_buffers(capsys, tmp_path):
    arguments = ["--microbatch", "--capture-sizes", "1,4", "--out", str(tmp_path / "run")]
    assert cli.run(["capture", *arguments]) == 0
    (table,) = (tmp_path / "run").glob("capture*.csv")
    text = table.read_text()
    assert text.count("ubatches=2") == 1
    assert text.index("tokens=4]") < text.index("tokens=4,ubatches=2]") < text.index("tokens=1]")
    assert "rank*.ubatch1.seq_lens" in capsys.readouterr().out
