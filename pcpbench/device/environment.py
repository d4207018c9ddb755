"""What this machine is: versions and devices. Owns the looking-up, no opinion."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import torch

from pcpbench.records import Environment

PACKAGES = ("pcpbench", "torch", "triton", "numpy", "scipy", "pandas", "vllm")


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that matter to a result; absent ones are left out."""
    versions = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def device_name(device: torch.device) -> str:
    """The device's own name, for a CPU its instruction set as torch sees it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def environment_of(device: torch.device) -> Environment:
    """The environment of a run on a device."""
    return Environment(
        versions=package_versions(),
        device=str(device),
        device_name=device_name(device),
        num_threads=torch.get_num_threads(),
        platform=platform.platform(),
    )
