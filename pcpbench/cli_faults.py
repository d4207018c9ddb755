"""The `pcpbench faults` commands: parse -> one frozen request -> one call. No logic.

Imports neither torch nor numpy at the top, as cli.py.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pcpbench.cli_options import (
    Check,
    Device,
    Dtype,
    ExpertParallel,
    FaultDcp,
    FaultInterleave,
    FaultModel,
    FaultPcp,
    FaultSpecTokens,
    FaultTarget,
    FaultTp,
    Json,
    Microbatch,
    Seed,
)

faults_app = typer.Typer(no_args_is_help=True, help="Inject known faults: does the judge see them?")


@faults_app.command("list", epilog="Example: pcpbench faults list")
def faults_list(target: FaultTarget = "builtin") -> None:
    """List the fault catalogue: name, class, contracts expected, what goes wrong."""
    from pcpbench.session.faults import run_list

    raise typer.Exit(run_list(target))


@faults_app.command("run", epilog="Example: pcpbench faults run --fault stale-padded-seq-lens")
def faults_run(
    target: FaultTarget = "builtin",
    fault: Annotated[
        list[str] | None, typer.Option("--fault", help="Name; repeatable. Default: all.")
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            "--scenario", help="Shipped name or YAML file; repeatable. Default: each fault's own."
        ),
    ] = None,
    pcp: FaultPcp = None,
    tp: FaultTp = None,
    dcp: FaultDcp = None,
    interleave: FaultInterleave = None,
    spec_tokens: FaultSpecTokens = None,
    model: FaultModel = None,
    device: Device = "auto",
    check: Check = "quick",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    microbatch: Microbatch = False,
    expert_parallel: ExpertParallel = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
    json: Json = False,
) -> None:
    """Inject faults and show which contracts fire; exit 1 when one escapes."""
    from pcpbench.session.faults import run_faults
    from pcpbench.session.faults_request import FaultsRequest

    request = FaultsRequest(
        target=target,
        faults=tuple(fault or ()),
        scenarios=tuple(scenario or ()),
        pcp=pcp,
        tp=tp,
        dcp=dcp,
        interleave=interleave,
        spec_tokens=spec_tokens,
        model=model,
        device=device,
        checks=check,
        dtype=dtype,
        seed=seed,
        microbatch=microbatch,
        expert_parallel=expert_parallel,
        markdown=markdown,
        json=json,
    )
    raise typer.Exit(run_faults(request))


@faults_app.command("clean", epilog="Example: pcpbench faults clean --runs 200")
def faults_clean(
    runs: Annotated[int, typer.Option("--runs", help="How many comparisons.")] = 200,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw of settings.")] = 0,
    device: Device = "auto",
    check: Annotated[str, typer.Option("--check", help="quick or full, as in compare.")] = "quick",
) -> None:
    """Compare sound engines in settings drawn by chance; exit 1 when one is accused.

    Exit code 3 where none is, but one could not be compared.
    """
    from pcpbench.session.clean_runs import CleanRequest, run_clean

    request = CleanRequest(num_runs=runs, seed=seed, device=device, checks=check)
    raise typer.Exit(run_clean(request))
