"""Watches two arms step by step and keeps the first place where one left the other.

Owns from which step taps are compared: capture drift may not be anywhere, so from the first step
on; where a budget holds, intermediate results say something only once the judge has seen it broken.
Reads plans, records and arrays; knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pcpbench.checks.judge import ScenarioJudge
from pcpbench.checks.kv import KvView
from pcpbench.checks.kv_origin import KvOrigins
from pcpbench.checks.metadata import METADATA, metadata_difference
from pcpbench.checks.setup import ArmSetup
from pcpbench.checks.tap_compare import (
    TapFinding,
    TapSide,
    beyond,
    describe,
    first_non_finite,
    first_tap,
    token_place,
)
from pcpbench.divergence import Accusation
from pcpbench.plan import StepPlan
from pcpbench.records import StepRecord, TapRecord

Taps = Mapping[str, tuple[TapRecord, ...]]
Records = Mapping[str, StepRecord]

_OUTPUTS: Final = (("restore", "hidden"), ("lm_head", "logits"), ("sample", "sampled"))
"""What a step ends with, behind the last tap point: op and tensor."""


class Probe:
    """A watcher of a trial of the accused arm and its twin.

    taps: asks for the taps of the last step, arm by arm. Afterwards `tap` is the first tap point
    that differs (or is not finite), `output` the first output that does, `metadata` the first
    broken contract on what a step was given, and `kv.first` the first bad KV write.
    descriptors: of every arm in each step, by label.
    """

    def __init__(
        self,
        accusation: Accusation,
        setups: Mapping[str, ArmSetup],
        dtype: str,
        taps: Callable[[], Taps],
    ) -> None:
        self.accusation, self.dtype, self._ask = accusation, dtype, taps
        self.kind = accusation.kind or "partition"  # without a twin no budget is asked for
        self.arm = setups[accusation.arm]
        self.twin = None if accusation.twin is None else setups[accusation.twin]
        self.kv = KvOrigins(self.arm, self.twin, self.kind, dtype)
        self.tap: TapFinding | None = None
        self.output: TapFinding | None = None
        self.metadata: TapFinding | None = None
        self.descriptors: dict[tuple[str, int], str] = {}

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Both sides' values of what was found, by name."""
        found = {"kv_found": self.kv.found, "kv_expected": self.kv.expected}
        for name in ("metadata", "tap", "output"):
            finding: TapFinding | None = getattr(self, name)
            if finding is not None:
                found |= {f"{name}_found": finding.found, f"{name}_expected": finding.expected}
        return {name: values for name, values in found.items() if values is not None}

    def start(self, views: Mapping[str, KvView]) -> None:
        """Take in the caches before the first step."""
        self.kv.start(views[self.arm.name])

    def observe(
        self, step: StepPlan, judge: ScenarioJudge, records: Records, views: Mapping[str, KvView]
    ) -> None:
        """Look at a step that the judge has just judged."""
        for name, record in records.items():
            self.descriptors[name, step.index] = record.descriptor.label
        self.kv.observe(step, judge.oracle, judge.expected.get(self.arm.name), views)
        if self.metadata is None:
            self.metadata = self._broken(step, judge, records)
        if self.kind != "capture" and step.index < self.accusation.step:
            return
        if self.tap is None:
            self.tap = self._first_tap(step, judge)
        if self.output is None and judge.expected.get(self.arm.name) is not None:
            self.output = self._first_output(step, records)

    def _broken(self, step: StepPlan, judge: ScenarioJudge, records: Records) -> TapFinding | None:
        name = self.arm.name
        for found in judge.ledger.violations:
            if (found.step, found.arm) == (step.index, name) and found.contract in METADATA:
                return metadata_difference(found, records.get(name), judge.expected.get(name))
        return None

    def _first_tap(self, step: StepPlan, judge: ScenarioJudge) -> TapFinding | None:
        arm, twin = (self._side(setup, judge) for setup in (self.arm, self.twin))
        found = None
        if arm is not None and twin is not None:
            found = first_tap(arm, twin, step, self.kind, self.dtype)
        if found is None and arm is not None and step.index >= self.accusation.step:
            found = first_non_finite(arm, step, self.dtype)
        return found

    def _first_output(self, step: StepPlan, records: Records) -> TapFinding | None:
        if self.twin is None or not {self.arm.name, self.twin.name} <= records.keys():
            return None
        record, twin = records[self.arm.name], records[self.twin.name]
        for op, tensor in _OUTPUTS:
            found, right = getattr(record, tensor), getattr(twin, tensor)
            if found.shape != right.shape or not found.size:
                continue
            exact = "capture" if tensor == "sampled" else self.kind
            differs = beyond(found, right, exact, self.dtype)
            if not differs.any():
                continue
            row = int(np.argwhere(differs)[0][0])
            if tensor == "hidden":
                place = token_place(step, row)
            else:
                place = f"request {record.sampled_req_ids[row]}"
            told = describe(found, right, differs, self.twin.name)
            told = replace(told, step=step.index, op=op, tensor=tensor, place=place)
            return TapFinding(told, found, right)
        return None

    def _side(self, setup: ArmSetup | None, judge: ScenarioJudge) -> TapSide | None:
        if setup is None:
            return None
        expected, taps = judge.expected.get(setup.name), self._ask().get(setup.name, ())
        return TapSide(setup, expected, taps) if expected is not None and taps else None
