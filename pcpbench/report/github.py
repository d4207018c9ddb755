"""What a gate tells GitHub when it runs there: annotations on stderr, and the step's summary.

Owns the escaping and the limits of both. Elsewhere it does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

from pcpbench.gate_results import Finding, GateResult, GateVerdict
from pcpbench.report.gate_view import (
    acceptance,
    cells_of,
    compared,
    confidence,
    processes,
    rules_of,
    summary,
    told,
    word,
)
from pcpbench.report.printable import printable

MAX_ANNOTATIONS: Final = 10
MAX_SUMMARY_BYTES: Final = 1 << 20


def tell_github(
    result: GateResult, environ: Mapping[str, str] = os.environ, stream: TextIO | None = None
) -> None:
    """Annotate and summarise, if the environment says that this is a step of GitHub Actions."""
    if not _is_here(environ):
        return
    out = sys.stderr if stream is None else stream
    for line in annotation_lines(result):
        print(printable(line), file=out, flush=True)
    path = environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        _append(Path(path), markdown(result))
    except OSError as error:
        said = f"pcpbench: the step summary could not be written: {error}."
        print(printable(said), file=out)


def tell_github_error(
    error: Exception, environ: Mapping[str, str] = os.environ, stream: TextIO | None = None
) -> None:
    """Annotate an error that ended a gate without a result, if this is a step of GitHub Actions."""
    if _is_here(environ):
        line = f"::error title=pcpbench gate::{_data(str(error) or repr(error))}"
        print(printable(line), file=sys.stderr if stream is None else stream, flush=True)


def annotation_lines(result: GateResult) -> list[str]:
    """Workflow commands, worst first; the last one says how many there was no room for."""
    all_told = [
        (level, finding)
        for level in ("error", "warning", "notice")
        for finding in result.findings
        if _level(finding, result.on_undecided) == level
    ]
    room = MAX_ANNOTATIONS if len(all_told) <= MAX_ANNOTATIONS else MAX_ANNOTATIONS - 1
    shown = all_told[:room]
    lines = [
        f"::{level} title={_property('pcpbench gate: ' + finding.verdict.value)}"
        f"::{_data(_told(finding))}"
        for level, finding in shown
    ]
    if len(shown) < len(all_told):
        more = len(all_told) - len(shown)
        lines.append(f"::warning title=pcpbench gate::and {more} more findings")
    return lines


def markdown(result: GateResult) -> str:
    """The step summary: verdict, table, reasons."""
    lines = [
        f"### pcpbench gate: {word(result.verdict)}",
        "",
        _cell(summary(result)),
        "",
        _cell(compared(result)),
        "",
        _cell(f"Rules: {rules_of(result)}"),
        "",
        "| rule | scenario | verdict | baseline | run | change [interval] | confidence | "
        "processes |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for finding in result.findings:
        cells = (
            f"`{finding.rule.text}`",
            finding.scenario or "all",
            finding.verdict.value,
            *cells_of(finding),
            confidence(finding),
            processes(finding),
        )
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    accepted = dict.fromkeys(acceptance(f) for f in result.findings if f.accepted is not None)
    lines += ["", *(f"- accepted: {_cell(text)}" for text in accepted)]
    steps = dict.fromkeys(f.next_step for f in result.findings if f.next_step)
    lines += [f"- to see where: `{_cell(step)}`" for step in steps]
    lines += [*(f"- {_cell(n.setting)}: {_cell(n.message)}" for n in result.notices), ""]
    return "\n".join(lines)


def _is_here(environ: Mapping[str, str]) -> bool:
    return environ.get("GITHUB_ACTIONS") == "true"


def _told(finding: Finding) -> str:
    excused = acceptance(finding)
    return f"{told(finding)}; accepted, {excused}" if excused else told(finding)


def _level(finding: Finding, on_undecided: str) -> str:
    if finding.verdict is GateVerdict.PASS:
        return ""
    if finding.verdict is GateVerdict.ACCEPTED:
        return "notice"
    if finding.verdict is GateVerdict.UNDECIDED:
        return {"fail": "error", "warn": "warning", "pass": ""}[on_undecided]
    return "error"


def _append(path: Path, text: str) -> None:
    """Add to what earlier commands of the step have left, within GitHub's limit."""
    held = path.stat().st_size if path.exists() else 0
    data = text.encode()[: max(MAX_SUMMARY_BYTES - held, 0)]
    with path.open("ab") as stream:
        stream.write(data.decode(errors="ignore").encode())


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
