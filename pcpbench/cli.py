"""The command line: parse -> one frozen request -> one call -> render -> exit code. No logic.

Imports neither torch nor numpy nor pandas at the top, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import TyperException  # here, so that a typer without it is told at the start

from pcpbench import __version__, cli_report, cli_runs
from pcpbench.arguments import refuse_empty, refuse_repeated, refuse_undecodable, text_of
from pcpbench.cli_check import check_app
from pcpbench.cli_engine_options import engine_options
from pcpbench.cli_faults import faults_app
from pcpbench.cli_options import (
    Base,
    Baseline,
    BaselineProcesses,
    Candidate,
    Check,
    EnginePython,
    EngineTimeout,
    Inject,
    Json,
    Out,
    Quick,
    SaveBaseline,
)
from pcpbench.errors import PcpbenchError
from pcpbench.gate_commands import add_gate
from pcpbench.report.printable import printable
from pcpbench.report.streams import guard_streams
from pcpbench.stops import end_guard, guard_stops

if TYPE_CHECKING:
    from pcpbench.engine_options import EngineOptions

INTERRUPTED = 130

app = typer.Typer(
    name="pcpbench",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich alone would take a third of the time that --help may take
    pretty_exceptions_enable=False,
    help="Do captured graphs under context parallelism still compute what eager computes? "
    "And what do they save?",
)
scenarios_app = typer.Typer(no_args_is_help=True, help="List, show and check scenario files.")
app.add_typer(scenarios_app, name="scenarios")
app.add_typer(faults_app, name="faults")
app.add_typer(check_app, name="check")
cli_runs.register(app)
add_gate(app)
cli_report.register(app)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"pcpbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: pcpbench capture --mode full_decode_only --pcp 2")
@engine_options()
def capture(
    mode: Annotated[
        str,
        typer.Option(
            "--mode", help="full_decode_only, full_and_piecewise, piecewise or full (without PCP)."
        ),
    ] = "full_decode_only",
    *,
    options: EngineOptions,
    json: Json = False,
    out: Out = None,
) -> None:
    """Capture every graph of a configuration and show what each one reads and writes."""
    from pcpbench.request import CaptureRequest

    request = CaptureRequest(mode=mode, options=options, json=json, out=out)
    request.check()  # before torch is imported: a refusal answers at once
    from pcpbench.session import run_capture

    raise typer.Exit(run_capture(request))


@app.command(epilog="Example: pcpbench compare eager full --scenario preemption --spec-tokens 3")
@engine_options()
def compare(
    base: Base,
    candidate: Candidate,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario",
            help="Shipped name or YAML file, or all; repeatable. Default: the core scenarios.",
        ),
    ] = None,
    *,
    options: EngineOptions,
    feed: Annotated[
        str,
        typer.Option(
            "--feed",
            help="teacher-forced: the reference's tokens feed every arm; free-running: its own.",
        ),
    ] = "teacher-forced",
    repetitions: Annotated[
        int,
        typer.Option("--repetitions", help="Timed runs of each scenario and arm; 0 judges only."),
    ] = 3,
    quick: Quick = False,
    check: Check = "quick",
    inject: Inject = None,
    save_baseline: SaveBaseline = None,
    processes: BaselineProcesses = None,
    baseline: Baseline = None,
    engine_python: EnginePython = None,
    engine_timeout: EngineTimeout = None,
    json: Json = False,
    out: Out = None,
) -> None:
    """Replay arm CANDIDATE against arm BASE over scenarios and judge what it computed.

    With `builtin vllm` instead of arms: hold what both targets prepare for the same steps against
    each other and the oracle, field by field; nothing is timed.

    The first scenario that fails leaves divergence/ in the run's directory, for `pcpbench repro`.
    A scenario in which the fault of --inject was not found is not compared: it never passes.
    """
    from pcpbench.request import CompareRequest
    from pcpbench.targets_request import TargetsRequest, names_targets

    if names_targets(base, candidate):
        asked = TargetsRequest(
            base=base,
            candidate=candidate,
            options=options,
            scenarios=tuple(scenario or ()),
            quick=quick,
            repetitions=repetitions,
            feed=feed,
            checks=check,
            inject=inject,
            save_baseline=save_baseline,
            processes=processes,
            baseline=baseline,
            engine_python=engine_python,
            engine_timeout=engine_timeout,
            json=json,
            out=out,
        )
        asked.check()
        from pcpbench.session.compare_targets import run_compare_targets

        raise typer.Exit(run_compare_targets(asked))
    request = CompareRequest(
        base=base,
        candidate=candidate,
        scenarios=tuple(scenario or ()),
        options=options,
        feed=feed,
        repetitions=repetitions,
        checks=check,
        json=json,
        out=out,
        inject=inject,
        save_baseline=save_baseline,
        processes=processes,
        baseline=baseline,
        quick=quick,
        engine_python=engine_python,
        engine_timeout=engine_timeout,
    )
    request.check()  # before torch is imported: a refusal answers at once
    from pcpbench.session import run_compare

    raise typer.Exit(run_compare(request))


@app.command(epilog="Example: pcpbench repro results/20260101T120000Z-compare-1a2b/divergence")
def repro(
    bundle: Annotated[
        Path, typer.Argument(help="The divergence/ directory of a run, or the run's directory.")
    ],
    json: Json = False,
) -> None:
    """Run the two arms of a failed scenario again, up to the step where they parted.

    Exit code 1: they part again; 0: they do not any more; 2: no such bundle, or a damaged one;
    3: it cannot be run here.
    """
    from pcpbench.session.repro import ReproRequest, run_repro

    raise typer.Exit(run_repro(ReproRequest(bundle=bundle, json=json)))


@app.command(epilog="Example: pcpbench doctor")
def doctor() -> None:
    """Show versions, devices and backends, and what can and cannot run here and why."""
    from pcpbench.doctor import run_doctor

    raise typer.Exit(run_doctor())


@scenarios_app.command("list", epilog="Example: pcpbench scenarios list")
def scenarios_list() -> None:
    """List the shipped scenarios."""
    from pcpbench.scenario_commands import show_list

    show_list()


@scenarios_app.command("show", epilog="Example: pcpbench scenarios show s1-grow-shrink")
def scenarios_show(
    scenario: Annotated[str, typer.Argument(help="Shipped name or YAML file.")],
) -> None:
    """Show one scenario and the steps it turns into."""
    from pcpbench.scenario_commands import show_one

    show_one(scenario)


@scenarios_app.command("validate", epilog="Example: pcpbench scenarios validate mine.yaml")
def scenarios_validate(
    files: Annotated[list[str], typer.Argument(help="YAML files or shipped names.")],
) -> None:
    """Check scenario files; exit 2 at the first that cannot be used."""
    from pcpbench.scenario_commands import validate

    validate(files)


@scenarios_app.command("schema", epilog="Example: pcpbench scenarios schema > scenario.json")
def scenarios_schema() -> None:
    """Print the JSON Schema of a scenario file."""
    from pcpbench.scenario_commands import show_schema

    show_schema()


def main() -> None:
    """Run the command line; every error ends in one sentence and its exit code."""
    guard_streams()
    guard_stops()
    code = run(sys.argv[1:])
    end_guard()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command line with arguments and return the exit code."""
    try:
        refuse_empty(arguments)
        refuse_undecodable(arguments)
        refuse_repeated(arguments, typer.main.get_command(app))
        result = app(arguments, prog_name="pcpbench", standalone_mode=False)
        code = _flushed(result if isinstance(result, int) else 0)
        return _interrupted() if code == INTERRUPTED else code
    except PcpbenchError as error:
        return _complain(str(error), error.exit_code)
    except typer.Exit as stop:
        return stop.exit_code
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its text is the whole help
            _say(text_of(error))
            return _complain("name a command.", 2)
        return _complain(text_of(error), 2)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted()
    except OSError as error:  # no verdict; what befalls stdout and stderr is in streams.py
        return _complain(f"a file could not be read or written: {error}.", 3)
    except SystemExit as stop:  # a signal, or the console's answer to a pipe that nobody guards
        return _left(stop)
    except Exception:
        _say(printable(traceback.format_exc()).rstrip("\n"))
        return _complain("pcpbench itself failed (see above); nothing was measured.", 3)


def _flushed(code: int) -> int:
    """Told here, not by the interpreter: a stdout that cannot be written is 3, but no pardon."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except PcpbenchError as error:
        return _complain(str(error), code if code == 1 else error.exit_code)
    return code


def _left(stop: SystemExit) -> int:
    """The exit code of who called sys.exit: no library's 1, and no text, is a regression."""
    if stop.code is None:
        return 0
    if not isinstance(stop.code, int):
        return _complain(f"something in it ended the program: {stop.code}", 3)
    return _interrupted(stop.code) if stop.code > 128 else 3 if stop.code == 1 else stop.code


def _interrupted(exit_code: int = INTERRUPTED) -> int:
    end_guard()
    return _complain("interrupted: what had finished is on disk.", exit_code)


def _complain(message: str, exit_code: int) -> int:
    """One line, whatever a device or a library said: who started us reads the last one."""
    _say(f"pcpbench: {printable(' '.join(message.splitlines()))}")
    return exit_code


def _say(text: str) -> None:
    """Talk. Where it cannot be written the exit code alone has to do: nothing may replace it."""
    if sys.stderr is None:  # print would take stdout instead
        return
    with suppress(Exception):
        print(text, file=sys.stderr)
