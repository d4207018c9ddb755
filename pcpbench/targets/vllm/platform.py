"""What this machine is to vLLM when it has no accelerator: a plain host, plugged in by its own way.

Owns the `vllm.platform_plugins` entry point. An installed pcpbench changes no other vLLM process:
the plugin stands aside unless the process asks for it (host.py sets PCPBENCH_VLLM_HOST).
"""

from __future__ import annotations

import os
from typing import Any

ASKED = "PCPBENCH_VLLM_HOST"
"""The environment variable that has the plugin take part."""

ENTRY_POINT = "pcpbench_host"
"""The plugin's name in pyproject.toml."""

PLATFORM = "pcpbench.targets.vllm.host_platform.HostPlatform"


def register() -> str | None:
    """The entry point: where vLLM finds the platform, None in a process that did not ask for it."""
    return PLATFORM if os.environ.get(ASKED) == "1" else None


def plugged_in(platform: Any) -> bool:
    """Whether vLLM's current platform is ours."""
    return f"{type(platform).__module__}.{type(platform).__name__}" == PLATFORM
