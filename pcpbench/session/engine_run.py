"""`pcpbench compare --target engine`: whole vLLM engines, one arm after the other.

Owns the run of one request from options to exit code. Whatever can be refused is, before a file is
made or a process started.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pcpbench import __version__
from pcpbench.engine_request import EngineArm, EngineRequest
from pcpbench.engine_results import ArmRun, EngineResult, Event, Generation, Probe, Ready
from pcpbench.errors import CannotMeasure
from pcpbench.records import Environment, Notice
from pcpbench.report.console import make_console
from pcpbench.report.engine_files import EngineFiles, engine_json
from pcpbench.report.engine_view import print_engine, print_engine_verdict
from pcpbench.report.json_out import print_text
from pcpbench.report.progress import Progress, make_progress
from pcpbench.results import Outcome
from pcpbench.session.engine_judging import Verdict
from pcpbench.targets.engine.checkpoint import write_checkpoint
from pcpbench.targets.engine.host import HOST_PATCHES, engine_environment, refuse, usable_cores
from pcpbench.targets.engine.order import Load, load_of, order_of
from pcpbench.targets.engine.process import EngineBroke, probe_python, run_engine


def run_engine_compare(request: EngineRequest) -> int:
    """Run all engines, print the report and return the exit code."""
    start = time.perf_counter()
    request.check()
    python = Path(sys.executable) if request.python is None else request.python
    load, cores = load_of(request.scenario, request.seed), usable_cores()
    probe = probe_python(python)
    refuse(probe, python, request.arms, cores)
    settings, environment = _settings(request, load, python, probe), _environment(probe)
    with EngineFiles(request.out, settings=settings, environment=environment) as files:
        settings["checkpoint_sha256"] = write_checkpoint(files.checkpoint, request.seed)
        with make_progress() as progress:
            runs, broke = _run_arms(
                request.arms,
                lambda arm: _run_arm(request, arm, load, probe, python, cores, files, progress),
            )
        verdict = Verdict(
            [arm for arm in request.arms if arm.label in runs],
            dict(zip(load.requests, load.output_lens, strict=True)),
            request.dtype,
            request.inject or "",
        )
        verdict.judge(runs, request.base, request.candidate)
        if broke is not None and verdict.outcome is not Outcome.FAIL:
            raise broke
        result = EngineResult(
            base=request.base,
            candidate=request.candidate,
            outcome=verdict.outcome,
            reasons=(*verdict.reasons, *([] if broke is None else [str(broke)])),
            arms=verdict.rows,
            settings=settings,
            environment=environment,
            notices=_notices(request, probe, cores),
            wall_s=time.perf_counter() - start,
            run_dir=str(files.path),
        )
        files.finish(result)
    if request.json:
        print_text(engine_json(result))
        print_engine_verdict(result, make_console(sys.stderr))
    else:
        print_engine(result, make_console())
    return result.outcome.exit_code


def _run_arms(
    arms: Sequence[EngineArm], run_arm: Callable[[EngineArm], ArmRun]
) -> tuple[dict[str, ArmRun], CannotMeasure | None]:
    """What each arm told, in order, and what ended the first one that broke off: what was told
    before may be a failure already."""
    runs: dict[str, ArmRun] = {}
    for arm in arms:
        try:
            runs[arm.label] = run_arm(arm)
        except CannotMeasure as error:
            return runs, error
    return runs, None


def _run_arm(
    request: EngineRequest,
    arm: EngineArm,
    load: Load,
    probe: Probe,
    python: Path,
    cores: tuple[int, ...],
    files: EngineFiles,
    progress: Progress,
) -> ArmRun:
    order = order_of(
        arm,
        load,
        probe,
        checkpoint=files.checkpoint,
        dtype=request.dtype,
        repetitions=request.repetitions,
        capture_sizes=request.capture_sizes,
        fault=request.inject or "",
    )
    progress.start(f"engine {arm.label}", 3 + 1 + request.repetitions, "stages")

    def on_event(event: Event) -> None:
        progress.advance()
        if isinstance(event, Ready):
            progress.say(f"{arm.label}: started in {event.init_s:.0f} s")
        elif isinstance(event, Generation) and event.repetition == 0:
            progress.say(f"{arm.label}: {len(event.requests)} requests in {event.wall_s:.1f} s")

    environment = engine_environment(probe, arm, cores)
    try:
        return run_engine(
            arm.label, python, order, files.engines, environment, request.timeout_s, on_event
        )
    except EngineBroke as error:
        for line in error.tail:
            progress.say(f"{arm.label} | {line}")
        raise


def _settings(request: EngineRequest, load: Load, python: Path, probe: Probe) -> dict[str, Any]:
    sizes = request.capture_sizes
    return {
        "target": "engine",
        "prefill_context_parallel_size": request.pcp,
        "decode_context_parallel_size": request.dcp,
        "tensor_parallel_size": request.tp,
        "model": "random deepseek_v2",
        "dtype": request.dtype,
        "device": probe.platform,
        "scenario": request.scenario.name,
        "num_requests": len(load.requests),
        "max_num_seqs": load.max_num_seqs,
        "max_num_batched_tokens": load.max_num_batched_tokens,
        "max_model_len": load.max_model_len,
        "cudagraph_capture_sizes": "default" if sizes is None else list(sizes),
        "seed": request.seed,
        "repetitions": request.repetitions,
        "engine_python": str(python),
        "engine_timeout_s": request.timeout_s,
        "host_patches": [name for name, _ in HOST_PATCHES] if probe.platform == "cpu" else [],
        **({"inject": request.inject} if request.inject is not None else {}),
    }


def _environment(probe: Probe) -> Environment:
    """Where the engines run: the other interpreter's packages, not ours."""
    return Environment(
        versions={"pcpbench": __version__, **probe.versions},
        device=probe.platform,
        device_name=probe.device_name or platform.machine(),
        num_threads=1,
        platform=platform.platform(),
    )


def _notices(request: EngineRequest, probe: Probe, cores: tuple[int, ...]) -> tuple[Notice, ...]:
    notices = []
    if probe.platform == "cpu":
        ranks = max(arm.num_ranks for arm in request.arms)
        message = (
            f"up to {ranks} ranks on {len(cores)} cores, each bound to one, kernels in triton's "
            "interpreter: the times say nothing of GPUs, nor of ranks with more of their own."
        )
        notices.append(Notice(setting="cores", message=message))
    if request.scenarios and any(e.at_step or e.at_s for e in request.scenario.requests):
        message = (
            "requests are all there from the start, in their order, whenever the scenario has them "
            "arrive: vLLM's own scheduler admits them as there is room."
        )
        notices.append(Notice(setting="scenario", message=message))
    return tuple(notices)
