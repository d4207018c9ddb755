"""`pcpbench repro`: run the two arms of a bundle again, up to the step where they parted.

Owns the run of one request from a bundle to an exit code.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import one_thread
from pcpbench.device.environment import environment_of
from pcpbench.errors import CannotMeasure, DeviceMissing, MeasuredFailure, UsageError
from pcpbench.faults.registry import catalogue
from pcpbench.records import Environment
from pcpbench.report.console import make_console
from pcpbench.report.divergence_view import ReproResult, print_repro, print_repro_json
from pcpbench.session.bundle import Bundle, read_bundle
from pcpbench.session.case import Case
from pcpbench.session.divergence import locate, pair_ladder
from pcpbench.session.inject import lacks_in
from pcpbench.session.stand import StandBuilder
from pcpbench.targets.choice import make_target
from pcpbench.targets.protocol import Target


class ReproRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`pcpbench repro`."""

    bundle: Path
    json: bool = False


def run_repro(request: ReproRequest) -> int:
    """Replay the bundle, print what was found, and return the exit code.

    0: it does not diverge any more; 1: it does; 3: that it does not says nothing. Raises UsageError
    (2) for a bundle that is none, and CannotMeasure (3) for one that cannot be run here.
    """
    bundle = read_bundle(request.bundle)
    case = bundle.case
    options = case.options
    try:
        device = resolve_device(options.device)
        backend = resolve_backend(options.backend, device)
        target = make_target(options.target, device, backend)
        check_case(case, target, str(device))
    except DeviceMissing as error:
        raise CannotMeasure(
            f"the bundle was made on device {options.device!r}, which is not here: {error}"
        ) from error
    with one_thread(device):
        environment = environment_of(device)
        try:
            location = locate(case, target, device)
        except MeasuredFailure as failure:  # from capture: the arm cannot even be built
            found, num_hits, cause = None, 0, str(failure)
        else:
            found, num_hits, cause = location.divergence, location.num_hits, ""
    result = ReproResult(
        bundle=str(request.bundle),
        recorded=bundle.finding,
        found=found,
        cause=cause,
        changes=_changes(bundle, environment),
        fault=case.fault,
        num_hits=num_hits,
    )
    if request.json:
        print_repro_json(result)
    print_repro(result, make_console(sys.stderr if request.json else None))
    return result.exit_code


def check_case(case: Case, target: Target, device: str) -> None:
    """Raise UsageError for a case that the engine refuses, CannotMeasure for a fault not here."""
    known = catalogue(case.options.target)
    if case.fault and case.fault not in known.faults:
        broken = [entry.told for entry in known.unusable if entry.name == case.fault]
        why = (
            f"cannot be used here ({broken[0]})."
            if broken
            else ("is not installed here: install the package that brings it.")
        )
        raise CannotMeasure(
            f"the bundle was made with the fault {case.fault!r} injected, which {why}"
        )
    lacks = lacks_in(known.faults[case.fault], case.options) if case.fault else ""
    if lacks:
        raise UsageError(f"the bundle is damaged: its fault {case.fault!r} {lacks}.")
    try:
        StandBuilder(target, pair_ladder(case), case.options, device).check(case.plan)
    except UsageError as error:
        raise UsageError(f"the bundle is damaged: {error}") from error


def _changes(bundle: Bundle, now: Environment) -> tuple[str, ...]:
    """What is not as it was when the bundle was made."""
    before = bundle.environment
    names = sorted(before.versions.keys() | now.versions.keys())
    found = [
        f"{name} was {before.versions.get(name, 'not there')}, "
        f"is {now.versions.get(name, 'not there')}"
        for name in names
        if before.versions.get(name) != now.versions.get(name)
    ]
    for name in ("device_name", "platform"):
        was, is_now = getattr(before, name), getattr(now, name)
        if was != is_now:
            found.append(f"{name} was {was!r}, is {is_now!r}")
    return tuple(found)
