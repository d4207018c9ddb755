"""What the judge must be told of an arm and of a comparison before the first step.

Owns frozen settings records. Knows no step, no record and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pcpbench.config import ALL2ALL_BACKENDS
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.records import IndexTables
from pcpbench.results import CapturedGraph
from pcpbench.traits import NO_TRAITS, Traits
from pcpbench.world import World

KINDS: Final = ("partition", "padding", "capture")
"""The drifts that SPEC 11 separates."""


@dataclass(frozen=True, kw_only=True)
class ExpertSetup:
    """The experts of a model with MoE layers, and how an arm deals them out.

    top_k: experts of a token. layers: those that have experts. backend: how rows get to experts on
    other ranks; None without expert parallelism, where every rank has a share of each.
    """

    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    backend: str | None = None

    @property
    def gathers(self) -> bool:
        """Whether each rank routes the rows of all ranks."""
        return self.backend == ALL2ALL_BACKENDS[0]

    def num_local(self, world_size: int) -> int:
        """Experts of one rank."""
        return self.num_experts if self.backend is None else self.num_experts // world_size


@dataclass(frozen=True, kw_only=True)
class DraftSetup:
    """A draft model that runs behind the target model in each step.

    num_steps: drafts that it proposes a request, one a pass. max_num_reqs: most requests of a pass.
    captured: the graphs of its passes; None for an arm that captures none.
    """

    num_steps: int
    max_num_reqs: int
    captured: tuple[CapturedGraph, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ArmSetup:
    """One arm as it was configured.

    name: as in its records, such as `full` or `eager_padded[full]`.
    world, interleave: its ranks and how KV positions are dealt out; the reference arm has World().
    mode: the configured graph mode (NONE for eager arms and their padded twins).
    candidates: what the arm could dispatch to: the descriptors that it captured, or for a padded
    twin those of the arm that it is padded like. Empty where nothing is captured.
    padded_like: the arm whose descriptor each step of this one is padded to, if any.
    descriptor_mode: the mode that the candidates are for where it is not `mode`: a padded twin has
    that of the arm that it is padded like.
    capture_sizes: the token counts that were to be captured; None where nobody said, and the
    candidates are taken as they are.
    captured: the graphs that were captured; None for an arm that captures none.
    decode_query_len: tokens of a decode: one, and its draft tokens. has_dynamic_drafts: whether it
    may have fewer, so that shapes for shorter and for unequal queries are captured as well.
    max_model_len: most tokens of a request; None where nobody said.
    sharded_groups: for each KV group, whether DCP shards it; None means all of them.
    ubatch_thresholds: fewest rank-local tokens of a step that is cut into two microbatches, of one
    without and one with a prefill; None where none is cut.
    index_tables: how a sparse model chooses keys; None for one that attends to all, or whose scores
    cannot be recomputed exactly.
    experts: None for a dense model, or where the target cannot tell what is routed.
    traits: where the target is known to differ from the contracts.
    draft: None without a draft model.
    """

    name: str
    world: World
    interleave: int = 1
    mode: CUDAGraphMode = CUDAGraphMode.NONE
    candidates: tuple[BatchExecutionDescriptor, ...] = ()
    padded_like: str | None = None
    capture_sizes: tuple[int, ...] | None = None
    decode_query_len: int = 1
    has_dynamic_drafts: bool = False
    descriptor_mode: CUDAGraphMode | None = None
    captured: tuple[CapturedGraph, ...] | None = None
    max_model_len: int | None = None
    sharded_groups: tuple[bool, ...] | None = None
    ubatch_thresholds: tuple[int, int] | None = None
    index_tables: IndexTables | None = field(default=None, compare=False, repr=False)
    experts: ExpertSetup | None = None
    traits: Traits = NO_TRAITS
    draft: DraftSetup | None = None

    @property
    def tells_all(self) -> bool:
        """Whether records hold every field that a step can have, as those of pcpbench's engine do.

        A target with traits is another's code: what it leaves out it may be unable to tell.
        """
        return self.traits == NO_TRAITS

    def dcp_size_of(self, group: int) -> int:
        """Over how many ranks the positions of one KV group are spread."""
        if self.sharded_groups is not None and not self.sharded_groups[group]:
            return 1
        return self.world.dcp_size

    def candidates_for(
        self, num_tokens: int, has_prefill: bool
    ) -> tuple[BatchExecutionDescriptor, ...]:
        """The candidates in as many microbatches as a step of these counts has."""
        count = self.num_ubatches(num_tokens, has_prefill)
        return tuple(d for d in self.candidates if d.num_ubatches == count)

    def num_ubatches(self, num_tokens: int, has_prefill: bool) -> int:
        """Microbatches of a step whose largest rank has this many tokens."""
        if self.ubatch_thresholds is None:
            return 1
        return 2 if num_tokens >= self.ubatch_thresholds[has_prefill] else 1


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two arms to compare: `kind` is the drift between `arm` and the `twin` it is measured from."""

    kind: str
    arm: str
    twin: str
