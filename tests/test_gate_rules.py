"""How rules are written: what each form means, and that nothing doubtful is taken."""

import math
from datetime import date

import pytest

from pcpbench.errors import UsageError
from pcpbench.gate_rules import (
    DEFAULT_RULES,
    Form,
    Rule,
    effective_rules,
    parse_acceptance,
    parse_rule,
)


@pytest.mark.parametrize(
    ("text", "metric", "stat", "form", "limit"),
    [
        ("tpot:5%", "tpot", "median", Form.MORE, 0.05),
        ("median_itl:2.5%", "itl", "median", Form.MORE, 0.025),
        ("tpot.p99:10%", "tpot", "p99", Form.MORE, 0.1),
        ("p99_ttft:10%", "ttft", "p99", Form.MORE, 0.1),
        ("mean_launch_overhead:10%", "launch", "mean", Form.MORE, 0.1),
        ("launch:10%", "launch", "median", Form.MORE, 0.1),
        ("launch:40us", "launch", "median", Form.MORE_SECONDS, 40e-6),
        ("tpot:.5ms", "tpot", "median", Form.MORE_SECONDS, 0.5e-3),
        ("step: 1.25 %", "step", "median", Form.MORE, 0.0125),
        ("capture_time:20%", "capture_time", "median", Form.MORE, 0.2),
        ("capture_time:100ms", "capture_time", "median", Form.MORE_SECONDS, 0.1),
        ("drift:0", "drift", "median", Form.AT_MOST, 0),
        ("contracts:0", "contracts", "median", Form.AT_MOST, 0),
        ("full_share:>=99%", "full_share", "median", Form.AT_LEAST, 0.99),
        ("full_share:>=99.5%", "full_share", "median", Form.AT_LEAST, 0.995),
        ("full_share:1%", "full_share", "median", Form.LESS, 0.01),
    ],
)
def test_every_form_means_what_it_says(text, metric, stat, form, limit):
    rule = parse_rule(text)
    assert (rule.metric, rule.stat, rule.form) == (metric, stat, form)
    assert math.isclose(rule.limit, limit)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tpot:nan%", "no finite number"),
        ("drift:1", "use drift:0"),
        ("drift:off", "what computes something else has no speed: leave it out"),
        ("contracts:off", "leave it out"),
        ("contracts:3", "use contracts:0"),
        ("tpot:nan", "no finite number"),
        ("tpot:inf%", "no finite number"),
        ("tpot:-inf", "no finite number"),
        ("tpot:Infinity%", "no finite number"),
        ("tpot:1e400%", "no finite number"),
        ("tpot:1e3%", "no finite number"),
        ("tpot:" + "9" * 400 + "%", "no finite number"),
        ("tpot:-5%", "no finite number"),
        ("tpot:+5%", "no finite number"),
        ("tpot:5 6%", "no finite number"),
        ("tpot:\u0665%", "no finite number"),
        ("tpot:1_0%", "no finite number"),
        ("tpot:%", "no finite number"),
        ("tpot:", "no finite number"),
        ("tpot", "no colon"),
        ("tpot:5", "no unit"),
        ("tpot:5s", "no finite number"),
        ("tpot:5%%", "no finite number"),
        ("tpot:0%", "nothing at all"),
        ("tpot:>=5%", "at least"),
        ("speed:5%", "use one of tpot, itl"),
        ("tpot.p90:5%", "use one of median, mean, p99"),
        ("capture_time.p99:5%", "capture_time:VALUE"),
        ("drift:0%", "drift:0"),
        ("drift:0.5", "drift:0"),
        ("drift:>=0", "drift:0"),
        ("full_share:99", ">=99%"),
        ("full_share:>=101%", ">=99%"),
        ("full_share:>=nan%", "no finite number"),
        ("", "no colon"),
        (":5%", "use one of tpot"),
    ],
)
def test_what_is_no_rule_is_refused_with_what_would_work(text, told):
    with pytest.raises(UsageError, match=told) as refusal:
        parse_rule(text, "--fail-on")
    assert repr(text) in str(refusal.value)
    assert str(refusal.value).startswith("--fail-on: ")


def test_a_later_layer_replaces_the_rule_of_its_metric_and_statistic():
    rules = effective_rules(
        [
            ("pyproject", ["tpot:5%", "launch:10%"]),
            ("command line", ["tpot:7%", "itl:off", "p99_tpot:9%"]),
        ]
    )
    found = {rule.name: (rule.text, rule.source) for rule in rules}
    assert found["tpot"] == ("tpot:7%", "command line")
    assert found["tpot.p99"] == ("p99_tpot:9%", "command line")
    assert found["launch"] == ("launch:10%", "pyproject")
    assert found["drift"] == ("drift:0", "default")
    assert "itl" not in found


def test_rules_of_another_form_stand_side_by_side():
    rules = effective_rules([("command line", ["tpot:40us", "full_share:>=99%"])])
    texts = {rule.text for rule in rules}
    assert {"tpot:2.5%", "tpot:40us", "full_share:0%", "full_share:>=99%"} <= texts
    rules = effective_rules([("a", ["tpot:40us"]), ("b", ["tpot:off"])])
    assert not [rule for rule in rules if rule.metric == "tpot"]


@pytest.mark.parametrize("second", ["tpot:3%", "median_tpot:3%", "tpot:2.5%"])
def test_two_rules_of_one_source_for_the_same_thing_are_refused(second):
    with pytest.raises(UsageError, match=r"comes after 'tpot:2\.5%': leave one of the two out"):
        effective_rules([("--fail-on", ["tpot:2.5%", "itl:1%", second])])


@pytest.mark.parametrize("pair", [("tpot:off", "tpot:3%"), ("tpot:40us", "median_tpot:off")])
def test_a_rule_and_its_off_in_one_source_are_refused(pair):
    with pytest.raises(UsageError, match="leave one of the two out"):
        effective_rules([("--fail-on", pair)])
    rules = effective_rules([("--fail-on", ["p99_tpot:off", "tpot:3%"])])
    assert "tpot:3%" in {rule.text for rule in rules}


def test_the_defaults_are_rules():
    assert all(isinstance(parse_rule(text), Rule) for text in DEFAULT_RULES)
    assert [rule.text for rule in effective_rules([])] == list(DEFAULT_RULES)


def test_wrong_numbers_are_judged_whatever_is_off():
    names = [parse_rule(text).name for text in DEFAULT_RULES]
    off = [f"{name}:off" for name in names if name not in ("drift", "contracts")]
    left = effective_rules([("command line", off)])
    assert [rule.text for rule in left] == ["drift:0", "contracts:0"]


def test_an_acceptance_has_a_limit_a_day_and_a_reason():
    known = {"rule": "tpot:8%", "until": date(2027, 1, 31), "reason": "new kernel"}
    accepted = parse_acceptance(known, "x")
    assert (accepted.rule.limit, accepted.until) == (0.08, date(2027, 1, 31))
    assert parse_acceptance({**known, "until": "2027-01-31"}, "x") == accepted
    for change, told in [
        ({"reason": "  "}, "needs a reason"),
        ({"until": "soon"}, "last day"),
        ({"until": None}, "last day"),
        ({"until": "20270131"}, "last day"),
        ({"until": "2027-W05"}, "last day"),
        ({"rule": "tpot:off"}, "how much"),
        ({"rule": None}, "how much"),
        ({"rule": "drift:0"}, "cannot"),
        ({"rule": "full_share:>=90%"}, "can be"),
        ({"because": "x"}, "no 'because'"),
    ]:
        with pytest.raises(UsageError, match=told):
            parse_acceptance({**known, **change}, "x")
