"""The `pcpbench check` commands: parse -> one frozen request -> one call. No logic.

Imports neither torch nor numpy at the top, as cli.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcpbench.cli_options import Json, Out

check_app = typer.Typer(no_args_is_help=True, help="Hold one part of an engine to the oracle.")


@check_app.callback()
def _check() -> None:
    pass


@check_app.command(
    "partition", epilog="Example: pcpbench check partition --target vllm --batches 500"
)
def check_partition(
    target: Annotated[
        str,
        typer.Option("--target", help="builtin, or vllm: the installed vLLM as well."),
    ] = "builtin",
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="All small batches instead of a sample.")
    ] = False,
    batches: Annotated[int, typer.Option("--batches", help="Batches of the sample.")] = 300,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sample.")] = 0,
    pcp: Annotated[
        list[int] | None, typer.Option("--pcp", help="Only this PCP size; repeatable.")
    ] = None,
    dcp: Annotated[
        list[int] | None, typer.Option("--dcp", help="Only this DCP size; repeatable.")
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option("--tp", help="Only this TP size; repeatable.")
    ] = None,
    interleave: Annotated[
        list[int] | None, typer.Option("--interleave", help="Only this interleave; repeatable.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", help="Most requests of a batch, 1 to 4.")
    ] = 4,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", help="One batch, as a report names it; repeatable."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Processes.")] = 1,
    max_time: Annotated[
        float | None, typer.Option("--max-time", help="Seconds after which no part begins.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Directory of an earlier exhaustive run to go on with."),
    ] = None,
    json: Json = False,
    out: Out = None,
) -> None:
    """Compare partition, tables, slots, lengths, microbatches and dispatch of small batches.

    Every field of every rank has to be the oracle's, exactly, and a batch that must be refused has
    to be refused. Exit code 0: no difference that nobody can explain; 1: one; 3: cut short.
    """
    from pcpbench.partition_request import PartitionRequest, PartitionSettings

    request = PartitionRequest(
        settings=PartitionSettings(
            target=target,
            exhaustive=exhaustive,
            batches=batches,
            seed=seed,
            pcp=tuple(pcp or ()),
            dcp=tuple(dcp or ()),
            tp=tuple(tp or ()),
            interleave=tuple(interleave or ()),
            max_requests=max_requests,
            batch=tuple(batch or ()),
        ),
        jobs=jobs,
        max_time=max_time,
        resume=resume,
        json=json,
        out=out,
    )
    request.check()  # before torch is imported: a refusal answers at once
    from pcpbench.session.partition import run_partition

    raise typer.Exit(run_partition(request))
