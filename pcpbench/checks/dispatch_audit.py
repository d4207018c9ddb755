"""The dispatch audit of one arm: what each step ran as, what would have served it, and why not.

Owns the classes of batches and the search for one that no graph ever served. Judges nothing: that
is contract C10's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pcpbench.checks.contract_dispatch import smallest_covering
from pcpbench.checks.oracle import StepExpectation
from pcpbench.checks.setup import ArmSetup
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.plan import StepPlan
from pcpbench.records import StepRecord
from pcpbench.results import BatchClass, DispatchSummary, StepAudit

NONE = CUDAGraphMode.NONE


class ClassKey(NamedTuple):
    """What makes two batches alike for dispatch.

    num_reqs: requests of a decode batch, 0 for one with a prefill. query_len: of each decode, None
    where they differ. too_large: which limit of the captured sizes it exceeds, "" for none.
    """

    num_reqs: int
    query_len: int | None
    too_large: str


@dataclass
class _Seen:
    """Steps of one class. size: the largest count a rank that `too_large` speaks of."""

    num_steps: int = 0
    num_served: int = 0
    size: int = 0
    ran_as: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


class DispatchAudit:
    """Takes in the steps of one arm and ends with a summary; `steps` has one entry a step."""

    def __init__(self, setup: ArmSetup) -> None:
        self.setup = setup
        self.steps: list[StepAudit] = []
        self._modes: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._classes: dict[ClassKey, _Seen] = {}

    def observe(self, step: StepPlan, record: StepRecord, expected: StepExpectation | None) -> None:
        """Add one step; expected: None for an idle one."""
        best = None if expected is None else self._smallest(expected)
        choices = tuple(rank.descriptor.label for rank in record.ranks)
        self.steps.append(
            StepAudit(
                arm=self.setup.name,
                step=step.index,
                smallest=None if best is None else best.label,
                rank_choices=choices,
                excess_tokens=_excess(record.descriptor, best) * len(record.ranks),
            )
        )
        if expected is None:
            self._modes["IDLE"] += 1
            return
        # A padded twin runs eagerly, whatever it is padded to.
        mode = NONE if self.setup.padded_like is not None else record.descriptor.cg_mode
        self._modes[mode.name] += 1
        if record.miss_reason and self.setup.padded_like is None:
            self._reasons[record.miss_reason] += 1
        wanted = self._wanted(expected.has_prefill)
        if wanted is not NONE:
            self._add_class(expected, len(step.scheduled), mode, wanted, record.miss_reason)

    def summary(self) -> DispatchSummary:
        """The audit of all steps so far."""
        larger = [step.excess_tokens for step in self.steps if step.excess_tokens]
        return DispatchSummary(
            modes=dict(self._modes.most_common()),
            reasons=dict(self._reasons.most_common()),
            steps_ranks_disagree=sum(len(set(step.rank_choices)) > 1 for step in self.steps),
            steps_larger_than_needed=len(larger),
            excess_tokens=sum(larger),
            never_served=tuple(self._never_served()),
        )

    def _smallest(self, expected: StepExpectation) -> BatchExecutionDescriptor | None:
        counts = expected.dispatch_num_tokens, expected.has_prefill
        return smallest_covering(self.setup.candidates_for(*counts), expected)

    def _wanted(self, has_prefill: bool) -> CUDAGraphMode:
        mode = self.setup.mode
        return mode.mixed_mode() if has_prefill else mode.decode_mode()

    def _add_class(
        self,
        expected: StepExpectation,
        num_reqs: int,
        mode: CUDAGraphMode,
        wanted: CUDAGraphMode,
        reason: str,
    ) -> None:
        graphs = [d for d in self.setup.candidates if d.cg_mode is wanted]
        too_large, size = _too_large(graphs, expected)
        if expected.has_prefill:
            key = ClassKey(0, None, too_large)
        else:
            key = ClassKey(num_reqs, expected.uniform_token_count, too_large)
        seen = self._classes.setdefault(key, _Seen())
        seen.num_steps += 1
        # A prefill that ran as FULL was served as well; whether it may is C10's to say.
        seen.num_served += mode in (wanted, CUDAGraphMode.FULL)
        seen.size = max(seen.size, size)
        seen.ran_as["eager" if mode is NONE else mode.name] += 1
        if reason:
            seen.reasons[reason] += 1

    def _never_served(self) -> Iterator[BatchClass]:
        """Classes of which no step ran as configured; neighbours in size are told as one."""
        missed = sorted(
            ((key, seen) for key, seen in self._classes.items() if not seen.num_served),
            key=lambda item: (item[0].query_len or 0, item[0].too_large, item[0].num_reqs),
        )
        runs: list[list[tuple[ClassKey, _Seen]]] = []
        for key, seen in missed:
            last = runs[-1][-1][0] if runs else None
            if last is not None and key == last._replace(num_reqs=last.num_reqs + 1):
                runs[-1].append((key, seen))
            else:
                runs.append([(key, seen)])
        for run in runs:
            yield self._batch_class(run)

    def _batch_class(self, run: list[tuple[ClassKey, _Seen]]) -> BatchClass:
        (first, _), (last, _) = run[0], run[-1]
        ran_as: Counter[str] = sum((seen.ran_as for _, seen in run), Counter())
        reasons: Counter[str] = sum((seen.reasons for _, seen in run), Counter())
        wanted = self._wanted(first.num_reqs == 0).name
        graphs = [d for d in self.setup.candidates if d.cg_mode.name == wanted]
        if not graphs:
            why = f"no {wanted} graph was captured"
        elif first.too_large:
            size = max(seen.size for _, seen in run)
            why = _limit_words(first.too_large, size, graphs)
        else:
            why = ", ".join(reason for reason, _ in reasons.most_common()) or "no reason was given"
        return BatchClass(
            name=_class_name(first, last.num_reqs),
            wanted=wanted,
            ran_as=tuple(name for name, _ in ran_as.most_common()),
            num_steps=sum(seen.num_steps for _, seen in run),
            why=why,
        )


def _excess(chosen: BatchExecutionDescriptor, best: BatchExecutionDescriptor | None) -> int:
    """Tokens a rank that a smaller graph of the same mode would have saved."""
    if best is None or chosen.cg_mode is not best.cg_mode:
        return 0
    return max(0, chosen.num_tokens - best.num_tokens)


def _too_large(
    graphs: list[BatchExecutionDescriptor], expected: StepExpectation
) -> tuple[str, int]:
    """Which count a rank is past the largest captured size, `rows` before `tokens`, and the count.

    ("", 0) where neither is, or nothing was captured.
    """
    rows = [d.num_reqs for d in graphs if d.num_reqs is not None]
    if rows and expected.dispatch_num_reqs > max(rows):
        return "rows", expected.dispatch_num_reqs
    if graphs and expected.dispatch_num_tokens > max(d.num_tokens for d in graphs):
        return "tokens", expected.dispatch_num_tokens
    return "", 0


def _limit_words(limit: str, size: int, graphs: list[BatchExecutionDescriptor]) -> str:
    sizes = [d.num_reqs if limit == "rows" else d.num_tokens for d in graphs]
    largest = max(known for known in sizes if known is not None)
    return f"larger than the largest captured size {largest} (up to {size} {limit} a rank)"


def _class_name(key: ClassKey, last: int) -> str:
    if not key.num_reqs:
        return "large batches with a prefill" if key.too_large else "batches with a prefill"
    if key.query_len is None:
        each = " of unequal lengths"
    else:
        each = f" of {key.query_len} tokens" if key.query_len > 1 else ""
    if last > key.num_reqs:
        return f"decode with {key.num_reqs} to {last} requests{each}"
    return f"decode with {last} request{'s' if last > 1 else ''}{each}"
