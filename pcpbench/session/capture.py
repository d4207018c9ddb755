"""`pcpbench capture`: capture every graph of one configuration and show what it touches.

Owns the run of one request from options to exit code. All input is checked before a file is made.
"""

from __future__ import annotations

import sys
import time

import torch

from pcpbench.config import EngineConfig
from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import one_thread
from pcpbench.device.environment import environment_of
from pcpbench.report.capture_files import CaptureFiles
from pcpbench.report.capture_view import print_capture, print_capture_verdict
from pcpbench.report.console import make_console
from pcpbench.report.json_out import print_json
from pcpbench.report.progress import make_progress
from pcpbench.request import CaptureRequest
from pcpbench.results import CapturedGraph, CaptureResult
from pcpbench.scenarios.schema import Limits
from pcpbench.session.settings import (
    chosen_settings,
    idle_settings,
    known_differences,
    settings_of,
    target_settings,
)
from pcpbench.targets.choice import make_target


def run_capture(request: CaptureRequest) -> int:
    """Run the capture, print its report and return the exit code."""
    start = time.perf_counter()
    request.check()
    mode = request.graph_mode
    device = resolve_device(request.options.device)
    backend = resolve_backend(request.options.backend, device)
    target = make_target(request.options.target, device, backend)
    config = capture_config(request, device)
    target.check(config)
    settings = settings_of(request.options, device=str(device), backend=backend.name)
    settings |= target_settings(target)
    settings["cudagraph_mode"] = mode.name
    settings["max_num_seqs"] = config.scheduler_config.max_num_seqs
    sizes = config.compilation_config.cudagraph_capture_sizes
    settings["cudagraph_capture_sizes"] = list(sizes)
    with one_thread(device):
        environment = environment_of(device)
        with CaptureFiles(request.out, settings=settings, environment=environment) as files:
            arm = target.build(request.mode, config, replays=True)
            with make_progress() as progress:
                num_graphs = len(arm.candidates) + arm.num_draft_graphs
                progress.start(f"capturing {request.mode}", num_graphs, "graphs")

                def on_captured(graph: CapturedGraph) -> None:
                    files.add_graph(graph)
                    progress.advance()

                arm.capture(on_captured)
            # Default sizes need no excuse.
            unused = () if request.options.requested_sizes is None else arm.notices
            result = CaptureResult(
                mode=request.mode,
                graphs=(*arm.captured, *arm.draft_captured),
                addresses=arm.addresses,
                pool_bytes=arm.pool_bytes,
                settings=settings,
                environment=environment,
                notices=(
                    *chosen_settings(request.options),
                    *idle_settings(request.options),
                    *known_differences(target.traits, request.options),
                    *unused,
                ),
                wall_s=time.perf_counter() - start,
                run_dir=str(files.path),
            )
            files.finish(result)
    if request.json:
        print_json(result)
        print_capture_verdict(result, make_console(sys.stderr))
    else:
        print_capture(result, make_console())
    return result.outcome.exit_code


def capture_config(request: CaptureRequest, device: torch.device) -> EngineConfig:
    """The engine to capture: a scenario's default limits, widened for a larger --max-num-seqs."""
    limits, options = Limits(), request.options
    max_num_seqs = options.max_num_seqs or limits.max_num_seqs
    return options.engine_config(
        request.graph_mode,
        device=str(device),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(
            limits.max_num_batched_tokens, max_num_seqs * (1 + options.spec_tokens)
        ),
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
    )
