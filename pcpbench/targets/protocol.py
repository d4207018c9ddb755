"""What can be put on the stand: the seam between a session and an engine under test.

Owns Protocols only. A target builds arms; an arm runs steps of a plan and hands out records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pcpbench.config import EngineConfig
from pcpbench.modes import BatchExecutionDescriptor
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import Notice, StepRecord
from pcpbench.results import AddressUse, CapturedGraph


class Arm(Protocol):
    """One engine of a comparison, with worker states of its own."""

    @property
    def label(self) -> str:
        """The arm's name in records and reports."""

    @property
    def candidates(self) -> tuple[BatchExecutionDescriptor, ...]:
        """Descriptors that dispatch may choose from."""

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What was asked for and could not be done."""

    @property
    def captured(self) -> tuple[CapturedGraph, ...]:
        """Graphs captured so far."""

    @property
    def addresses(self) -> tuple[AddressUse, ...]:
        """What those graphs read and write."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of the graphs' shared pool."""

    def capture(self, on_captured: Callable[[CapturedGraph], None] | None = None) -> None:
        """Capture every candidate, if the arm replays."""

    def start(self, plan: ScenarioPlan) -> None:
        """Begin a scenario (again)."""

    def execute(self, step: StepPlan, forced: Sequence[int] | None = None) -> None:
        """Run one step; `forced` tokens are fed on in place of the sampled ones."""

    def sampled(self) -> list[int]:
        """Tokens that the last step sampled, in the plan's order."""

    def record(self, step: StepPlan, scenario: str) -> StepRecord:
        """Host copies of what the last step left behind."""

    def kv_caches(self) -> list[list[NDArray[Any]]]:
        """Caches as [rank][layer][num_blocks, block_size, latent], valid until the next step.

        16-bit types come as their raw bits in float32-widened form: see the target.
        """

    def block_tables(self) -> list[list[NDArray[Any]]]:
        """Global block tables as [rank][KV group][request slots, columns], valid until the next
        step."""

    def replay_again(self, step: StepPlan, scenario: str) -> StepRecord | None:
        """Replay the step just executed once more on the same inputs; None if it was no replay.

        Requests do not advance (contract C14).
        """

    def poison(self, unread: Sequence[Sequence[NDArray[np.bool_]]], kind: str) -> None:
        """Fill what the next step may not read (contract C16), KV slots as [rank][group][slots].

        kind: `nan` or `large`. Covers the next step only.
        """


class Target(Protocol):
    """Builds arms."""

    def check(self, config: EngineConfig) -> None:
        """Raise UsageError for settings that `build` would refuse; builds nothing."""

    def build(self, label: str, config: EngineConfig, *, replays: bool) -> Arm:
        """An arm under these settings; raises UsageError for settings it refuses."""


FloatArray = NDArray[np.float32]
