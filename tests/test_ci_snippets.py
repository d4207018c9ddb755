"""The snippets for CI use commands and flags that exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main
import yaml

from pcpbench.cli import app

DOCS = Path(__file__).parent.parent / "docs" / "ci"


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


@pytest.mark.parametrize("name", ["action.yml", "gitlab.yml"])
def test_the_commands_of_a_snippet_can_be_run(name):
    document = yaml.safe_load((DOCS / name).read_text(encoding="utf-8"))
    commands = typer.main.get_command(app).commands
    lines = [
        line
        for script in scripts(document)
        for line in script.replace("\\\n", " ").splitlines()
        if re.match(r"\s*pcpbench ", line)
    ]
    assert lines
    known = set()
    for line in lines:
        _, name, *words = shlex.split(line)
        known |= {option for param in commands[name].params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= known
    ours = [script for script in scripts(document) if not script.startswith("curl")]
    assert {flag for script in ours for flag in re.findall(r"--[a-z-]+", script)} <= known
