"""C10 over an arm's candidates: what it may dispatch to is what SPEC 3 makes of its capture sizes.

Owns the judge's own list of candidates. Knows no step.
"""

from __future__ import annotations

from collections.abc import Iterator

from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.plan import ScenarioPlan
from pcpbench.records import Violation

Shape = tuple[str, int, int | None, int | None]
"""Mode, tokens, requests, tokens of each request."""


def wanted_shapes(setup: ArmSetup, plan: ScenarioPlan) -> set[Shape]:
    """The captured shapes of a mode with a decode routine, or of PIECEWISE.

    Sizes 1, 2, 4, 8 with decodes of 3 tokens: decode graphs of 3 tokens (1 request) and 6 (2); 8
    would become 9, which is past the largest size.
    """
    shapes: set[Shape] = set()
    sizes, length = setup.capture_sizes or (), setup.decode_query_len
    for size in sizes:
        if size > plan.max_num_batched_tokens:
            continue
        if setup.mode.mixed_mode() is CUDAGraphMode.PIECEWISE:
            shapes.add(("PIECEWISE", size, None, None))
        num_reqs = (size + length - 1) // length
        fits = num_reqs * length <= min(max(sizes), plan.max_num_batched_tokens)
        if setup.mode.has_full_cudagraphs() and fits and num_reqs <= plan.max_num_seqs:
            shapes.add(("FULL", num_reqs * length, num_reqs, length))
    return shapes


def candidate_violations(setup: ArmSetup, plan: ScenarioPlan) -> Iterator[Violation]:
    """C10: a violation for each shape that is missing, and for each that is not as it should be."""
    if setup.capture_sizes is None or setup.mode is CUDAGraphMode.FULL:
        return
    wanted = wanted_shapes(setup, plan)
    found = {_shape(candidate) for candidate in setup.candidates}
    sizes = ", ".join(map(str, setup.capture_sizes))
    made = f"capture sizes {sizes} and decodes of {setup.decode_query_len} tokens"
    for shapes, what in ((wanted - found, "is missing among"), (found - wanted, "is no shape of")):
        for shape in sorted(shapes, key=str):
            yield Violation(
                contract="C10",
                arm=setup.name,
                scenario=plan.scenario,
                step=plan.steps[0].index,
                rank=None,
                tensor="candidates",
                message=f"{_words(shape)} {what} the candidates for {made}",
            )


def _shape(candidate: BatchExecutionDescriptor) -> Shape:
    return (
        candidate.cg_mode.name,
        candidate.num_tokens,
        candidate.num_reqs,
        candidate.uniform_token_count,
    )


def _words(shape: Shape) -> str:
    mode, num_tokens, num_reqs, length = shape
    rows = "" if num_reqs is None else f" in {num_reqs} requests of {length}"
    return f"{mode} with {num_tokens} tokens{rows}"
