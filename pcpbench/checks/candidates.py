"""C10 over an arm's graphs: what it may dispatch to is what SPEC 3 makes of its capture sizes.

Owns the judge's own list of candidates, and that each was captured as its mode says. Knows no step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import CUDAGraphMode
from pcpbench.plan import ScenarioPlan
from pcpbench.records import Violation

Shape = tuple[str, int, int | None, int | None, int | None]
"""Mode, tokens, requests, tokens of each request, longest query where they may differ."""


def wanted_shapes(setup: ArmSetup, plan: ScenarioPlan) -> set[Shape]:
    """The captured shapes of a mode with a decode routine, or of PIECEWISE; none for NONE.

    Sizes 1, 2, 4, 8 with decodes of 3 tokens: decode graphs of 3 tokens (1 request) and 6 (2); 8
    would become 9, past the largest size that a step has room for. Where the number of drafts
    varies, the same for decodes of 2 tokens and of 1, and a varlen graph of each size for all
    requests that fit it.
    """
    shapes: set[Shape] = set()
    mode, sizes, longest = _mode(setup), setup.capture_sizes or (), setup.decode_query_len
    lengths = range(1, longest + 1) if setup.has_dynamic_drafts else (longest,)
    usable = [size for size in sizes if size <= plan.max_num_batched_tokens]
    for size in usable:
        if mode.mixed_mode() is CUDAGraphMode.PIECEWISE:
            shapes.add(("PIECEWISE", size, None, None, None))
        if not mode.has_full_cudagraphs():
            continue
        for length in lengths:
            num_reqs = (size + length - 1) // length
            fits = num_reqs * length <= max(usable)
            if fits and num_reqs <= plan.max_num_seqs:
                shapes.add(("FULL", num_reqs * length, num_reqs, length, None))
        if setup.has_dynamic_drafts and size <= plan.max_num_seqs * longest:
            shapes.add(("FULL", size, min(size, plan.max_num_seqs), None, longest))
    return shapes


def candidate_violations(setup: ArmSetup, plan: ScenarioPlan) -> Iterator[Violation]:
    """C10: shapes that are missing or not as they should be; graphs that are missing or cut."""
    messages = (*_shape_messages(setup, plan), *_graph_messages(setup), *_twin_messages(setup))
    for message in messages:
        yield Violation(
            contract="C10",
            arm=setup.name,
            scenario=plan.scenario,
            step=plan.steps[0].index if plan.steps else 0,
            rank=None,
            tensor="candidates",
            message=message,
        )


def _shape_messages(setup: ArmSetup, plan: ScenarioPlan) -> Iterator[str]:
    """Candidates against the list made here. Plain FULL is refused under PCP and left out."""
    if setup.capture_sizes is None or _mode(setup) is CUDAGraphMode.FULL:
        return
    wanted = wanted_shapes(setup, plan)
    found = _candidates(setup)
    sizes = ", ".join(map(str, setup.capture_sizes))
    made = (
        f"capture sizes {sizes}, decodes of {setup.decode_query_len} tokens and at most "
        f"{plan.max_num_seqs} requests"
    )
    for shapes, what in ((wanted - found, "is missing among"), (found - wanted, "is no shape of")):
        for shape in sorted(shapes, key=str):
            yield f"{_words(shape)} {what} the candidates for {made}"


def _graph_messages(setup: ArmSetup) -> Iterator[str]:
    """Graphs against candidates, and FULL whole, PIECEWISE cut at attention (SPEC 3)."""
    if setup.captured is None:
        return
    candidates = _candidates(setup)
    found: set[Shape] = {
        (
            graph.mode,
            graph.num_tokens,
            graph.num_reqs,
            graph.uniform_token_count,
            graph.max_query_len,
        )
        for graph in setup.captured
    }
    for shape in sorted(candidates - found, key=str):
        yield f"{_words(shape)} is a candidate and was not captured"
    for shape in sorted(found - candidates, key=str):
        yield f"{_words(shape)} was captured and is no candidate"
    for graph in setup.captured:
        if graph.mode == "FULL" and graph.eager_breaks:
            count = f"{graph.eager_breaks} eager break{'s' if graph.eager_breaks > 1 else ''}"
            yield f"{graph.descriptor} has {count}: a FULL graph holds the whole forward pass"
        if graph.mode == "PIECEWISE" and not graph.eager_breaks:
            yield f"{graph.descriptor} has no eager break: attention was captured with the rest"


def _twin_messages(setup: ArmSetup) -> Iterator[str]:
    """Each shape that a step in microbatches can have is there twice, whole and cut (SPEC 3, 8)."""
    least = None if setup.ubatch_thresholds is None else min(setup.ubatch_thresholds)
    graphs = None if setup.captured is None else {graph.descriptor for graph in setup.captured}
    for whole in setup.candidates:
        if whole.num_ubatches > 1:
            continue
        twin = replace(whole, num_ubatches=2)
        is_due, is_there = least is not None and whole.num_tokens >= least, twin in setup.candidates
        if is_due and not is_there:
            yield f"{twin.label} is missing among the candidates"
        elif is_there and not is_due:
            yield f"{twin.label} is a candidate, and no step of its size is cut"
        elif is_due and graphs is not None and twin.label not in graphs:
            yield f"{twin.label} is a candidate and was not captured"


def _mode(setup: ArmSetup) -> CUDAGraphMode:
    return setup.mode if setup.descriptor_mode is None else setup.descriptor_mode


def _candidates(setup: ArmSetup) -> set[Shape]:
    return {
        (
            each.cg_mode.name,
            each.num_tokens,
            each.num_reqs,
            each.uniform_token_count,
            each.max_query_len,
        )
        for each in setup.candidates
    }


def _words(shape: Shape) -> str:
    mode, num_tokens, num_reqs, length, longest = shape
    each = f"of {length}" if longest is None else f"of at most {longest}"
    rows = "" if num_reqs is None else f" in {num_reqs} requests {each}"
    return f"{mode} with {num_tokens} tokens{rows}"
