"""What can be put on the stand: the seam between a session and an engine under test.

Owns Protocols only. A target builds arms; an arm runs steps of a plan and hands out records.

How long what a step hands out holds, whatever is allocated and freed meanwhile (contract C14):

- sampled tokens and logits: as long as their holder keeps them. Later steps, dummy runs and replays
  of any graph, the step's own included, leave them alone. An output thread may read them late.
- hidden states: until the next forward pass of the arm, a dummy run's included. They may lie in the
  buffer that replays leave their result in; who needs them longer copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pcpbench.config import EngineConfig
from pcpbench.modes import BatchExecutionDescriptor
from pcpbench.plan import ScenarioPlan, StepPlan
from pcpbench.records import IndexTables, Notice, StepRecord, TapRecord
from pcpbench.results import AddressUse, CapturedGraph
from pcpbench.traits import Traits


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
    def traits(self) -> Traits:
        """Where the target is known to differ from the contracts."""

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

    def execute(
        self,
        step: StepPlan,
        forced: Sequence[int] | None = None,
        drafts: Sequence[int] | None = None,
    ) -> None:
        """Run one step; `forced` tokens are fed on in place of the sampled ones.

        drafts: the step's draft tokens, request after request; None lets the arm find those that
        make the planned acceptance come true.
        """

    def execute_watched(
        self,
        step: StepPlan,
        forced: Sequence[int] | None,
        drafts: Sequence[int] | None,
        now: Callable[[], float],
    ) -> tuple[tuple[str, int | None, float, float], ...]:
        """Run one step as `execute` does, and tell its phases: name, rank, begin and end by `now`.

        Rank None is for what is done for all ranks at once. Names: see records.Phase. A target that
        cannot look into its steps returns ().
        """

    def sampled(self) -> list[int]:
        """Tokens that the last step sampled, one for each row of logits, in the plan's order."""

    def drafts(self) -> list[int]:
        """Draft tokens of the last step, request after request."""

    def record(self, step: StepPlan, scenario: str) -> StepRecord:
        """Host copies of what the last step left behind.

        May be called again: outputs are then read anew from what the step handed out.
        """

    def taps(self) -> tuple[TapRecord, ...]:
        """Intermediate results of the step just executed, each rank's in the order of its forward
        pass; nothing after an idle step, and nothing where the arm was built without taps."""

    def kv_caches(self) -> list[list[NDArray[Any]]]:
        """Caches as [rank][layer][num_blocks, block_size, latent], valid until the next step; those
        of index keys, of another width, behind those of latents.

        16-bit types come as their raw bits in float32-widened form: see the target.
        """

    @property
    def kv_groups(self) -> tuple[int, ...]:
        """The KV group of each of these caches; empty where all are in group 0."""

    @property
    def num_layers(self) -> int:
        """How many of `kv_caches` are layers'; behind them are those of index keys, as many."""

    def index_tables(self) -> IndexTables | None:
        """How the arm's model chooses keys (contract C20); None where it attends to all, or its
        scores cannot be recomputed exactly."""

    def block_tables(self) -> list[list[NDArray[Any]]]:
        """Global block tables as [rank][KV group][request slots, columns], valid until the next
        step."""

    def dense_logits(
        self, token_ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]] | None:
        """Logits of some positions of whole sequences, by a plain forward pass (contract C18).

        From the arm's weights alone: no KV cache, no metadata, nothing of the code that runs steps.
        token_ids: sequences from position 0 on. One [len(positions), vocab] each; None where the
        target has no such computation, or the arm's weights are split over ranks.
        """

    def run_again(self, step: StepPlan, scenario: str) -> StepRecord | None:
        """Run the step just executed once more on the same inputs, as it ran; None if it was idle.

        Requests do not advance (contract C14).
        """

    def previous_outputs(self) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """What the step before the last one handed out, read now: (sampled, logits) of each rank.

        Empty where that step sampled nothing, or there is none since `start`. Logits are widened to
        float32, as in records.
        """

    def churn_memory(self) -> None:
        """Allocate memory of several sizes on the arm's device, fill it with NaN and free it."""

    def replay_idle(self, graphs: Sequence[str]) -> tuple[str, ...]:
        """Replay captured graphs (by label, in this order) as dummy runs and say which ran.

        Their inputs are padding alone, so that they write no KV slot but the null block's; memory
        is churned before each. Afterwards the inputs of the step just executed are in place again,
        for `run_again`. An arm without captured graphs does nothing and returns ().
        """

    def wipe(self, slots: Sequence[Sequence[NDArray[np.integer[Any]]]]) -> None:
        """Zero these KV slots, [rank][KV group][slots].

        They are those that the step just executed wrote, so that `run_again` must write them again.
        """

    def poison(self, unread: Sequence[Sequence[NDArray[np.bool_]]], kind: str) -> None:
        """Fill what the next step may not read (contract C16), KV slots as [rank][group][slots].

        kind: `nan` or `large`. Covers the next step only.
        """

    def keep_evidence(self, keep: bool) -> None:
        """Whether steps keep what only a judge looks at; timed ones need not.

        That is which buffers had moved when a forward pass began, and what draft passes read.
        """


@runtime_checkable
class DraftingArm(Protocol):
    """What an arm offers besides, if a draft model can run behind its target model."""

    @property
    def num_draft_caches(self) -> int:
        """How many of `kv_caches`, at the end, are the draft model's; 0 where none runs."""

    @property
    def draft_captured(self) -> tuple[CapturedGraph, ...]:
        """Graphs of the draft model's passes."""

    def dense_draft_logits(
        self, token_ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]] | None:
        """What `Arm.dense_logits` is, of the draft model's first pass; None also where none runs.

        token_ids: sequences that end with the token behind the last position asked for.
        """


class Target(Protocol):
    """Builds arms.

    name: as on the command line. version: of what is driven, "" where it is pcpbench itself.
    """

    @property
    def name(self) -> str:
        """`builtin` or `vllm`."""

    @property
    def version(self) -> str:
        """The version of the software under test, "" for pcpbench's own engine."""

    @property
    def traits(self) -> Traits:
        """Where its arms are known to differ from the contracts."""

    @property
    def api(self) -> Any:
        """Its way to code that is not pcpbench's, for faults of it; None for its own engine."""

    def arrange(self, plan: ScenarioPlan, query_len: int) -> ScenarioPlan:
        """The plan with each step's requests in the order in which this target batches them.

        query_len: tokens of a decode. All arms of a comparison get the arranged plan.
        """

    def check(self, config: EngineConfig) -> None:
        """Raise UsageError for settings that `build` would refuse; builds nothing."""

    def build(self, label: str, config: EngineConfig, *, replays: bool, taps: bool = False) -> Arm:
        """An arm under these settings; raises UsageError for settings it refuses.

        taps: keep intermediate results, for `Arm.taps`; an arm that has none to give ignores it.
        """


FloatArray = NDArray[np.float32]
