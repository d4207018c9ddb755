"""C18: the base of the ladder computes what a forward over a request's own tokens gives (SPEC 12).

Every arm runs the same worker code, the reference included; what is wrong in all alike, no two of
them show. The other side here is a plain forward of the model over whole sequences, without cache,
metadata or ranks, which a target offers (`Arm.dense_logits`). Owns which requests are looked at,
their tokens and sampled positions, and the comparison. Knows no model and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.budgets import budget_of
from pcpbench.checks.drift import is_ok, measure, relative_errors
from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import StepRecord, Violation

MAX_TOKENS: Final = 1024
"""Beyond the five requests that are always looked at, others are while all come to no more."""


@dataclass
class _Life:
    """One request in a plan. length: tokens that it computes. times: how often it was admitted."""

    length: int = 0
    last_step: int = 0
    times: int = 0


def choose_requests(plan: ScenarioPlan) -> tuple[str, ...]:
    """The requests of a scenario that are computed again, from the plan alone.

    Always: the longest, the one preempted most often, the two of the tightest reuse of a KV block
    (who got it and who had it; both at once comes before any other), and the one that ended last.
    Then others in order of admission, while the tokens of all come to no more than MAX_TOKENS.
    """
    lives = _lives(plan)
    if not lives:
        return ()
    names = list(lives)
    longest = max(names, key=lambda name: lives[name].length)
    resumed = max(names, key=lambda name: lives[name].times)
    last = max(names, key=lambda name: lives[name].last_step)
    first = [longest, *([resumed] if lives[resumed].times > 1 else []), *_reuse(plan), last]
    chosen = dict.fromkeys(name for name in first if name in lives)
    total = sum(lives[name].length for name in chosen)
    for name in names:
        if name not in chosen and total + lives[name].length <= MAX_TOKENS:
            chosen[name] = None
            total += lives[name].length
    return tuple(chosen)


def _lives(plan: ScenarioPlan) -> dict[str, _Life]:
    lives: dict[str, _Life] = {}
    for step in plan.steps:
        for new in step.new_requests:
            lives.setdefault(new.req_id, _Life()).times += 1
        for share in step.scheduled:
            life = lives.setdefault(share.req_id, _Life())
            life.length = max(life.length, share.num_computed_tokens + share.num_scheduled_tokens)
            life.last_step = step.index
    return lives


def _reuse(plan: ScenarioPlan) -> tuple[str, ...]:
    """Who got a block that another had, soonest after that one left, and who had it."""
    holder: dict[int, str] = {}
    left_at: dict[str, int] = {}
    best: tuple[int, str, str] | None = None
    for step in plan.steps:
        left_at.update(dict.fromkeys((*step.finished_req_ids, *step.preempted_req_ids), step.index))
        for new in step.new_requests:
            left_at.pop(new.req_id, None)
        for req_id, groups in step.new_block_ids.items():
            for block in (block for group in groups for block in group):
                before = holder.get(block, req_id)
                # A holder that has not left: two requests own the block.
                gap = step.index - left_at[before] if before in left_at else -1
                if before != req_id and (best is None or gap < best[0]):
                    best = gap, req_id, before
                holder[block] = req_id
    return () if best is None else best[1:]


@dataclass
class _Samples:
    """Sampled positions of one request: position -> (step, its row of logits)."""

    prompt: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    rows: dict[int, tuple[int, NDArray[Any]]] = field(default_factory=dict)

    def all_tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.prompt, *self.tokens]

    def keep_known(self, vocab_size: int, ahead: int) -> None:
        """Leave out positions that see a token outside the vocabulary; C7 names those.

        ahead: how many tokens past its own a position sees.
        """
        tokens = self.all_tokens()
        bad = [place for place, token in enumerate(tokens) if not 0 <= token < vocab_size]
        end = bad[0] if bad else len(tokens)
        self.rows = {place: row for place, row in self.rows.items() if place + ahead < end}


class DenseCheck:
    """Gathers what one arm sampled for the chosen requests, then compares.

    records: those of the arm, one for each step of the plan so far, in its order. The tokens fed on
    are the arm's own: it is the teacher, or each arm feeds itself.
    """

    tensor, ahead = "logits", 0
    """What is compared, and how many tokens past its own a position sees."""

    def __init__(self, plan: ScenarioPlan, records: Sequence[StepRecord], dtype: str) -> None:
        self._dtype, self._arm = dtype, records[0].arm if records else ""
        self._scenario = plan.scenario
        self._feed = TokenFeed()
        self._samples = {name: _Samples() for name in choose_requests(plan)}
        for step, record in zip(plan.steps, records, strict=False):
            self._observe(step, record)
        for found in self._samples.values():
            found.keep_known(plan.vocab_size, self.ahead)
        self._samples = {name: found for name, found in self._samples.items() if found.rows}

    @property
    def token_ids(self) -> list[list[int]]:
        """The chosen requests' tokens: prompt and generated ones, as far as a position sees."""
        tokens = [(found.all_tokens(), max(found.rows)) for found in self._samples.values()]
        return [known[: last + 1 + self.ahead] for known, last in tokens]

    @property
    def positions(self) -> list[list[int]]:
        """Of each, the positions that a token was sampled behind."""
        return [list(found.rows) for found in self._samples.values()]

    def compare(self, dense: Sequence[NDArray[np.float32]]) -> list[Violation]:
        """One violation for each position that left the budget, in the order of their steps.

        dense: [positions, vocab] of each sequence.
        """
        return sorted(self._compare(dense), key=lambda violation: violation.step)

    def _compare(self, dense: Sequence[NDArray[np.float32]]) -> Iterator[Violation]:
        for (name, found), right in zip(self._samples.items(), dense, strict=True):
            left = np.stack([row for _, row in found.rows.values()])
            drift = measure("partition", self.tensor, left, right, self._dtype)
            if is_ok(drift):
                continue
            if drift.outcome == "shape_mismatch":
                what = f"shape {list(left.shape)}, the dense ones {list(right.shape)}"
                yield self._violation(name, next(iter(found.rows)), what)
                continue
            yield from self._beyond(name, left, right)

    def _beyond(self, name: str, left: NDArray[Any], right: NDArray[Any]) -> Iterator[Violation]:
        """Positions beyond the limit; the worst where only all together left the budget."""
        budget = budget_of("partition", self._dtype)
        limit = 0.0 if budget is None else budget.relative
        errors = relative_errors(left, right)
        errors[~(np.isfinite(left) & np.isfinite(right)).all(axis=1)] = np.inf
        places = list(self._samples[name].rows)
        beyond = np.flatnonzero(~(errors <= limit))
        for row in beyond if len(beyond) else [int(errors.argmax())]:
            gap = float(np.abs(left[row] - right[row]).max())
            what = f"off by {errors[row]:.3g} of the row's rms (max abs {gap:.3g})"
            yield self._violation(name, places[row], f"{what}, the limit is {limit:g}")

    def _violation(self, name: str, position: int, what: str) -> Violation:
        step = self._samples[name].rows[position][0]
        return Violation(
            contract="C18",
            arm=self._arm,
            scenario=self._scenario,
            step=step,
            rank=None,
            tensor=self.tensor,
            message=(
                f"{self.tensor} of request {name} at position {position} are not those of a dense "
                f"forward over its {position + 1 + self.ahead} tokens: {what}"
            ),
        )

    def _observe(self, step: StepPlan, record: StepRecord) -> None:
        self._feed.advance(step)
        for new in step.new_requests:
            found = self._samples.get(new.req_id)
            if found is not None:
                found.prompt = new.prompt_token_ids
                kept = len(found.prompt) + new.num_generated
                found.rows = {p: row for p, row in found.rows.items() if p < kept}
        before = {name: len(self._feed.of(name)) for name in record.sampled_req_ids}
        self._feed.take(step, record.sampled_req_ids, record.sampled)
        rows = _rows(record.sampled_req_ids)
        for name, known in before.items():
            found = self._samples.get(name)
            if found is None:
                continue
            found.tokens = list(self._feed.of(name))
            first = len(found.prompt) + known - 1
            self._keep(found, first, rows[name][: len(found.tokens) - known], record)

    def _keep(self, found: _Samples, first: int, rows: list[int], record: StepRecord) -> None:
        """Take in rows of logits that tokens were sampled from, at positions from `first` on."""
        for place, row in enumerate(rows):
            if row < len(record.logits):  # else the comparison of outputs names it
                found.rows[first + place] = record.step, record.logits[row]


def _rows(req_ids: Iterable[str]) -> dict[str, list[int]]:
    """Rows of the sampled outputs, by request."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(req_ids):
        rows.setdefault(name, []).append(row)
    return rows
