"""Plants one fault of the catalogue around the building and the running of a stand.

Owns when: before capture for a fault that acts there, else into engines that have captured soundly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pcpbench.errors import UsageError
from pcpbench.faults.fault import Fault, Setting, Site
from pcpbench.faults.registry import all_faults
from pcpbench.request import EngineOptions
from pcpbench.session.stand import Stand
from pcpbench.targets.builtin import BuiltinArm


def fault_named(name: str, options: EngineOptions) -> Fault:
    """A fault of the catalogue; raises UsageError for an unknown one or one the world lacks."""
    fault = all_faults().get(name)
    if fault is None:
        raise UsageError(
            f"--inject is {name!r}, which the catalogue lacks: `pcpbench faults list` shows all "
            "names."
        )
    setting = Setting(
        pcp=options.pcp,
        tp=options.tp,
        dcp=options.dcp,
        interleave=options.interleave,
        spec_tokens=options.spec_tokens,
        dynamic_spec=options.dynamic_spec,
        microbatch=options.microbatch,
        model=options.preset,
        dcp_backend=options.dcp_backend,
    )
    lacks = fault.lacks(setting)
    if lacks:
        raise UsageError(
            f"--inject is {name!r}, which {lacks}, and the world is {setting.world}: try "
            f"{_flags(fault.setting)}."
        )
    return fault


@contextmanager
def planted_stand(fault: Fault | None, build: Callable[[], Stand]) -> Iterator[tuple[Stand, Site]]:
    """A stand with the fault in it for the length of the `with` block; None plants nothing.

    build: makes the stand; with a fault it must be a fresh one.
    """
    if fault is None:
        yield build(), Site()
    elif fault.at_capture:
        site = Site()
        with fault.inject(site):
            yield build(), site
    else:
        stand = build()
        arms = {name: arm for name, arm in stand.arms.items() if isinstance(arm, BuiltinArm)}
        site = Site({name: arm.engine for name, arm in arms.items()})
        with fault.inject(site):
            yield stand, site


def in_words(fault: Fault) -> str:
    """Where the catalogue runs a fault: `--pcp 2 --tp 1 --scenario s1-grow-shrink`."""
    setting = fault.setting
    text = f"compare eager {setting.candidate} {_flags(setting)} --scenario {setting.scenario}"
    sizes = "" if setting.capture_sizes is None else f" --capture-sizes {setting.capture_sizes}"
    return f"`{text}{sizes}`"


def _flags(setting: Setting) -> str:
    flags = f"--pcp {setting.pcp} --tp {setting.tp}"
    if setting.dcp > 1:
        flags += f" --dcp {setting.dcp} --interleave {setting.interleave}"
    if setting.model != "tiny":
        flags += f" --model {setting.model}"
    if setting.dcp_backend != "ag_rs":
        flags += f" --dcp-backend {setting.dcp_backend}"
    if setting.spec_tokens:
        flags += f" --spec-tokens {setting.spec_tokens}"
    if setting.dynamic_spec != "off":
        flags += f" --dynamic-spec {setting.dynamic_spec}"
    return flags + (" --microbatch" if setting.microbatch else "")
