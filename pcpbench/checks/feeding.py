"""Whose tokens every arm reads as its inputs, step by step (SPEC 11).

Owns the choice: under teacher forcing all arms share one feed, of an arm that is recorded or of an
earlier run; in free running each arm feeds itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pcpbench.checks.oracle_tables import TokenFeed
from pcpbench.plan import StepPlan
from pcpbench.records import IntArray, StepRecord


class Given(NamedTuple):
    """What fed all arms in a step, from an earlier run.

    tokens: one for each row of logits. drafts: those that the step verifies, request after request.
    """

    tokens: IntArray
    drafts: IntArray


class Feeding:
    """The feeds of all arms.

    teacher: the arm whose tokens feed all of them, None where each feeds itself.
    """

    def __init__(self, teacher: str | None, arms: Iterable[str]) -> None:
        names = list(arms)
        self.teacher = teacher
        self._shared = TokenFeed()
        self.feeds = {name: TokenFeed() if teacher is None else self._shared for name in names}
        self._is_away = teacher is not None and teacher not in names
        self._given: Given | None = None

    def begin(self, step: StepPlan, records: Mapping[str, StepRecord], given: Given | None) -> None:
        """Take in a step's drafts, which are inputs of it. given: counts where the teacher is not
        among the arms."""
        self._given = given if self._is_away else None
        for feed in {id(feed): feed for feed in self.feeds.values()}.values():
            feed.advance(step)
        for name, record in self._teachers(records):
            if record.draft_tokens is not None:
                self.feeds[name].draft(step, record.draft_tokens)
        if self._given is not None:
            self._shared.draft(step, self._given.drafts)

    def end(self, step: StepPlan, records: Mapping[str, StepRecord]) -> None:
        """Take in what the step sampled, which later steps read."""
        for name, record in self._teachers(records):
            self.feeds[name].take(step, record.sampled_req_ids, record.sampled)
        if self._given is not None:
            names = [r.req_id for r in step.scheduled for _ in range(r.num_logits)]
            self._shared.take(step, names, self._given.tokens)

    def tokens_for(self, record: StepRecord, records: Mapping[str, StepRecord]) -> IntArray:
        """What the current step of an arm goes on with: a token for each row of logits."""
        if self._given is not None:
            return self._given.tokens
        return (record if self.teacher is None else records.get(self.teacher, record)).sampled

    def _teachers(self, records: Mapping[str, StepRecord]) -> list[tuple[str, StepRecord]]:
        """The arms whose tokens are fed on: the teacher, or each arm for itself."""
        return [item for item in records.items() if self.teacher in (None, item[0])]
