"""Rows of `summary.csv` and `steps.csv`, made from what a comparison found.

Owns which fact goes into which column. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pcpbench.modes import ARM_MODES, CUDAGraphMode
from pcpbench.plan import PLAN, ScenarioPlan, StepPlan
from pcpbench.records import Drift, StepRecord
from pcpbench.report.arms import base_arm, contract_order, drift_of, find_arm
from pcpbench.report.columns import RATIOS, SETTINGS, STAT_NAMES, STATS
from pcpbench.report.csv_files import Cell, Row, ms
from pcpbench.results import (
    ArmSummary,
    DispatchSummary,
    DriftSummary,
    Outcome,
    ScenarioResult,
    StepAudit,
    StepDrift,
)
from pcpbench.timings import StepTiming

PARALLEL_SIZES = tuple(c.name for c in SETTINGS if c.name.endswith("_size"))


def summary_rows(
    result: ScenarioResult, base: str, candidate: str, settings: Mapping[str, Any]
) -> list[Row]:
    """One row for each arm, in the order in which the arms ran.

    base, candidate: the arms asked for. settings: flat, by vLLM's names.
    """
    asked = {"candidate": find_arm(result, candidate), "base": find_arm(result, base)}
    roles = {arm.arm: role for role, arm in asked.items() if arm is not None}
    return [_summary_row(result, arm, roles.get(arm.arm, "rung"), settings) for arm in result.arms]


def _summary_row(
    result: ScenarioResult, arm: ArmSummary, role: str, settings: Mapping[str, Any]
) -> Row:
    waste = arm.padding_waste
    broken = sorted(
        {v.contract for v in result.violations if v.arm in (arm.arm, PLAN)}, key=contract_order
    )
    row: dict[str, Cell] = {
        "scenario": result.scenario,
        "arm": arm.arm,
        "role": role,
        "outcome": result.outcome.value,
        **_setting_cells(arm.arm, settings),
        "num_steps": arm.num_steps,
        "num_requests": arm.num_requests,
        "num_output_tokens": arm.num_output_tokens,
        "steps_full": arm.steps_full,
        "steps_piecewise": arm.steps_piecewise,
        "steps_none": arm.steps_none,
        "steps_idle": arm.steps_idle,
        "steps_cut": arm.steps_cut,
        "decode_steps": arm.decode_steps,
        "coverable": arm.coverable,
        "coverable_full": arm.coverable_full,
        "real_tokens": arm.real_tokens,
        "padded_tokens": arm.padded_tokens,
        "padding_waste_percent": None if waste is None else 100 * waste,
        **_dispatch_cells(arm.dispatch),
        "num_draft_tokens": arm.num_draft_tokens,
        "num_accepted_tokens": arm.num_accepted_tokens,
        "num_graphs": arm.num_graphs,
        "capture_ms": ms(arm.capture_s),
        "violated_contracts": ";".join(broken) or None,
        "reasons": "; ".join(result.reasons) or None,
        "wall_s": result.wall_s,
    }
    for field, name, _ in STATS:
        stat = getattr(arm, field)
        for part in STAT_NAMES:
            row[f"{part}_{name}_ms"] = None if stat is None else ms(getattr(stat, part))
        row[f"num_{name}_samples"] = None if stat is None else stat.num_samples
    quotable = role == "candidate" and result.outcome is Outcome.PASS
    for field, name in RATIOS:
        ratio = getattr(result, f"{field}_ratio") if quotable else None
        row[f"{name}_ratio"] = None if ratio is None else ratio.median
        row[f"{name}_ratio_low"] = None if ratio is None else ratio.low
        row[f"{name}_ratio_high"] = None if ratio is None else ratio.high
        row[f"num_{name}_pairs"] = None if ratio is None else ratio.num_pairs
    return row | _drift_cells(drift_of(result, arm.arm))


def _dispatch_cells(dispatch: DispatchSummary | None) -> dict[str, Cell]:
    names = ("steps_ranks_disagree", "steps_larger_than_needed", "excess_tokens")
    cells: dict[str, Cell] = {n: None if dispatch is None else getattr(dispatch, n) for n in names}
    never = () if dispatch is None else dispatch.never_served
    told = "; ".join(f"{batch.name}: never {batch.wanted}, {batch.why}" for batch in never)
    return cells | {"never_served": told or None}


def _setting_cells(arm: str, settings: Mapping[str, Any]) -> dict[str, Cell]:
    kind = base_arm(arm)
    cells: dict[str, Cell] = {column.name: settings.get(column.name) for column in SETTINGS}
    if kind == "reference":
        cells |= {**dict.fromkeys(PARALLEL_SIZES, 1), "enable_dbo": False}
        cells["enable_expert_parallel"] = False
    if not cells["enable_expert_parallel"]:
        cells["all2all_backend"] = None
    mode = ARM_MODES.get(kind)
    cells["cudagraph_mode"] = None if mode is None else mode.name.lower()
    return cells


def _drift_cells(summary: DriftSummary | None) -> dict[str, Cell]:
    worst = None if summary is None else summary.worst
    cells: dict[str, Cell] = {
        "drift_kind": None if summary is None else summary.kind,
        "drift_twin": None if summary is None else summary.twin,
        "drift_ok": None if summary is None else summary.ok,
        "drift_steps_compared": None if summary is None else summary.num_steps_compared,
        "top1_agreement": None if summary is None else summary.top1_agreement,
        "token_mismatches": None if summary is None else summary.token_mismatches,
        "max_kl": None if summary is None else summary.max_kl,
        "drift_relative": None if summary is None else summary.max_relative,
        "drift_relative_limit": None if summary is None else summary.limit_relative,
        "drift_cosine_gap": None if summary is None else summary.max_cosine_gap,
        "drift_cosine_gap_limit": None if summary is None else summary.limit_cosine_gap,
        "drift_max_rel": None if worst is None else worst.max_rel,
        "drift_cosine": None if worst is None else worst.cosine,
    }
    return cells | _worst_cells(worst)


def _worst_cells(worst: Drift | None) -> dict[str, Cell]:
    names = ("outcome", "tensor", "num_mismatched", "max_abs", "max_ulp")
    return {f"drift_{name}": None if worst is None else getattr(worst, name) for name in names}


def step_rows(
    result: ScenarioResult,
    plan: ScenarioPlan,
    records: Iterable[StepRecord],
    timings: Iterable[StepTiming] = (),
    step_drifts: Iterable[StepDrift] = (),
    step_audits: Iterable[StepAudit] = (),
    async_device: bool = False,
) -> list[Row]:
    """One row for each record: arms in the order of the result, steps in the order of the plan.

    step_audits: one for each record; the columns made of it are empty for a step without.

    async_device: whether the device runs behind the host; it decides what launch overhead is.
    """
    steps = {step.index: step for step in plan.steps}
    order = {arm.arm: number for number, arm in enumerate(result.arms)}
    timed: dict[tuple[str, int], list[StepTiming]] = {}
    for timing in timings:
        timed.setdefault((timing.arm, timing.step), []).append(timing)
    drifts = {(drift.arm, drift.step): drift for drift in step_drifts}
    audits = {(audit.arm, audit.step): audit for audit in step_audits}
    rows: list[Row] = []
    for record in sorted(records, key=lambda r: (order.get(r.arm, len(order)), r.step)):
        key = (record.arm, record.step)
        drift = drifts.get(key)
        rows.append(
            {
                **_count_cells(record, steps[record.step]),
                **_time_cells(timed.get(key, ()), async_device),
                "drift_kind": None if drift is None else drift.kind,
                "drift_twin": None if drift is None else drift.twin,
                **_worst_cells(None if drift is None else drift.worst),
                **_audit_cells(audits.get(key)),
            }
        )
    return rows


def _audit_cells(audit: StepAudit | None) -> dict[str, Cell]:
    if audit is None:
        names = ("smallest_descriptor", "rank_descriptors", "excess_tokens", "violated_contracts")
        return dict.fromkeys(names)
    choices = audit.rank_choices
    told = [f"rank{rank}={label}" for rank, label in enumerate(choices)]
    contracts = sorted(audit.violated_contracts, key=contract_order)
    return {
        "smallest_descriptor": audit.smallest,
        "rank_descriptors": choices[0] if len(set(choices)) == 1 else ";".join(told) or None,
        "excess_tokens": audit.excess_tokens,
        "violated_contracts": ";".join(contracts) or None,
    }


def _count_cells(record: StepRecord, step: StepPlan) -> dict[str, Cell]:
    descriptor, ranks = record.descriptor, record.ranks
    return {
        "scenario": record.scenario,
        "arm": record.arm,
        "step": record.step,
        "idle": record.idle,
        "has_prefill": step.has_prefill,
        "num_reqs": len(step.scheduled),
        "num_decodes": sum(not request.is_prefilling for request in step.scheduled),
        "num_tokens": step.num_tokens,
        "num_sampled": record.num_output_tokens,
        "served_as": served_as(record),
        "miss_reason": record.miss_reason or None,
        "descriptor_mode": descriptor.cg_mode.name,
        "descriptor_num_reqs": descriptor.num_reqs,
        "descriptor_num_tokens": descriptor.num_tokens,
        "local_num_reqs": max((rank.dispatch_num_reqs for rank in ranks), default=None),
        "local_num_tokens": max((rank.dispatch_num_tokens for rank in ranks), default=None),
        "real_tokens": sum(rank.num_tokens for rank in ranks),
        "padded_tokens": sum(rank.num_tokens_after_padding for rank in ranks),
        "max_query_len": max((r.num_scheduled_tokens for r in step.scheduled), default=None),
        "num_draft_tokens": step.num_draft_tokens,
        "num_accepted_tokens": record.num_accepted,
    }


def served_as(record: StepRecord) -> str:
    """How a step ran; a padded eager arm runs eagerly, whatever it is padded to."""
    if record.idle:
        return "IDLE"
    if base_arm(record.arm) == "eager_padded":
        return CUDAGraphMode.NONE.name
    return record.descriptor.cg_mode.name


def _time_cells(timings: Sequence[StepTiming], async_device: bool) -> dict[str, Cell]:
    """Medians over repetitions."""
    launches = [timing.launch_s(async_device) for timing in timings]
    return {
        "num_repetitions": len(timings),
        "median_step_ms": ms(_median(timing.wall_s for timing in timings)),
        "median_submit_ms": ms(_median(timing.submit_s for timing in timings)),
        "kernel_ms": ms(_median(timing.kernel_s for timing in timings)),
        "launch_overhead_ms": ms(_median(launches)),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
