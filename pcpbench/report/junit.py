"""A gate as JUnit XML: what CI systems show as tests. Owns which verdict is which element.

failure: a regression (and an undecided finding where `on_undecided` is `fail`). error: a process
crashed, nothing could be compared, or the gate ended without a result. skipped: undecided. The
facts are in each element's text.
"""

from __future__ import annotations

import re
from typing import Final

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from pcpbench.gate_results import Finding, GateResult, GateVerdict
from pcpbench.report.gate_view import acceptance, told
from pcpbench.report.printable import printable

SUITE: Final = "pcpbench gate"
_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(result: GateResult) -> str:
    """The text of `junit.xml`: one suite, one test for each finding."""
    suite = TestSuite(SUITE)
    for name in ("baseline", "run", "num_baseline", "num_run", "same_machine"):
        suite.add_property(name, _clean(str(getattr(result, name))))
    seen: dict[tuple[str, str], int] = {}
    for finding in result.findings:
        key = finding.scenario, finding.rule.text
        seen[key] = seen.get(key, 0) + 1
        suite.add_testcase(_case(finding, result.on_undecided, seen[key]))
    return _text_of(suite, result.wall_s)


def junit_of_error(message: str) -> str:
    """The text of `junit.xml` where a gate ended without a result: one test, in error."""
    case = TestCase(name="gate", classname="gate.all")
    case.result = [_of(Error, _clean(message), "error")]
    suite = TestSuite(SUITE)
    suite.add_testcase(case)
    return _text_of(suite, 0.0)


def _text_of(suite: TestSuite, wall_s: float) -> str:
    suite.update_statistics()  # type: ignore[no-untyped-call]
    xml = JUnitXml("pcpbench")
    xml.add_testsuite(suite)
    xml.update_statistics()  # type: ignore[no-untyped-call]
    xml.time = suite.time = round(wall_s, 3)
    text: bytes = xml.tostring()  # type: ignore[no-untyped-call]
    return text.decode() + "\n"


def _case(finding: Finding, on_undecided: str, number: int) -> TestCase:
    """number: which of the findings with one name, since CI systems keep one test of a name."""
    place = _clean(f"gate.{finding.scenario or 'all'}")
    name = finding.rule.text if number == 1 else f"{finding.rule.text} ({number})"
    case = TestCase(name=_clean(name), classname=place)
    facts = _clean(told(finding))
    if finding.verdict is GateVerdict.REGRESSION:
        case.result = [_of(Failure, facts, finding.verdict.value)]
    elif finding.verdict is GateVerdict.UNDECIDED:
        kind = Failure if on_undecided == "fail" else Skipped
        case.result = [_of(kind, facts, finding.verdict.value)]
    elif finding.verdict in (GateVerdict.CRASHED, GateVerdict.NOT_COMPARABLE):
        case.result = [_of(Error, facts, finding.verdict.value)]
    else:
        case.system_out = facts + (_clean(f"\n{acceptance(finding)}") if finding.accepted else "")
    return case


def _of(kind: type[Failure | Error | Skipped], facts: str, type_: str) -> Failure | Error | Skipped:
    element = kind(message=facts, type_=type_)
    element.text = facts
    return element


def _clean(text: str) -> str:
    """As a terminal shows it, and without what XML 1.0 cannot hold."""
    return _NO_XML.sub("", printable(text))
