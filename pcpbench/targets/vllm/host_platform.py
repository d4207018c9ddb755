"""The Platform that vLLM sees on a machine without an accelerator. Owns its few answers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum


class HostPlatform(Platform):  # type: ignore[misc]  # vllm is untyped for those without it
    """Tensors live on the CPU, no memory is pinned, Triton kernels are interpreted.

    Without pinned memory vLLM keeps a host and a "device" copy of each buffer that is written by
    the host, so that a copy that was forgotten is seen, as it would be on a GPU.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """`cpu`."""
        return "cpu"

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Never."""
        return False

    @classmethod
    def inference_mode(cls) -> Any:
        """torch's own."""
        return torch.inference_mode()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Nothing to set."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Leaves the settings alone; vLLM's CPU platform would drop capture sizes and DBO."""

    def graph_pool_handle(self) -> object:
        """Stands for a pool of device memory; nothing is taken from it."""
        return object()
