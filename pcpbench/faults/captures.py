"""Faults of what is captured: a shape that should have a whole graph has none (K37)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from pcpbench.engine import engine as engine_module
from pcpbench.engine.dispatcher import Candidates
from pcpbench.engine.engine import Engine
from pcpbench.faults.classes import PCP, shipped
from pcpbench.faults.fault import Site
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode

MIXED: Final = replace(PCP, candidate="full_and_piecewise", scenario="s4-one-token-prompts")
FULL: Final = CUDAGraphMode.FULL


def _drop(site: Site, dropped: Callable[[Candidates, int], list[BatchExecutionDescriptor]]) -> None:
    """Leave candidates out without a word. dropped: which, of those and max_num_seqs."""

    def faulty(build: Callable[..., Candidates], *args: Any, **kwargs: Any) -> Candidates:
        candidates = build(*args, **kwargs)
        lost = dropped(candidates, kwargs["max_num_seqs"])
        if lost:
            site.hit()
        kept = tuple(each for each in candidates.descriptors if each not in lost)
        return replace(candidates, descriptors=kept)

    site.wrap(engine_module, "build_candidates", faulty)


def largest_batch_not_captured(site: Site) -> None:
    """The size of exactly max_num_seqs is taken for too large."""
    _drop(site, lambda found, most: [d for d in found.descriptors if d.num_reqs == most])


def smallest_not_captured(site: Site) -> None:
    """The loop over sizes ends one early."""
    _drop(site, lambda found, _: list(found.descriptors[-1:]))


def mixed_not_captured(site: Site) -> None:
    """The mixed routine's mode is read as NONE."""
    _drop(site, lambda found, _: [d for d in found.descriptors if d.cg_mode is not FULL])


def full_graph_in_pieces(site: Site) -> None:
    """The break flag of the PIECEWISE captures stays set for FULL ones."""

    def faulty(
        prepare: Callable[..., Any], self: Engine, descriptor: BatchExecutionDescriptor
    ) -> Any:
        routines = prepare(self, descriptor)
        for worker in self.workers:
            worker.context.breaks = True
        if descriptor.cg_mode is FULL:
            site.hit()
        return routines

    site.wrap(Engine, "prepare_inputs_to_capture", faulty)


FAULTS: Final = (
    shipped("K37", "largest-batch-not-captured", "The decode graph of exactly max_num_seqs "
            "requests is not captured.", largest_batch_not_captured, "C10", at_capture=True),
    shipped("K37", "smallest-size-not-captured", "The smallest capture size is dropped without a "
            "word.", smallest_not_captured, "C10", at_capture=True),
    shipped("K37", "no-piecewise-graphs", "full_and_piecewise captures no PIECEWISE graph.",
            mixed_not_captured, "C10", setting=MIXED, at_capture=True),
    shipped("K37", "full-graph-in-pieces", "FULL graphs are cut at attention and run it eagerly.",
            full_graph_in_pieces, "C10", setting=MIXED, at_capture=True),
)  # fmt: skip
