"""Results made by hand, as a session would hand them to a report."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.plan import ScenarioPlan, ScheduledRequest, StepPlan
from pcpbench.records import (
    Difference,
    Drift,
    Environment,
    Notice,
    RankRecord,
    StepRecord,
    Violation,
)
from pcpbench.report.console import make_console
from pcpbench.results import (
    Ability,
    AddressUse,
    ArmSummary,
    BatchClass,
    CapturedGraph,
    CaptureResult,
    CompareResult,
    DispatchSummary,
    DoctorReport,
    DoctorRow,
    DriftSummary,
    HostChange,
    Outcome,
    Ratio,
    ScenarioResult,
    Stat,
    StepAudit,
    StepDrift,
    overall,
)
from pcpbench.timings import StepTiming

NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL

SETTINGS = {
    "prefill_context_parallel_size": 2,
    "decode_context_parallel_size": 1,
    "tensor_parallel_size": 1,
    "cp_kv_cache_interleave_size": 1,
    "model": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "backend": "host",
    "feed": "teacher-forced",
    "cudagraph_capture_sizes": (1, 2, 4, 8),
}
ENVIRONMENT = Environment(
    versions={"python": "3.12.3", "torch": "2.13.0"},
    device="cpu",
    device_name="Some CPU @ 2.9 GHz",
    num_threads=1,
    platform="Linux-6.1-x86_64",
)


def stat(median_ms: float, num_samples: int = 36) -> Stat:
    median = median_ms * 1e-3
    return Stat(
        mean=median * 1.02,
        median=median,
        std=median * 0.1,
        p99=median * 1.5,
        num_samples=num_samples,
    )


def drift(kind: str, outcome: str, **values: object) -> Drift:
    known: dict[str, object] = {
        "kind": kind,
        "tensor": "hidden",
        "outcome": outcome,
        "num_elements": 4096,
        "num_mismatched": 0 if outcome == "bitwise" else 311,
        "max_abs": 0.0 if outcome == "bitwise" else 3.1e-7,
        "max_rel": 0.0 if outcome == "bitwise" else 2.2e-6,
        "max_ulp": 0.0 if outcome == "bitwise" else 14.0,
        "cosine": 1.0,
    }
    return Drift(**(known | values))  # type: ignore[arg-type]


def arm(name: str, tpot_ms: float | None, launch_ms: float | None, **values: object) -> ArmSummary:
    timed = tpot_ms is not None
    known: dict[str, object] = {
        "num_steps": 51,
        "num_requests": 12,
        "num_output_tokens": 430,
        "steps_full": 0,
        "steps_piecewise": 0,
        "steps_none": 50,
        "steps_idle": 1,
        "decode_steps": 42,
        "coverable": 0,
        "coverable_full": 0,
        "miss_reasons": {},
        "real_tokens": 700,
        "padded_tokens": 700,
        "tpot": stat(tpot_ms) if timed else None,
        "itl": stat(tpot_ms * 0.98, 418) if timed else None,
        "ttft": stat(tpot_ms * 3, 12) if timed else None,
        "step": stat(tpot_ms * 0.97, 150) if timed else None,
        "launch": stat(launch_ms, 50) if launch_ms is not None else None,
        "kernel": stat(0.41, 50) if timed else None,
    }
    return ArmSummary(arm=name, **(known | values))  # type: ignore[arg-type]


FULL_COUNTS = {
    "steps_full": 42,
    "steps_none": 8,
    "coverable": 42,
    "coverable_full": 42,
    "miss_reasons": {"batch has a prefill": 8},
    "padded_tokens": 800,
    "dispatch": DispatchSummary(
        modes={"FULL": 42, "NONE": 8, "IDLE": 1},
        reasons={"batch has a prefill": 8},
        steps_ranks_disagree=0,
        steps_larger_than_needed=0,
        excess_tokens=0,
    ),
}
UNSERVED = BatchClass(
    name="decode with 9 requests",
    wanted="FULL",
    ran_as=("eager",),
    num_steps=12,
    why="larger than the largest captured size 8 (up to 9 rows a rank)",
)
ODD_DISPATCH = DispatchSummary(
    modes={"FULL": 30, "NONE": 20, "IDLE": 1},
    reasons={"more requests than the largest FULL graph": 12, "batch has a prefill": 8},
    steps_ranks_disagree=2,
    steps_larger_than_needed=3,
    excess_tokens=24,
    never_served=(UNSERVED,),
)


def summary(kind: str, name: str, twin: str, worst: Drift, ok: bool = True) -> DriftSummary:
    return DriftSummary(
        kind=kind,
        arm=name,
        twin=twin,
        num_steps_compared=50,
        worst=worst,
        top1_agreement=1.0,
        token_mismatches=0,
        max_kl=1.2e-9,
        ok=ok,
        max_relative=0.0 if kind == "capture" and ok else 3.1e-6,
        max_cosine_gap=0.0 if kind == "capture" and ok else 2.5e-13,
        limit_relative=None if kind == "capture" else 1e-4,
        limit_cosine_gap=None if kind == "capture" else 1e-10,
    )


DRIFTS = (
    summary("partition", "eager", "reference", drift("partition", "within_budget")),
    summary("padding", "eager_padded[full]", "eager", drift("padding", "within_budget")),
    summary("capture", "full", "eager_padded[full]", drift("capture", "bitwise")),
)


def make_passed(name: str = "s1-grow-shrink", scale: float = 1.0, **values: object):
    known: dict[str, object] = {
        "scenario": name,
        "outcome": Outcome.PASS,
        "reasons": (),
        "arms": (
            arm("reference", None, None),
            arm("eager", 1.2341 * scale, 0.7812 * scale),
            arm("eager_padded[full]", None, None, padded_tokens=800),
            arm("full", 0.8123 * scale, 0.3141 * scale, **FULL_COUNTS),
        ),
        "drifts": DRIFTS,
        "violations": (),
        "first_differences": (),
        "tpot_ratio": Ratio(median=0.658, low=0.641, high=0.672, num_pairs=36),
        "itl_ratio": Ratio(median=0.661, low=0.648, high=0.679, num_pairs=418),
        "launch_ratio": Ratio(median=0.402, low=0.391, high=0.415, num_pairs=50),
        "wall_s": 1.84,
    }
    return ScenarioResult(**(known | values))  # type: ignore[arg-type]


def make_odd_dispatch(name: str = "s2-capture-edges") -> ScenarioResult:
    """A pass in which a class of batches was never served, among other oddities."""
    passed = make_passed(name)
    full = msgspec.structs.replace(passed.arms[3], dispatch=ODD_DISPATCH)
    return msgspec.structs.replace(passed, arms=(*passed.arms[:3], full))


def violation(contract: str, step: int, rank: int | None, tensor: str, message: str) -> Violation:
    return Violation(
        contract=contract,
        arm="full",
        scenario="s3-idle-and-reuse",
        step=step,
        rank=rank,
        tensor=tensor,
        message=message,
    )


STALE = "seq_lens[3] is 17, expected 0 (padding row); 1 of 4 values differs"
BITS = (
    "logits is not bitwise that of eager_padded[full]: 311 of 4096 values differ, max abs 0.125 "
    "(exceeds_budget, ran as FULL[reqs=4,tokens=4])"
)


def make_failed() -> ScenarioResult:
    worst = drift("capture", "exceeds_budget", tensor="logits", max_abs=0.125, max_ulp=81234.0)
    found = [violation("C1", step, 1, "seq_lens", STALE) for step in range(7, 12)]
    found += [violation("C13", step, None, "logits", BITS) for step in (7, 9)]
    first = Difference(
        kind="capture",
        arm="full",
        twin="eager_padded[full]",
        scenario="s3-idle-and-reuse",
        step=7,
        rank=1,
        layer=0,
        tensor="logits",
        drift=worst,
    )
    return make_passed(
        "s3-idle-and-reuse",
        outcome=Outcome.FAIL,
        reasons=(
            f"C1 broken by full 5 times, first at step 7, rank 1, seq_lens: {STALE}",
            f"C13 broken by full 2 times, first at step 7, logits: {BITS}",
            "full computed a non-finite value: step 9, tensor hidden, row 2",
        ),
        drifts=(*DRIFTS[:2], summary("capture", "full", "eager_padded[full]", worst, ok=False)),
        violations=tuple(found),
        num_violations={"C1": 31, "C13": 2},
        first_differences=(first,),
        tpot_ratio=None,
        itl_ratio=None,
        launch_ratio=None,
    )


NOT_SERVED = (
    "full: no step was served by FULL, of 12 decode steps; none of them fits a captured size"
)


def make_not_compared() -> ScenarioResult:
    missed = {"more requests than the largest FULL graph": 12, "batch has a prefill": 39}
    return make_passed(
        "s8-large-eager-then-replay",
        outcome=Outcome.NOT_COMPARED,
        reasons=(NOT_SERVED,),
        arms=(
            arm("reference", None, None),
            arm("eager", 1.2341, 0.7812),
            arm("full", 1.25, 0.79, miss_reasons=missed),
        ),
        drifts=DRIFTS[:1],
        tpot_ratio=None,
        itl_ratio=None,
        launch_ratio=None,
    )


def make_compare(*scenarios: ScenarioResult, **values: object) -> CompareResult:
    outcome, reasons = overall(scenarios)
    known: dict[str, object] = {
        "base": "eager",
        "candidate": "full",
        "outcome": outcome,
        "reasons": reasons,
        "scenarios": scenarios,
        "settings": SETTINGS,
        "environment": ENVIRONMENT,
        "notices": (
            Notice(
                setting="capture_sizes",
                message="capture size 64 is not used: 64 decodes are more than --max-num-seqs 16.",
            ),
        ),
        "wall_s": 11.4,
        "run_dir": "results/20261129T170039Z-compare-3f2a",
    }
    return CompareResult(**(known | values))  # type: ignore[arg-type]


def graph(mode: str, tokens: int, pool_bytes: int) -> CapturedGraph:
    full = mode == "FULL"
    label = f"FULL[reqs={tokens},tokens={tokens}]" if full else f"PIECEWISE[tokens={tokens}]"
    return CapturedGraph(
        descriptor=label,
        mode=mode,
        num_tokens=tokens,
        num_reqs=tokens if full else None,
        uniform_token_count=1 if full else None,
        capture_s=0.0123 + tokens * 1e-4,
        num_ops=412,
        num_segments=1 if full else 5,
        eager_breaks=0 if full else 4,
        pool_bytes_after=pool_bytes,
        num_reads=31,
        num_writes=12,
    )


def use(name: str | None, graph_label: str, address: int, **values: object) -> AddressUse:
    known: dict[str, object] = {
        "graph": graph_label,
        "name": name,
        "address": address,
        "num_bytes": 256,
        "shape": (16, 4),
        "dtype": "torch.int32",
        "reads": True,
        "writes": False,
        "op": "aten.index_select.default",
        "source": "pcpbench/model/decoder.py:88",
    }
    return AddressUse(**(known | values))  # type: ignore[arg-type]


def make_capture(*, unowned: bool = False) -> CaptureResult:
    graphs = (
        graph("PIECEWISE", 8, 40_960),
        graph("PIECEWISE", 4, 40_960),
        graph("FULL", 8, 81_920),
        graph("FULL", 4, 81_920),
    )
    uses = []
    for label in (g.descriptor for g in graphs):
        for rank in (0, 1):
            uses.append(use(f"rank{rank}.input_ids", label, 0x7F0000001000 + rank * 0x1000))
            for layer in range(2):
                uses.append(
                    use(
                        f"rank{rank}.kv_cache.{layer}",
                        label,
                        0x7F0000100000 + rank * 0x20000 + layer * 0x10000,
                        num_bytes=65_536,
                        shape=(256, 16, 4),
                        dtype="torch.float32",
                        writes=True,
                    )
                )
    if unowned:
        uses.append(use(None, graphs[2].descriptor, 0x7F00DEAD0000, op="aten.mul.Tensor"))
    return CaptureResult(
        mode="full_and_piecewise",
        graphs=graphs,
        addresses=tuple(uses),
        pool_bytes=81_920,
        settings=SETTINGS,
        environment=ENVIRONMENT,
        notices=(Notice(setting="capture_sizes", message="capture size 64 is not used."),),
        wall_s=0.9,
        run_dir="results/20261129T170039Z-capture-3f2a",
    )


def make_doctor() -> DoctorReport:
    return DoctorReport(
        environment=ENVIRONMENT,
        devices=("cpu: Some CPU @ 2.9 GHz, 2 cores",),
        rows=(
            DoctorRow(what="host graphs", status=Ability.OK, why="recorded and replayed on cpu"),
            DoctorRow(
                what="accelerator graphs",
                status=Ability.NO,
                why="torch finds no CUDA device: install a CUDA build of torch on a machine with "
                "a GPU",
            ),
            DoctorRow(
                what="Triton kernels",
                status=Ability.LIMITED,
                why="no GPU: their torch twins run; TRITON_INTERPRET=1 runs the kernels slowly",
            ),
        ),
        changes=(
            HostChange(
                name="platform",
                how="plugin",
                what="vllm.platform_plugins entry point",
                why="no pinned memory",
            ),
        ),
    )


def rank_record(rank: int, descriptor: BatchExecutionDescriptor, reqs: int, tokens: int):
    rows = descriptor.num_reqs or reqs
    ints = np.zeros(tokens, dtype=np.int64)
    return RankRecord(
        rank=rank,
        num_reqs=reqs,
        num_reqs_after_padding=rows,
        num_tokens=tokens,
        num_tokens_after_padding=descriptor.num_tokens,
        input_ids=ints,
        positions=ints,
        is_padding=np.zeros(tokens, dtype=bool),
        query_start_loc=np.zeros(rows + 1, dtype=np.int32),
        seq_lens=np.zeros(rows, dtype=np.int32),
        dcp_local_seq_lens=None,
        block_tables=(),
        slot_mappings=np.zeros((1, tokens), dtype=np.int64),
        row_req_index=ints,
        row_start=ints,
        hidden_restore_idx=None,
        gathered_kv_write_mask=None,
        descriptor=descriptor,
        dispatch_num_reqs=reqs,
        dispatch_num_tokens=tokens,
    )


def step_record(name: str, step: int, descriptor: BatchExecutionDescriptor, **values: object):
    tokens = 3 if descriptor.cg_mode is not NONE else descriptor.num_tokens
    known: dict[str, object] = {
        "arm": name,
        "scenario": "s1-grow-shrink",
        "step": step,
        "descriptor": descriptor,
        "miss_reason": "",
        "ranks": tuple(rank_record(rank, descriptor, min(tokens, 3), tokens) for rank in (0, 1)),
        "sampled_req_ids": ("a", "b"),
        "sampled": np.array([5, 6]),
        "logits": np.zeros((2, 8), dtype=np.float32),
        "hidden": np.zeros((4, 8), dtype=np.float32),
    }
    return StepRecord(**(known | values))  # type: ignore[arg-type]


def make_steps() -> SimpleNamespace:
    """A plan of three steps (prefill, decode, idle) with records and times of two arms."""

    def request(name: str, tokens: int, computed: int) -> ScheduledRequest:
        return ScheduledRequest(
            req_id=name,
            num_scheduled_tokens=tokens,
            num_computed_tokens=computed,
            prefill_len=8,
            prompt_len=8,
        )

    plan = ScenarioPlan(
        scenario="s1-grow-shrink",
        steps=(
            StepPlan(index=0, scheduled=(request("a", 1, 8), request("b", 8, 0))),
            StepPlan(index=1, scheduled=(request("a", 1, 9), request("b", 1, 8))),
            StepPlan(index=2, scheduled=(), idle=True),
        ),
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        num_blocks=8,
        block_sizes=(16,),
        vocab_size=8,
    )
    eager, full = BatchExecutionDescriptor(NONE, 5, 2), BatchExecutionDescriptor(FULL, 4, 4, 1)
    records = []
    for name in ("full", "eager_padded[full]", "eager"):  # not the order of the result
        padded = eager if name == "eager" else full
        reason = "batch has a prefill" if name == "full" else ""
        records += [
            step_record(name, 0, eager, miss_reason=reason),
            step_record(name, 1, padded),
            step_record(name, 2, padded, idle=True, sampled=np.array([], dtype=np.int64)),
        ]
    timings = [
        StepTiming(
            arm=name,
            scenario="s1-grow-shrink",
            step=step,
            repetition=repetition,
            wall_s=1e-3 * (1 + step + repetition),
            submit_s=0.5e-3,
            kernel_s=0.25e-3,
        )
        for name in ("eager", "full")
        for step in (0, 1, 2)
        for repetition in (0, 1, 2)
    ]
    step_drifts = [
        StepDrift(
            kind="capture",
            arm="full",
            twin="eager_padded[full]",
            step=1,
            worst=drift("capture", "bitwise"),
        )
    ]
    audits = [
        StepAudit(
            arm=name,
            step=step,
            smallest="FULL[reqs=2,tokens=2]" if step == 1 else None,
            rank_choices=("FULL[reqs=4,tokens=4]", "NONE") if step == 1 else ("NONE", "NONE"),
            excess_tokens=4 if step == 1 else 0,
            violated_contracts=("C10", "C2") if step == 1 else (),
        )
        for name in ("eager_padded[full]", "full")
        for step in (0, 1, 2)
    ]
    return SimpleNamespace(
        plan=plan, records=records, timings=timings, step_drifts=step_drifts, step_audits=audits
    )


def render(print_view, result, width: int) -> str:
    """What a view prints on a console of this width that is no terminal."""
    stream = io.StringIO()
    print_view(result, make_console(stream, width=width))
    return stream.getvalue()


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    """No colour that the machine running the tests asks for."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make() -> SimpleNamespace:
    """Builders of results, settings and steps."""
    return SimpleNamespace(
        passed=make_passed,
        odd_dispatch=make_odd_dispatch,
        failed=make_failed,
        not_compared=make_not_compared,
        compare=make_compare,
        capture=make_capture,
        doctor=make_doctor,
        steps=make_steps,
        drift=drift,
        drift_summary=summary,
        violation=violation,
        arm=arm,
        settings=SETTINGS,
        environment=ENVIRONMENT,
        render=render,
        unwrapped=lambda text: re.sub(r"\s+", " ", text),
    )


@pytest.fixture
def figures(monkeypatch):
    """Matplotlib's figures in the order in which plots were drawn."""
    from pcpbench.report.page import gate_plots, plots

    drawn = []

    def keep(figure, title, desc):
        drawn.append(figure)
        return "<svg></svg>"

    for module in (plots, gate_plots):
        monkeypatch.setattr(module, "to_svg", keep)
    return drawn
