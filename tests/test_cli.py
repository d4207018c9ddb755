"""What a person meets on the command line: refusals in one sentence, exit codes, help."""

import functools
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer.main

from pcpbench import cli

HELP_COMMANDS = [
    ["--help"],
    ["capture", "--help"],
    ["compare", "--help"],
    ["modes", "--help"],
    ["matrix", "--help"],
    ["report", "--help"],
    ["trace", "--help"],
    ["repro", "--help"],
    ["gate", "--help"],
    ["check", "partition", "--help"],
    ["doctor", "--help"],
    ["scenarios", "--help"],
    ["scenarios", "list", "--help"],
    ["scenarios", "show", "--help"],
    ["scenarios", "validate", "--help"],
    ["scenarios", "schema", "--help"],
]

BAD_INPUT = [
    (
        "capture --mode full --pcp 2",
        2,
        [
            "--mode is 'full' with --pcp 2",
            "use one of piecewise, full_decode_only, full_and_piecewise, or --pcp 1.",
        ],
    ),
    ("capture --mode none --pcp 1", 2, ["use one of piecewise, full, full_decode_only, "]),
    ("capture --mode none", 2, ["--mode is 'none'", "full_decode_only"]),
    ("capture --mode sideways", 2, ["--mode is 'sideways'", "piecewise"]),
    ("capture --pcp 1 --tp 4 --dcp 3", 2, ["--dcp is 3", "use one of 1, 2, 4."]),
    ("capture --dcp 3", 2, ["--dcp is 3", "--pcp 2 --tp 1", "use one of 1, 2."]),
    ("compare eager full --dcp 3", 2, ["--dcp is 3", "--pcp 2 --tp 1", "use one of 1, 2."]),
    (
        "compare eager full --dcp 2 --model tiny",
        2,
        [
            "--model is 'tiny' with --pcp 2 and --dcp 2",
            "use --model tiny-sparse or tiny-sparse-moe, or --dcp 1.",
        ],
    ),
    (
        "compare eager full --dcp 2 --dcp-backend a2a",
        2,
        ["--dcp-backend is 'a2a' with --pcp 2 and --dcp 2", "use ag_rs, or --pcp 1."],
    ),
    ("capture --pcp 1 --tp 2 --dcp 2 --dcp-backend nccl", 2, ["'nccl'", "ag_rs, a2a"]),
    ("compare eager full --target trt", 2, ["--target is 'trt'", "builtin, vllm"]),
    (
        "compare eager full --target vllm --baseline x.json",
        2,
        ["--baseline is 'x.json' with --target vllm", "built-in engine only"],
    ),
    (
        "compare eager full --target vllm --save-baseline x.json",
        2,
        ["--save-baseline is 'x.json' with --target vllm"],
    ),
    ("compare eager full --target vllm --microbatch", 2, ["--microbatch with --target vllm"]),
    ("compare eager full --target vllm --draft-model mtp", 2, ["--draft-model with --target vllm"]),
    ("capture --target vllm --dynamic-spec step", 2, ["--dynamic-spec with --target vllm"]),
    ("compare builtin vllm --spec-tokens 2 --draft-model mtp", 2, ["--draft-model: vLLM's"]),
    ("compare eager full --quick --repetitions 5", 2, ["--repetitions is 5 with --quick"]),
    ("compare eager full --model huge", 2, ["--model is 'huge'", "auto", "tiny-sparse"]),
    ("compare eager graph", 2, ["'graph' is unknown", "full_and_piecewise"]),
    ("compare eager", 2, ["candidate"]),
    ("compare eager eager", 2, ["both arms are 'eager'"]),
    ("compare eager full --scenario nowhere.yaml", 2, ["nowhere.yaml", "does not exist"]),
    ("compare eager full --scenario s1-grow-shrunk", 2, ["s1-grow-shrink"]),
    ("compare eager full --scenario misspelt.yaml", 2, ["max_num_seq", "max_num_seqs", "line"]),
    ("compare eager full --scenario empty.yaml", 2, ["empty.yaml", "empty"]),
    ("compare eager full --scenario broken.yaml", 2, ["broken.yaml", "line"]),
    ("compare eager full --capture-sizes 0", 2, ["--capture-sizes is '0'", "from 1 to 1048576"]),
    ("compare eager full --capture-sizes", 2, ["--capture-sizes", "argument"]),
    ("compare eager full --capture-sizes 1,,2", 2, ["--capture-sizes is '1,,2'"]),
    ("compare eager full --capture-sizes 1.5", 2, ["--capture-sizes is '1.5'"]),
    ("compare eager full --capture-sizes -1", 2, ["--capture-sizes is '-1'"]),
    ("compare eager full --pcp 0", 2, ["--pcp is 0"]),
    ("compare eager full --pcp -1", 2, ["--pcp is -1"]),
    ("compare eager full --pcp two", 2, ["--pcp"]),
    ("compare eager full --pcp 1 --tp 10000000000", 2, ["10000000000 ranks", "at most 64"]),
    (
        "compare eager full --scenario long.yaml",
        2,
        ["max_model_len is 9000", "1 to 8192", "8192 at most, or use --model v2-lite-layer."],
    ),
    ("capture --pcp 1 --tp 10000000000 --dcp 7", 2, ["10000000000 ranks", "at most 64"]),
    ("compare eager full --tp 3 --pcp 1", 2, ["--tp is 3", "divide", "use one of 1, 2, 4."]),
    ("compare eager full --pcp 1 --tp 4 --dcp 4 --interleave 3", 2, ["--interleave is 3", "1, 2"]),
    ("compare eager full --pcp 1 --tp 4 --dcp 4 --interleave 0", 2, ["--interleave is 0"]),
    ("faults run --fault stale-padded-seq-lens --interleave 0", 2, ["--interleave is 0"]),
    ("faults run --fault stale-padded-slotz", 2, ["did you mean stale-padded-slots"]),
    ("compare eager full --inject stale-padded-slotz", 2, ["did you mean stale-padded-slots"]),
    ("faults run --check most", 2, ["--check is 'most'", "use one of quick, full"]),
    ("faults clean --check most", 2, ["--check is 'most'", "use one of quick, full"]),
    ("faults run --pcp 2 --interleave 2", 2, ["--interleave is 2 without --dcp"]),
    ("compare eager full --model big", 2, ["--model is 'big'", "tiny"]),
    ("compare eager full --dtype int8", 2, ["--dtype is 'int8'", "float32"]),
    ("compare eager full --device tpu", 2, ["--device is 'tpu'"]),
    ("compare eager full --device cuda:99", 3, ["--device is 'cuda:99'", "--device cpu"]),
    ("compare eager full --backend magic", 2, ["--backend is 'magic'"]),
    ("compare eager full --launcher mpi", 2, ["--launcher is 'mpi'", "inproc"]),
    ("compare eager full --feed maybe", 2, ["--feed is 'maybe'", "free-running"]),
    (
        "compare eager full --expert-parallel",
        2,
        ["--expert-parallel is set with --model tiny", "no experts", "tiny-moe"],
    ),
    (
        "compare eager full --model tiny-moe --pcp 3 --expert-parallel",
        2,
        ["over 3 ranks", "use 1, 2, 4, 8 ranks"],
    ),
    (
        "compare eager full --model tiny-moe --all2all-backend all_to_all",
        2,
        ["--all2all-backend is all_to_all", "set --expert-parallel"],
    ),
    (
        "capture --model tiny-moe --expert-parallel --all2all-backend deepep",
        2,
        ["--all2all-backend is 'deepep'", "allgather_reducescatter, all_to_all"],
    ),
    (
        "compare eager full --inject moe-padding-routed",
        2,
        ["needs a --model with experts", "--model tiny-moe --expert-parallel"],
    ),
    (
        "compare eager full --model tiny-moe --inject moe-half-the-room",
        2,
        ["needs --expert-parallel with --all2all-backend all_to_all"],
    ),
    ("compare eager full --spec-tokens -1", 2, ["--spec-tokens is -1", "0 to 16"]),
    ("capture --spec-tokens 17", 2, ["--spec-tokens is 17", "0 to 16"]),
    ("faults run --spec-tokens 99 --fault stale-block-rows", 2, ["--spec-tokens is 99"]),
    (
        "compare eager full --spec-tokens 2 --feed free-running",
        2,
        ["--feed is free-running with --spec-tokens 2", "--feed teacher-forced"],
    ),
    ("compare eager full --repetitions -1", 2, ["--repetitions is -1"]),
    ("compare eager full --max-num-seqs 0", 2, ["--max-num-seqs is 0"]),
    ("compare eager full --seed -1", 2, ["--seed is -1"]),
    ("compare eager full --inject no-such", 2, ["--inject is 'no-such'", "pcpbench faults list"]),
    ("compare eager full --inject lse-base-two", 2, ["needs dcp 2", "--dcp 4 --interleave 2"]),
    ("modes --prompts 0", 2, ["--prompts is 0", "1 to 10000"]),
    ("modes --prompt-len 9-3", 2, ["--prompt-len is '9-3'", "8-32"]),
    ("modes --output-len x", 2, ["--output-len is 'x'", "range"]),
    ("modes --feed both", 2, ["--feed is 'both'", "free-running"]),
    ("modes --repetitions -1", 2, ["--repetitions is -1"]),
    ("modes --pcp 0", 2, ["--pcp is 0"]),
    ("modes --inject no-such", 2, ["--inject is 'no-such'", "pcpbench faults list"]),
    ("modes --out full-directory", 2, ["--out", "full-directory"]),
    ("matrix --parallel pcp", 2, ["--parallel is 'pcp'", "tp4-dcp2-i4"]),
    ("matrix --model tiny", 2, ["--model is 'tiny'", "dense, moe"]),
    ("matrix --out full-directory", 2, ["--out", "full-directory"]),
    ("matrix --resume full-directory", 2, ["--resume is 'full-directory'", "manifest.json"]),
    ("faults run --json --markdown", 2, ["--markdown and --json"]),
    ("repro nowhere", 2, ["'nowhere'", "does not exist"]),
    ("repro full-directory", 2, ["full-directory", "bundle.json"]),
    ("repro empty.yaml", 2, ["empty.yaml", "is damaged"]),
    ("repro", 2, ["bundle"]),
    ("compare eager full --out full-directory", 2, ["--out", "full-directory"]),
    ("compare eager full --sceanrio x", 2, ["--scenario"]),
    ("compare eager full --baseline nowhere.json", 2, ["'nowhere.json'", "does not exist"]),
    ("compare eager full --baseline empty.yaml", 2, ["'empty.yaml'", "is empty"]),
    ("compare eager full --save-baseline no/b.json", 2, ["--save-baseline is 'no/b.json'"]),
    ("compare eager full --save-baseline broken.yaml", 2, ["broken.yaml"]),
    (
        "compare eager full --inject stale-block-rows --save-baseline b.json",
        2,
        ["--inject is 'stale-block-rows' with a baseline"],
    ),
    ("gate", 2, ["BASELINE is missing", "--save-baseline"]),
    ("gate nowhere.json", 2, ["baseline 'nowhere.json' does not exist", "--save-baseline"]),
    ("gate full-directory", 2, ["holds no samples.jsonl"]),
    ("gate x.json --fail-on tpot:nan%", 2, ["'tpot:nan%'", "no finite number"]),
    ("gate x.json --fail-on tpot", 2, ["'tpot'", "no colon"]),
    ("gate x.json --fail-on speed:5%", 2, ["'speed'", "tpot, itl"]),
    ("gate x.json --on-undecided maybe", 2, ["on-undecided is 'maybe'", "fail, warn, pass"]),
    ("gate x.json --max-time nan", 2, ["max-time is nan"]),
    ("gate x.json --max-time -1", 2, ["max-time is -1"]),
    ("gate x.json --processes 2", 2, ["processes is 2", "4 to 1000"]),
    ("gate x.json --config nowhere.toml", 2, ["nowhere.toml"]),
    ("gate x.json --accept tpot:8%", 2, ["--accept is 'tpot:8%'", "until"]),
    ("gate x.json y --self-check", 2, ["leave RUN out"]),
    ("scenarios show nowhere.yaml", 2, ["nowhere.yaml"]),
    ("scenarios validate empty.yaml", 2, ["empty.yaml"]),
    ("comprae eager full", 2, ["compare"]),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    (tmp_path / "broken.yaml").write_text("name: [\n", encoding="utf-8")
    (tmp_path / "misspelt.yaml").write_text(
        "name: x\ndescription: d\nlimits: {max_num_seq: 4}\n"
        "requests: [{prompt_len: 1, output_len: 1}]\n",
        encoding="utf-8",
    )
    (tmp_path / "long.yaml").write_text(
        "name: long\ndescription: d\nlimits: {max_model_len: 9000}\n"
        "requests: [{prompt_len: 1, output_len: 1}]\n",
        encoding="utf-8",
    )
    (tmp_path / "full-directory").mkdir()
    (tmp_path / "full-directory" / "mine.txt").write_text("keep me", encoding="utf-8")
    return tmp_path


def test_every_mode_that_a_refusal_lists_would_be_taken():
    from pcpbench.engine_options import EngineOptions
    from pcpbench.errors import UsageError
    from pcpbench.request import CaptureRequest

    for pcp in (1, 2):
        options = EngineOptions(pcp=pcp)
        with pytest.raises(UsageError) as refusal:
            CaptureRequest(mode="sideways", options=options).check()
        listed = str(refusal.value).partition("use one of ")[2].rstrip(".").split(", ")
        assert len(listed) == 5 - pcp
        for mode in listed:
            CaptureRequest(mode=mode, options=options).check()


@pytest.mark.parametrize(("command", "exit_code", "words"), BAD_INPUT, ids=lambda x: str(x)[:60])
def test_bad_input_gets_one_sentence(place, capsys, command, exit_code, words):
    before = sorted(path.name for path in place.rglob("*"))
    assert cli.run(command.split()) == exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith("pcpbench: ")
    assert "Traceback" not in printed.err
    for word in words:
        assert word in printed.err
    assert sorted(path.name for path in place.rglob("*")) == before, "nothing half-written"


def _options(group=None, path=()):
    """Every option and argument of every command that takes a value, as (command, option)."""
    group = group or typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _options(command, (*path, name))
            continue
        for parameter in command.params:
            if not getattr(parameter, "is_flag", False):
                yield (*path, name), next(iter(parameter.opts))


@pytest.mark.parametrize(("command", "option"), list(_options()), ids=str)
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_value_is_refused_and_nothing_is_written(place, capsys, command, option, empty):
    before = sorted(place.rglob("*"))
    given = [option, empty] if option.startswith("--") else [empty]
    assert cli.run([*command, *given]) == 2
    assert cli.run([*command, f"{option}={empty}"]) == 2 or not option.startswith("--")
    after = option if option.startswith("--") else command[-1]
    told = f"pcpbench: the value after {after} is empty: give one, or leave it out.\n"
    assert capsys.readouterr().err.startswith(told)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["gate", "x.json", "--accept", "tpot:8% until 2099-01-31 because caf\udce9"],
        ["gate", "b\udcff.json"],
        ["compare", "eager", "full", "--out=r\udcff"],
    ],
    ids=ascii,
)
def test_a_byte_that_is_no_text_is_refused_and_nothing_is_written(place, capsys, arguments):
    """How Python hands over an argument that is no UTF-8."""
    before = sorted(place.rglob("*"))
    assert cli.run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"pcpbench: the argument {arguments[-1]!r} holds a byte that is")
    assert printed.err.count("\n") == 1
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("command", HELP_COMMANDS, ids=" ".join)
def test_help_has_an_example(capsys, command):
    assert cli.run(command) == 0
    printed = capsys.readouterr().out
    if len(command) > 1 and command[:2] != ["scenarios", "--help"]:
        assert "Example" in printed
        assert "pcpbench" in printed


@pytest.mark.parametrize(("command", "option"), list(_options()), ids=str)
def test_an_option_of_one_value_is_taken_once(capsys, command, option):
    """A second value would win, and the first be dropped without a word."""
    root = typer.main.get_command(cli.app)
    for name in command:
        root = root.commands[name]
    (parameter,) = [each for each in root.params if option in each.opts]
    if not option.startswith("--") or parameter.multiple:
        return
    assert cli.run([*command, option, "1", f"{option}=2"]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"pcpbench: {option} is given twice, as '1' and as '2': give it once.\n"
    assert printed.out == ""


def test_a_value_is_not_taken_for_an_option_that_repeats(place):
    from pcpbench.arguments import refuse_repeated

    root = typer.main.get_command(cli.app)
    refuse_repeated(["faults", "run", "--fault", "a", "--fault", "b", "--json", "--json"], root)
    refuse_repeated(["compare", "--out", "--pcp", "--pcp", "2"], root)
    refuse_repeated(["compare", "--pcp", "2", "--", "--pcp", "4"], root)


def test_an_argument_that_is_missing_says_what_there_is(capsys):
    assert cli.run(["compare", "eager"]) == 2
    said = capsys.readouterr().err
    assert "CANDIDATE" in said.upper()
    assert "reference, eager, eager_padded, piecewise, full, full_and_piecewise" in said


def test_the_help_of_the_gate_names_the_defaults_that_hold(tmp_path, capsys):
    from pcpbench.gate_settings import GateOptions, resolve_settings

    (tmp_path / ".git").mkdir()
    holds = resolve_settings(GateOptions(), tmp_path)
    assert cli.run(["gate", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"before the first look; default {holds.processes}." in told
    assert f"Seconds for the whole gate; default {holds.max_time_s:g}." in told


def test_version_is_the_installed_one(capsys):
    from importlib.metadata import version

    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"pcpbench {version('pcpbench')}\n"


@pytest.mark.parametrize("arguments", [["compare", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_import_nothing_heavy(arguments):
    code = (
        f"import sys; from pcpbench import cli; cli.run({arguments!r}); "
        "heavy = {'torch', 'triton', 'pandas', 'numpy', 'scipy'} & set(sys.modules); "
        "assert not heavy, heavy; raise SystemExit(bool(heavy))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_failure_of_pcpbench_itself_is_3_and_never_1(monkeypatch, capsys):
    from pcpbench import doctor

    def broken():
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(doctor, "run_doctor", broken)
    assert cli.run(["doctor"]) == 3
    assert "a mistake of ours" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [(None, 0), (0, 0), (1, 3), (2, 2), ("no licence found", 3), ((4, "x"), 3), (143, 143)],
)
def test_a_library_that_ends_the_program_gives_no_verdict(monkeypatch, capsys, code, exit_code):
    from pcpbench import doctor

    monkeypatch.setattr(doctor, "run_doctor", lambda: sys.exit(code))
    assert cli.run(["doctor"]) == exit_code
    told = capsys.readouterr().err
    if not isinstance(code, int | None):
        assert told == f"pcpbench: something in it ended the program: {code}\n"


@pytest.mark.parametrize("stream", ["closed", "broken", None])
def test_a_complaint_that_cannot_be_written_leaves_the_exit_code(monkeypatch, capsys, stream):
    class Broken(io.StringIO):
        def write(self, text):
            raise BlockingIOError(11, "write could not complete without blocking")

    made = {"closed": io.StringIO(), "broken": Broken(), None: None}[stream]
    if stream == "closed":
        made.close()
    monkeypatch.setattr(sys, "stderr", made)
    assert cli.run(["compare", "x", "y"]) == 2
    assert cli.run(["compare"]) == 2
    assert capsys.readouterr().out == ""


def test_what_a_device_said_in_several_lines_is_one_line(monkeypatch, capsys):
    from pcpbench import doctor
    from pcpbench.errors import CaptureError

    def refused():
        raise CaptureError("the device refused the capture: CUDA error\nCompile with DSA")

    monkeypatch.setattr(doctor, "run_doctor", refused)
    assert cli.run(["doctor"]) == 1
    told = "pcpbench: the device refused the capture: CUDA error Compile with DSA\n"
    assert capsys.readouterr().err == told


def test_an_interrupt_is_told_and_is_no_verdict(monkeypatch, capsys):
    from pcpbench import doctor

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run_doctor", interrupted)
    assert cli.run(["doctor"]) == 130
    assert "on disk" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_as_ctrl_c_does(place, signum):
    command = [sys.executable, "-m", "pcpbench", "compare", "eager", "full", "--out", "run"]
    asked = functools.partial(signal.signal, signum, signal.SIG_DFL)  # not ignored, as by nohup
    with subprocess.Popen(
        command, cwd=place, stderr=subprocess.PIPE, text=True, preexec_fn=asked
    ) as process:
        while not (place / "run" / "manifest.json").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signum)
        _, talk = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "interrupted" in talk
    assert "Traceback" not in talk
    manifest = json.loads((place / "run" / "manifest.json").read_text())
    assert (manifest["outcome"], manifest["exit_code"]) == ("interrupted", 128 + signum)


def test_scenarios_are_read_before_anything_is_built(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pcpbench.session", None)  # importing it would fail
    assert cli.run(["compare", "eager", "full", "--scenario", "nope"]) == 2
    assert "scenario 'nope'" in capsys.readouterr().err


def test_compare_leaves_its_files_and_json_is_all_of_stdout(place, capsys):
    arguments = "compare eager full --scenario s2-capture-edges --repetitions 1 --json --out run"
    assert cli.run(arguments.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["outcome"] == "pass"
    names = {path.name for path in (place / "run").iterdir()}
    assert {"manifest.json", "summary.csv", "steps.csv"} <= names
    import pandas as pd

    summary = pd.read_csv(place / "run" / "summary.csv")
    assert set(summary["arm"]) == {"reference", "eager", "eager_padded[full]", "full"}
    full = summary[summary["arm"] == "full"].iloc[0]
    assert full["coverable_full"] == full["coverable"] > 0
    steps = pd.read_csv(place / "run" / "steps.csv")
    assert len(steps) == summary["num_steps"].sum()


def test_a_comparison_that_nothing_came_of_is_no_pass(place, capsys):
    """Eight decodes on two ranks never fit a graph of one: the arm `full` never ran as asked."""
    (place / "never.yaml").write_text(
        "name: never\ndescription: d\nrequests: [{prompt_len: 4, output_len: 6, count: 8}]\n",
        encoding="utf-8",
    )
    command = "compare eager full --scenario never.yaml --capture-sizes 1 --out run"
    assert cli.run(command.split()) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "NOT COMPARED" in printed
    assert "no step was served by FULL" in printed
    manifest = json.loads((place / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["outcome"] == "not compared"
    assert manifest["exit_code"] == 3


@pytest.mark.parametrize("asked", ["--interleave 4", "--interleave 1", ""])
def test_an_interleave_without_dcp_is_told_and_stored(place, capsys, asked):
    scenario = "--scenario s2-capture-edges --repetitions 0"
    for command in (f"compare eager full {scenario}", "capture --capture-sizes 1,2"):
        assert cli.run([*command.split(), *asked.split(), "--out", command[:7]]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert ("interleave: --interleave 4 changes nothing" in printed) == ("4" in asked)
        manifest = json.loads((place / command[:7] / "manifest.json").read_text(encoding="utf-8"))
        assert [n["setting"] for n in manifest["notices"]] == ["interleave"] * ("4" in asked)


def test_a_dcp_backend_without_dcp_is_told(place, capsys):
    command = "compare eager full --scenario s2-capture-edges --repetitions 0 --out run"
    assert cli.run([*command.split(), "--dcp-backend", "a2a"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "dcp_backend: --dcp-backend a2a changes nothing with --dcp 1" in printed


def test_judging_without_timing_gives_a_verdict_and_no_speed(place, capsys):
    command = "compare eager full --scenario s2-capture-edges --repetitions 0 --json --out run"
    assert cli.run(command.split()) == 0
    scenario = json.loads(capsys.readouterr().out)["scenarios"][0]
    assert scenario["outcome"] == "pass"
    assert scenario["tpot_ratio"] is None


def test_capture_shows_and_writes_every_graph(place, capsys):
    arguments = "capture --mode full_and_piecewise --capture-sizes 1,2,32 --out run"
    assert cli.run(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert "FULL[reqs=2,tokens=2]" in printed
    assert "capture size 32" in printed
    import pandas as pd

    graphs = pd.read_csv(place / "run" / "capture.csv")
    assert len(graphs) == 5
    assert (graphs[graphs["mode"] == "PIECEWISE"]["eager_breaks"] > 0).all()
    book = pd.read_csv(place / "run" / "address_book.csv")
    assert book["buffer"].notna().all()


def test_json_is_all_of_what_capture_prints_and_what_it_leaves(place, capsys):
    assert cli.run(["capture", "--capture-sizes", "1,2", "--json", "--out", "run"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["command"], result["outcome"]) == ("capture", "pass")
    assert [graph["num_tokens"] for graph in result["graphs"]] == [2, 1]
    assert json.loads((place / "run" / "capture.json").read_text(encoding="utf-8")) == result
    assert printed.err.splitlines()[-2].startswith("PASS  full_decode_only: 2 descriptors")


def test_an_unowned_buffer_fails_the_capture(place, capsys, monkeypatch):
    """A tensor that a graph reads and nobody registered can vanish under it."""
    import torch

    from pcpbench.model.decoder import MLADecoder

    forward = MLADecoder.forward
    stray = torch.zeros(1)

    async def faulty(self, input_ids, positions, context):
        return (await forward(self, input_ids, positions, context)) + stray

    monkeypatch.setattr(MLADecoder, "forward", faulty)
    assert cli.run(["capture", "--capture-sizes", "1", "--out", "run"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "unowned" in printed
    assert "test_cli.py" in printed


def test_a_sync_during_capture_names_op_and_line(place, capsys, monkeypatch):
    from pcpbench.model.decoder import MLADecoder

    forward = MLADecoder.forward

    async def faulty(self, input_ids, positions, context):
        if int(positions.max()) > 10**6:
            raise RuntimeError
        return await forward(self, input_ids, positions, context)

    monkeypatch.setattr(MLADecoder, "forward", faulty)
    assert cli.run(["capture", "--capture-sizes", "1", "--out", "run"]) == 1
    printed = capsys.readouterr().err
    assert "test_cli.py" in printed
    assert "_local_scalar_dense" in printed or "int" in printed
    manifest = json.loads((place / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["outcome"] == "fail"


def test_no_ansi_reaches_a_pipe():
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "pcpbench", "scenarios", "list"],
        check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert "s1-grow-shrink" in done.stdout
    assert "\x1b" not in done.stdout
