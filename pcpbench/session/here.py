"""What a measurement is made with, here and now: machine, code, settings. And whether two agree.

Owns the hashes of a baseline and what keeps two runs from being held against each other.
"""

from __future__ import annotations

import hashlib
import os
import platform
import uuid
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

import pcpbench
from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import one_thread
from pcpbench.device.environment import environment_of
from pcpbench.device.own_time import clock_name
from pcpbench.gate_jobs import Machine, Measured, SampleJob
from pcpbench.gate_samples import JudgedScenario
from pcpbench.modes import ARM_MODES, CUDAGraphMode
from pcpbench.records import Notice
from pcpbench.session.settings import settings_of

_IDENTITY = Path("/etc/machine-id")


def measured_here(job: SampleJob, judged: tuple[JudgedScenario, ...] = ()) -> Measured:
    """A run of this job with no process measured yet; raises for a device that is not here."""
    device = resolve_device(job.options.device)
    backend = resolve_backend(job.options.backend, device)
    settings = settings_of(job.options, device=str(device), backend=backend.name)
    settings |= {"base": job.base, "candidate": job.candidate, "repetitions": job.repetitions}
    settings["floor_repetitions"] = job.floor_repetitions
    settings["clock"] = clock_name(device)
    if ARM_MODES.get(job.base, CUDAGraphMode.NONE) is not CUDAGraphMode.NONE:
        settings["capture_time"] = "of the candidate"  # it was of both arms in older baselines
    with one_thread(device):
        environment = environment_of(device)
    return Measured(
        job=job,
        settings=settings,
        settings_hash=_hash_of(settings),
        code_hash=code_hash(),
        machine=machine(environment.device_name),
        environment=environment,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        judged=judged,
    )


def machine(device_name: str) -> Machine:
    """This machine. The id is a hash: a name or serial number does not leave it.

    Where there is no machine-id its network address stands in for it.
    """
    identity = [_text(_IDENTITY) or uuid.getnode(), platform.node(), _cpu_model(), device_name]
    return Machine(id=_hash_of(identity), cpu=_cpu_model(), num_cpus=os.cpu_count() or 1)


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Of every source file of the package, by name and content."""
    root = Path(pcpbench.__file__).parent
    digest = hashlib.sha256()
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.yaml"))):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def incomparable(baseline: Measured, run: Measured) -> str:
    """Why nothing of two runs may be compared, "" for runs of equal settings."""
    if baseline.settings_hash == run.settings_hash:
        return ""
    names = sorted(baseline.settings.keys() | run.settings.keys())
    differing = [
        f"{name} was {baseline.settings.get(name)!r} and is {run.settings.get(name)!r}"
        for name in names
        if baseline.settings.get(name) != run.settings.get(name)
    ]
    return f"the settings are not those of the baseline: {'; '.join(differing[:3]) or 'unknown'}"


def other_times(baseline: Measured, run: Measured) -> str:
    """Why absolute times may not be compared, "" where they may.

    They are of one machine, and of the same libraries on it.
    """
    if baseline.machine.id != run.machine.id:
        return "the baseline was made on another machine, whose times are never judged"
    changed = ", ".join(_changed_libraries(baseline, run))
    return f"the baseline's times are of other libraries ({changed})" if changed else ""


def can_extend(run: Measured, here: Measured) -> str:
    """Why more processes started now would not belong to a run, "" where they would."""
    if run.code_hash != here.code_hash:
        return "it was measured with other code than is installed here"
    if run.settings_hash != here.settings_hash:
        return "its settings come to something else here"
    if run.machine.id != here.machine.id:
        return "it was measured on another machine"
    changed = ", ".join(_changed_libraries(run, here))
    return f"it was measured with other libraries ({changed})" if changed else ""


def differences(baseline: Measured, run: Measured) -> tuple[Notice, ...]:
    """What is not as it was when the baseline was made, where it may matter to a reader."""
    notices = []
    if baseline.machine.id != run.machine.id:
        message = (
            f"the baseline was made on another machine ({baseline.machine.cpu}, here "
            f"{run.machine.cpu}): ratios to the {run.job.base} arm are judged, times are not. "
            "Where a ratio depends on the CPU, record the baseline on this kind of machine."
        )
        notices.append(Notice(setting="machine", message=message))
    for changed in _changed_libraries(baseline, run):
        name, _, versions = changed.partition(" ")
        notices.append(Notice(setting=name, message=f"{versions}."))
    if baseline.code_hash == run.code_hash:
        message = "baseline and run are of the same pcpbench sources."
        notices.append(Notice(setting="code", message=message))
    return tuple(notices)


def _changed_libraries(baseline: Measured, run: Measured) -> list[str]:
    """`torch was 2.12.0, is 2.13.0` for each that is another one now."""
    was, now = _libraries(baseline), _libraries(run)
    return [
        f"{name} was {was.get(name, 'not there')}, is {now.get(name, 'not there')}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]


def _libraries(measured: Measured) -> dict[str, str]:
    """Versions of what the times depend on; pcpbench itself is what the gate is about."""
    versions = measured.environment.versions
    return {name: versions[name] for name in ("python", "torch", "triton") if name in versions}


def _cpu_model() -> str:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _hash_of(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:16]
