"""Commands that are many runs in one: `modes`, `matrix`. Parse -> one frozen request -> one call.

Owns their options. Imports neither torch nor numpy at the top, as cli.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pcpbench.cli_engine_options import engine_options
from pcpbench.cli_options import Check, Inject, Json, Out

if TYPE_CHECKING:
    from pcpbench.engine_options import EngineOptions


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.command(epilog="Example: pcpbench modes --prompts 100 --pcp 2 --dtype bfloat16")(modes)
    app.command(epilog="Example: pcpbench matrix --parallel pcp2 --k 0 --model dense")(matrix)


@engine_options("target")
def modes(
    prompts: Annotated[int, typer.Option("--prompts", help="How many prompts.")] = 200,
    prompt_len: Annotated[
        str, typer.Option("--prompt-len", help="Tokens of a prompt: 16, or a range such as 8-32.")
    ] = "8-32",
    output_len: Annotated[
        str, typer.Option("--output-len", help="Tokens to generate: 8, or a range such as 4-16.")
    ] = "4-16",
    *,
    options: EngineOptions,
    feed: Annotated[
        str,
        typer.Option(
            "--feed",
            help="free-running: every mode goes on with its own tokens; teacher-forced: all are "
            "fed the reference's, and in float32 none may differ.",
        ),
    ] = "free-running",
    repetitions: Annotated[
        int, typer.Option("--repetitions", help="Timed runs of each mode; 0 judges only.")
    ] = 2,
    check: Check = "quick",
    inject: Inject = None,
    json: Json = False,
    out: Out = None,
) -> None:
    """Run a few hundred prompts in NONE, PIECEWISE, FULL_DECODE_ONLY and FULL_AND_PIECEWISE.

    One row a mode: tokens equal to NONE's, times, and how much ran as a graph. A token that differs
    is traced: exit code 0 where padding drift explains it, 1 where not.
    """
    from pcpbench.modes_request import ModesRequest

    request = ModesRequest(
        options=options,
        num_prompts=prompts,
        prompt_len=prompt_len,
        output_len=output_len,
        feed=feed,
        repetitions=repetitions,
        checks=check,
        inject=inject,
        json=json,
        out=out,
    )
    request.check()  # before torch is imported: a refusal answers at once
    from pcpbench.session.modes import run_modes

    raise typer.Exit(run_modes(request))


def matrix(
    parallel: Annotated[
        list[str] | None,
        typer.Option(
            "--parallel",
            help="Ranks, such as pcp2 or tp4-dcp2-i4 (i: interleave); repeatable. Default: pcp2, "
            "pcp4, pcp2-dcp2, pcp2-tp2-dcp4, tp4-dcp2-i4.",
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option("--k", help="Draft tokens of a decode; repeatable. Default: 0, 1, 3."),
    ] = None,
    microbatch: Annotated[
        list[str] | None, typer.Option("--microbatch", help="off or on; repeatable. Default: both.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="dense or moe; repeatable. Default: both.")
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", help="Shipped name or YAML file; repeatable. Default: all."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32 (default), bfloat16 or float16.")
    ] = None,
    check: Annotated[
        str | None, typer.Option("--check", help="quick (default) or full, as in compare.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of weights and prompts; default 0.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto (default), cpu, cuda or cuda:N.")
    ] = None,
    faults: Annotated[
        bool, typer.Option("--faults", help="Inject a fault of each class in every cell, too.")
    ] = False,
    inject: Inject = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Cells that run at once.")] = 1,
    max_time: Annotated[
        float | None, typer.Option("--max-time", help="Seconds after which no cell goes on.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Directory of an earlier run: its finished cells stand."),
    ] = None,
    json: Json = False,
    out: Out = None,
) -> None:
    """Prove every combination of ranks, draft tokens, microbatches and model, cell by cell.

    Each cell is a process of its own: compare full full_and_piecewise over all scenarios, untimed.
    Exit code 0: every cell passed; 1: one failed; 3: none failed, but one has no verdict.
    """
    from pcpbench.matrix_request import MatrixRequest

    request = MatrixRequest(
        parallel=tuple(parallel or ()),
        spec_tokens=tuple(k or ()),
        microbatch=tuple(microbatch or ()),
        model=tuple(model or ()),
        scenario=tuple(scenario or ()),
        dtype=dtype,
        checks=check,
        seed=seed,
        device=device,
        faults=faults or None,
        inject=inject,
        jobs=jobs,
        max_time=max_time,
        resume=resume,
        json=json,
        out=out,
    )
    request.check()  # before torch is imported: a refusal answers at once
    from pcpbench.session.matrix import run_matrix

    raise typer.Exit(run_matrix(request))
