"""What `pcpbench scenarios` can say about scenarios, as plain data for any report to render.

Owns the sight of a scenario together with the steps it turns into under its own limits. Knows no
console and no engine but the scheduler; imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from pcpbench.engine.plan_steps import make_plan
from pcpbench.plan import ScenarioPlan
from pcpbench.scenarios.loader import load_scenario, load_scenarios, scenario_path
from pcpbench.scenarios.schema import Scenario, json_schema

_ANY_VOCAB_SIZE = 1024


class ScenarioInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario in numbers. Steps are those of its own limits with dcp 1.

    num_steps = num_prefill_steps (mixed ones included) + num_decode_steps + num_idle_steps.
    path: the file it came from.
    """

    name: str
    description: str
    covers: tuple[str, ...]
    source: str
    path: str
    num_requests: int
    num_output_tokens: int
    num_steps: int
    num_prefill_steps: int
    num_decode_steps: int
    num_idle_steps: int
    num_preemptions: int
    max_decode_batch: int


class StepInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One step in numbers, for `scenarios show`. kind: `decode`, `prefill`, `mixed` or `idle`."""

    index: int
    time_s: float
    kind: str
    num_decodes: int
    num_prefills: int
    num_tokens: int
    num_finished: int
    num_preempted: int


class ScenarioDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario, its numbers and its steps."""

    info: ScenarioInfo
    scenario: Scenario
    steps: tuple[StepInfo, ...]


def list_scenarios() -> list[ScenarioInfo]:
    """All shipped scenarios by name."""
    return [_info(scenario, scenario.name, _plan(scenario)) for scenario in load_scenarios()]


def describe_scenario(name_or_file: str | os.PathLike[str]) -> ScenarioDetail:
    """One scenario, shipped or a file; raises ScenarioError or UsageError for what cannot run."""
    scenario = load_scenario(name_or_file)
    plan = _plan(scenario)
    return ScenarioDetail(
        info=_info(scenario, name_or_file, plan), scenario=scenario, steps=_steps(plan)
    )


def validate_scenarios(names_or_files: Sequence[str]) -> list[ScenarioInfo]:
    """Load and plan each; raises ScenarioError or UsageError at the first that cannot be used."""
    return [describe_scenario(name_or_file).info for name_or_file in names_or_files]


def schema() -> dict[str, Any]:
    """The JSON Schema of a scenario file."""
    return json_schema()


def _plan(scenario: Scenario) -> ScenarioPlan:
    return make_plan(scenario, vocab_size=_ANY_VOCAB_SIZE)


def _info(
    scenario: Scenario, name_or_file: str | os.PathLike[str], plan: ScenarioPlan
) -> ScenarioInfo:
    decode_sizes = [
        len(step.scheduled) for step in plan.steps if step.scheduled and not step.has_prefill
    ]
    num_idle = sum(step.idle for step in plan.steps)
    return ScenarioInfo(
        name=scenario.name,
        description=scenario.description,
        covers=scenario.covers,
        source=scenario.source,
        path=str(scenario_path(name_or_file)),
        num_requests=scenario.num_requests,
        num_output_tokens=sum(entry.count * entry.output_len for entry in scenario.requests),
        num_steps=len(plan.steps),
        num_prefill_steps=len(plan.steps) - len(decode_sizes) - num_idle,
        num_decode_steps=len(decode_sizes),
        num_idle_steps=num_idle,
        num_preemptions=sum(len(step.preempted_req_ids) for step in plan.steps),
        max_decode_batch=max(decode_sizes, default=0),
    )


def _steps(plan: ScenarioPlan) -> tuple[StepInfo, ...]:
    infos = []
    for step in plan.steps:
        num_prefills = sum(request.is_prefilling for request in step.scheduled)
        num_decodes = len(step.scheduled) - num_prefills
        if step.idle:
            kind = "idle"
        elif not num_prefills:
            kind = "decode"
        else:
            kind = "mixed" if num_decodes else "prefill"
        infos.append(
            StepInfo(
                index=step.index,
                time_s=step.time_s,
                kind=kind,
                num_decodes=num_decodes,
                num_prefills=num_prefills,
                num_tokens=step.num_tokens,
                num_finished=len(step.finished_req_ids),
                num_preempted=len(step.preempted_req_ids),
            )
        )
    return tuple(infos)
