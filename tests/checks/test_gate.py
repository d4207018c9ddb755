"""The gate's judge on processes with known truth: every verdict, and what may never be a pass."""

from datetime import date

import numpy as np
import pytest
from msgspec.structs import replace

from pcpbench.checks.acceptances import expired, idle
from pcpbench.checks.gate import Case, Side, applicable, is_broken, is_settled, judge_gate
from pcpbench.gate_results import GateVerdict, exit_code_of, worst
from pcpbench.gate_rules import STATS, effective_rules, parse_acceptance, parse_rule
from pcpbench.gate_samples import TIME_METRICS, MetricSample

TODAY = date(2026, 6, 1)


def spread(center, n, sd=0.004, seed=0):
    return list(center * np.exp(np.random.default_rng(seed).normal(0, sd, n)))


@pytest.fixture
def case(fake):
    def make(baseline=0.8, run=0.8, sd=0.004, n=(12, 8), **changes):
        sides = {
            "baseline": Side(fake.processes(spread(baseline, n[0], sd, 1)), (fake.judged(),)),
            "run": Side(fake.processes(spread(run, n[1], sd, 2)), (fake.judged(),)),
        }
        known = {"today": TODAY, **sides, **changes}
        return Case(**known)

    return make


def verdicts(case, *rules, accept=()):
    found = judge_gate(case, [parse_rule(rule) for rule in rules], accept)
    return [finding.verdict for finding in found]


def test_equal_runs_pass_every_default_rule(case):
    found = judge_gate(case(), effective_rules([]))
    assert {f.verdict for f in found} == {GateVerdict.PASS}
    assert worst(found) is GateVerdict.PASS
    assert {f.rule.metric for f in found} == {
        "tpot", "itl", "capture_time", "full_share", "drift", "contracts",
    }  # fmt: skip


def test_a_slowdown_of_five_percent_is_a_regression_with_both_numbers(case):
    (found,) = judge_gate(case(run=0.84), [parse_rule("tpot:2.5%")])
    assert found.verdict is GateVerdict.REGRESSION
    assert found.baseline == pytest.approx(0.8, rel=0.01)
    assert found.run == pytest.approx(0.84, rel=0.01)
    assert found.low > 0.025
    assert found.low < found.change < found.high
    assert found.change == pytest.approx(0.05, abs=0.01)
    assert (found.num_baseline, found.num_run) == (12, 8)
    assert len(found.run_values) == 8


def test_a_speedup_is_no_regression(case):
    assert verdicts(case(run=0.7), "tpot:2.5%") == [GateVerdict.PASS]


def test_what_lies_at_the_limit_is_undecided_and_says_what_would_help(case):
    (found,) = judge_gate(case(run=0.8 * 1.02, sd=0.02), [parse_rule("tpot:2.5%")])
    assert found.verdict is GateVerdict.UNDECIDED
    assert found.low < found.limit < found.high
    (near,) = judge_gate(case(run=0.8 * 1.01, sd=0.02, n=(40, 6)), [parse_rule("tpot:2.5%")])
    assert near.verdict is GateVerdict.UNDECIDED
    assert near.num_needed > 6


def test_an_absolute_rule_judges_seconds_on_the_same_machine_only(case):
    # candidate = 3 ms x ratio: 0.84 is 120 us more than 0.8
    assert verdicts(case(run=0.84), "tpot:50us") == [GateVerdict.REGRESSION]
    assert verdicts(case(run=0.84), "tpot:1ms") == [GateVerdict.PASS]
    elsewhere = case(run=0.84, other_times="torch was 2.12")
    (found,) = judge_gate(elsewhere, [parse_rule("tpot:50us")])
    assert found.verdict is GateVerdict.NOT_COMPARABLE
    assert found.why == "torch was 2.12: use a rule in %, such as tpot:5%"
    assert verdicts(elsewhere, "tpot:2.5%") == [GateVerdict.REGRESSION]


def test_a_machine_that_is_twice_as_slow_changes_no_ratio(fake, case):
    slow = tuple(fake.processes(spread(0.8, 8, seed=2), base_s=6e-3, capture_s=0.5))
    run = Side(slow, (fake.judged(),))
    found = case(run=0.8)
    moved = Case(baseline=found.baseline, run=run, other_times="another machine", today=TODAY)
    assert verdicts(moved, "tpot:2.5%", "capture_time:20%") == [GateVerdict.PASS] * 2


RULES = {f"{metric}.{stat}": f"{metric}.{stat}:2.5%" for metric in TIME_METRICS for stat in STATS}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_sees_its_own_metric_and_statistic_and_no_other(fake, case, name):
    """A median is of pairs; a mean or a tail is of each arm's own."""
    known = case()
    moved = name.replace("median", "ratio")
    slow = fake.processes(spread(0.8, 8), slow={moved: 1.05})
    found = Case(
        baseline=known.baseline,
        run=Side(slow, (fake.judged(),)),
        today=TODAY,
    )
    for other, rule in RULES.items():
        wanted = GateVerdict.REGRESSION if other == name else GateVerdict.PASS
        assert verdicts(found, rule) == [wanted], rule


def test_capture_time_counts_in_steps_of_the_base_arm(fake, case):
    slow = Side(fake.processes(spread(0.8, 8), capture_s=0.4), (fake.judged(),))
    known = case()
    changed = Case(baseline=known.baseline, run=slow, today=TODAY)
    assert verdicts(changed, "capture_time:20%") == [GateVerdict.REGRESSION]
    assert verdicts(changed, "capture_time:100%") == [GateVerdict.PASS]


def test_a_scenario_of_the_baseline_that_the_run_lacks_is_no_pass(fake, case):
    known = case()
    baseline = Side(known.baseline.processes, (fake.judged(), fake.judged("s14-uneven-ranks")))
    less = Case(baseline=baseline, run=known.run, today=TODAY)
    for rule in ("drift:0", "contracts:0", "full_share:0%"):
        (found,) = judge_gate(less, [parse_rule(rule)])
        assert found.verdict is GateVerdict.NOT_COMPARABLE
        assert "did not judge s14-uneven-ranks of the baseline" in found.why
    bad = Side(known.run.processes, (fake.judged(drifts=1, outcome="fail"),))
    worse = Case(baseline=baseline, run=bad, today=TODAY)
    assert verdicts(worse, "drift:0") == [GateVerdict.REGRESSION]


def test_a_fall_of_the_share_is_seen_next_to_a_scenario_that_changed(fake, case):
    known = case()
    baseline = Side(known.baseline.processes, (fake.judged(), fake.judged("b")))
    changed = fake.judged(plan_hash="another")
    for steps_full, wanted in ((10, GateVerdict.NOT_COMPARABLE), (0, GateVerdict.REGRESSION)):
        run = Side(known.run.processes, (changed, fake.judged("b", steps=(steps_full, 10))))
        found = Case(baseline=baseline, run=run, today=TODAY)
        assert verdicts(found, "full_share:0%") == [wanted]


@pytest.mark.parametrize("how", ["changed", "not judged"])
def test_an_accepted_fall_of_the_share_hides_nothing_else(fake, case, how):
    known = case()
    baseline = Side(known.baseline.processes, (fake.judged(), fake.judged("b")))
    judged = [fake.judged(steps=(9, 10))]
    if how == "changed":
        judged.append(fake.judged("b", plan_hash="another"))
    run = Side(known.run.processes, tuple(judged))
    found = Case(baseline=baseline, run=run, today=TODAY)
    accept = [parse_acceptance({"rule": "full_share:15%", "until": TODAY, "reason": "r"}, "x")]
    (one,) = judge_gate(found, [parse_rule("full_share:0%")], accept)
    assert one.verdict is GateVerdict.NOT_COMPARABLE
    (one,) = judge_gate(found, [parse_rule("full_share:0%")])
    assert one.verdict is GateVerdict.REGRESSION


@pytest.mark.parametrize("rule", ["drift:0", "contracts:0", "full_share:0%"])
def test_a_judged_scenario_that_is_another_one_now_is_no_pass(fake, case, rule):
    """Also where it has no decode step, whose share could have changed."""
    known = case()
    baseline = Side(known.baseline.processes, (fake.judged(), fake.judged("b", steps=(0, 0))))
    changed = fake.judged("b", steps=(0, 0), plan_hash="another")
    run = Side(known.run.processes, (fake.judged(), changed))
    found = Case(baseline=baseline, run=run, today=TODAY)
    (one,) = judge_gate(found, [parse_rule(rule)])
    assert one.verdict is GateVerdict.NOT_COMPARABLE
    assert "b is another one now" in one.why


def test_too_few_processes_are_worth_another_one(fake, case):
    found = judge_gate(case(n=(12, 3)), [parse_rule("launch:20%")])
    assert found[0].verdict is GateVerdict.NOT_COMPARABLE
    assert found[0].num_needed == 4
    assert not is_settled(found)


@pytest.mark.parametrize("side", ["run", "baseline"])
def test_processes_without_a_value_are_not_left_out_of_a_sample(fake, case, side):
    """Theirs were too small for a ratio: without them the others look slower than all were."""
    known = case(n=(12, 12))
    lost = without_launch(known, 2).run
    found = Case(
        baseline=lost if side == "baseline" else known.baseline,
        run=lost if side == "run" else known.run,
        today=TODAY,
    )
    (one,) = judge_gate(found, [parse_rule("launch:20%")])
    assert one.verdict is GateVerdict.NOT_COMPARABLE
    assert f"10 of 12 processes of the {side} have a value: use a rule in us or ms" in one.why
    assert is_settled([one])


def without_launch(case, num):
    """The case with so many processes of the run that could not tell a launch overhead."""
    nothing = MetricSample(base=None, candidate=None, ratio=None, num_pairs=0)
    processes = [
        replace(p, scenarios=tuple(replace(s, metrics={**s.metrics, "launch": nothing})
                                   for s in p.scenarios))
        if index < num else p
        for index, p in enumerate(case.run.processes)
    ]  # fmt: skip
    run = Side(tuple(processes), case.run.judged)
    return Case(baseline=case.baseline, run=run, today=TODAY)


def test_a_default_rule_that_the_baseline_cannot_have_is_left_out(fake):
    eager = Side(tuple(fake.processes(spread(0.8, 12), capture_s=None)), (fake.judged(),))
    rules, notices = applicable(effective_rules([]), eager)
    assert "capture_time:50%" not in {rule.text for rule in rules}
    assert len(rules) == 5
    assert [notice.setting for notice in notices] == ["capture_time:50%"]
    asked = effective_rules([("command line", ["capture_time:50%"])])
    assert applicable(asked, eager) == (asked, [])


def test_an_acceptance_that_changes_nothing_is_told(fake):
    until = {"until": date(2027, 1, 31), "reason": "known"}
    accept = [
        parse_acceptance({"rule": text, **until}, "x")
        for text in ("tpot:8%", "tpot:2%", "itl:40us")
    ]
    told = [notice.message for notice in idle(accept, effective_rules([]))]
    assert len(told) == 2
    assert "tpot:2% (known) accepts nothing: tpot:2.5% allows as much" in told[0]
    assert "itl:40us (known) accepts nothing: no such rule" in told[1]


def test_nothing_to_compare_is_never_a_pass(fake, case):
    known = case()
    other = Side(known.run.processes, (fake.judged("another"),))
    empty = Side((), ())
    for run in (empty, other):
        changed = Case(baseline=known.baseline, run=run, today=TODAY)
        found = judge_gate(changed, [parse_rule("tpot:2.5%")])
        assert worst(found) is GateVerdict.NOT_COMPARABLE
        assert exit_code_of(worst(found), "pass") == 3
    no_judge = Case(baseline=known.baseline, run=empty, today=TODAY)
    assert (
        verdicts(no_judge, "drift:0", "contracts:0", "full_share:0%")
        == [GateVerdict.NOT_COMPARABLE] * 3
    )
    nothing = Case(baseline=empty, run=known.run, today=TODAY)
    assert verdicts(nothing, "tpot:2.5%") == [GateVerdict.NOT_COMPARABLE]
    assert worst([]) is GateVerdict.NOT_COMPARABLE


def test_other_settings_and_other_steps_are_not_compared(fake, case):
    found = judge_gate(case(incomparable="dtype differs"), effective_rules([]))
    assert {f.verdict for f in found} == {GateVerdict.NOT_COMPARABLE}
    known = case()
    moved = Side(fake.processes(spread(0.8, 8), plan_hash="q"), (fake.judged(plan_hash="q"),))
    changed = Case(baseline=known.baseline, run=moved, today=TODAY)
    assert verdicts(changed, "tpot:2.5%", "full_share:0%") == [GateVerdict.NOT_COMPARABLE] * 2


def test_a_ratio_below_zero_is_no_value(fake, case):
    known = case()
    lost = Side((*fake.processes(spread(0.8, 8)), *fake.processes([-0.1])), (fake.judged(),))
    changed = Case(baseline=known.baseline, run=lost, today=TODAY)
    (found,) = judge_gate(changed, [parse_rule("launch:10%")])
    assert found.verdict is GateVerdict.NOT_COMPARABLE
    assert "8 of 9 processes of the run" in found.why


def test_a_failed_scenario_is_a_regression_and_has_no_speed(fake, case):
    known = case()
    for bad in (
        fake.judged(outcome="fail", drifts=1),
        fake.judged(outcome="fail", violations=3),
        fake.judged(outcome="fail"),
    ):
        failed = Side(known.run.processes, (bad,))
        changed = Case(baseline=known.baseline, run=failed, today=TODAY)
        found = judge_gate(changed, effective_rules([]))
        assert worst(found) is GateVerdict.REGRESSION
        times = [f for f in found if f.rule.metric == "tpot"]
        assert [f.verdict for f in times] == [GateVerdict.NOT_COMPARABLE]
        untimed = Case(baseline=known.baseline, run=Side((), (bad,)), today=TODAY)
        (time,) = judge_gate(untimed, [parse_rule("tpot:2.5%")])
        assert "is fail: it has no speed" in time.why


def test_tokens_that_went_wrong_in_a_timed_process_break_a_contract(fake, case):
    wrong = Side(fake.processes(spread(0.8, 8), num_wrong=1), (fake.judged(),))
    changed = Case(baseline=case().baseline, run=wrong, today=TODAY)
    found = judge_gate(changed, effective_rules([]))
    assert is_broken(found)
    (contracts,) = (finding for finding in found if finding.rule.metric == "contracts")
    assert contracts.verdict is GateVerdict.REGRESSION
    assert "8 timed steps of s sampled other tokens than the first run" in contracts.why


def test_a_slowdown_alone_is_no_wrong_number(case):
    found = judge_gate(case(run=0.9), effective_rules([]))
    assert is_settled(found)
    assert not is_broken(found)


def test_a_scenario_that_is_another_one_is_told_before_it_was_timed(fake, case):
    bare = Side((), (fake.judged(plan_hash="another"),))
    changed = Case(baseline=case().baseline, run=bare, today=TODAY)
    (tpot,) = judge_gate(changed, [parse_rule("tpot:5%")])
    assert tpot.verdict is GateVerdict.NOT_COMPARABLE
    assert "another one now" in tpot.why


def test_what_could_not_be_judged_is_no_clean_count(fake, case):
    skipped = Side(case().run.processes, (fake.judged(outcome="not compared"),))
    changed = Case(baseline=case().baseline, run=skipped, today=TODAY)
    assert (
        verdicts(changed, "drift:0", "contracts:0", "tpot:2.5%") == [GateVerdict.NOT_COMPARABLE] * 3
    )


@pytest.mark.parametrize(
    ("rule", "steps", "verdict"),
    [
        ("full_share:0%", (10, 10), GateVerdict.PASS),
        ("full_share:0%", (9, 10), GateVerdict.REGRESSION),
        ("full_share:10%", (9, 10), GateVerdict.PASS),
        ("full_share:>=99%", (99, 100), GateVerdict.PASS),
        ("full_share:>=99%", (98, 100), GateVerdict.REGRESSION),
    ],
)
def test_the_share_of_full_steps(fake, case, rule, steps, verdict):
    run = Side(case().run.processes, (fake.judged(steps=steps),))
    changed = Case(baseline=case().baseline, run=run, today=TODAY)
    assert verdicts(changed, rule) == [verdict]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("full_share:5%", "FULL served 100 % -> 87.5 % of decode steps, limit: a fall by 5 points"),
        ("full_share:>=99%", "FULL served 100 % -> 87.5 % of decode steps, limit: at least 99 %"),
    ],
)
def test_a_fall_of_the_share_is_told_with_both_numbers_and_the_limit(fake, case, rule, words):
    run = Side(case().run.processes, (fake.judged(steps=(7, 8)),))
    (found,) = judge_gate(Case(baseline=case().baseline, run=run, today=TODAY), [parse_rule(rule)])
    assert (found.why, found.scenario) == (words, "s")


def test_wrong_numbers_are_seen_whatever_else_cannot_be_compared(fake, case):
    """Drift and contracts are of the run alone: other settings of the baseline excuse neither."""
    bad = Side(case().run.processes, (fake.judged(drifts=1, outcome="fail"),))
    known = {"baseline": case().baseline, "today": TODAY, "incomparable": "the dtype is another"}
    rules = ("drift:0", "contracts:0", "tpot:2.5%")
    assert verdicts(Case(run=bad, **known), *rules) == [
        GateVerdict.REGRESSION, GateVerdict.NOT_COMPARABLE, GateVerdict.NOT_COMPARABLE
    ]  # fmt: skip
    found = judge_gate(Case(run=case().run, **known), [parse_rule(rule) for rule in rules])
    assert {(one.verdict, one.why) for one in found} == {
        (GateVerdict.NOT_COMPARABLE, "the dtype is another")
    }


def accepted(rule="tpot:8%", until="2026-06-01"):
    return parse_acceptance({"rule": rule, "until": until, "reason": "new kernel"}, "x")


def test_a_known_regression_is_accepted_as_far_and_as_long_as_it_says(case):
    slow = case(run=0.84)
    assert verdicts(slow, "tpot:2.5%", accept=[accepted()]) == [GateVerdict.ACCEPTED]
    (found,) = judge_gate(slow, [parse_rule("tpot:2.5%")], [accepted()])
    assert found.limit == pytest.approx(0.08)
    assert found.accepted.reason == "new kernel"
    over = accepted(until="2026-05-31")
    assert verdicts(slow, "tpot:2.5%", accept=[over]) == [GateVerdict.REGRESSION]
    assert "until 2026-05-31 (new kernel)" in expired([over, accepted()], TODAY)[0].message
    for run, verdict in ((0.92, GateVerdict.REGRESSION), (0.864, GateVerdict.UNDECIDED)):
        (found,) = judge_gate(case(run=run), [parse_rule("tpot:2.5%")], [accepted()])
        assert (found.verdict, found.limit) == (verdict, pytest.approx(0.08))
        assert found.accepted is None, "nothing is excused"
    other = accepted("itl:8%")
    assert verdicts(slow, "tpot:2.5%", accept=[other]) == [GateVerdict.REGRESSION]


def test_a_fall_of_the_share_can_be_accepted_too(fake, case):
    run = Side(case().run.processes, (fake.judged(steps=(9, 10)),))
    changed = Case(baseline=case().baseline, run=run, today=TODAY)
    accept = [accepted("full_share:15%")]
    assert verdicts(changed, "full_share:0%", accept=accept) == [GateVerdict.ACCEPTED]
    accept = [accepted("full_share:5%")]
    assert verdicts(changed, "full_share:0%", accept=accept) == [GateVerdict.REGRESSION]


def test_the_worst_finding_decides_and_has_its_exit_code():
    order = [GateVerdict.REGRESSION, GateVerdict.CRASHED, GateVerdict.NOT_COMPARABLE]
    assert [exit_code_of(v, "pass") for v in order] == [1, 3, 3]
    codes = {how: exit_code_of(GateVerdict.UNDECIDED, how) for how in ("fail", "warn", "pass")}
    assert codes == {"fail": 1, "warn": 0, "pass": 0}
    assert exit_code_of(GateVerdict.ACCEPTED, "fail") == 0


def test_more_findings_make_each_interval_wider(fake):
    names = ["a", "b", "c", "d"]

    def side(seed):
        values = [spread(0.8, 8, 0.02, seed + k) for k in range(4)]
        return Side(
            tuple(
                fake.process(*(fake.scenario(n, ratio=v[i]) for n, v in zip(names, values)))  # noqa: B905
                for i in range(8)
            ),
            tuple(map(fake.judged, names)),
        )

    case = Case(baseline=side(1), run=side(9), today=TODAY)
    found = judge_gate(case, [parse_rule("tpot:2.5%")])
    assert [f.scenario for f in found] == names
    assert {f.confidence for f in found} == {1 - 2 * 0.01 / 4}


def gates(fake, sd, slowdown, num=150):
    """Verdicts of whole gates, looking after each process from the sixth to the fourteenth."""
    rng, ends = np.random.default_rng(11), []
    for _ in range(num):
        draw = lambda k, center: list(center * np.exp(rng.normal(0, sd, k)))  # noqa: E731
        baseline = Side(fake.processes(draw(12, 0.8)), (fake.judged(),))
        values = draw(14, 0.8 * (1 + slowdown))
        for looked in range(6, 15):
            run = Side(fake.processes(values[:looked]), (fake.judged(),))
            case = Case(baseline=baseline, run=run, today=TODAY)
            found = judge_gate(case, [parse_rule("tpot:2.5%")])
            if is_settled(found):
                break
        ends.append(worst(found))
    return ends


@pytest.mark.parametrize("sd", [0.005, 0.01])
def test_equal_code_is_hardly_ever_accused_and_a_slowdown_hardly_ever_missed(fake, sd):
    clean = gates(fake, sd, 0.0)
    assert clean.count(GateVerdict.REGRESSION) <= 0.01 * len(clean)
    assert clean.count(GateVerdict.PASS) >= 0.95 * len(clean)
    slow = gates(fake, sd, 0.05)
    assert slow.count(GateVerdict.REGRESSION) >= 0.95 * len(slow)


def test_noise_that_hides_a_slowdown_makes_gates_undecided_not_wrong(fake):
    clean = gates(fake, 0.03, 0.0, num=80)
    assert clean.count(GateVerdict.REGRESSION) <= 1
    slow = gates(fake, 0.03, 0.05, num=80)
    assert slow.count(GateVerdict.PASS) == 0
