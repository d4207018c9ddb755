"""The files for CI: they parse, fit each other, and their own bash does what docs/gate.md says."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer.main
import yaml

from pcpbench.cli import app

DOCS = Path(__file__).parent.parent / "docs"
CI = DOCS / "ci"
WORKFLOWS = ["github-main.yml", "github-pr.yml"]
FILES = ["action.yml", *WORKFLOWS, "gitlab.yml"]
LOCAL_ACTION = "./.github/actions/pcpbench-gate"
ARGUMENTS = "arguments"
OUTPUTS = "outputs"
STUB = f"""#!/bin/sh
printf '%s\\n' "$@" > "$STUB_DIRECTORY/{ARGUMENTS}"
exit "$STUB_EXIT"
"""


def load(name):
    return yaml.safe_load((CI / name).read_text(encoding="utf-8"))


def scripts(value):
    """Every string of a YAML document under `run` or `script`."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "run":
                yield item
            elif key == "script":
                yield from item
            else:
                yield from scripts(item)
    elif isinstance(value, list):
        for item in value:
            yield from scripts(item)


def steps(document):
    """The steps of a workflow or a composite action."""
    jobs = document.get("jobs", {"": document.get("runs")}).values()
    return [step for job in jobs for step in job["steps"]]


def step(document, key, value):
    """The only step that has this."""
    (found,) = (step for step in steps(document) if step.get(key) == value)
    return found


def gitlab_job(name):
    """A job with what it extends, mappings merged as GitLab does."""

    def merged(base, top):
        both = {key: base[key] for key in base if key not in top}
        for key, item in top.items():
            nested = isinstance(item, dict) and isinstance(base.get(key), dict)
            both[key] = merged(base[key], item) if nested else item
        return both

    document = load("gitlab.yml")
    job = document[name]
    return merged(document[job["extends"]], job)


@pytest.fixture
def shell(tmp_path):
    """Runs bash in an empty directory; the `pcpbench` there notes its arguments and ends as told.

    Returns the process and these arguments, None where pcpbench was not called.
    """
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "pcpbench").write_text(STUB)
    (binaries / "pcpbench").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()

    def run(script, env=(), exit_code=0):
        process = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=work,
            env={
                "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
                "STUB_DIRECTORY": str(tmp_path),
                "STUB_EXIT": str(exit_code),
                "GITHUB_OUTPUT": str(tmp_path / OUTPUTS),
                **dict(env),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        noted = tmp_path / ARGUMENTS
        return process, noted.read_text().splitlines() if noted.exists() else None

    run.work, run.outputs = work, tmp_path / OUTPUTS
    return run


@pytest.fixture
def act(shell):
    """Runs the bash of action.yml with inputs by name, `_` for `-`."""
    action = load("action.yml")
    gate = step(action, "id", "gate")
    defaults = {name: value.get("default") for name, value in action["inputs"].items()}

    def run(exit_code=0, **given):
        inputs = defaults | {name.replace("_", "-"): value for name, value in given.items()}
        assert inputs.keys() == defaults.keys()
        env = {
            name: re.sub(r"\$\{\{ inputs\.([a-z-]+) \}\}", lambda match: inputs[match[1]], text)
            for name, text in gate["env"].items()
        }
        assert not any("${{" in text for text in env.values())
        return shell(gate["run"], env, exit_code)

    return run


@pytest.mark.parametrize("name", FILES)
def test_the_commands_of_a_snippet_can_be_run(name):
    commands = typer.main.get_command(app).commands
    lines = [line.strip() for script in scripts(load(name)) for line in script.splitlines()]
    ours = [line for line in lines if re.match(r"pcpbench ", line)]
    assert ours or name == "github-pr.yml"  # which has action.yml call it
    known = set()
    for line in ours:
        _, command, *words = shlex.split(line)
        known |= {option for param in commands[command].params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= known
    rest = [line for line in lines if not line.startswith("python -m pip")]
    assert {flag for line in rest for flag in re.findall(r"--[a-z-]+", line)} <= known


def test_every_file_is_checked_here_and_named_in_the_docs():
    assert {path.name for path in CI.iterdir()} == set(FILES)
    text = (DOCS / "gate.md").read_text(encoding="utf-8")
    section = text.split("\n## In CI\n")[1].split("\n## ")[0]
    assert [name for name in FILES if f"(ci/{name})" not in section] == []
    for name, place in [
        ("action.yml", f"{LOCAL_ACTION[2:]}/action.yml"),
        ("github-main.yml", ".github/workflows/pcpbench-main.yml"),
        ("github-pr.yml", ".github/workflows/pcpbench-pr.yml"),
        ("gitlab.yml", ".gitlab-ci.yml"),
    ]:
        assert place in section
        assert place in (CI / name).read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize("name", FILES)
def test_no_mapping_names_a_key_twice(name):
    def check(node):
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), keys
            for _, item in node.value:
                check(item)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                check(item)

    check(yaml.compose((CI / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["action.yml", *WORKFLOWS])
def test_expressions_and_inputs_name_what_is_there(name):
    document, action = load(name), load("action.yml")
    text = (CI / name).read_text(encoding="utf-8")
    ids = {step["id"] for step in steps(document) if "id" in step}
    assert set(re.findall(r"steps\.([a-z-]+)\.outputs", text)) <= ids
    used = set(re.findall(r"inputs\.([a-z-]+)", text))
    assert used == (set(action["inputs"]) if name == "action.yml" else set())
    required = {key for key, value in action["inputs"].items() if value.get("required")}
    for found in steps(document):
        uses = found.get("uses", "")
        if uses == LOCAL_ACTION:
            assert required <= found["with"].keys() <= action["inputs"].keys()
        elif uses:
            assert re.fullmatch(r"actions/[a-z/-]+@v\d+", uses)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_asks_for_little_and_ends(name):
    document = load(name)
    assert document["permissions"] == {"contents": "read"}
    assert "group" in document["concurrency"]
    for job in document["jobs"].values():
        assert job["timeout-minutes"] <= 30
        assert job["env"]["OMP_NUM_THREADS"] == "1"
        assert "checkout" in job["steps"][0]["uses"]


def test_both_sides_run_alike():
    sides = [next(iter(load(name)["jobs"].values())) for name in WORKFLOWS]
    both = [found for job in sides for found in job["steps"]]
    installs = [found["run"] for found in both if "pip install" in found.get("run", "")]
    pythons = [found["with"] for found in both if "setup-python" in found.get("uses", "")]
    assert len(installs) == len(pythons) == 2
    assert sides[0]["runs-on"] == sides[1]["runs-on"]
    assert pythons[0] == pythons[1]
    assert {installs[0]} == {installs[1]} == set(gitlab_job("pcpbench-gate")["before_script"])


def test_what_main_keeps_is_what_a_pull_request_fetches():
    main, change = map(load, WORKFLOWS)
    save = step(main, "uses", "actions/cache/save@v5")["with"]
    restore = step(change, "uses", "actions/cache/restore@v5")["with"]
    prefix = restore["restore-keys"]
    assert save["key"] == prefix + "${{ github.sha }}"
    assert restore["key"] == prefix + "${{ steps.main.outputs.sha }}"
    gate = step(change, "uses", LOCAL_ACTION)
    assert save["path"] == restore["path"] == gate["with"]["baseline"]
    assert f" --save-baseline {save['path']} " in " ".join(scripts(main))
    assert gate["if"] == "steps.baseline.outputs.cache-matched-key != ''"


def test_what_a_job_leaves_is_uploaded_whatever_it_ended_with():
    upload = step(load("github-main.yml"), "uses", "actions/upload-artifact@v7")
    assert upload["if"] == "always()"
    assert "pcpbench-compare" in upload["with"]["path"].split()
    upload = step(load("action.yml"), "uses", "actions/upload-artifact@v7")
    assert upload["if"] == "always()"
    assert upload["with"]["path"] == "${{ inputs.name }}"
    for name, directory in [("baseline", "pcpbench-compare"), ("gate", "pcpbench-gate")]:
        job = gitlab_job(f"pcpbench-{name}")
        assert job["artifacts"]["when"] == "always"
        assert directory in job["artifacts"]["paths"]
        assert f"--out {directory}" in " ".join(job["script"])


def test_the_action_leaves_out_what_nobody_asked_for(act):
    process, arguments = act(baseline="main.json")
    assert process.returncode == 0
    assert arguments == ["gate", "main.json", "--out", "pcpbench-gate"]


@pytest.mark.parametrize("blank", [" ", "  ", "\n"])
def test_the_action_passes_on_every_rule(act, blank):
    process, arguments = act(baseline="main.json", fail_on=f"tpot:5%{blank}full_share:>=99%")
    assert process.returncode == 0
    rules = ["--fail-on", "tpot:5%", "--fail-on", "full_share:>=99%"]
    assert arguments == ["gate", "main.json", *rules, "--out", "pcpbench-gate"]


def test_the_action_takes_a_rule_as_it_is_written(act, shell):
    (shell.work / "tpot:5%").touch()
    _, arguments = act(baseline="main.json", fail_on="tpot:* $HOME")
    assert arguments[2:6] == ["--fail-on", "tpot:*", "--fail-on", "$HOME"]


def test_the_action_passes_on_paths_with_spaces_and_every_setting(act):
    _, arguments = act(
        baseline="a place/main file.json", on_undecided="fail", max_time="120", name="my gate"
    )
    assert arguments == [
        *("gate", "a place/main file.json", "--on-undecided", "fail"),
        *("--max-time", "120", "--out", "my gate"),
    ]


@pytest.mark.parametrize("exit_code", [0, 1, 2, 3, 130])
def test_the_action_ends_as_the_gate_did(act, shell, exit_code):
    process, _ = act(exit_code, baseline="main.json")
    assert process.returncode == exit_code
    assert process.stdout == ""
    assert shell.outputs.read_text() == f"exit-code={exit_code}\n"


@pytest.mark.parametrize("exit_code", [0, 1, 2, 3, 130])
def test_the_action_turns_a_3_alone_into_a_warning(act, shell, exit_code):
    process, _ = act(exit_code, baseline="main.json", on_unmeasured="warn")
    assert process.returncode == (0 if exit_code == 3 else exit_code)
    assert process.stdout.startswith("::warning ") == (exit_code == 3)
    assert shell.outputs.read_text() == f"exit-code={exit_code}\n"


def test_the_action_refuses_a_choice_that_it_does_not_know(act):
    process, arguments = act(baseline="main.json", on_unmeasured="pass")
    assert process.returncode == 2
    assert process.stdout.startswith("::error ")
    assert arguments is None


@pytest.mark.parametrize(
    ("found", "says"),
    [("", "No baseline yet"), ("key-1", None), ("key-0", "held against key-0")],
)
def test_a_pull_request_is_told_which_baseline_it_meets(shell, found, says):
    script = step(load("github-pr.yml"), "name", "Say which baseline it is")["run"]
    process, _ = shell(script, {"WANTED": "key-1", "FOUND": found})
    assert process.returncode == 0
    if says is None:
        assert process.stdout == ""
    else:
        assert process.stdout.startswith("::notice ")
        assert says in process.stdout


def as_runner(job):
    """A GitLab job's script as its runner has bash run it: evaluated, and at the end of a pipe."""
    return f"set -eo pipefail\n: | eval {shlex.quote(chr(10).join(job['script']))}\nexit 0\n"


@pytest.mark.parametrize("exit_code", [0, 1, 2, 3, 130])
def test_a_gitlab_gate_ends_as_pcpbench_did(shell, exit_code):
    (shell.work / "main.json").touch()
    process, arguments = shell(as_runner(gitlab_job("pcpbench-gate")), exit_code=exit_code)
    assert process.returncode == exit_code
    assert arguments == ["gate", "main.json", "--out", "pcpbench-gate"]


def test_a_gitlab_gate_without_a_baseline_is_orange(shell):
    job = gitlab_job("pcpbench-gate")
    process, arguments = shell(as_runner(job))
    assert job["allow_failure"] == {"exit_codes": [3]}
    assert process.returncode == 3
    assert "No baseline yet" in process.stdout
    assert arguments is None


def test_gitlab_jobs_share_one_cache():
    baseline, gate = (gitlab_job(f"pcpbench-{name}") for name in ("baseline", "gate"))
    caches = [baseline["cache"], gate["cache"]]
    assert [cache.pop("policy") for cache in caches] == ["push", "pull"]
    assert caches[0] == caches[1]
    assert caches[0] == {"key": "pcpbench-baseline", "paths": ["main.json"], "unprotect": True}
    assert "allow_failure" not in baseline
    assert gate["artifacts"]["reports"]["junit"] == "pcpbench-gate/junit.xml"
