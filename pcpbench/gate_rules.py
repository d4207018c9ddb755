"""The rules of a gate: how they are written, which hold by default, which regressions are accepted.

Owns the grammar `METRIC[.STAT]:VALUE[%|us|ms]` and the order in which sources override each other.
Knows no samples and no verdict; docs/gate.md says what each metric is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from enum import Enum
from typing import Final

import msgspec

from pcpbench.errors import UsageError
from pcpbench.gate_samples import TIME_METRICS

CAPTURE_TIME: Final = "capture_time"
COUNTS: Final = ("drift", "contracts")
FULL_SHARE: Final = "full_share"
METRICS: Final = (*TIME_METRICS, CAPTURE_TIME, *COUNTS, FULL_SHARE)
STATS: Final = ("median", "mean", "p99")
ALIASES: Final = {"launch_overhead": "launch", "capture": CAPTURE_TIME}

DEFAULT_RULES: Final = (
    "tpot:2.5%",
    "itl:2.5%",
    "capture_time:50%",
    "full_share:0%",
    "drift:0",
    "contracts:0",
)
DEFAULT_SOURCE: Final = "default"
EXAMPLES: Final = "tpot:2.5%, launch:40us, drift:0 or full_share:>=99%"

_FORM: Final = re.compile(r"(?P<bound>>=)?\s*(?P<number>[^%a-zA-Z>]*?)\s*(?P<unit>%|us|ms)?")
_NUMBER: Final = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3}


class Form(Enum):
    """What a rule holds its metric against.

    MORE: the ratio to the base arm of the same process may grow by a share. MORE_SECONDS: the time
    itself may grow by seconds; judged on one machine only. AT_MOST: a count. AT_LEAST: a share.
    LESS: a share may fall by so much from the baseline's.
    """

    MORE = "more"
    MORE_SECONDS = "more seconds"
    AT_MOST = "at most"
    AT_LEAST = "at least"
    LESS = "less"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule. limit: a share (0.025), seconds, or a count, as `form` says. source: who set it."""

    metric: str
    form: Form
    limit: float
    text: str
    stat: str = "median"
    source: str = "default"

    @property
    def name(self) -> str:
        """What it is about: `tpot`, `tpot.p99`."""
        return self.metric if self.stat == STATS[0] else f"{self.metric}.{self.stat}"

    @property
    def key(self) -> tuple[str, Form]:
        """What a later rule of the same key replaces; `tpot:2.5%` and `tpot:40us` both stand."""
        return self.name, self.form


PROCESS_RULE: Final = Rule(
    metric="process", form=Form.AT_MOST, limit=0, text="process:0", source="always"
)
"""What no rule needs to say: every process of a gate ends with a result."""


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A known regression: until a day (included) the rule's limit is this one instead."""

    rule: Rule
    until: date
    reason: str
    source: str = "default"


def parse_rule(text: str, source: str = "--fail-on") -> Rule | str:
    """A rule, or for `METRIC:off` the name of those that it switches off.

    `tpot:2.5%`, `median_itl:2.5%`, `tpot.p99:10%`, `launch:40us`, `drift:0`, `full_share:>=99%`.
    Raises UsageError, naming what would work.
    """
    name, colon, value = (part.strip() for part in text.partition(":"))
    if not colon:
        raise _bad(source, text, "has no colon", f"write METRIC:VALUE, such as {EXAMPLES}")
    metric, stat = _metric(name, text, source)
    if value == "off":
        if metric in COUNTS:
            what = "would let wrong numbers through, and what computes something else has no speed"
            raise _bad(source, text, what, "leave it out")
        return metric if stat == STATS[0] else f"{metric}.{stat}"
    form, limit = _value(metric, value, text, source)
    return Rule(metric=metric, stat=stat, form=form, limit=limit, text=text.strip(), source=source)


def parse_acceptance(item: Mapping[str, object], source: str) -> Acceptance:
    """`{rule = "tpot:8%", until = 2027-01-31, reason = "..."}`; raises UsageError for less."""
    unknown = sorted(set(item) - {"rule", "until", "reason"})
    if unknown:
        raise UsageError(f"{source}: accept has no {unknown[0]!r}: use rule, until and reason.")
    reason, until = item.get("reason"), item.get("until")
    if not isinstance(reason, str) or not reason.strip():
        raise UsageError(f"{source}: accept needs a reason: say why the regression is known.")
    if isinstance(until, str) and _DAY.fullmatch(until.strip()):
        try:
            until = date.fromisoformat(until.strip())
        except ValueError:
            until = None
    if type(until) is not date:
        raise UsageError(
            f"{source}: accept has until = {item.get('until')!r}: name the last day on which it "
            "holds, such as 2027-01-31."
        )
    text = item.get("rule")
    rule = parse_rule(text, source) if isinstance(text, str) else None
    if not isinstance(rule, Rule):
        raise UsageError(
            f"{source}: accept has rule = {text!r}: write how much is accepted, such as tpot:8%."
        )
    if rule.form is Form.AT_LEAST or rule.metric in COUNTS:
        raise UsageError(
            f"{source}: accept has rule = {text!r}: only a time or a fall of full_share can be "
            "accepted; wrong numbers cannot."
        )
    return Acceptance(rule=rule, until=until, reason=" ".join(reason.split()), source=source)


def effective_acceptances(
    layers: Iterable[tuple[str, Iterable[Mapping[str, object]]]],
) -> tuple[Acceptance, ...]:
    """Those of all layers, weakest first; what a stronger one says of a rule replaces the weaker.

    Within one source several may stand for one rule: each has its own last day.
    """
    found: dict[tuple[str, Form], list[Acceptance]] = {}
    for source, items in layers:
        mine: dict[tuple[str, Form], list[Acceptance]] = {}
        for item in items:
            acceptance = parse_acceptance(item, source)
            mine.setdefault(acceptance.rule.key, []).append(acceptance)
        found |= mine
    return tuple(acceptance for each in found.values() for acceptance in each)


def effective_rules(layers: Sequence[tuple[str, Iterable[str]]]) -> tuple[Rule, ...]:
    """The default rules with each layer's on top, the last layer strongest.

    layers: (source, rules) from the weakest. A rule replaces the one of its metric, statistic and
    form; `METRIC:off` takes all of a metric and statistic away. Raises UsageError for two rules of
    one source of which the second would replace the first or take it away, or the other way round.
    """
    found: dict[tuple[str, Form], Rule] = {}
    for source, texts in ((DEFAULT_SOURCE, DEFAULT_RULES), *layers):
        given: dict[tuple[str, Form | None], str] = {}
        for text in texts:
            rule = parse_rule(text, source)
            earlier = next((given[key] for key in given if _is_same(key, rule)), None)
            if earlier is not None:
                raise _bad(source, text, f"comes after {earlier!r}", "leave one of the two out")
            if isinstance(rule, str):
                given[rule, None] = text
                found = {key: other for key, other in found.items() if other.name != rule}
            else:
                found[rule.key], given[rule.key] = rule, text
    return tuple(found.values())


def _is_same(key: tuple[str, Form | None], rule: Rule | str) -> bool:
    """Whether a rule (its name, for one that is `off`) is about what one of this key is about."""
    if isinstance(rule, str):
        return key[0] == rule
    return key[0] == rule.name and key[1] in (None, rule.form)


def _metric(name: str, text: str, source: str) -> tuple[str, str]:
    """`tpot.p99` and `p99_tpot` are ("tpot", "p99")."""
    metric, dot, stat = name.partition(".")
    if not dot:
        stat = STATS[0]
        for prefix in STATS:
            if metric.startswith(prefix + "_"):
                metric, stat = metric.removeprefix(prefix + "_"), prefix
    metric = ALIASES.get(metric, metric)
    if metric not in METRICS:
        raise _bad(source, text, f"has the metric {metric!r}", f"use one of {', '.join(METRICS)}")
    if stat not in STATS:
        raise _bad(source, text, f"has the statistic {stat!r}", f"use one of {', '.join(STATS)}")
    if stat != STATS[0] and metric not in TIME_METRICS:
        raise _bad(source, text, f"asks for the {stat} of {metric}", f"write {metric}:VALUE")
    return metric, stat


def _value(metric: str, value: str, text: str, source: str) -> tuple[Form, float]:
    match = _FORM.fullmatch(value)
    number = _number(match["number"]) if match else None
    if match is None or number is None:
        what = f"has the value {value!r}, which is no finite number"
        raise _bad(source, text, what, f"write METRIC:VALUE, such as {EXAMPLES}")
    bound, unit = match["bound"], match["unit"]
    if metric in COUNTS:
        if bound or unit or number != int(number):
            raise _bad(source, text, f"gives {metric}, a count, as {value!r}", f"use {metric}:0")
        _check_zero(metric, value, text, source)
        return Form.AT_MOST, number
    if metric == FULL_SHARE:
        if unit != "%" or number > 100:
            what = f"gives full_share as {value!r}"
            raise _bad(source, text, what, "use full_share:1% (it may fall by 1) or >=99%")
        return (Form.AT_LEAST if bound else Form.LESS), number / 100
    if bound:
        raise _bad(
            source, text, "asks for a time of at least", f"use {metric}:2.5% or {metric}:2us"
        )
    if unit is None:
        raise _bad(source, text, "has no unit", f"use {metric}:{value}%, us or ms")
    if number == 0:
        what = "allows nothing at all, which no measurement can confirm"
        raise _bad(source, text, what, f"use a small limit such as {metric}:1%")
    if unit == "%":
        return Form.MORE, number / 100
    return Form.MORE_SECONDS, number * _SECONDS[unit]


def _check_zero(metric: str, value: str, text: str, source: str) -> None:
    if float(value):
        what = f"lets {value} through, and what computes something else has no speed to judge"
        raise _bad(source, text, what, f"use {metric}:0")


def _number(text: str) -> float | None:
    if not _NUMBER.fullmatch(text):  # neither nan nor inf nor a sign nor an exponent
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def _bad(source: str, text: str, what: str, remedy: str) -> UsageError:
    return UsageError(f"{source}: the rule {text!r} {what}: {remedy}.")
