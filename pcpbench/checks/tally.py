"""Running counts of one arm and of one pair over the steps of a scenario.

Owns what is added up and the summaries made of it. Decides nothing about pass or fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pcpbench.checks.budgets import budget_of
from pcpbench.checks.compare import StepComparison
from pcpbench.checks.contract_dispatch import smallest_covering
from pcpbench.checks.dispatch_audit import DispatchAudit
from pcpbench.checks.drift import cosine_gap, is_ok, worse
from pcpbench.checks.metrics import ArmTimes
from pcpbench.checks.oracle import StepExpectation
from pcpbench.checks.setup import ArmSetup, Pair
from pcpbench.modes import CUDAGraphMode
from pcpbench.plan import StepPlan
from pcpbench.records import Difference, Drift, StepRecord
from pcpbench.results import ArmSummary, DriftSummary, PlaceDrift, StepDrift


@dataclass
class ArmTally:
    """Counts of one arm; see ArmSummary for their meaning."""

    setup: ArmSetup
    num_steps: int = 0
    steps_idle: int = 0
    steps_padded: int = 0
    steps_cut: int = 0
    decode_steps: int = 0
    coverable: int = 0
    coverable_full: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    modes: Counter[CUDAGraphMode] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    requests: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.audit = DispatchAudit(self.setup)

    def observe(self, step: StepPlan, record: StepRecord, expected: StepExpectation | None) -> None:
        """Add one step. A padded twin runs eagerly, whatever descriptor it is padded to."""
        self.num_steps += 1
        self.audit.observe(step, record, expected)
        if expected is None:
            self.steps_idle += 1
            return
        padded_twin = self.setup.padded_like is not None
        mode = CUDAGraphMode.NONE if padded_twin else record.descriptor.cg_mode
        self.modes[mode] += 1
        self.steps_padded += record.descriptor.cg_mode is not CUDAGraphMode.NONE
        self.steps_cut += any(rank.microbatches for rank in record.ranks)
        self.requests.update(request.req_id for request in step.scheduled)
        self.output_tokens += record.num_output_tokens
        self.draft_tokens += step.num_draft_tokens
        self.accepted_tokens += record.num_accepted
        self.real_tokens += sum(rank.num_tokens for rank in record.ranks)
        self.padded_tokens += sum(rank.num_tokens_after_padding for rank in record.ranks)
        if record.miss_reason and not padded_twin:
            self.reasons[record.miss_reason] += 1
        if step.has_prefill:
            return
        self.decode_steps += 1
        if padded_twin:  # it replays nothing: no graph of its own covers a step
            return
        best = smallest_covering(self.setup.candidates, expected)
        if best is not None and best.cg_mode is CUDAGraphMode.FULL:
            self.coverable += 1
            self.coverable_full += mode is CUDAGraphMode.FULL

    @property
    def steps_computed(self) -> int:
        """Steps that ran a real batch."""
        return self.num_steps - self.steps_idle

    @property
    def replays(self) -> bool:
        """Whether this is an arm of graphs, not the eager twin that is padded like one."""
        return self.setup.mode is not CUDAGraphMode.NONE and self.setup.padded_like is None

    def not_as_asked(self) -> list[str]:
        """Why this arm's results say nothing of the mode it was configured with; [] if they do.

        Each kind of batch that the mode has graphs for, and the scenario has, must have met one; an
        arm that cuts steps must have cut one.
        """
        return [*self._not_replayed(), *self._not_cut()]

    def _not_cut(self) -> list[str]:
        if self.setup.ubatch_thresholds is None or self.setup.padded_like is not None:
            return []
        if self.steps_cut or not self.steps_computed:
            return []
        decode, prefill = self.setup.ubatch_thresholds
        return [
            f"{self.setup.name}: no step was cut into microbatches, of {self.steps_computed}; that "
            f"takes {decode} tokens a rank in a decode step, {prefill} in one with a prefill"
        ]

    def _not_replayed(self) -> list[str]:
        mode, name = self.setup.mode, self.setup.name
        if self.setup.padded_like is not None:
            nothing = f"{name}: no batch fits a captured size, so none was padded"
            return [] if self.steps_padded else [nothing]
        if mode is CUDAGraphMode.NONE:
            return []
        reasons = []
        prefill_steps = self.steps_computed - self.decode_steps
        if mode.decode_mode() is CUDAGraphMode.FULL and not self.modes[CUDAGraphMode.FULL]:
            if self.decode_steps:
                reasons.append(self._no_full())
            elif mode.mixed_mode() is CUDAGraphMode.NONE:
                reasons.append(
                    f"{name}: the scenario has no decode step, so no FULL graph could run"
                )
        if mode.mixed_mode() is CUDAGraphMode.PIECEWISE and not self.modes[CUDAGraphMode.PIECEWISE]:
            if mode.decode_mode() is CUDAGraphMode.PIECEWISE:
                reasons.append(f"{name}: no step was served by a PIECEWISE graph")
            elif prefill_steps:
                reasons.append(
                    f"{name}: no step was served by PIECEWISE, of {prefill_steps} with a prefill; "
                    "name larger --capture-sizes to have their sizes captured"
                )
        return reasons

    def _no_full(self) -> str:
        fit = f"{self.coverable} of them fit" if self.coverable else "none of them fits"
        return (
            f"{self.setup.name}: no step was served by FULL, of {self.decode_steps} decode steps; "
            f"{fit} a captured size"
        )

    def summary(self, times: ArmTimes | None) -> ArmSummary:
        """The arm's part of a result."""
        stats: dict[str, Any] = {} if times is None else {**times.stats()}
        return ArmSummary(
            arm=self.setup.name,
            num_steps=self.num_steps,
            num_requests=len(self.requests),
            num_output_tokens=self.output_tokens,
            steps_full=self.modes[CUDAGraphMode.FULL],
            steps_piecewise=self.modes[CUDAGraphMode.PIECEWISE],
            steps_none=self.modes[CUDAGraphMode.NONE],
            steps_idle=self.steps_idle,
            steps_cut=self.steps_cut,
            decode_steps=self.decode_steps,
            coverable=self.coverable,
            coverable_full=self.coverable_full,
            miss_reasons=dict(self.reasons.most_common()),
            real_tokens=self.real_tokens,
            padded_tokens=self.padded_tokens,
            dispatch=self.audit.summary(),
            num_draft_tokens=self.draft_tokens,
            num_accepted_tokens=self.accepted_tokens,
            **stats,
        )


@dataclass
class PairTally:
    """Drift of one pair so far.

    num_steps: steps with an output in common. num_shown: those of them that say something of the
    pair: under capture drift the steps that were replayed, not those that both arms ran eagerly.
    diverged: requests whose inputs differ (free running only).
    """

    pair: Pair
    num_steps: int = 0
    num_shown: int = 0
    num_sampled: int = 0
    num_top1_equal: int = 0
    token_mismatches: int = 0
    max_kl: float | None = None
    max_relative: float | None = None
    max_cosine_gap: float | None = None
    worst: Drift | None = None
    first: Difference | None = None
    diverged: set[str] = field(default_factory=set)
    by_step: dict[int, Drift] = field(default_factory=dict)
    by_place: dict[tuple[int, str, int | None], Drift] = field(default_factory=dict)

    def observe(self, step: int, comparison: StepComparison, replayed: bool) -> None:
        """Add one step's outputs; a step with nothing in common does not count as compared.

        replayed: whether the pair's arm ran this step as a graph.
        """
        if not comparison.drifts:
            return
        self.num_steps += 1
        self.num_shown += replayed or self.pair.kind != "capture"
        self.num_sampled += comparison.num_sampled
        self.num_top1_equal += comparison.num_top1_equal
        self.token_mismatches += comparison.token_mismatches
        if comparison.max_kl is not None:
            self.max_kl = max(self.max_kl or 0.0, comparison.max_kl)
        self.note(step, comparison.drifts, comparison.difference)

    def note(
        self,
        step: int,
        drifts: Iterable[Drift],
        difference: Difference | None,
        layer: int | None = None,
    ) -> None:
        """Add drifts of one step, and the place of the first one that was not allowed."""
        for drift in drifts:
            self.worst = worse(self.worst, drift)
            self.max_relative = _larger(self.max_relative, drift.relative)
            self.max_cosine_gap = _larger(self.max_cosine_gap, cosine_gap(drift))
            self.by_step[step] = worse(self.by_step.get(step), drift)
            place = (step, drift.tensor, layer)
            self.by_place[place] = worse(self.by_place.get(place), drift)
        if self.first is None:
            self.first = difference

    def step_drifts(self) -> list[StepDrift]:
        """The worst drift of every step that was compared."""
        pair = self.pair
        return [
            StepDrift(kind=pair.kind, arm=pair.arm, twin=pair.twin, step=step, worst=drift)
            for step, drift in self.by_step.items()
        ]

    def place_drifts(self) -> list[PlaceDrift]:
        """The worst drift of every tensor and layer of every step that was compared."""
        pair = self.pair
        return [
            PlaceDrift(
                kind=pair.kind, arm=pair.arm, twin=pair.twin, step=step, layer=layer, worst=drift
            )
            for (step, _, layer), drift in sorted(self.by_place.items(), key=_place_order)
        ]

    def summary(self, dtype: str) -> DriftSummary | None:
        """The pair's part of a result; None where nothing was compared. dtype: of the engines."""
        if self.worst is None or not (self.num_shown or self.first is not None):
            return None
        budget = budget_of(self.pair.kind, dtype)
        return DriftSummary(
            kind=self.pair.kind,
            arm=self.pair.arm,
            twin=self.pair.twin,
            num_steps_compared=self.num_shown,
            worst=self.worst,
            top1_agreement=self.num_top1_equal / self.num_sampled if self.num_sampled else None,
            token_mismatches=self.token_mismatches,
            max_kl=self.max_kl,
            ok=is_ok(self.worst) and self.first is None,
            max_relative=self.max_relative,
            max_cosine_gap=self.max_cosine_gap,
            limit_relative=None if budget is None else budget.relative,
            limit_cosine_gap=None if budget is None else budget.cosine_gap,
        )

    def reason(self) -> str:
        """The first drift that was not allowed, in a sentence."""
        difference = self.first
        assert difference is not None
        drift = difference.drift
        size = "" if drift.max_abs is None else f", max abs {drift.max_abs:.3g}"
        rank = "" if difference.rank is None else f", rank {difference.rank}"
        layer = "" if difference.layer is None else f", layer {difference.layer}"
        return (
            f"{drift.kind} drift of {difference.arm} from {difference.twin} {drift.outcome}, first "
            f"at step {difference.step}{rank}{layer}, {drift.tensor}: {drift.num_mismatched} of "
            f"{drift.num_elements} values differ{size}"
        )


def _place_order(item: tuple[tuple[int, str, int | None], Drift]) -> tuple[int, int, str]:
    """Steps in order, in a step its layers, then what lies behind them."""
    step, tensor, layer = item[0]
    return step, 1_000_000 if layer is None else layer, tensor


def _larger(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)
