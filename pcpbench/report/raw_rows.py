"""Rows of `samples.csv`, `drift.csv` and `phases.csv`: what a run measured, before any statistic.

Owns which fact goes into which column. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pcpbench.report.csv_files import Row, ms
from pcpbench.results import PlaceDrift
from pcpbench.timings import Phase, Sample


def sample_rows(scenario: str, samples: Iterable[Sample]) -> Iterator[Row]:
    """One row for each sample, in their order."""
    for sample in samples:
        yield {
            "scenario": scenario,
            "arm": sample.arm,
            "repetition": sample.repetition,
            "measure": sample.measure,
            "request": sample.request,
            "step": sample.step,
            "value_ms": ms(sample.value_s),
        }


def drift_rows(scenario: str, drifts: Iterable[PlaceDrift]) -> Iterator[Row]:
    """One row for each pair of arms, step, tensor and layer, in their order."""
    for drift in drifts:
        worst = drift.worst
        yield {
            "scenario": scenario,
            "step": drift.step,
            "kind": drift.kind,
            "arm": drift.arm,
            "twin": drift.twin,
            "layer": drift.layer,
            "tensor": worst.tensor,
            "outcome": worst.outcome,
            "num_elements": worst.num_elements,
            "num_mismatched": worst.num_mismatched,
            "max_abs": worst.max_abs,
            "relative": worst.relative,
            "cosine": worst.cosine,
        }


def phase_rows(scenario: str, phases: Iterable[Phase]) -> Iterator[Row]:
    """One row for each phase, in their order."""
    for phase in phases:
        yield {
            "scenario": scenario,
            "arm": phase.arm,
            "step": phase.step,
            "rank": phase.rank,
            "phase": phase.name,
            "start_ms": ms(phase.start_s),
            "duration_ms": ms(phase.duration_s),
        }
