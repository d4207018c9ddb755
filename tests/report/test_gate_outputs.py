"""A gate's outputs: each verdict in the element that CI expects, both numbers, the interval."""

import io
import json
import xml.etree.ElementTree as ET
from datetime import date

import msgspec
import pytest
from rich.console import Console

from pcpbench.checks.gate import Case, Side, judge_gate
from pcpbench.errors import CannotMeasure
from pcpbench.gate_results import GateResult, GateVerdict, worst
from pcpbench.gate_rules import effective_rules, parse_acceptance
from pcpbench.records import Environment, Notice
from pcpbench.report import github
from pcpbench.report.gate_columns import GATE
from pcpbench.report.gate_files import GateFiles
from pcpbench.report.gate_json import GateDocument, gate_json, gate_schema
from pcpbench.report.gate_view import print_gate
from pcpbench.report.junit import junit_xml
from pcpbench.session.gathering import failure_of, finding_of


@pytest.fixture
def gate(fake):
    """A gate of two scenarios; `slow` of them by 5 %, `wild` with noise that hides everything."""

    def make(slow=(), wild=(), crashed=False, accept=(), on_undecided="warn", rules=(), **changes):
        def side(is_run):
            rows = []
            for i in range(8):
                row = []
                for name in ("alpha", "beta"):
                    ratio = 0.8 + 0.001 * (i % 3)
                    ratio *= 1.05 if is_run and name in slow else 1.0
                    ratio *= 1 + 0.1 * (i % 4) if name in wild else 1.0
                    row.append(fake.scenario(name, ratio=ratio))
                rows.append(fake.process(*row))
            return Side(tuple(rows), (fake.judged("alpha"), fake.judged("beta")))

        case = Case(baseline=side(False), run=side(True), today=date(2026, 6, 1))
        chosen = effective_rules([("test", ["itl:off", "capture_time:off", *rules])])
        findings = judge_gate(case, chosen, accept)
        if crashed:
            broken = failure_of(CannotMeasure("a worker was ended by signal 9: <no> & 100 %"))
            findings = (finding_of(broken), *findings)
        known = {
            "baseline": "main.json",
            "run": "measured now",
            "findings": findings,
            "rules": chosen,
            "on_undecided": on_undecided,
            "settings": {"base": "eager", "candidate": "full"},
            "gate_settings": {},
            "baseline_environment": Environment(),
            "environment": Environment(),
            "num_baseline": 8,
            "num_run": 8,
            "same_machine": True,
        }
        return GateResult(**{**known, **changes})

    return make


def cases(result):
    """JUnit cases as (classname, element, message)."""
    root = ET.fromstring(junit_xml(result))
    suite = root.find("testsuite")
    found = []
    for case in suite.findall("testcase"):
        kinds = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = kinds[0] if kinds else None
        found.append(
            (case.get("classname"), None if kind is None else kind.tag,
             "" if kind is None else kind.text)
        )  # fmt: skip
    assert suite.get("tests") == str(len(found))
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(suite.get(name)) == sum(kind == tag for _, kind, _ in found)
    return found


def test_junit_has_a_failure_for_a_regression_with_its_facts(gate):
    found = cases(gate(slow=["beta"]))
    assert [(name, kind) for name, kind, _ in found if kind] == [("gate.beta", "failure")]
    text = next(text for _, kind, text in found if kind)
    assert "0.801 -> 0.841" in text
    assert "[" in text
    assert "limit +2.5 %" in text


def test_junit_has_an_error_for_a_crash_and_skips_what_is_undecided(gate):
    kinds = {name: kind for name, kind, _ in cases(gate(wild=["beta"], crashed=True))}
    assert kinds["gate.beta"] == "skipped"
    kinds = [kind for _, kind, _ in cases(gate(crashed=True))]
    assert kinds[0] == "error"
    strict = {name: kind for name, kind, _ in cases(gate(wild=["beta"], on_undecided="fail"))}
    assert strict["gate.beta"] == "failure"


def test_junit_of_a_pass_has_neither(gate):
    assert all(kind is None for _, kind, _ in cases(gate()))


def test_junit_is_xml_whatever_a_message_holds(gate):
    """XML 1.0 has no C0 but tab and line ends, no surrogates, no U+FFFE and U+FFFF."""
    told = "".join(map(chr, [*range(0x300), 0xD7FF, *range(0xD800, 0xD803), 0xDFFF, 0xE000]))
    told += "\ufffd\ufffe\uffff\U00010000\U0010ffff"
    result = gate()
    result = gate(
        findings=(finding_of(failure_of(CannotMeasure(told))), *result.findings), run=f"run {told}"
    )
    text = next(text for _, kind, text in cases(result) if kind == "error")
    assert text.startswith("process: ")
    assert text.endswith("\ud7ff\ue000\ufffd\U00010000\U0010ffff")


def test_junit_shows_what_turns_the_direction_of_text_as_a_terminal_does(gate):
    (text,) = (text for _, kind, text in cases(turned(gate)) if kind == "error")
    assert text.endswith("a\\u202eb \\x1b[31m")


def turned(gate):
    broken = finding_of(failure_of(CannotMeasure("a\u202eb \x1b[31m")))
    return gate(findings=(broken, *gate().findings))


def test_where_the_rules_came_from_is_told_and_which_defaults_are_off(gate):
    result = gate(rules=["tpot:50%"])
    told = "test: tpot:50%; default: full_share:0%, drift:0, contracts:0; not judged: itl, "
    stream = io.StringIO()
    print_gate(result, Console(file=stream, width=200))
    assert f"{told}capture_time" in " ".join(stream.getvalue().split())
    assert f"Rules: {told}capture_time" in github.markdown(result)


@pytest.mark.parametrize("width", [80, 140])
def test_the_console_shows_both_numbers_and_the_interval(gate, width):
    stream = io.StringIO()
    print_gate(gate(slow=["beta"]), Console(file=stream, width=width))
    text = stream.getvalue()
    assert text.startswith("REGRESSION")
    assert all(len(line) <= width for line in text.splitlines())
    flat = " ".join(text.split())
    assert "tpot of beta: 0.801 -> 0.841, +5.0 %" in flat
    assert "pass" in flat
    assert "Change [interval]" in flat


def test_long_names_stay_whole_in_eighty_columns(gate):
    """A rule and a scenario that are folded cannot be searched for or copied."""
    long = "s8-large-eager-then-replay"
    result = gate(rules=["tpot:12.12345%"])
    findings = tuple(
        msgspec.structs.replace(f, scenario=f.scenario and long) for f in result.findings
    )
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    print_gate(msgspec.structs.replace(result, findings=findings), console)
    text = stream.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.count(f"  {long} ") == 2
    assert "tpot:12.12345% " in text
    table = text[text.index("Change [interval]") :].split("Reading")[0]
    assert table.count("[") == table.count("]") == 3


def test_an_undecided_finding_says_how_many_processes_would_decide(gate):
    stream = io.StringIO()
    result = gate(wild=["beta"])
    assert result.verdict is GateVerdict.UNDECIDED
    print_gate(result, Console(file=stream, width=400))
    text = stream.getvalue()
    finding = next(f for f in result.findings if f.verdict is GateVerdict.UNDECIDED)
    told = "no sensible number" if finding.num_needed is None else f"about {finding.num_needed} pro"
    assert told in text


def test_an_acceptance_is_told_with_its_reason(gate):
    accept = [
        parse_acceptance({"rule": "tpot:9%", "until": "2026-12-31", "reason": "new kernel"}, "x")
    ]
    result = gate(slow=["beta"], accept=accept)
    assert (result.verdict, result.exit_code) == (GateVerdict.ACCEPTED, 0)
    stream = io.StringIO()
    print_gate(result, Console(file=stream, width=200))
    told = "tpot:9% until 2026-12-31: new kernel"
    assert told in stream.getvalue()
    assert told in junit_xml(result)
    assert f"\n- accepted: {told}\n" in github.markdown(result)
    (line,) = github.annotation_lines(result)
    assert line.startswith("::notice title=pcpbench gate%3A accepted::tpot of beta: ")
    assert line.endswith(f"; accepted, {told}".replace("%", "%25"))


def test_the_json_is_what_its_schema_says(gate):
    for result in (gate(), gate(slow=["beta"], crashed=True), gate(wild=["alpha"])):
        text = gate_json(result)
        document = msgspec.json.decode(text, type=GateDocument)
        assert document.verdict is result.verdict
        assert document.findings == result.findings
        assert document.exit_code == result.exit_code
    schema = json.loads(gate_schema())
    properties = schema["$defs"]["GateDocument"]["properties"]
    assert set(json.loads(text)) == set(properties)


def test_the_published_schema_is_the_one_of_the_code():
    from pathlib import Path

    docs = Path(__file__).parents[2] / "docs" / "gate.schema.json"
    assert docs.read_text(encoding="utf-8") == gate_schema()


def test_the_files_of_a_gate(gate, tmp_path):
    import pandas as pd

    with GateFiles(tmp_path / "run", settings={}, environment=Environment()) as files:
        files.add_lines("samples.jsonl", b"{}\n")
        files.finish_gate(gate(slow=["beta"]))
    table = pd.read_csv(tmp_path / "run" / "gate.csv")
    assert list(table.columns) == [column.name for column in GATE]
    row = table[(table.scenario == "beta") & (table.metric == "tpot")].iloc[0]
    assert row.verdict == "regression"
    assert row.change_percent == pytest.approx(5.0, abs=0.2)
    assert row.change_low_percent < row.change_percent < row.change_high_percent
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["outcome"], manifest["exit_code"]) == ("regression", 1)
    assert "gate.json" in manifest["files"]


def test_a_gate_that_is_cut_short_leaves_what_it_had(tmp_path):
    files = GateFiles(tmp_path / "run", settings={}, environment=Environment())

    def interrupted():
        with files:
            files.add_lines("samples.jsonl", b"{}\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["outcome"] == "interrupted"
    assert (tmp_path / "run" / "samples.jsonl").read_bytes() == b"{}\n"


def test_github_gets_escaped_annotations_and_a_summary(gate, tmp_path):
    stream, path = io.StringIO(), tmp_path / "summary.md"
    path.write_text("before\n", encoding="utf-8")
    result = gate(slow=["beta"], wild=["alpha"], crashed=True,
                  notices=(Notice(setting="a|b", message="c"),))  # fmt: skip
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(path)}
    github.tell_github(result, environ, stream)
    lines = stream.getvalue().splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error", "::error", "::warning"]
    assert "100 %25" in lines[0]
    assert all("\r" not in line and "::error" not in line[3:] for line in lines)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n### pcpbench gate: REGRESSION")
    assert "| `tpot:2.5%` | beta | regression | 0.801 | 0.841 |" in text
    assert "a\\|b" in text


def test_github_is_told_nothing_elsewhere_and_at_most_ten_annotations(gate, tmp_path):
    stream = io.StringIO()
    github.tell_github(gate(slow=["beta"]), {}, stream)
    assert stream.getvalue() == ""
    stats = [f"{stat}_{m}:1%" for m in ("step", "itl", "ttft") for stat in ("mean", "p99")]
    many = gate(slow=["alpha", "beta"], rules=stats)
    lines = github.annotation_lines(many)
    assert len(lines) == 10
    assert lines[-1].endswith("more findings")
    bare = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "x.md")}
    github.tell_github(gate(), bare, stream)
    assert "could not be written" in stream.getvalue()


def test_a_summary_stays_within_the_limit_of_github(gate, tmp_path, monkeypatch):
    monkeypatch.setattr(github, "MAX_SUMMARY_BYTES", 200)
    path = tmp_path / "summary.md"
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(path)}
    for _ in range(2):
        github.tell_github(gate(), environ, io.StringIO())
    assert path.stat().st_size <= 200


def test_worst_of_the_fixture(gate):
    assert worst(gate(slow=["beta"], crashed=True).findings) is GateVerdict.REGRESSION
    assert gate(crashed=True).exit_code == 3


def test_one_reason_is_told_once(gate):
    from pcpbench.report.gate_view import summary

    nothing = Side((), ())
    case = Case(
        baseline=nothing,
        run=nothing,
        today=date(2026, 6, 1),
        incomparable="the settings are others",
    )
    found = judge_gate(case, effective_rules([]))
    text = summary(gate(findings=found))
    assert text.count("the settings are others") == 1
    assert "6 of 6 findings" in text
