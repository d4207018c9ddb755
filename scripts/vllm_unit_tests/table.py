"""Two runs of the same tests, against vLLM's classes and pcpbench's, put side by side.

Owns what is counted: a test applies if it ran pcpbench's code and is not about something that
pcpbench lacks. Reads outcomes; runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_unit_tests import reasons
from vllm_unit_tests.reasons import DIFFERENCE, INTERNALS, KINDS

NOT_RUN = "does not run here"
FAILURE = "FAILED"
STALE = "STALE REASON"


@dataclass(frozen=True)
class Row:
    """One test. kind, why: "" where it applies and passes."""

    test: str
    vllm: str
    pcpbench: str
    applies: bool
    kind: str
    why: str
    ran: tuple[str, ...]

    @property
    def file(self) -> str:
        """The test file, without its ending."""
        return self.test.split("::")[0]


Outcomes = dict[str, dict[str, Any]]


def compare(vllm: Outcomes, pcpbench: Outcomes) -> list[Row]:
    """A row for each test that either run knows, in the order of vLLM's run."""
    nodes = list(dict.fromkeys([*vllm, *pcpbench]))
    missing = {"outcome": "missing", "message": "the other run did not collect it", "ran": []}
    return [_row(node, vllm.get(node, missing), pcpbench.get(node, missing)) for node in nodes]


def _row(node: str, vllm: dict[str, Any], pcpbench: dict[str, Any]) -> Row:
    file, _, name = node.partition("::")
    test = "::".join(filter(None, (file.rsplit("/", 1)[-1].removesuffix(".py"), name)))
    applies, kind, why = _judge(test, vllm, pcpbench)
    return Row(
        test, vllm["outcome"], pcpbench["outcome"], applies, kind, why, tuple(pcpbench["ran"])
    )


def _judge(test: str, vllm: dict[str, Any], pcpbench: dict[str, Any]) -> tuple[bool, str, str]:
    """Whether a test applies, and the kind of reason and the reason if it is not simply passed."""
    reason = reasons.reason_for(test)
    passed = pcpbench["outcome"] == "passed"
    if not pcpbench["ran"]:
        if reason is not None and reason.kind != DIFFERENCE:
            return False, reason.kind, reason.text
        if passed:
            return False, INTERNALS, "runs no code of pcpbench"
        if vllm["outcome"] != "passed":
            return False, NOT_RUN, vllm["message"]
        return True, FAILURE, pcpbench["message"]
    if reason is None:
        return True, "" if passed else FAILURE, "" if passed else pcpbench["message"]
    if reason.kind != DIFFERENCE:
        return False, reason.kind, reason.text
    if passed:
        return True, STALE, f"passes, and is listed as different: {reason.text}"
    return True, DIFFERENCE, reason.text


def is_good(rows: Iterable[Row]) -> bool:
    """Whether every test that applies passes or is different on purpose, and there is one."""
    rows = list(rows)
    return any(row.applies for row in rows) and not any(
        row.kind in (FAILURE, STALE) for row in rows
    )


def counts(rows: Iterable[Row]) -> Counter[str]:
    """How many tests, passed against vLLM, applying, passed against pcpbench, different."""
    total: Counter[str] = Counter()
    for row in rows:
        total["tests"] += 1
        total["vllm"] += row.vllm == "passed"
        total["apply"] += row.applies
        total["pass"] += row.applies and row.pcpbench == "passed"
        total["differ"] += row.kind == DIFFERENCE
    return total


def render(rows: list[Row]) -> str:
    """The tables, as Markdown."""
    lines = [
        "| file | tests | pass on vLLM | apply to pcpbench | pass on it | different on purpose |",
        "|---|---|---|---|---|---|",
    ]
    files = list(dict.fromkeys(row.file for row in rows))
    for name in [*files, "all"]:
        total = counts(row for row in rows if name in (row.file, "all"))
        cells = [total[key] for key in ("tests", "vllm", "apply", "pass", "differ")]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    order = [FAILURE, STALE, *KINDS, NOT_RUN]
    for kind in sorted({row.kind for row in rows if row.kind}, key=order.index):
        lines += ["", f"{kind} ({KINDS.get(kind, 'see the messages')}):", ""]
        mine = [row for row in rows if row.kind == kind]
        for why in dict.fromkeys(row.why for row in mine):
            lines.append(f"- {why}: {_named(row for row in mine if row.why == why)}")
    return "\n".join(lines)


def _named(rows: Iterable[Row]) -> str:
    """Tests by file, without their parameters: `test_a.py` test_x, test_y x 3."""
    by_file: dict[str, Counter[str]] = {}
    for row in rows:
        name = row.test.split("[")[0].removeprefix(f"{row.file}::")
        by_file.setdefault(row.file, Counter())[name] += 1
    return "; ".join(
        f"`{file}` " + ", ".join(f"{name} x {n}" if n > 1 else name for name, n in names.items())
        for file, names in by_file.items()
    )
