"""Gates on the page: their processes, the trend over several, a self-check; known numbers each."""

import json
import os
import re

import msgspec
import pytest
import typer

from pcpbench import cli
from pcpbench.errors import UsageError
from pcpbench.gate_commands import add_gate
from pcpbench.gate_results import Finding, GateVerdict, SelfCheckResult
from pcpbench.gate_rules import PROCESS_RULE, parse_rule
from pcpbench.gate_samples import ProcessFailure
from pcpbench.records import Environment
from pcpbench.report.csv_files import header, lines
from pcpbench.report.gate_columns import GATE
from pcpbench.report.gate_files import gate_row
from pcpbench.report.page.gate import VALUED, asked, gate_told
from pcpbench.report.page.gate_lines import read_lines
from pcpbench.report.page.gate_trend import gate_trend_section
from pcpbench.report.page.page import render_page
from pcpbench.report.page.self_check import self_check_told
from pcpbench.report.self_check_view import self_check_json, summary
from pcpbench.report.stored import StoredRun, read_run
from pcpbench.session.baseline import read_measured, samples_bytes

CRASH = ProcessFailure(why="a worker was ended by signal 9", is_crash=True)
BROKEN = ProcessFailure(why="C8 broke at step 3", is_crash=False)
RATIOS = (0.8, 0.81, 0.79, 0.82)


@pytest.fixture
def store(tmp_path, fake):
    """Writes the directory of a gate with the program's own writers.

    measured: what is in samples.jsonl, None for none. findings: None for a gate without verdict.
    """

    def write(name="gate-1", measured="default", findings=None, outcome="running", day=1,
              arguments=("gate", "main.json"), command="gate", **manifest):  # fmt: skip
        path = tmp_path / name
        path.mkdir(parents=True)
        if measured is not None:
            run = fake.measured(RATIOS) if measured == "default" else measured
            (path / "samples.jsonl").write_bytes(samples_bytes(run))
        if findings is not None:
            text = header(GATE) + lines(GATE, map(gate_row, findings))
            (path / "gate.csv").write_text(text, encoding="utf-8")
        known = {
            "schema_version": 1, "pcpbench_version": "0", "command": command, "outcome": outcome,
            "started_at": f"2026-01-{day:02d}T00:00:00+00:00", "arguments": list(arguments),
            "settings": {"base": "eager", "candidate": "full", "gate": {"processes": 5}},
        }  # fmt: skip
        (path / "manifest.json").write_text(json.dumps(known | manifest), encoding="utf-8")
        return path

    return write


def finding(rule="tpot:2.5%", verdict=GateVerdict.PASS, scenario="s", **numbers):
    known = parse_rule(rule)
    numbers = {"limit": known.limit, "why": "because"} | numbers
    return Finding(rule=known, scenario=scenario, verdict=verdict, **numbers)


def table_of(told):
    (section,) = told.sections
    return section.table


def lines_of(axes, label):
    return [line for line in axes.lines if line.get_label() == label]


def page_of(*paths):
    return render_page([read_run(path) for path in paths])


# -------------------------------------------------------------------------------- samples.jsonl


def test_processes_are_those_that_the_gate_itself_reads(store, fake):
    run = fake.measured(RATIOS).with_failure(CRASH).with_failure(BROKEN)
    path = store(measured=run)
    ours, theirs = read_lines(read_run(path), "samples.jsonl"), read_measured(path, "run")
    assert tuple(process for _, process in ours.samples) == theirs.processes
    assert tuple(failure for _, failure in ours.failures) == theirs.failures == (CRASH, BROKEN)
    assert (ours.base, ours.candidate) == (theirs.job.base, theirs.job.candidate)
    assert ours.judged == theirs.judged
    assert ours.is_readable
    assert not ours.left_out()


def test_lines_that_cannot_be_trusted_are_left_out_and_counted(store):
    path = store()
    file = path / "samples.jsonl"
    head, *rest = file.read_bytes().splitlines(keepends=True)
    other = rest[1].replace(b'"wall_s":1', b'"wall_s":2')
    assert other != rest[1]
    bad = [other, b"{\n", b"[" * 100_000 + b"\n", b"\xff\n", b"{}\n", b'{"checksum":"x"}\n', b"\n"]
    file.write_bytes(b"".join([head, rest[0], *bad, rest[2], rest[0], rest[3][:-20]]))
    with pytest.raises(UsageError, match="damaged in line 3"):
        read_measured(path, "run")
    found = read_lines(read_run(path), "samples.jsonl")
    assert (found.num_damaged, found.num_twice, found.num_cut) == (7, 1, 1)
    assert [number for number, _ in found.samples] == [1, 9]
    text = page_of(path)
    assert "samples.jsonl: 7 lines are left out, damaged" in text
    assert "samples.jsonl: 1 line is left out, a process that an earlier line holds" in text
    assert "samples.jsonl: 1 line is left out, cut short" in text
    assert "A gate refuses samples.jsonl while a damaged line is in it" in text
    assert "2 that ended with a sample" in text


def test_a_line_cut_short_alone_keeps_no_gate_from_going_on(store):
    path = store()
    file = path / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert len(read_measured(path, "run").processes) == 3
    text = page_of(path)
    assert "1 line is left out, cut short" in text
    assert "A gate refuses" not in text


@pytest.mark.parametrize("head", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, None])
def test_a_first_line_that_cannot_be_read_costs_no_process(store, head):
    path = store()
    file = path / "samples.jsonl"
    first, *rest = file.read_bytes().splitlines(keepends=True)
    first = first.replace(b'"eager"', b'"weird"') if head is None else head + b"\n"
    file.write_bytes(b"".join([first, *rest]))
    told = gate_told(read_run(path))
    assert any("its first line cannot be read" in text for text in told.warnings)
    assert told.facts == [("To gate again", "pcpbench gate main.json")]
    assert table_of(told).columns[3] == "TPOT base, ms"
    assert len(table_of(told).rows) == 4


def test_a_file_that_is_listed_and_gone_or_no_file_is_refused(store, tmp_path, capsys):
    path = store(measured=None, files=["samples.jsonl"])
    assert cli.run(["report", str(path)]) == 2
    assert "lists samples.jsonl, which is not there" in capsys.readouterr().err
    os.mkfifo(path / "samples.jsonl")
    assert cli.run(["report", str(path)]) == 2
    assert "no regular file" in capsys.readouterr().err
    assert not (path / "report.html").exists()


# -------------------------------------------------------------------------------- one gate


def test_every_process_of_a_killed_gate_is_in_the_table(store, fake, figures):
    timed = [
        fake.scenario("s", ratio=0.8, base_s=3e-3, capture_s=0.25),
        fake.scenario("s", ratio=0.9, base_s=2e-3, capture_s=None, slow={"itl.ratio": 1.1}),
        fake.scenario("s", ratio=0.7, num_wrong=2),
    ]
    processes = tuple(fake.process(one, started_at=f"at {n}") for n, one in enumerate(timed, 1))
    run = fake.measured((), processes=processes).with_failure(CRASH).with_failure(BROKEN)
    told = gate_told(read_run(store(measured=run)))
    table = table_of(told)
    assert table.columns == [
        *("process", "started at", "scenario", "TPOT eager, ms", "TPOT full, ms"),
        *("TPOT ratio", "ITL ratio", "capture, ms", "wrong tokens", "ended"),
    ]
    sound = "with a sample"
    assert table.rows == [
        ["1", "at 1", "s", "3.000", "2.400", "0.8000", "0.8000", "250.0", "0", sound],
        ["2", "at 2", "s", "2.000", "1.800", "0.9000", "0.9900", "-", "0", sound],
        ["3", "at 3", "s", *["-"] * 5, "2", sound],
        ["4", *["-"] * 8, "crashed: a worker was ended by signal 9"],
        ["5", *["-"] * 8, "broke a contract: C8 broke at step 3"],
    ]
    assert "No times are shown where tokens were wrong: process 3." in told.warnings
    (plot,) = told.sections[0].figures
    assert plot.table.rows == [["1", "0.8000", "0.8000"], ["2", "0.9000", "0.9900"]]
    (axes,) = figures[0].axes
    (tpot,) = lines_of(axes, "TPOT, median 0.8500")
    (itl,) = lines_of(axes, "ITL, median 0.8950")
    assert (list(tpot.get_xdata()), list(tpot.get_ydata())) == ([1, 2], [0.8, 0.9])
    assert list(itl.get_ydata()) == pytest.approx([0.8, 0.99])
    assert [list(line.get_xdata()) for line in lines_of(axes, "no times")] == [[3, 4, 5]]


def test_a_killed_gate_says_what_had_finished_and_how_to_go_on(store):
    path = store(arguments=["gate", "--fail-on", "tpot:5%", "my main.json", "--out=x", "--json"])
    assert cli.run(["report", str(path)]) == 0
    text = (path / "report.html").read_text(encoding="utf-8")
    assert "The run did not end by itself" in text
    assert "No verdict: the gate ended before it had one." in text
    assert "gate.csv has no row" not in text
    assert "4 that ended with a sample, 0 without one" in text
    rows = re.findall(r'<tr><td class="number">(\d)</td><td>second \d</td><td>s</td>', text)
    assert rows == ["1", "2", "3", "4"]
    command = f"pcpbench gate &#39;my main.json&#39; {path} --fail-on tpot:5% --json"
    assert f"<dt>To go on</dt><dd>{command}</dd>" in text


@pytest.mark.parametrize(
    ("outcome", "with_table", "name"),
    [
        ("running", False, "To go on"),
        ("interrupted", False, "To go on"),
        ("not compared", False, "To go on"),
        ("undecided", True, "To go on"),
        ("pass", True, None),
        ("regression", True, None),
        ("crashed", True, None),
    ],
)
def test_processes_are_shown_of_every_gate_and_a_command_of_those_that_are_open(
    store, outcome, with_table, name
):
    path = store(outcome=outcome, findings=[finding()] if with_table else None)
    told = gate_told(read_run(path))
    assert len(table_of(told).rows) == 4
    assert [fact[0] for fact in told.facts] == ([name] if name else [])
    assert ("No verdict" in page_of(path)) is not with_table


def test_a_gate_that_had_nothing_yet_is_run_again(store, fake):
    bare = read_run(store("bare", measured=fake.measured((), judged=())))
    assert gate_told(bare).facts == [("To gate again", "pcpbench gate main.json")]
    none = gate_told(read_run(store("none", measured=None)))
    assert none.facts == [("To gate again", "pcpbench gate main.json")]
    assert none.sections[0].lead.startswith("There is no samples.jsonl")
    judged = store("judged", measured=fake.measured(()))
    told = gate_told(read_run(judged))
    assert told.facts == [("To go on", f"pcpbench gate main.json {judged}")]
    assert told.sections[0].lead == "samples.jsonl holds no process: none had ended."


def test_no_times_of_a_scenario_that_was_not_judged_a_pass(store, fake):
    run = fake.measured(RATIOS, judged=(fake.judged(outcome="fail", drifts=1),))
    told = gate_told(read_run(store(measured=run)))
    assert "No times are shown for what did not pass: s (fail)." in told.warnings
    assert {tuple(row[3:8]) for row in table_of(told).rows} == {("-",) * 5}


def test_ranks_that_share_a_device_are_told_beside_the_times(store):
    settings = {"prefill_context_parallel_size": 2}
    told = gate_told(read_run(store(settings=settings)))
    assert "2 ranks share one device" in told.sections[0].lead


@pytest.mark.parametrize(
    ("arguments", "baseline_name", "options"),
    [
        (["gate", "main.json"], "main.json", []),
        (["gate", "--max-time", "9", "b.json", "results/x"], "b.json", ["--max-time", "9"]),
        (["gate", "--out", "y", "--max-time=9", "b.json"], "b.json", ["--max-time=9"]),
        (["gate", "--json", "--", "b.json"], "b.json", ["--json"]),
        (["gate", "--config"], "BASELINE", ["--config", ""]),
        (["compare", "eager", "full", "--baseline", "c.json", "--pcp", "2"], "c.json", []),
        (["compare", "eager", "full", "--baseline=c.json"], "c.json", []),
        (["compare", "eager", "full", "--baseline"], "BASELINE", []),
        ([], "BASELINE", []),
        (None, "BASELINE", []),
    ],
)
def test_what_a_gate_was_asked_is_read_from_its_command_line(
    tmp_path, arguments, baseline_name, options
):
    run = StoredRun(tmp_path, {"command": "gate", "arguments": arguments})
    assert asked(run) == (baseline_name, options)


def test_the_options_that_a_value_follows_are_those_of_the_command_line():
    app = typer.Typer()
    add_gate(app)
    command = typer.main.get_command(app).commands["gate"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.is_flag]
    assert {name for option in options for name in option.opts} - {"--help"} == VALUED


def test_what_a_line_says_is_never_markup(store, fake):
    evil = '<script>alert("x")</script>$\\frac{1}{2}$\x1b[1m\u202e'
    run = fake.measured(
        (), processes=(fake.process(fake.scenario(evil), started_at=evil),),
        judged=(fake.judged(evil, outcome="<b>"), fake.judged("t", outcome="pass")),
    ).with_failure(ProcessFailure(why=evil, is_crash=True))  # fmt: skip
    shown = msgspec.structs.replace(run, judged=())
    paths = [
        store(name, run_, arguments=["gate", evil], day=day,
              findings=[finding(scenario=evil, change=0.1, low=0.0, high=0.2)])
        for name, run_, day in (("one", run, 1), ("two", shown, 2))
    ]  # fmt: skip
    text = page_of(*paths)
    assert text.count("<svg") >= 2
    assert "<script" not in text
    assert "alert(" in text
    assert "(&lt;b&gt;)" in text
    assert not set(text) & set("\x1b\u202e")


def test_the_gate_of_a_comparison_is_named_with_it(store):
    store("compare-1", command="compare", measured=None)
    inner = store("compare-1/gate")
    assert read_run(inner).name == "compare-1/gate"
    assert read_run(inner.parent).name == "compare-1"


# -------------------------------------------------------------------------------- trend


def ratio_finding(change, low, high, verdict=GateVerdict.PASS, rule="tpot:2.5%", **more):
    known = {"change": change, "low": low, "high": high, "baseline": 0.8, "confidence": 0.99,
             "run": 0.8 * (1 + change), "num_baseline": 12, "num_run": 5}  # fmt: skip
    return finding(rule, verdict, **known | more)


def trend_of(*paths):
    return gate_trend_section([read_run(path) for path in paths])


def test_the_trend_has_the_change_of_each_rule_with_interval_and_limit(store, figures):
    changes = [
        ratio_finding(0.01, -0.005, 0.02),
        ratio_finding(0.06, 0.05, 0.07, GateVerdict.REGRESSION, "tpot:3%"),
        ratio_finding(0.02, None, 0.04, GateVerdict.UNDECIDED, num_run=4),
    ]
    paths = [
        store(f"g{day}", findings=[one], outcome=one.verdict.value, day=day)
        for day, one in enumerate(changes, 1)
    ]
    section = trend_of(*paths)
    assert section.title == "Trend over gates"
    (figure,) = section.figures
    assert figure.title == "tpot of s, change in %"
    assert figure.table.columns == [
        *("run", "directory", "kind", "verdict", "change in %", "lowest", "highest", "limit"),
        *("baseline, ratio", "run, ratio", "processes"),
    ]
    assert figure.table.rows == [
        ["1", "g1", "A", "pass", "+1.00", "-0.50", "+2.00", "+2.5", "0.8", "0.808", "5 / 12"],
        ["2", "g2", "A", "regression", "+6.00", "+5.00", "+7.00", "+3", "0.8", "0.848", "5 / 12"],
        ["3", "g3", "A", "undecided", "+2.00", "unbounded", "+4.00", "+2.5", "0.8", "0.816",
         "4 / 12"],
    ]  # fmt: skip
    (axes,) = figures[0].axes
    (points,) = lines_of(axes, "kind A")
    assert list(points.get_xdata()) == [1, 2, 3]
    assert list(points.get_ydata()) == pytest.approx([1.0, 6.0, 2.0])
    assert points.get_linestyle() == "None", "no line joins gates of two baselines"
    bottom = axes.get_ylim()[0]
    upright = [
        line for line in axes.lines if len(set(line.get_xdata())) == 1 < len(line.get_xdata())
    ]
    bars = {line.get_xdata()[0]: list(line.get_ydata()) for line in upright}
    assert bars == {
        1: pytest.approx([-0.5, 2.0]),
        2: pytest.approx([5.0, 7.0]),
        3: pytest.approx([bottom, 4.0]),
    }
    dashes = {}
    for line in axes.lines:
        xs, ys = list(line.get_xdata()), list(line.get_ydata())
        if len(xs) == 2 and 0 < xs[1] - xs[0] < 1 and ys[0] == ys[1] != 0:
            dashes[round(sum(xs) / 2)] = ys[0]
    assert dashes == {1: pytest.approx(2.5), 2: pytest.approx(3.0), 3: pytest.approx(2.5)}
    assert [list(line.get_xdata()) for line in lines_of(axes, "regression")] == [[2]]


def test_each_form_of_rule_has_a_plot_in_its_own_unit(store, figures):
    def findings(run_count, share):
        return [
            ratio_finding(0.1, 0.0, 0.2, rule="capture_time:50%", baseline=80.0, run=88.0),
            finding("launch:40us", change=1.5e-5, low=1e-5, high=2e-5, baseline=1e-3, run=1.015e-3),
            finding("full_share:1%", scenario="", baseline=1.0, run=share),
            finding("full_share:>=99%", scenario="", baseline=1.0, run=share),
            finding("contracts:0", scenario="", baseline=0.0, run=run_count),
            finding("drift:0", scenario="", baseline=0.0, run=0.0),
            Finding(rule=PROCESS_RULE, scenario="", verdict=GateVerdict.CRASHED, why="x", limit=0),
        ]

    section = trend_of(
        store("one", findings=findings(0.0, 1.0), outcome="pass"),
        store("two", findings=findings(3.0, 0.98), outcome="regression", day=2),
    )
    cells = {figure.title: figure.table.rows[1][4:] for figure in section.figures}
    assert cells == {
        "capture_time of s, change in %": [
            "+10.00",
            "+0.00",
            "+20.00",
            "+50",
            "80",
            "88",
            "5 / 12",
        ],
        "launch of s, change in us": ["+15.00", "+10.00", "+20.00", "+40", "1000", "1015"],
        "full_share, change in points": ["-2.00", "-1", "100", "98"],
        "full_share, in %": ["98", "99"],
        "contracts, count": ["3", "0"],
        "drift, count": ["0", "0"],
    }
    notes = {figure.title: figure.note for figure in section.figures if not figure.svg}
    assert notes == {"drift, count": "It is 0 in every gate that has a value."}
    low, _ = figures[3].axes[0].get_ylim()
    assert low > 90, "a share of 98 % is not drawn above an axis from 0"


def test_a_gate_without_an_answer_or_verdict_keeps_its_place(store, figures):
    none = finding(verdict=GateVerdict.NOT_COMPARABLE, scenario="")
    section = trend_of(
        store("g1", findings=[ratio_finding(0.01, 0.0, 0.02)], outcome="pass"),
        store("g2", findings=[none], outcome="not comparable", day=2),
        store("g3", day=3),
        store(
            "g4", findings=[ratio_finding(0.0, -0.01, 0.01, rule="itl:2%")], outcome="pass", day=4
        ),
    )
    tpot, itl = section.figures
    assert (tpot.title, itl.title) == ("tpot of s, change in %", "itl of s, change in %")
    assert [row[3] for row in tpot.table.rows] == [
        "pass", "not comparable", "no verdict", "not judged",
    ]  # fmt: skip
    assert [row[4] for row in tpot.table.rows] == ["+1.00", "-", "-", "-"]
    assert [row[:8] for row in section.table.rows][2] == [
        *("3", "A", "g3", "2026-01-03T00:00:00+00:00", "running", "main.json", "4", "0")
    ]


def test_gates_of_other_settings_or_baselines_are_of_another_kind(store, figures):
    def gate(name, day, **changes):
        findings = [ratio_finding(0.01, 0.0, 0.02)]
        return store(name, findings=findings, outcome="pass", day=day, **changes)

    own = {"base": "eager", "candidate": "full", "gate": {"processes": 7}}
    section = trend_of(
        gate("a", 1),
        gate("b", 2, settings=own),
        gate("c", 3, settings={**own, "dtype": "bfloat16"}),
        gate("d", 4, arguments=["gate", "other.json"]),
    )
    assert [row[1] for row in section.table.rows] == ["A", "A", "B", "C"]
    assert "3 kinds, marked A, B, C" in section.lead
    assert section.table.columns[-1] == "dtype"
    assert [row[-1] for row in section.table.rows] == ["-", "-", "bfloat16", "-"]
    assert len({line.get_marker() for name in "ABC"
                for line in lines_of(figures[0].axes[0], f"kind {name}")}) == 3  # fmt: skip


def test_gates_and_comparisons_have_a_trend_each(store):
    gates = [store(f"g{day}", findings=[ratio_finding(0.01, 0.0, 0.02)], day=day) for day in (1, 3)]
    compares = [store(f"c{day}", None, command="compare", day=day) for day in (2, 4)]
    text = page_of(*gates, *compares)
    assert text.index("Trend over runs</h2>") < text.index("Trend over gates</h2>")
    assert "Trend over gates" not in page_of(gates[0], *compares)
    assert "Trend over runs" not in page_of(*gates, compares[0])
    section = text[text.index("Trend over gates</h2>") : text.index("<article")]
    assert ">g1</td>" in section
    assert ">c2</td>" not in section


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.replace("tpot:2.5%,", "tpot,"), "has no colon"),
        (lambda s: s.replace("tpot:2.5%,", "tpot:off,"), "judges nothing"),
        (lambda s: s.replace("verdict", "word", 1), "no column verdict"),
    ],
)
def test_a_damaged_table_of_a_gate_is_refused(store, capsys, change, told):
    paths = [store(f"g{day}", findings=[finding()], day=day) for day in (1, 2)]
    file = paths[1] / "gate.csv"
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    out = paths[0] / "x.html"
    assert cli.run(["report", *map(str, paths), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "gate.csv" in error
    assert not out.exists()


# -------------------------------------------------------------------------------- self-check

CHECKED = SelfCheckResult(
    num_processes=31,
    num_planted=11,
    num_baseline=12,
    num_first=5,
    num_most=8,
    num_gates=66,
    num_apart=1,
    rates=(
        {"slowdown": 0.0, "regression": 0.0, "undecided": 0.25, "passed": 0.75, "num_run": 6},
        {"slowdown": 0.04, "regression": 0.96, "undecided": 0.04, "passed": 0.0, "num_run": 5},
    ),
    smallest_called=0.04,
    spreads=(("tpot:2.5%", "s", 0.0073), ("capture_time:50%", "s", 0.15)),
    planted=0.05,
    seen=(("tpot:2.5%", "s", 0.0512),),
    environment=Environment(),
    gate_time_s=75.0,
    wall_s=300.0,
)


def check_of(store, fake, result=CHECKED, **known):
    path = store(command="gate-self-check", outcome="pass" if result else "running", **known)
    (path / "planted.jsonl").write_bytes(samples_bytes(fake.measured((0.84,), judged=())))
    if result is not None:
        (path / "self-check.json").write_text(self_check_json(result), encoding="utf-8")
    return path


def test_a_self_check_shows_its_rates_and_what_it_says_of_them(store, fake, figures):
    told = self_check_told(read_run(check_of(store, fake)))
    rates, spreads, clean, planted = told.sections
    (figure,) = rates.figures
    assert figure.is_open
    assert figure.table.columns == [
        *("true slowdown", "gates", "regression", "undecided", "pass", "processes of a run")
    ]
    assert figure.table.rows == [
        ["none", "66", "0 %", "25.0 %", "75.0 %", "6"],
        ["4 %", "66", "96.0 %", "4.0 %", "0 %", "5"],
    ]
    assert rates.lead.startswith(summary(CHECKED))
    assert "0 % false alarms and 25.0 % undecided without any slowdown (66 gates" in rates.lead
    assert "a slowdown of 4 % is called in 95 % of gates" in rates.lead
    assert "31 processes as they are and 11 slowed by 5 % on purpose, in 300 s" in rates.lead
    assert "66 gates of 75 s, each with a baseline of 12 processes" in rates.lead
    assert spreads.table.rows == [
        ["tpot:2.5%", "s", "0.73 %", "5 %", "5.1 %"],
        ["capture_time:50%", "s", "15.00 %", "-", "-"],
    ]
    assert [row[5] for row in clean.table.rows] == ["0.8000", "0.8100", "0.7900", "0.8200"]
    assert [row[5] for row in planted.table.rows] == ["0.8400"]
    heights = [bar.get_height() for bar in figures[0].axes[0].patches]
    assert heights == pytest.approx([0, 96, 25, 4, 75, 0])


def test_the_table_of_a_self_check_is_unfolded(store, fake):
    text = page_of(check_of(store, fake))
    assert "<h2>gate --self-check</h2>" in text
    assert "has no table that a report shows" not in text
    assert "<details open><summary>Table: Verdicts by true slowdown" in text


def test_a_self_check_that_was_killed_shows_its_processes(store, fake):
    path = check_of(store, fake, None)
    file = path / "planted.jsonl"
    file.write_bytes(file.read_bytes() + b"{")
    told = self_check_told(read_run(path))
    assert told.sections[0].lead.startswith("There is no self-check.json")
    assert len(told.sections[1].table.rows) == 4
    assert told.warnings == [
        "planted.jsonl: 1 line is left out, cut short: the run was ended while it was written."
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s[: len(s) // 2], "is no JSON"),
        (lambda s: "[]", "schema version is None"),
        (lambda s: s.replace('"schema_version": 1', '"schema_version": 2'), "is 2, not 1"),
        (lambda s: s.replace('"num_gates": 66', '"num_gates": "many"'), "num_gates"),
        (lambda s: s.replace('"undecided": 0.25,', ""), "undecided"),
        (lambda s: re.sub(r'"rates": \[.*?\]', '"rates": []', s, flags=re.DOTALL), "no rates"),
    ],
)
def test_a_damaged_result_of_a_self_check_is_refused(store, fake, capsys, change, told):
    path = check_of(store, fake)
    file = path / "self-check.json"
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    assert cli.run(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert "self-check.json" in error
    assert told in error
    assert error.count("\n") == 1
