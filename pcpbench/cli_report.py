"""Commands that read runs back: `report`, `trace`. Parse -> one call -> where the file is.

Owns their options. Imports nothing heavy at the top, as cli.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcpbench.report.printable import printable

Out = Annotated[
    Path | None,
    typer.Option("--out", help="File to write; only a file that this command made is replaced."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.command(epilog="Example: pcpbench report results/20260101T120000Z-compare-1a2b")(report)
    app.command(epilog="Example: pcpbench trace results/20260101T120000Z-compare-1a2b")(trace)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Directories of runs, or files of `faults run --json`."
        ),
    ],
    out: Out = None,
) -> None:
    """Make one HTML file of plots and tables from runs; several runs also get a trend.

    Default file: report.html in the directory of the run, for several runs in this directory.
    """
    from pcpbench.report_commands import write_report

    print(printable(str(write_report(runs, out))))


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a `compare` run.")],
    out: Out = None,
) -> None:
    """Write a Chrome trace (chrome://tracing, Perfetto) of a comparison's steps by arm and rank.

    Default file: trace.json in the directory of the run.
    """
    from pcpbench.report_commands import write_trace

    print(printable(str(write_trace(run, out))))
