"""Violations of one scenario: the first few in full, all of them counted, each step's contracts.

Owns what is kept and what is only counted. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from pcpbench.plan import PLAN
from pcpbench.records import Violation
from pcpbench.results import StepAudit

MAX_SHOWN: Final = 20
"""Violations kept of one contract in one arm; the rest are counted."""


class Ledger:
    """violations: those kept, in the order found."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._by_step: dict[tuple[str, int], set[str]] = {}

    def keep(self, found: Iterable[Violation]) -> None:
        """Enter violations; a message past the cap is dropped, its step and contract are not."""
        for violation in found:
            key = (violation.contract, violation.arm)
            self._counts[key] += 1
            if self._counts[key] <= MAX_SHOWN:
                self.violations.append(violation)
            place = (violation.arm, violation.step)
            self._by_step.setdefault(place, set()).add(violation.contract)

    def mark(self, audit: StepAudit) -> StepAudit:
        """The audit with all contracts broken in its step, by its arm or by the plan."""
        places = [(audit.arm, audit.step), (PLAN, audit.step)]
        broken = set().union(*(self._by_step.get(place, set()) for place in places))
        return msgspec.structs.replace(audit, violated_contracts=tuple(broken))

    def num_violations(self) -> dict[str, int]:
        """Contract id -> violations of it over all arms, those that were not kept included."""
        totals: Counter[str] = Counter()
        for (contract, _), count in self._counts.items():
            totals[contract] += count
        return dict(totals)

    def reasons(self) -> list[str]:
        """One sentence for each contract and arm: how often it broke, and the first time."""
        told = []
        for (contract, arm), count in self._counts.items():
            first = next(v for v in self.violations if (v.contract, v.arm) == (contract, arm))
            rank = "" if first.rank is None else f", rank {first.rank}"
            told.append(
                f"{contract} broken by {arm} {count} time{'s' if count > 1 else ''}, first at step "
                f"{first.step}{rank}, {first.tensor}: {first.message}"
            )
        return told
