"""The worlds in which vLLM's code is damaged, and how an entry is made.

Owns the settings. Sharded decodes (PCP without DCP) are run without FULL graphs: there vLLM's own
dispatch is accused in every run (docs/vllm.md), and nothing may be taken for caught by that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from pcpbench.faults.classes import shipped
from pcpbench.faults.fault import Fault, Setting, Site

SMALL: Final = "small-steps"
BOTH: Final = Setting(pcp=2, dcp=2, interleave=2, model="tiny-sparse", scenario=SMALL)
"""PCP and DCP: every rank runs every decode, FULL graphs serve them."""
DCP: Final = Setting(pcp=1, tp=2, dcp=2, interleave=2, scenario=SMALL)
"""No PCP manager: the runner's own buffers and tables."""
SHARDED: Final = Setting(pcp=2, candidate="piecewise", capture_sizes="1,2,4,8", scenario=SMALL)
"""PCP alone: each decode has one owner."""
DRAFTS: Final = replace(BOTH, spec_tokens=2)
"""Decodes that verify two drafts."""


def entry(
    class_id: str,
    name: str,
    description: str,
    plant: Callable[[Site], None],
    *contracts: str,
    setting: Setting = BOTH,
    at_capture: bool = False,
) -> Fault:
    """One fault of vLLM's code; what its world must have follows from the setting's."""
    fault = shipped(
        class_id, name, description, plant, *contracts, setting=setting, at_capture=at_capture
    )
    is_sharded = setting.pcp > 1 and setting.dcp == 1
    return replace(
        fault, target="vllm", needs_sparse=False, max_dcp=1 if is_sharded else fault.max_dcp
    )
