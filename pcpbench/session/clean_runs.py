"""`pcpbench faults clean`: comparisons of sound engines, where every accusation is false.

Owns how settings are drawn and the command line that repeats one. A run judges only; it times
nothing. One that could not be compared, or that no memory was left for, is a row without a verdict.
"""

from __future__ import annotations

import shlex
import time
from typing import Any, Final

import msgspec
import numpy as np
import torch

from pcpbench.config import DRAFT_MODELS, DTYPES, DYNAMIC_SPEC, PRESETS
from pcpbench.device.backends import resolve_backend, resolve_device
from pcpbench.device.clock import make_clock, one_thread
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.fault_results import CleanOutcome, CleanResult, CleanRun
from pcpbench.model.presets import MODEL_SHAPES
from pcpbench.report.clean_view import print_clean
from pcpbench.report.console import make_console
from pcpbench.report.progress import make_progress
from pcpbench.request import CHECKS, FEEDS
from pcpbench.scenarios.loader import load_scenario, shipped_names
from pcpbench.session.faults import judged_clean
from pcpbench.session.ladder import build_ladder
from pcpbench.session.planning import plan_scenario
from pcpbench.session.stand import StandBuilder
from pcpbench.session.trial import Trial
from pcpbench.targets.builtin import BuiltinTarget

MAX_RUNS = 100_000
SPEC_TOKENS = (0, 1, 2, 3)
WORLDS = (
    EngineOptions(pcp=1),
    EngineOptions(pcp=2),
    EngineOptions(pcp=4),
    EngineOptions(pcp=8),
    EngineOptions(pcp=2, tp=2),
    EngineOptions(pcp=1, tp=2, dcp=2),
    EngineOptions(pcp=1, tp=4, dcp=2, interleave=4),
    EngineOptions(pcp=1, tp=4, dcp=4, interleave=2),
    EngineOptions(pcp=2, dcp=2),
    EngineOptions(pcp=2, tp=2, dcp=4, interleave=2),
    EngineOptions(pcp=2, model="tiny-sparse"),
    EngineOptions(pcp=1, tp=4, dcp=2, interleave=4, model="tiny-sparse", dcp_backend="a2a"),
    EngineOptions(pcp=2, model="tiny-swa"),
    EngineOptions(pcp=1, tp=4, dcp=2, interleave=2, model="tiny-swa"),
)
EXPERTS: Final[tuple[dict[str, Any] | None, ...]] = (
    None,
    {},
    {"expert_parallel": True},
    {"expert_parallel": True, "all2all_backend": "all_to_all"},
)
"""Without experts, and with them in every way that they are dealt out."""
ARMS = (
    ("eager", "full"),
    ("eager", "full_and_piecewise"),
    ("eager", "piecewise"),
    ("eager_padded", "full"),
    ("reference", "eager"),
)


class CleanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`pcpbench faults clean`."""

    num_runs: int = 200
    seed: int = 0
    device: str = "auto"
    checks: str = "quick"

    def check(self) -> None:
        """Raise UsageError for a request that could not be run whatever the machine is."""
        if not 1 <= self.num_runs <= MAX_RUNS:
            raise UsageError(f"--runs is {self.num_runs}: use 1 to {MAX_RUNS}.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}: use a whole number from 0 to 2^63 - 1.")
        if self.checks not in CHECKS:
            raise UsageError(f"--check is {self.checks!r}: use one of {', '.join(CHECKS)}.")


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one run."""

    scenario: str
    options: EngineOptions
    base: str
    candidate: str
    feed: str
    checks: str = "quick"

    @property
    def command(self) -> str:
        """The command line of the same comparison."""
        feed = [] if self.feed == FEEDS[0] else ["--feed", self.feed]
        checks = [] if self.checks == CHECKS[0] else ["--check", self.checks]
        words = ["--scenario", self.scenario, *self.options.words, *feed, *checks]
        words += ["--repetitions", "0"]
        return shlex.join(["pcpbench", "compare", self.base, self.candidate, *words])


def run_clean(request: CleanRequest) -> int:
    """Make the runs, print what they found and return the exit code."""
    start = time.perf_counter()
    request.check()
    device = resolve_device(request.device)
    draws = draw_runs(request.num_runs, request.seed, str(device), request.checks)
    runs = []
    with one_thread(device), make_progress() as progress:
        progress.start("clean runs", len(draws), "runs")
        for draw in draws:
            runs.append(run := _run(draw, device))
            progress.advance()
            if run.outcome is not CleanOutcome.CLEAN:
                told = ", ".join(run.accused) or f"{run.outcome.value}: {run.detail}"
                progress.say(f"{run.command}: {told}")
    result = CleanResult(runs=tuple(runs), wall_s=time.perf_counter() - start)
    print_clean(result, make_console())
    return result.exit_code


def draw_runs(num_runs: int, seed: int, device: str, checks: str = "quick") -> list[Draw]:
    """Settings of `num_runs` runs: every scenario, world (some with a model of their own), dtype,
    pair of arms and feed, with and without microbatches and experts, as often as any other (give or
    take one), combined by chance, each with a seed of its own. So are numbers of draft tokens where
    the feed is teacher-forced; the others run without. Where there are drafts their number varies
    or not, and a draft model proposes more or not, where one can run."""
    rng = np.random.default_rng(seed)

    def spread(count: int) -> list[int]:
        places: list[int] = rng.permutation(np.arange(num_runs) % count).tolist()
        return places

    names = shipped_names()
    scenarios, worlds, arms = spread(len(names)), spread(len(WORLDS)), spread(len(ARMS))
    kinds, feeds, seeds = spread(len(DTYPES)), spread(len(FEEDS)), rng.integers(0, 2**31, num_runs)
    drafts = spread(len(SPEC_TOKENS))
    cuts, dynamic = spread(2), spread(len(DYNAMIC_SPEC))
    experts = spread(len(EXPERTS))
    models = spread(len(DRAFT_MODELS))
    return [
        Draw(
            scenario=names[scenarios[i]],
            options=_with_draft_model(
                DRAFT_MODELS[models[i]],
                WORLDS[worlds[i]],
                dtype=DTYPES[kinds[i]],
                seed=int(seeds[i]),
                device=device,
                spec_tokens=0 if feeds[i] else SPEC_TOKENS[drafts[i]],
                dynamic_spec=DYNAMIC_SPEC[dynamic[i] if drafts[i] and not feeds[i] else 0],
                microbatch=bool(cuts[i]),
                **_with_experts(WORLDS[worlds[i]], EXPERTS[experts[i]]),
            ),
            base=ARMS[arms[i]][0],
            candidate=ARMS[arms[i]][1],
            feed=FEEDS[feeds[i]],
            checks=checks,
        )
        for i in range(num_runs)
    ]


def _with_draft_model(draft_model: str, world: EngineOptions, **settings: Any) -> EngineOptions:
    """The options of a run; with a draft model only where one can run, see EngineOptions.check."""
    options = msgspec.structs.replace(world, **settings)
    one_group = len(MODEL_SHAPES[options.preset].kv_groups) == 1
    if not options.spec_tokens or options.microbatch or not one_group:
        return options
    return msgspec.structs.replace(options, draft_model=draft_model)


def _with_experts(world: EngineOptions, settings: dict[str, Any] | None) -> dict[str, Any]:
    """The options of the world's model with experts; nothing for a model without."""
    model = f"{world.preset}-moe"
    return {} if settings is None or model not in PRESETS else {"model": model, **settings}


def _run(draw: Draw, device: torch.device) -> CleanRun:
    start, options = time.perf_counter(), draw.options
    plan = plan_scenario(load_scenario(draw.scenario), options)
    target = BuiltinTarget(device, resolve_backend("auto", device))
    ladder = build_ladder(draw.base, draw.candidate)
    builder = StandBuilder(target, ladder, options, str(device))
    outcome, accused, detail = judged_clean(
        lambda: Trial(
            plan,
            builder.stand_for(plan),
            make_clock(device),
            dtype=options.dtype,
            teacher_forced=draw.feed == FEEDS[0],
            repetitions=0,
            checks=draw.checks,
        ).run()
    )
    return CleanRun(
        world=_world(options),
        scenario=draw.scenario,
        arms=f"{draw.base} {draw.candidate}",
        dtype=options.dtype,
        outcome=outcome,
        accused=accused,
        detail=detail,
        command=draw.command,
        wall_s=time.perf_counter() - start,
    )


def _world(options: EngineOptions) -> str:
    sizes = [(name, getattr(options, name)) for name in ("pcp", "tp", "dcp", "interleave")]
    parts = [f"{name} {size}" for name, size in sizes if name == "pcp" or size > 1]
    parts += [options.preset] if options.preset != "tiny" else []
    parts += [options.dcp_backend] if options.dcp_backend != "ag_rs" else []
    parts += ["expert-parallel"] if options.expert_parallel else []
    parts += [options.all2all_backend] if options.all2all_backend else []
    return " ".join([*parts, *(["microbatch"] if options.microbatch else [])])
