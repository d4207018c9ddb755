import msgspec
import pytest

from pcpbench.records import Notice
from pcpbench.report.compare_view import print_compare, print_verdict, verdict

WIDTHS = [80, 140]


@pytest.fixture(params=WIDTHS)
def width(request):
    return request.param


@pytest.fixture
def show(make, width):
    """The report as text, and as one line whose line breaks are gone."""

    def show_compare(*scenarios, **values):
        text = make.render(print_compare, make.compare(*scenarios, **values), width)
        return text, make.unwrapped(text)

    return show_compare


def every_kind(make):
    return make.passed(), make.failed(), make.not_compared()


def test_no_line_is_wider_than_the_console_and_nothing_is_cut(make, show, width):
    text, _ = show(*every_kind(make))

    assert max(len(line) for line in text.splitlines()) <= width
    assert "\u2026" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize("candidate", ["full_and_piecewise", "eager_padded"])
def test_long_names_of_arms_are_not_cut_either(make, width, candidate):
    def renamed(name):
        return name.replace("full", "full_and_piecewise")

    arms = tuple(msgspec.structs.replace(a, arm=renamed(a.arm)) for a in make.passed().arms)
    drifts = tuple(
        msgspec.structs.replace(d, arm=renamed(d.arm), twin=renamed(d.twin))
        for d in make.passed().drifts
    )
    result = make.compare(make.passed("Q" * 90, arms=arms, drifts=drifts), candidate=candidate)
    text = make.render(print_compare, result, width)

    assert max(len(line) for line in text.splitlines()) <= width
    assert "\u2026" not in text
    assert f"{candidate} / eager" in make.unwrapped(text)
    assert text.count("Q") == 90


def test_the_verdict_is_the_first_line(make, show):
    for scenarios, word in (
        ([make.passed()], "PASS"),
        (every_kind(make), "FAIL"),
        ([make.not_compared()], "NOT COMPARED"),
        ([], "NOT COMPARED"),
    ):
        text, _ = show(*scenarios)
        assert text.splitlines()[0].startswith(f"{word}  full vs eager")


def test_a_long_report_ends_with_its_verdict(make, show):
    text, _ = show(*every_kind(make))
    assert text.rstrip().rpartition("\n\n")[2].startswith("FAIL  full vs eager: 1 of 3")


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (["passed"], "full vs eager, 1 scenario: replays bitwise equal, contracts held."),
        (
            ["passed", "failed"],
            "full vs eager: 1 of 2 scenarios failed: s3-idle-and-reuse (C1, C13, capture drift).",
        ),
        ([], "full vs eager: no scenario was run."),
    ],
)
def test_the_verdict_names_the_reason(make, kinds, sentence):
    scenarios = [getattr(make, kind)() for kind in kinds]
    assert verdict(make.compare(*scenarios)) == sentence


def test_the_verdict_on_nothing_says_why(make):
    assert "no step was served by FULL, of 12 decode steps" in verdict(
        make.compare(make.not_compared())
    )


def test_a_verdict_without_a_replay_claims_no_bits(make):
    result = make.compare(make.passed(drifts=make.passed().drifts[:1]), candidate="eager_padded")
    assert "bitwise" not in verdict(result)
    assert "drift within budget" in verdict(result)


def test_many_failures_are_counted(make):
    failed = [msgspec.structs.replace(make.failed(), scenario=f"f{n}") for n in range(5)]
    assert "5 of 5 scenarios failed: f0 (" in verdict(make.compare(*failed))
    assert verdict(make.compare(*failed)).endswith("; and 2 more.")


def test_times_of_both_arms_with_ratio_and_interval(make, show, width):
    text, _ = show(make.passed())
    (tpot,) = [line for line in text.splitlines() if line.startswith("TPOT ")]
    (launch,) = [line for line in text.splitlines() if line.startswith("Launch overhead ")]

    assert all(part in tpot for part in ("1.23 ms", "0.81 ms", "0.66 [0.64, 0.67]"))
    assert "0.40 [0.39, 0.41]" in launch
    assert [line.split()[-1 if width == 80 else -4] for line in (tpot, launch)] == ["36", "50"]
    if width == 140:
        assert "34 % less" in tpot
        assert "1.22 ms" in tpot  # p99
        assert "0.78 ms" in launch  # one unit a row


def test_a_long_verdict_folds_and_the_numbers_beside_it_do_not(make, show):
    text, _ = show(make.failed())
    (row,) = [line for line in text.splitlines() if line.startswith("capture ")]
    assert "NOT ALLOWED" in row
    assert row.count("(bitwise)") == 2


def test_the_range_of_ratios_is_told_at_the_top(make, show):
    slower = msgspec.structs.replace(make.passed().tpot_ratio, median=0.914, high=1.02)
    _, line = show(make.passed(), make.passed("s2", tpot_ratio=slower))
    assert "Ratio full / eager: TPOT 0.66 to 0.91 (clear in 1 of 2), launch overhead 0.40" in line


def test_a_ratio_whose_interval_holds_1_is_marked_wherever_it_stands_alone(make, show, width):
    unclear = msgspec.structs.replace(make.passed().launch_ratio, median=0.88, low=0.7, high=1.1)
    text, line = show(make.passed(), make.passed("s2", launch_ratio=unclear))
    assert "launch overhead 0.40 to 0.88 (clear in 1 of 2)" in line
    assert ("~0.88" in text) == (width == 80)


def test_steps_padding_and_misses(make, show):
    text, line = show(make.passed())

    assert "50\u00a0eager" in text
    assert "42\u00a0FULL, 8\u00a0eager" in text
    assert "42 of 42 (100 %)" in line
    assert "12.5 %" in line
    assert "Missed FULL 8 steps, batch has a prefill" in line


@pytest.fixture
def untimed(make):
    """Makes of a scenario what it is with `--repetitions 0`."""

    def without_times(result):
        none = dict.fromkeys(("tpot", "itl", "ttft", "step", "launch", "kernel"))
        arms = tuple(msgspec.structs.replace(arm, **none) for arm in result.arms)
        ratios = dict.fromkeys(("tpot_ratio", "itl_ratio", "launch_ratio"))
        return msgspec.structs.replace(result, arms=arms, **ratios)

    return without_times


@pytest.mark.parametrize("kinds", [["passed"], ["passed", "failed"], ["not_compared"]])
def test_what_was_not_timed_is_left_out_and_said_once(make, show, untimed, kinds):
    settings = {**make.settings, "repetitions": 0}
    scenarios = [untimed(getattr(make, kind)()) for kind in kinds]
    text, line = show(*scenarios, settings=settings)

    assert line.count("not timed (--repetitions 0 or --quick)") == 1
    for legend in ("TPOT", "ITL", "Launch", "launch", "ratio =", "full / eager", "p99", "Median"):
        assert legend not in text
    assert "50\u00a0eager" in text
    assert not [row for row in text.splitlines() if row.split()[1:] == ["-", "-"]]


def test_a_run_whose_scenarios_all_failed_was_not_timed_either(make, show, untimed):
    _, line = show(untimed(make.failed()), settings={**make.settings, "repetitions": 3})
    assert "Times not timed: no scenario passed" in line
    assert "repetitions" not in line


def test_one_timed_scenario_is_enough_to_tell_how_to_read_times(make, show, untimed):
    text, line = show(untimed(make.failed()), make.passed())
    assert "TPOT = (last" in line
    assert "not timed" not in line
    assert "0.66" in text


def test_a_row_that_says_nothing_of_either_arm_is_left_out(make, show):
    arms = tuple(a for a in make.passed().arms if a.arm != "full")
    result = make.passed(arms=arms)
    text = make.render(print_compare, make.compare(result, candidate="eager_padded"), 80)
    assert "FULL of coverable" not in text
    assert "Padding waste" in text


def test_a_class_that_was_never_served_stands_out_in_a_pass(make, show):
    _, line = show(make.odd_dispatch(), make.passed())

    told = "full: decode with 9 requests: never FULL in 12 steps (eager), larger than the largest "
    assert f"Never served {told}captured size 8 (up to 9 rows a rank)" in line
    assert line.index("Never served full: decode with 9 requests Ratio") < line.index(told)
    assert "Ranks disagree full: 2 steps" in line
    assert "Larger graph full: 3 steps ran one that cost 24 padding tokens more" in line


def test_dispatch_is_counted_over_the_run(make, show):
    _, line = show(make.odd_dispatch(), make.passed())

    assert "Dispatch full: 72 FULL, 28 eager, 2 idle 16 steps, batch has a prefill" in line
    assert "12 steps, more requests than the largest FULL graph" in line


def test_a_sound_dispatch_adds_no_line(make, show):
    _, line = show(make.passed())

    assert not any(word in line for word in ("Never served", "Ranks disagree", "Larger graph"))


def test_drift_is_split(make, show):
    text, _ = show(make.passed())
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}

    assert "within budget" in rows["partition"]
    assert "bitwise equal" in rows["capture"]


def test_drift_is_shown_beside_what_it_is_judged_on(make, show):
    text, line = show(make.passed())
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}

    assert "3.1e-06 (0.0001)" in rows["partition"]
    assert "2.5e-13 (1e-10)" in rows["partition"]
    assert rows["capture"].count("0 (bitwise)") == 2
    assert "ULP" not in line


@pytest.mark.parametrize("kind", ["failed", "not_compared"])
def test_no_ratio_without_a_pass(make, show, kind):
    ratio = make.passed().tpot_ratio
    filled_in = msgspec.structs.replace(
        getattr(make, kind)(), tpot_ratio=ratio, itl_ratio=ratio, launch_ratio=ratio
    )
    _, line = show(filled_in)
    _, with_overview = show(filled_in, filled_in)

    assert "0.66" not in line + with_overview
    assert "[0.64" not in line + with_overview
    assert "did not pass, so its times are not compared" in line


def test_what_broke_is_told_once_by_contract_with_its_count(make, show):
    _, line = show(make.failed())

    assert "C1 broken 31x full, step 7, rank 1: seq_lens[3] is 17, expected 0" in line
    assert "... and 29 more" in line
    assert "C13 broken 2x" in line
    assert "C1 broken by full" not in line  # the reason says what the violation says
    assert "Why full computed a non-finite value: step 9, tensor hidden, row 2" in line


def test_the_first_difference_has_its_place_and_values(make, show, width):
    text, line = show(make.failed())

    assert (
        "First difference capture: full left eager_padded[full] at step 7, rank 1, layer 0, "
        "tensor logits: 311 of 4096 values differ, max abs 0.125, max rel 2.2e-06, max ULP 81,234"
    ) in line
    assert "NOT ALLOWED:" in text
    assert width == 80 or "NOT ALLOWED: exceeds budget in" in text


def test_names_with_brackets_are_not_taken_for_markup(make, show):
    _, line = show(make.failed())
    assert "FULL[reqs=4,tokens=4]" in line


def test_how_to_read_the_times(make, show):
    _, line = show(make.passed())

    assert "TPOT = (last - first token time) / (output tokens - 1)" in line
    assert "scope = worker" in line
    assert "ranks share one device and run one after the other: times are sums over 2 ranks" in line
    assert "launch overhead = step time - kernel floor" in line
    assert "Files results/20261129T170039Z-compare-3f2a" in line


def test_one_rank_shares_with_nobody(make, show):
    _, line = show(make.passed(), settings={**make.settings, "prefill_context_parallel_size": 1})
    assert "ranks share" not in line


def test_a_notice_is_shown_once_however_many_scenarios_repeat_it(make, show):
    notice = Notice(setting="capture_sizes", message="capture size 64 is not used: too large.")
    scenarios = [make.passed(name, notices=(notice,)) for name in ("a", "b")]
    _, line = show(*scenarios, notices=(notice,))

    assert line.count("capture_sizes: capture size 64 is not used: too large.") == 1


def test_reasons_without_a_violation_are_never_lost(make, show):
    reason = "partition drift of eager from reference exceeds_budget, first at step 3"
    failed = msgspec.structs.replace(
        make.failed(), violations=(), first_differences=(), num_violations={}, reasons=(reason,)
    )
    _, line = show(failed)
    assert f"Why {reason}" in line


def test_the_talk_beside_json_is_the_verdict(make):
    text = make.render(print_verdict, make.compare(*every_kind(make)), 100)
    assert text.startswith("FAIL")
    assert len(text.splitlines()) <= 4


def test_drafts_are_told_where_there_are_any(make, show):
    passed = make.passed()
    assert "Drafts accepted" not in show(passed)[1]
    arms = tuple(
        msgspec.structs.replace(arm, num_draft_tokens=200, num_accepted_tokens=150)
        for arm in passed.arms
    )
    settings = make.compare(passed).settings | {"num_speculative_tokens": 3}
    text = show(make.passed(arms=arms), settings=settings)[1]
    assert "Drafts accepted" in text
    assert text.count("150 of 200") == 2
    assert "spec-tokens 3" in text
    assert "ITL = gap between successive steps that gave a request tokens" in text


def test_another_target_is_named_with_its_version(make, show):
    _, line = show(make.passed(), settings={"target": "vllm", "target_version": "0.33.0"})
    assert "Compared vllm 0.33.0, " in line
    _, line = show(make.passed(), settings={"target": "builtin"})
    assert "builtin" not in line
