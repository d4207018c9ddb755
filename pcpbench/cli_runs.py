"""Commands that are many runs in one: `modes`. Parse -> one frozen request -> one call.

Owns their options. Imports neither torch nor numpy at the top, as cli.py.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pcpbench.cli_options import (
    Backend,
    CaptureSizes,
    Check,
    Dcp,
    Device,
    Dtype,
    Interleave,
    Json,
    Launcher,
    MaxNumSeqs,
    Microbatch,
    Model,
    Out,
    Pcp,
    Seed,
    SpecTokens,
    Tp,
)

Inject = Annotated[
    str | None,
    typer.Option("--inject", help="Plant a fault of `pcpbench faults list`: see a failing run."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.command(epilog="Example: pcpbench modes --prompts 100 --pcp 2 --dtype bfloat16")(modes)


def modes(
    prompts: Annotated[int, typer.Option("--prompts", help="How many prompts.")] = 200,
    prompt_len: Annotated[
        str, typer.Option("--prompt-len", help="Tokens of a prompt: 16, or a range such as 8-32.")
    ] = "8-32",
    output_len: Annotated[
        str, typer.Option("--output-len", help="Tokens to generate: 8, or a range such as 4-16.")
    ] = "4-16",
    pcp: Pcp = 2,
    dcp: Dcp = 1,
    tp: Tp = 1,
    interleave: Interleave = 1,
    model: Model = "tiny",
    dtype: Dtype = "float32",
    capture_sizes: CaptureSizes = None,
    max_num_seqs: MaxNumSeqs = None,
    spec_tokens: SpecTokens = 0,
    device: Device = "auto",
    backend: Backend = "auto",
    launcher: Launcher = "inproc",
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
    seed: Seed = 0,
    microbatch: Microbatch = False,
    json: Json = False,
    out: Out = None,
) -> None:
    """Run a few hundred prompts in NONE, PIECEWISE, FULL_DECODE_ONLY and FULL_AND_PIECEWISE.

    One row a mode: tokens equal to NONE's, times, and how much ran as a graph. A token that differs
    is traced: exit code 0 where padding drift explains it, 1 where not.
    """
    from pcpbench.modes_request import ModesRequest
    from pcpbench.request import EngineOptions

    request = ModesRequest(
        options=EngineOptions(
            pcp=pcp,
            dcp=dcp,
            tp=tp,
            interleave=interleave,
            model=model,
            dtype=dtype,
            capture_sizes=capture_sizes,
            max_num_seqs=max_num_seqs,
            spec_tokens=spec_tokens,
            device=device,
            backend=backend,
            launcher=launcher,
            seed=seed,
            microbatch=microbatch,
        ),
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
