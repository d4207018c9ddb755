"""`pcpbench faults run` as it was asked, and where that has each fault run.

Owns the refusals that need no engine. Knows no stand and no verdict.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.faults.fault import Fault, Setting
from pcpbench.faults.registry import SHIPPED_FOR
from pcpbench.model.presets import model_shape
from pcpbench.request import CHECKS


def check_target(target: str) -> None:
    """Raise UsageError for a target that has no catalogue of faults."""
    if target not in SHIPPED_FOR:
        raise UsageError(
            f"--target is {target!r}: faults can be injected into {' or '.join(SHIPPED_FOR)}."
        )


class FaultsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`pcpbench faults run`. None and empty: what each fault asks for itself."""

    target: str = "builtin"
    faults: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    pcp: int | None = None
    tp: int | None = None
    dcp: int | None = None
    interleave: int | None = None
    spec_tokens: int | None = None
    model: str | None = None
    device: str = "auto"
    checks: str = "quick"
    dtype: str = "float32"
    seed: int = 0
    microbatch: bool = False
    expert_parallel: bool = False
    markdown: bool = False
    json: bool = False

    def check(self) -> None:
        """Raise UsageError for a request that could not be run whatever the machine is."""
        check_target(self.target)
        if self.checks not in CHECKS:
            raise UsageError(f"--check is {self.checks!r}: use one of {', '.join(CHECKS)}.")
        EngineOptions(dtype=self.dtype, seed=self.seed).check()
        if self.interleave is not None and self.interleave < 1:
            raise UsageError(
                f"--interleave is {self.interleave}: it must be a whole number from 1 up."
            )
        if self.markdown and self.json:
            raise UsageError("--markdown and --json are two forms of one table: use one of them.")
        if (self.interleave or 1) > 1 and (self.dcp or 1) == 1:
            raise UsageError(
                f"--interleave is {self.interleave} without --dcp: it changes nothing there, so "
                "set --dcp above 1, or leave --interleave out."
            )

    def settings(self, fault: Fault) -> list[Setting]:
        """Where to run a fault: its own setting, or the world and the scenarios asked for.

        A world that is named is named whole: what is left out is 1. Draft tokens are no part of it.
        """
        setting = fault.setting
        asked = (self.pcp, self.tp, self.dcp, self.interleave)
        if any(size is not None for size in asked):
            pcp, tp, dcp, interleave = (1 if size is None else size for size in asked)
            setting = replace(setting, pcp=pcp, tp=tp, dcp=dcp, interleave=interleave)
            if pcp > 1 and dcp > 1:  # nothing else runs there
                is_sparse = model_shape(setting.model).is_sparse
                model = setting.model if is_sparse else "tiny-sparse"
                setting = replace(setting, model=model, dcp_backend="ag_rs")
        if self.model is not None:
            setting = replace(setting, model=self.model)
        if self.spec_tokens is not None:
            setting = replace(setting, spec_tokens=self.spec_tokens)
        if self.microbatch:
            setting = replace(setting, microbatch=True)
        if self.expert_parallel:
            setting = replace(setting, expert_parallel=True)
        several = len(model_shape(setting.model).kv_groups) > 1
        if not setting.spec_tokens or setting.microbatch or several:  # none can run there
            setting = replace(setting, draft_model="planned")
        names = self.scenarios or (setting.scenario,)
        return [replace(setting, scenario=name) for name in dict.fromkeys(names)]


def options_of(setting: Setting, target: str = "builtin") -> EngineOptions:
    """What a command line would say for the world that a fault is triggered in."""
    return EngineOptions(
        target=target,
        pcp=setting.pcp,
        tp=setting.tp,
        dcp=setting.dcp,
        interleave=setting.interleave,
        capture_sizes=setting.capture_sizes,
        spec_tokens=setting.spec_tokens,
        dynamic_spec=setting.dynamic_spec,
        draft_model=setting.draft_model,
        microbatch=setting.microbatch,
        model=setting.model,
        dcp_backend=setting.dcp_backend,
        expert_parallel=setting.expert_parallel,
        all2all_backend=setting.all2all_backend,
    )
