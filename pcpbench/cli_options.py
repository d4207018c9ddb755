"""Options that several commands share: flag, type and help text. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pcpbench.gate_defaults import BASELINE_PROCESSES
from pcpbench.modes import ARM_MODES

ARMS = ", ".join(ARM_MODES)
Base = Annotated[str, typer.Argument(help=f"Arm to compare with: {ARMS}; or builtin.")]
Candidate = Annotated[str, typer.Argument(help=f"Arm to judge: {ARMS}; or vllm.")]
Pcp = Annotated[int, typer.Option("--pcp", help="Prefill context parallel size.")]
Dcp = Annotated[int, typer.Option("--dcp", help="Decode context parallel size.")]
Target = Annotated[
    str,
    typer.Option(
        "--target",
        help="What is put on the stand: builtin (pcpbench's engine), vllm (the installed vLLM's "
        "worker classes) or, to compare, engine (vLLM's whole LLM, a process an arm).",
    ),
]
FaultTarget = Annotated[
    str,
    typer.Option(
        "--target",
        help="Whose code is damaged: builtin (pcpbench's engine) or vllm (the installed vLLM's "
        "worker classes); each has a catalogue of its own.",
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Two small scenarios unless --scenario names others; judged, not timed."
    ),
]
Tp = Annotated[int, typer.Option("--tp", help="Tensor parallel size.")]
Interleave = Annotated[
    int, typer.Option("--interleave", help="Consecutive KV positions a DCP rank owns.")
]
DcpBackend = Annotated[
    str, typer.Option("--dcp-backend", help="How DCP merges attention: ag_rs or a2a.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="Preset: tiny, tiny-swa, small, v2-lite-layer, tiny-sparse, tiny-moe or "
        "tiny-sparse-moe. auto: tiny-sparse where --pcp and --dcp are above 1, else tiny.",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
CaptureSizes = Annotated[
    str | None,
    typer.Option("--capture-sizes", help="Token counts to capture, such as 1,2,4,8."),
]
MaxNumSeqs = Annotated[
    int | None, typer.Option("--max-num-seqs", help="Most requests in one step.")
]
SpecTokens = Annotated[
    int, typer.Option("--spec-tokens", help="Draft tokens each decode verifies, such as 3.")
]
DynamicSpec = Annotated[
    str,
    typer.Option(
        "--dynamic-spec",
        help="Verify fewer drafts: off, step (as many in a step) or request (each its own number).",
    ),
]
DraftModel = Annotated[
    str,
    typer.Option(
        "--draft-model",
        help="Who drafts: planned (the plan alone), or mtp: a module that also proposes drafts "
        "after each step, in graphs of its own.",
    ),
]
FaultPcp = Annotated[
    int | None,
    typer.Option(
        "--pcp",
        help="World for all faults; default: each fault's smallest. Any one size sets the whole "
        "world: sizes left out are 1.",
    ),
]
FaultTp = Annotated[
    int | None, typer.Option("--tp", help="Tensor parallel size; sets the whole world, see --pcp.")
]
FaultDcp = Annotated[
    int | None,
    typer.Option("--dcp", help="Decode context parallel size; sets the whole world, see --pcp."),
]
FaultInterleave = Annotated[
    int | None,
    typer.Option(
        "--interleave",
        help="Consecutive KV positions of a DCP rank; sets the whole world, see --pcp.",
    ),
]
FaultModel = Annotated[
    str | None, typer.Option("--model", help="Preset for all faults; default: each fault's.")
]
FaultSpecTokens = Annotated[
    int | None, typer.Option("--spec-tokens", help="Draft tokens of a decode.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Backend = Annotated[str, typer.Option("--backend", help="Graphs: auto, host or accelerator.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and prompts.")]
Launcher = Annotated[str, typer.Option("--launcher", help="inproc: all ranks run in this process.")]
Check = Annotated[
    str,
    typer.Option(
        "--check", help="quick: what one run shows; full: also second replays and poisoned runs."
    ),
]
Microbatch = Annotated[
    bool,
    typer.Option(
        "--microbatch",
        help="Cut steps into two microbatches (dual-batch overlap); made for it: "
        "compare eager full --microbatch --scenario s16-microbatch-cut.",
    ),
]
ExpertParallel = Annotated[
    bool,
    typer.Option(
        "--expert-parallel/--no-expert-parallel",
        help="Deal out whole experts over all ranks (needs a model with experts, tiny-moe); "
        "without it TP divides each expert.",
    ),
]
All2AllBackend = Annotated[
    str | None,
    typer.Option(
        "--all2all-backend",
        help="How rows get to experts on other ranks: allgather_reducescatter (default) or "
        "all_to_all.",
    ),
]
EnginePython = Annotated[
    Path | None,
    typer.Option(
        "--engine-python", help="With --target engine: the Python that has vLLM (default: this)."
    ),
]
EngineTimeout = Annotated[
    float | None,
    typer.Option(
        "--engine-timeout",
        help="With --target engine: seconds that an engine may be silent (default 600).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout instead.")]
Inject = Annotated[
    str | None,
    typer.Option("--inject", help="Plant a fault of `pcpbench faults list`: see a failing run."),
]
SaveBaseline = Annotated[
    Path | None,
    typer.Option("--save-baseline", help="Time fresh processes too, and write a baseline here."),
]
BaselineProcesses = Annotated[
    int | None,
    typer.Option(
        "--processes",
        help=f"Fresh processes of --save-baseline; default {BASELINE_PROCESSES}.",
    ),
]
Baseline = Annotated[
    Path | None,
    typer.Option("--baseline", help="Then hold this run against a baseline, as `gate` does."),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Directory for the files (default results/<run>).")
]
