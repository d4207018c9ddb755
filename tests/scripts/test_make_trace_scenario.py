"""The script that cuts a scenario from a trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pcpbench.scenarios.loader import parse_scenario

SCRIPT = Path(__file__).parents[2] / "scripts" / "make-trace-scenario.py"

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,0
2023-11-16 18:17:04.0781490,110,27
2023-11-16 18:17:59.9999999,61,300
"""
BURST = """\
Session ID,Timestamp,Model,Response tokens,Request tokens,Total tokens,Log Type
1,5,m,18,472,490,Conversation log
2,45.5,m,0,1087,1087,Conversation log
3,118,m,7,2,9,API log
"""


def cut(tmp_path: Path, text: str | bytes, *options: str) -> subprocess.CompletedProcess[str]:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(text.encode() if isinstance(text, str) else text)
    command = [sys.executable, str(SCRIPT), str(trace), "--name", "cut", "--source", "a test"]
    return subprocess.run([*command, *options], capture_output=True, text=True)


def test_lengths_are_divided_and_failed_requests_left_out(tmp_path: Path) -> None:
    done = cut(tmp_path, AZURE)
    assert done.returncode == 0, done.stderr
    scenario = parse_scenario(done.stdout, "cut")
    assert [(r.prompt_len, r.output_len) for r in scenario.requests] == [(81, 10), (2, 27), (2, 48)]
    assert [r.at_s for r in scenario.requests] == [0.0, 0.098189, 56.02004]
    assert "a test" in scenario.source
    assert "divided by 60" in scenario.source


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    done = cut(tmp_path, BURST, "--context-divisor", "10", "--start", "1", "--output-divisor", "2")
    scenario = parse_scenario(done.stdout, "cut")
    assert [(r.prompt_len, r.output_len, r.at_s) for r in scenario.requests] == [(1, 4, 0.0)]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a,b\n1,2\n", (), "it needs one of TIMESTAMP"),
        ("", (), "(none)"),
        (AZURE.replace("4808", "many"), (), "line 2"),
        (AZURE.replace(",4808,10", ""), (), "line 2"),
        (b"\x7fELF\x02\x01\x00\xff\xfe\x80" * 9, (), "trace.csv is no text in UTF-8 (byte 7)"),
        (AZURE.encode() + b"\xff\n", (), "is no text in UTF-8"),
        (AZURE + '"' + "x" * 200_000, (), "trace.csv is no CSV file"),
        ("\0" * 9, (), "trace"),
        (AZURE.replace("2023-11-16 18:17:03", "2023-11-16 18:17:99"), (), "line 2"),
        (AZURE.replace("4808", "9" * 5000), (), "line 2"),
        (AZURE, ("--name", ""), "--name: it is empty"),
        (AZURE, ("--source", " "), "--source: it is empty"),
        (AZURE, ("--start", "9"), "--start is 9"),
        (AZURE, ("--context-divisor", "1"), "raise max_model_len"),
        (AZURE, ("--context-divisor", "0"), "0 is below 1"),
        (AZURE, ("--step-time-s", "nan"), "step_time_s"),
    ],
)
def test_a_trace_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, text: str, options: tuple[str, ...], words: str
) -> None:
    done = cut(tmp_path, text, *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_another_python_is_told_which_one_to_use(tmp_path: Path) -> None:
    """`-S -E` hides what is installed: the Python that a person has by that name."""
    command = [sys.executable, "-S", "-E", str(SCRIPT), "trace.csv"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "run scripts/setup, then .venv/bin/python scripts/make-trace-scenario.py" in done.stderr
