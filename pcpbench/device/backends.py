"""Which device and which graph backend a run uses, and what this machine offers.

Owns the choice and its refusals. Imports torch.
"""

from __future__ import annotations

import torch

from pcpbench.device.accelerator import AcceleratorGraphBackend
from pcpbench.device.graph import GraphBackend
from pcpbench.device.host_graph import HostGraphBackend
from pcpbench.errors import DeviceMissing, UsageError

BACKENDS = ("host", "accelerator")


def resolve_device(name: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `cuda:N`; the last becomes the current one.

    A capture, Triton and a synchronization act on the current device.
    Raises UsageError for a name that is no device, DeviceMissing for one that is not here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device is {name!r}: use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device is {name!r}: use auto, cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise DeviceMissing(
            f"--device is {name!r}, but this machine has {count} CUDA devices: use --device cpu."
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def resolve_backend(name: str, device: torch.device) -> GraphBackend:
    """The graph backend for `auto`, `host` or `accelerator` on a device."""
    if name == "auto":
        name = "host" if device.type == "cpu" else "accelerator"
    if name not in BACKENDS:
        raise UsageError(f"--backend is {name!r}: use auto, {' or '.join(BACKENDS)}.")
    if name == "host":
        if device.type != "cpu":
            raise UsageError(
                f"--backend is host, which records on a CPU, but --device is {device}: "
                "use --backend accelerator or --device cpu."
            )
        return HostGraphBackend()
    backend = AcceleratorGraphBackend()
    if device.type != "cuda":
        raise UsageError(
            f"--backend is accelerator, which captures on a CUDA device, but --device is {device}: "
            "use --backend host or --device cuda."
        )
    return backend
