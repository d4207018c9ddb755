"""The command line of the gate: `pcpbench gate`, and the worker that it starts. Owns no logic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcpbench.cli_options import Json, Out
from pcpbench.errors import PcpbenchError
from pcpbench.gate_defaults import DEFAULT_MAX_TIME_S, DEFAULT_PROCESSES, SELF_CHECK_GATES


def add_gate(app: typer.Typer) -> None:
    """Put the gate's commands on the command line."""
    app.command(
        "gate", epilog="Example: pcpbench gate main.json --fail-on tpot:2.5% --on-undecided fail"
    )(gate)
    app.command("worker", hidden=True)(worker)


def gate(
    baseline: Annotated[
        Path | None,
        typer.Argument(help="File of `compare --save-baseline`, or a run's directory."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Argument(help="A measured run to judge. Default: one is measured now."),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            help="METRIC[.STAT]:VALUE[%|us|ms], such as tpot:2.5%, launch:40us, drift:0, "
            "full_share:>=99% or capture_time:off; repeatable. Default: the rules of docs/gate.md.",
        ),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept", help="'tpot:8% until 2027-01-31 because WHY': a known regression."
        ),
    ] = None,
    on_undecided: Annotated[
        str | None,
        typer.Option("--on-undecided", help="fail (exit 1), warn (the default) or pass."),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            "--max-time",
            help=f"Seconds for the whole gate; default {DEFAULT_MAX_TIME_S:g}. With --self-check: "
            f"to measure in; default {SELF_CHECK_GATES * DEFAULT_MAX_TIME_S:g}.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            help=f"Fresh processes before the first look; default {DEFAULT_PROCESSES}.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with settings of the gate.")
    ] = None,
    self_check: Annotated[
        bool,
        typer.Option("--self-check", help="What can the gate see here? False alarms and power."),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of gate.json and exit.")
    ] = False,
    json: Json = False,
    out: Out = None,
) -> None:
    """Hold a run against a baseline: pass, regression or undecided, with both numbers.

    Exit code 0: pass; 1: a regression; 2: bad input; 3: nothing could be compared, or a process
    crashed. Undecided is what --on-undecided says.
    """
    from pcpbench.gate_jobs import GateRequest
    from pcpbench.gate_settings import GateOptions

    if schema:
        from pcpbench.report.gate_json import gate_schema

        print(gate_schema(), end="")
        return
    request = GateRequest(
        baseline=baseline,
        run=run,
        options=GateOptions(
            fail_on=tuple(fail_on or ()),
            accept=tuple(accept or ()),
            on_undecided=on_undecided,
            max_time_s=max_time,
            processes=processes,
            config=config,
        ),
        json=json,
        out=out,
        self_check=self_check,
    )
    try:
        request.check()  # before torch is imported: a refusal answers at once
    except PcpbenchError as error:
        from pcpbench.report.github import tell_github_error

        tell_github_error(error)
        raise
    if self_check:
        from pcpbench.session.self_check import run_self_check

        raise typer.Exit(run_self_check(request))
    from pcpbench.session.gate import run_gate

    raise typer.Exit(run_gate(request).exit_code)


def worker() -> None:
    """Do one job of a gate: read from stdin, measured, written to stdout."""
    from pcpbench.session.worker import run_worker

    raise typer.Exit(run_worker())
