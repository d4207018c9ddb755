"""What to run again after a failed scenario, and whether that can be: the truth of a bundle.

Owns `Case` and the search for what is wrong with one whose types are right: words, limits, plan and
the tokens that feed it. A plan is held to the audit of every comparison (C19), so that no sound
engine is accused of what a damaged plan asks of it. Reads no file and runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from pcpbench.checks.accusation import FINDINGS
from pcpbench.checks.plan_audit import plan_violations
from pcpbench.divergence import Accusation, Divergence
from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.model.presets import model_shape
from pcpbench.modes import ARM_MODES
from pcpbench.plan import PLAN, NewRequest, ScenarioPlan
from pcpbench.records import CONTRACT_IDS
from pcpbench.request import CHECKS, FEEDS
from pcpbench.scenarios.fields import field_problem
from pcpbench.scenarios.limits import limits_problem, request_problem
from pcpbench.scenarios.schema import Limits, Scenario
from pcpbench.session.ladder import Ladder, build_ladder

REPRODUCED: Final = ("with taps", "without taps", "no")
MAX_REPETITIONS: Final = 1000
"""As many as `compare` times at most."""

REQUEST_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,79}")


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to run. options: of every engine, device and backend resolved.

    base, candidate: the arms that were compared. accusation: names the pair to run.
    plan: the scenario's steps, up to the last one to look at. plan_findings: what the audit of the
    plan said when it was made (C19), nothing as a rule. tokens: what fed the arms, one list a
    step; empty where each fed itself. repetitions: timed runs, as many as the comparison had, for a
    finding that only they show; bundles of older versions have 1.
    fault: to be injected, "" for none.
    """

    options: EngineOptions
    base: str
    candidate: str
    accusation: Accusation
    plan: ScenarioPlan
    plan_findings: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
    feed: str = "teacher-forced"
    checks: str = "quick"
    repetitions: int = 0
    fault: str = ""


def plan_findings(plan: ScenarioPlan) -> tuple[str, ...]:
    """What the audit says of a plan (C19), one sentence each."""
    return tuple(f"step {found.step}: {found.message}" for found in plan_violations(plan))


def problem_of(case: Case, finding: Divergence) -> str:
    """The first thing that cannot be in a case and in what was found of it, "" for nothing."""
    try:
        case.options.check()
    except UsageError as error:
        return str(error).rstrip(".")
    for look in (_words, _limits, _requests, _plan, _fed):
        for problem in look(case):
            return problem
    return next(_accusations(case, finding), "")


def _words(case: Case) -> Iterator[str]:
    for arm in (case.base, case.candidate):
        if arm not in ARM_MODES:
            yield f"{arm!r} is no arm"
    if case.base == case.candidate:
        yield f"both its arms are {case.base!r}"
    if case.feed not in FEEDS or case.checks not in CHECKS:
        yield "its feed or its checks are unknown"
    if case.options.spec_tokens and case.feed != FEEDS[0]:
        yield f"its feed is {case.feed!r} with draft tokens"
    if not 0 <= case.repetitions <= MAX_REPETITIONS:
        yield f"its repetitions are {case.repetitions}, not 0 to {MAX_REPETITIONS}"
    reason = field_problem(Scenario, "name", case.plan.scenario)
    if reason is not None:
        yield f"its scenario {reason}"


def _limits(case: Case) -> Iterator[str]:
    """Limits that no scenario could have, or that exclude each other."""
    plan, dcp = case.plan, case.options.dcp
    spans = plan.block_sizes
    if not spans or min(spans) < 1 or spans[0] % dcp:
        yield f"its block_sizes are {list(spans)}"
        return
    values = {
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "max_model_len": plan.max_model_len,
        "block_size": spans[0] // dcp,
        "num_blocks": plan.num_blocks,
    }
    for name, value in values.items():
        reason = field_problem(Limits, name, value)
        if reason is not None:
            yield f"its {name} {reason}"
            return
    found = limits_problem(Limits(**values))
    if found is not None:
        yield f"its {found.field} {found.reason}"
    shape = model_shape(case.options.preset)
    if plan.vocab_size != shape.vocab_size:
        yield f"its vocab_size is {plan.vocab_size}, that of {shape.name} is {shape.vocab_size}"
    right = tuple(group.span(spans[0] // dcp, dcp) for group in shape.kv_groups)
    if spans != right:
        yield f"its block_sizes are {list(spans)}, those of {shape.name} are {list(right)}"


def _requests(case: Case) -> Iterator[str]:
    """Names, prompts and lengths of all requests."""
    plan = case.plan
    limits = Limits(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=plan.block_sizes[0] // case.options.dcp,
    )
    groups = model_shape(case.options.preset).kv_groups
    for request in _all_requests(plan):
        name = request.req_id
        if not REQUEST_NAME.fullmatch(name):
            yield f"a request is called {name!r}"
        if any(not 0 <= token < plan.vocab_size for token in request.prompt_token_ids):
            yield f"the prompt of request {name} has a token outside the vocabulary"
        if not request.prompt_token_ids or request.max_tokens < 1 or request.num_generated < 0:
            yield f"request {name} has no prompt or asks for no token"
        lengths = len(request.prompt_token_ids), request.max_tokens
        found = request_problem(*lengths, limits, case.options.dcp, groups)
        if found is not None:
            yield f"request {name} cannot run: {found.field} {found.reason}"


def _all_requests(plan: ScenarioPlan) -> Iterator[NewRequest]:
    yield from plan.requests
    for step in plan.steps:
        yield from step.new_requests


def _plan(case: Case) -> Iterator[str]:
    """Steps that are not numbered, and whatever the audit did not find when the plan was made."""
    indices = [step.index for step in case.plan.steps]
    if not indices or indices != list(range(len(indices))):
        yield "its plan's steps are not numbered from 0"
    found = plan_findings(case.plan)
    for sentence in found:
        if sentence not in case.plan_findings:
            yield f"its plan cannot be: {sentence}"
    if found != case.plan_findings:
        yield "its plan is not as it was recorded"


def _fed(case: Case) -> Iterator[str]:
    """Tokens and drafts: as many as each step takes, all of the vocabulary."""
    steps, is_forced = case.plan.steps, case.feed == FEEDS[0]
    needed = min(case.accusation.step, len(steps)) if is_forced else 0
    if not needed <= len(case.tokens) <= (len(steps) if is_forced else 0):
        yield f"{len(case.tokens)} of its {len(steps)} steps are given tokens"
    for step, tokens in zip(steps, case.tokens, strict=False):
        num_sampled = sum(request.num_logits for request in step.scheduled)
        if len(tokens) != num_sampled:
            yield f"step {step.index} samples {num_sampled} tokens and {len(tokens)} are given"
    for step, drafts in zip(steps, case.drafts, strict=False):
        if len(drafts) != step.num_draft_tokens:
            yield f"step {step.index} has {step.num_draft_tokens} drafts, {len(drafts)} are given"
    given = [token for step in (*case.tokens, *case.drafts) for token in step]
    if any(not 0 <= token < case.plan.vocab_size for token in given):
        yield "a token that it gives is outside the vocabulary"


def _accusations(case: Case, finding: Divergence) -> Iterator[str]:
    """What the case accuses, what was found, and whether both are of this plan and these arms."""
    ladder, last = build_ladder(case.base, case.candidate), case.plan.steps[-1].index
    yield from _accusation(case.accusation, ladder, case)
    if case.accusation.arm == PLAN:
        yield "it accuses the plan, which no two arms show"
    yield from _accusation(finding.accusation, ladder, case)
    if finding.scenario != case.plan.scenario:
        yield f"its finding is of scenario {finding.scenario!r}, its plan of {case.plan.scenario}"
    if finding.reproduced not in REPRODUCED:
        yield f"its finding was reproduced {finding.reproduced!r}"
    if finding.plan is not None and finding.plan not in case.plan.steps:
        yield "its finding's step is not that of its plan"
    for place in (finding.metadata, finding.tap, finding.judged, finding.kv):
        if place is not None and not 0 <= place.step <= last:
            yield f"its finding is at step {place.step}, which is not in its plan"


def _accusation(accusation: Accusation, ladder: Ladder, case: Case) -> Iterator[str]:
    last = case.plan.steps[-1].index
    labels = {PLAN, *(spec.label for spec in ladder.arms)}
    for name in (accusation.arm, accusation.twin or accusation.arm):
        if name not in labels:
            yield f"{name!r} is no arm of {case.base!r} against {case.candidate!r}"
    pairs = {pair.arm: (pair.kind, pair.twin) for pair in ladder.pairs}
    if (accusation.kind, accusation.twin) != pairs.get(accusation.arm, ("", None)):
        yield f"{accusation.arm!r} is not held against {accusation.twin!r} for {accusation.kind!r}"
    for step in (accusation.step, accusation.last_step):
        if not 0 <= step <= last:
            yield f"step {step} is not in its plan"
    if accusation.step > accusation.last_step:
        yield f"it looks up to step {accusation.last_step} for a finding of step {accusation.step}"
    known = accusation.contract in ("", *CONTRACT_IDS)
    if accusation.finding not in FINDINGS or not known:
        yield f"its finding is {accusation.finding!r} of contract {accusation.contract!r}"
