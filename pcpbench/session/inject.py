"""Plants one fault of the catalogue around the building and the running of a stand.

Owns when: before capture for a fault that acts there, else into engines that have captured soundly;
and what a scenario that ran with it may say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from msgspec.structs import replace

from pcpbench.engine_options import EngineOptions
from pcpbench.errors import CannotMeasure, NothingToDamage, UsageError
from pcpbench.faults.fault import Fault, Setting, Site
from pcpbench.faults.registry import catalogue, source_of
from pcpbench.results import Outcome, ScenarioResult
from pcpbench.session.stand import Stand
from pcpbench.targets.builtin import BuiltinArm


def fault_named(name: str, options: EngineOptions) -> Fault:
    """A fault of the catalogue; raises UsageError for an unknown one or one the world lacks."""
    known = catalogue(options.target)
    fault = known.faults.get(name)
    if fault is None:
        raise known.lacks("--inject", name)
    lacks = lacks_in(fault, options)
    if lacks:
        raise UsageError(f"--inject is {name!r}, which {lacks}: try {_flags(fault.setting)}.")
    return fault


def lacks_in(fault: Fault, options: EngineOptions) -> str:
    """What a world lacks for a fault, and which world that is; "" when it has all."""
    setting = Setting(
        pcp=options.pcp,
        tp=options.tp,
        dcp=options.dcp,
        interleave=options.interleave,
        spec_tokens=options.spec_tokens,
        dynamic_spec=options.dynamic_spec,
        draft_model=options.draft_model,
        microbatch=options.microbatch,
        model=options.preset,
        dcp_backend=options.dcp_backend,
        expert_parallel=options.expert_parallel,
        all2all_backend=options.all2all_backend,
    )
    lacks = fault.lacks(setting)
    return f"{lacks}, and the world is {setting.world}" if lacks else ""


@contextmanager
def planted(fault: Fault, site: Site) -> Iterator[None]:
    """The fault for the length of the `with` block.

    Raises CannotMeasure, naming the fault and who brings it, for an injection that itself raises:
    then nothing is known of the engine. What the block raises passes.
    """
    try:
        guard = fault.inject(site)
        guard.__enter__()
    except NothingToDamage as error:
        raise NothingToDamage(f"the fault {fault.name} cannot be planted: {error}.") from error
    except Exception as error:
        raise _broken(fault, "planted", error) from error
    try:
        yield
    except BaseException as error:
        if not _leave(fault, guard, error):
            raise
    else:
        _leave(fault, guard, None)


def _leave(
    fault: Fault, guard: AbstractContextManager[None], error: BaseException | None
) -> bool | None:
    kind = None if error is None else type(error)
    try:
        return guard.__exit__(kind, error, None if error is None else error.__traceback__)
    except Exception as own:
        if own is error:
            return False
        raise _broken(fault, "taken out", own) from own


def _broken(fault: Fault, when: str, error: Exception) -> CannotMeasure:
    source = source_of(fault.name, fault.target)
    said = " ".join(str(error).split())
    told = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return CannotMeasure(
        f"the fault {fault.name}{f' ({source})' if source else ''} raised {told} when it was "
        f"{when}: nothing was measured."
    )


@contextmanager
def planted_stand(
    fault: Fault | None, build: Callable[[], Stand], api: Any = None
) -> Iterator[tuple[Stand, Site]]:
    """A stand with the fault in it for the length of the `with` block; None plants nothing.

    build: makes the stand; with a fault it must be a fresh one. api: the target's, for its faults.
    """
    if fault is None:
        yield build(), Site()
    elif fault.at_capture:
        site = Site(api=api)
        with planted(fault, site):
            yield build(), site
    else:
        stand = build()
        arms = {name: arm for name, arm in stand.arms.items() if isinstance(arm, BuiltinArm)}
        site = Site({name: arm.engine for name, arm in arms.items()}, api)
        with planted(fault, site):
            yield stand, site


def without_bill(
    result: ScenarioResult, fault: Fault | None, num_hits: int, checks: str
) -> ScenarioResult:
    """The result of a scenario that was run with a fault: it never passes as a sound engine's.

    With nothing found the scenario counts as not compared, and says why. Only an entry that is no
    fault, and that has acted, may leave a PASS.
    """
    if fault is None or result.outcome is not Outcome.PASS:
        return result
    why = why_no_pass(fault, num_hits, checks)
    if not why:
        return result
    return replace(
        result,
        outcome=Outcome.NOT_COMPARED,
        reasons=(why,),
        tpot_ratio=None,
        itl_ratio=None,
        launch_ratio=None,
    )


def why_no_pass(fault: Fault, num_hits: int, checks: str) -> str:
    """Why a run with a fault in which nothing was found is no PASS; "" for what is no fault."""
    times = f"acted {num_hits} time{'s' if num_hits > 1 else ''}"
    if not num_hits:
        why = f"never acted here, so this proves nothing; it does in {in_words(fault)}"
    elif not fault.contracts:
        return ""
    elif fault.setting.checks == "full" and checks != "full":
        why = f"{times} and shows only with --check full"
    else:
        why = f"{times} and nothing was found of it; it is found in {in_words(fault)}"
    return f"the planted fault {fault.name} {why}"


def in_words(fault: Fault) -> str:
    """Where the catalogue runs a fault: `--pcp 2 --tp 1 --scenario s1-grow-shrink`."""
    setting = fault.setting
    text = f"compare eager {setting.candidate} {_flags(setting)} --scenario {setting.scenario}"
    text += "" if fault.target == "builtin" else f" --target {fault.target}"
    text += "" if setting.capture_sizes is None else f" --capture-sizes {setting.capture_sizes}"
    text += "" if setting.checks == "quick" else f" --check {setting.checks}"
    return f"`{text}`"


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
    if setting.expert_parallel:
        flags += " --expert-parallel"
        if setting.all2all_backend is not None:
            flags += f" --all2all-backend {setting.all2all_backend}"
    if setting.dynamic_spec != "off":
        flags += f" --dynamic-spec {setting.dynamic_spec}"
    if setting.draft_model != "planned":
        flags += f" --draft-model {setting.draft_model}"
    return flags + (" --microbatch" if setting.microbatch else "")
