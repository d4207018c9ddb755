"""C18 of a draft model: its first pass computes what a forward over a request's own tokens gives.

Owns which positions the first pass drafted from, and their logits; the rest is dense.py's. Later
passes go on from guesses: what they are fed is held by C22, and they run the same layer.
"""

from __future__ import annotations

from typing import Any

from pcpbench.checks.dense import DenseCheck
from pcpbench.plan import StepPlan
from pcpbench.records import StepRecord


class DraftDenseCheck(DenseCheck):
    """Gathers what the first pass made of the chosen requests; it sees one token ahead."""

    tensor, ahead = "draft_logits", 1

    def _observe(self, step: StepPlan, record: StepRecord) -> None:
        super()._observe(step, record)
        logits = record.draft_logits
        if logits is None or not len(logits) or logits.shape[1] != len(step.scheduled):
            return  # C22 names it
        for request, row in zip(step.scheduled, logits[0], strict=True):
            found = self._samples.get(request.req_id)
            if found is not None:
                end = request.num_computed_tokens + request.num_scheduled_tokens
                found.rows[end - request.num_rejected_tokens - 1] = record.step, row

    def _keep(self, *_: Any) -> None:
        """The target's own logits are another check's."""
