"""Which target a run puts on the stand. Owns the choice by name; builds nothing itself."""

from __future__ import annotations

import torch

from pcpbench.device.graph import GraphBackend
from pcpbench.targets.builtin import BuiltinTarget
from pcpbench.targets.vllm.target import VllmTarget

TARGETS = {"builtin": BuiltinTarget, "vllm": VllmTarget}


def make_target(name: str, device: torch.device, backend: GraphBackend) -> BuiltinTarget:
    """The target of that name.

    Raises CannotMeasure for one whose software is not installed, or not known, here.
    """
    return TARGETS[name](device, backend)
