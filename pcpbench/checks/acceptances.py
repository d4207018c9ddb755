"""Known regressions: which acceptance holds for a rule today, and which ones change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date

from pcpbench.gate_rules import Acceptance, Rule
from pcpbench.records import Notice


def acceptance_of(rule: Rule, acceptances: Sequence[Acceptance], today: date) -> Acceptance | None:
    """The widest acceptance of a rule that still holds, if it is wider than the rule."""
    mine = [
        a
        for a in acceptances
        if a.rule.key == rule.key and a.until >= today and a.rule.limit > rule.limit
    ]
    return max(mine, key=lambda a: a.rule.limit, default=None)


def expired(acceptances: Iterable[Acceptance], today: date) -> tuple[Notice, ...]:
    """Acceptances that hold no longer."""
    return tuple(
        Notice(
            setting="accept",
            message=f"{a.rule.text} was accepted until {a.until} ({a.reason}) and no longer is.",
        )
        for a in acceptances
        if a.until < today
    )


def idle(acceptances: Iterable[Acceptance], rules: Sequence[Rule]) -> tuple[Notice, ...]:
    """Acceptances that change nothing: of no rule that applies, or no wider than it is."""
    told = []
    for acceptance in acceptances:
        accepted = acceptance.rule
        mine = [rule for rule in rules if rule.key == accepted.key]
        if mine and mine[0].limit < accepted.limit:
            continue
        why = f"{mine[0].text} allows as much" if mine else "no such rule applies, in % or in time"
        message = f"{accepted.text} ({acceptance.reason}) accepts nothing: {why}."
        told.append(Notice(setting="accept", message=message))
    return tuple(told)
