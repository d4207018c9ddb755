"""Every way in which a scenario file can be unusable ends in one sentence that helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pcpbench.errors import ScenarioError
from pcpbench.scenarios import loader
from pcpbench.scenarios.loader import load_scenario, load_scenarios, parse_scenario, shipped_names

GOOD = """\
name: mine
description: two requests
limits:
  max_num_seqs: 4
requests:
  - prompt_len: 5
    output_len: 3
  - {prompt_len: 7, output_len: 2, at_s: 0.5}
"""


def refused(text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, "mine.yaml")
    message = str(caught.value)
    assert message.startswith("mine.yaml")
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    scenario = load_scenario(path)
    assert (scenario.name, scenario.limits.max_num_seqs, scenario.num_requests) == ("mine", 4, 2)
    assert scenario.requests[1].at_s == 0.5
    assert load_scenario(str(path)) == scenario


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('description: "a\\0b"', "line 2: a text holds the control character U+0000"),
        ('description: "\\e[31m"', "line 2: a text holds the control character U+001B"),
        ("description: !odd [1]", "line 2: the tag !odd is not read"),
    ],
)
def test_what_a_terminal_would_choke_on_is_refused(line: str, told: str) -> None:
    assert told in refused(f"name: mine\n{line}\nrequests: []\n")


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        '{"name": "j", "description": "d", "requests": [{"prompt_len": 5, "output_len": 3}]}'
    )
    assert load_scenario(path).name == "j"


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_scenario(path).name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("prompt_len: 5", "promt_len: 5", ["line 6", "requests[0].promt_len", "'prompt_len'"]),
        ("max_num_seqs", "max_seqs", ["line 4", "limits.max_seqs", "nearest is 'max_num_seqs'"]),
        ("limits:", "zzz:", ["line 3: zzz", "the keys here are name, description, requests"]),
        ("    output_len: 3\n", "", ["line 6", "requests[0] lacks the key 'output_len'"]),
        ("output_len: 3", "output_len: 0", ["line 7", "requests[0].output_len is 0", "from 1 to"]),
        ("output_len: 3", "output_len: -4", ["is -4"]),
        ("output_len: 3", "output_len: three", ["is 'three'", "a whole number"]),
        ("output_len: 3", "output_len: true", ["is true", "a whole number"]),
        ("output_len: 3", "output_len: no", ["is False", "a whole number"]),
        ("output_len: 3", "output_len: 3.0", ["is 3.0", "a whole number"]),
        ("output_len: 3", "output_len:", ["is empty", "a whole number"]),
        ("output_len: 3", "output_len: [3]", ["is a list", "a whole number"]),
        ("output_len: 3", "output_len: 010", ["line 7", "plain decimals"]),
        ("output_len: 3", "output_len: 1:30", ["line 7", "plain decimals"]),
        ("output_len: 3", "output_len: " + "9" * 5000, ["line 7", "plain decimals"]),
        ("output_len: 3", "output_len: 2024-01-01", ["line 7", "timestamp"]),
        ("output_len: 3", "output_len: 300", ["line 6", "305", "raise max_model_len to 305"]),
        ("at_s: 0.5", "at_s: .nan", ["line 8", "requests[1].at_s is nan", "seconds"]),
        ("at_s: 0.5", "at_s: -.inf", ["is -inf"]),
        ("at_s: 0.5", "at_s: -1", ["requests[1].at_s is -1"]),
        ("at_s: 0.5", "at_s: 1e400", ["line 8", "1e400"]),
        ("at_s: 0.5", "at_s: 0.5, at_step: 3", ["requests[1].at_s", "keep one"]),
        ("at_s: 0.5", "count: 0", ["requests[1].count is 0"]),
        ("at_s: 0.5", "count: 100000", ["requests[1].count is 100000"]),
        ("at_s: 0.5", "name: r0", ["requests[1].name", "second request 'r0'"]),
        ("at_s: 0.5", "name: 'Big one'", ["requests[1].name is 'Big one'", "a-z"]),
        ("name: mine", "name: no", ["line 1: name is False"]),
        ("name: mine", 'name: "mine\\n"', ["name is 'mine\\n'"]),
        ("name: mine", "name: ../up", ["name is '../up'"]),
        ("name: mine", "name: mine\ncovers: [S1, X9]", ["covers[1] is 'X9'", "S1 or K03"]),
        ("name: mine", "name: mine\ncovers: S1", ["covers is 'S1'", "a list"]),
        ("name: mine", "name: mine\nname: other", ["line 2", "'name' appears twice"]),
        ("name: mine", "name: !!python/object:os.system x", ["line 1"]),
        ("name: mine", "name: mine\nstep_time_s: 0", ["step_time_s is 0"]),
        ("name: mine", "name: mine\n? [a]\n: 1", ["line 2", "a key must be a plain word"]),
        ("max_num_seqs: 4", "max_num_seqs: 400", ["limits.max_num_batched_tokens", "line 3"]),
        ("max_num_seqs: 4", "num_blocks: 4000000", ["limits.num_blocks", "at most"]),
        ("max_num_seqs: 4", "num_blocks: 1", ["limits.num_blocks is 1"]),
        ("max_num_seqs: 4", "[1, 2]", ["line 3", "limits is a list", "a mapping"]),
        ("  max_num_seqs: 4\n", "", ["limits is empty", "a mapping"]),
        ("requests:\n", "requests: [\n", ["not valid YAML", "line"]),
        ("name: mine", "name: mine: x", ["line 1, column 11", "not valid YAML"]),
        ("name: mine", "name: &a mine\nsource: *a", ["line 2", "aliases"]),
        ("name: mine", "name: a\x00b", ["line 1", "not valid YAML"]),
        ("name: mine", "name: mine\n---\nname: b", ["line 2", "one scenario in a file"]),
        ("name: mine", "name: mine\nsource: " + "[" * 20, ["line 2", "deep"]),
    ],
)
def test_a_broken_value_is_named_with_line_and_remedy(old: str, new: str, words: list[str]) -> None:
    assert old in GOOD
    message = refused(GOOD.replace(old, new, 1))
    for word in words:
        assert word in message, message
    assert len(message) < 400


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n...\n"])
def test_an_empty_file_is_called_empty(text: str) -> None:
    assert "is empty" in refused(text)


@pytest.mark.parametrize("text", ["just words", "- a\n- b\n", "42"])
def test_a_file_that_is_no_mapping(text: str) -> None:
    assert "the document is" in refused(text)


def test_no_requests() -> None:
    head = GOOD.split("requests:")[0]
    assert "lacks the key 'requests'" in refused(head)
    assert "requests has 0 entries" in refused(head + "requests: []")
    assert "requests is empty" in refused(head + "requests:")


def test_too_many_requests_together() -> None:
    many = "\n".join("  - {prompt_len: 1, output_len: 1, count: 9000}" for _ in range(2))
    message = refused(GOOD.split("requests:")[0] + "requests:\n" + many)
    assert "18000 requests" in message


def test_a_prompt_that_needs_more_blocks_than_exist() -> None:
    text = GOOD.replace("max_num_seqs: 4", "num_blocks: 2").replace(
        "prompt_len: 5", "prompt_len: 30"
    )
    assert "use 3 blocks or more" in refused(text)


def test_an_alias_bomb_is_refused_before_it_is_built() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "aliases" in refused("\n".join(lines))


def test_paths_that_are_no_scenario_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: a\nb: \xff\xfe")
    large = tmp_path / "large.yaml"
    large.write_text(GOOD + "#" * loader.MAX_FILE_BYTES)
    cases = {
        str(tmp_path / "absent.yaml"): "does not exist",
        str(tmp_path): "is a directory",
        str(fifo): "not a regular file",
        str(binary): "line 2: not UTF-8",
        str(large): "larger than 256 KiB",
        "/".join(["x" * 300, "y.yaml"]): "cannot be read",
        "nul\0/byte.yaml": "nul.x00/byte.yaml' does not exist",
    }
    for path, words in cases.items():
        with pytest.raises(ScenarioError, match=words):
            load_scenario(path)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ScenarioError, match="Permission denied"):
        load_scenario(path)


def test_an_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(ScenarioError, match="did you mean steady-mixed"):
        load_scenario("stedy-mixed")
    with pytest.raises(ScenarioError, match="s1-grow-shrink"):
        load_scenario("grow")
    with pytest.raises(ScenarioError, match="use one of azure-code, "):
        load_scenario("@@@@")
    with pytest.raises(ScenarioError, match="scenario ''"):
        load_scenario("")


def test_a_shipped_name_wins_over_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steady-mixed").mkdir()
    assert load_scenario("steady-mixed").name == "steady-mixed"


def test_two_scenarios_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "copy.yaml"
    path.write_text(GOOD.replace("name: mine", "name: steady-mixed"))
    with pytest.raises(ScenarioError, match="already given by steady-mixed"):
        load_scenarios(["steady-mixed", str(path)])
    with pytest.raises(ScenarioError, match="already given"):
        load_scenarios(["steady-mixed", "steady-mixed"])


def test_names_are_listed_with_s2_before_s11() -> None:
    names = shipped_names()
    assert names.index("s2-capture-edges") < names.index("s11-long-kv")


def test_all_shipped_scenarios_load_under_their_own_names() -> None:
    assert [scenario.name for scenario in load_scenarios()] == shipped_names()


def test_loading_and_planning_import_neither_torch_nor_pandas() -> None:
    code = (
        "import sys, pcpbench.engine.plan_steps, pcpbench.scenarios.loader as loader;"
        "loader.load_scenarios();"
        "print([m for m in ('torch', 'pandas', 'triton', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
