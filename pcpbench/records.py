"""What a step left behind, as host copies: the judge's only food, and what the reports show.

Owns frozen records; knows neither the engine that made them nor the checks that read them. Times
are seconds; only reports choose units. Arrays are numpy copies that nothing writes to afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pcpbench.modes import BatchExecutionDescriptor

IntArray = NDArray[np.integer[Any]]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class BufferSpan:
    """Where a tensor lies: its first byte, and the bytes from there through its last element."""

    name: str
    address: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MicrobatchRecord:
    """One microbatch of a rank-local batch (R rows, T tokens of its own, after padding).

    first_token: where its tokens begin in the batch that was cut. row_index [num_reqs]: that
    batch's row of each of its own. spans: where its tensors lie. The rest is shaped as in
    RankRecord, with its own R and T.
    """

    first_token: int
    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int
    row_index: IntArray
    input_ids: IntArray
    positions: IntArray
    is_padding: BoolArray
    query_start_loc: IntArray
    seq_lens: IntArray
    dcp_local_seq_lens: IntArray | None
    block_tables: tuple[IntArray, ...]
    slot_mappings: IntArray
    spans: tuple[BufferSpan, ...]


@dataclass(frozen=True, kw_only=True)
class RoutingRecord:
    """What one rank routed in one MoE layer, in the batch or in one of its microbatches.

    part: the microbatch's number; 0 where the batch ran whole. chosen [rows, k]: the experts of
    each row that this rank routed, by their number in the model, -1 for none. Without expert
    parallelism these are its T rows. With it a rank routes C = ceil(T / tp) of them, from
    tp_rank * C on, made up with padding; `allgather_reducescatter` has each rank route the C rows
    of every world rank, in rank order. num_rows: rows that each expert of this rank computed.
    """

    layer: int
    part: int
    chosen: IntArray
    num_rows: IntArray


@dataclass(frozen=True, kw_only=True)
class DraftPassRecord:
    """What one pass of a draft model read on one rank (R rows, T tokens after padding).

    descriptor: what it ran as. num_replays: graphs launched for it. The rest is shaped as in
    RankRecord. block_tables is empty, slot_mappings of no group and the lengths None where it ran
    without attention inputs. slot_mappings: of the first pass the gathered mapping [num_groups,
    T * pcp], of a later one this rank's own [num_groups, T]. hidden_in, hidden_out [T, hidden]: the
    states that it was fed and those that it made, widened to float32.
    """

    descriptor: BatchExecutionDescriptor
    num_replays: int
    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int
    input_ids: IntArray
    positions: IntArray
    is_padding: BoolArray
    query_start_loc: IntArray | None
    seq_lens: IntArray | None
    dcp_local_seq_lens: IntArray | None
    block_tables: tuple[IntArray, ...]
    slot_mappings: IntArray
    hidden_in: NDArray[np.float32]
    hidden_out: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Rank-local metadata of one step after partition and padding (R rows, T tokens after padding).

    input_ids [T], positions [T], is_padding [T], query_start_loc [R+1], seq_lens [R];
    dcp_local_seq_lens [R] or None without DCP; block_tables: one [R, max_blocks] a KV group;
    slot_mappings [num_groups, T * pcp]: the gathered mapping, rank after rank of the PCP group.
    row_req_index [num_reqs]: each real row's request, as an index into the plan's `scheduled`;
    row_start [num_reqs]: the row's first token within that request's scheduled tokens (-1 and an
    empty query for the row of a rank with nothing to do).
    hidden_restore_idx [global tokens], gathered_kv_write_mask [T * pcp]: None without PCP.
    gathered_is_padding [T * pcp]: None where a rank is handed the flags of its own tokens only.
    dispatch_num_reqs, dispatch_num_tokens: counts this rank handed to the dispatcher.
    collectives: (kind, group, shape, dtype) in order of issue.
    hidden, sampled: as in StepRecord, but this rank's own; None where the target has only one.
    sampled_rows [num_sampled]: tokens of the global batch that were sampled from; None where the
    target cannot tell.
    num_accepted [requests that sample]: draft tokens that this rank's device accepted.
    num_computed_after [scheduled requests]: the device's cursors after the step. Both None for a
    step without drafts, or where the target cannot tell.
    seq_lens_cpu_upper_bound [R]: what the host takes seq_lens for; None where nobody can tell.
    selected [layers, T, index_topk]: the positions that each token attends to, -1 for none, in any
    order; None where a model attends to all, or the target cannot tell.
    microbatches: what the batch was cut into, in the order of its tokens; empty where it ran whole.
    spans: where the batch's own tensors lie; empty where it ran whole.
    routing: of each MoE layer and microbatch; empty where the target cannot tell, or has none.
    draft_passes: those of a draft model behind the step; empty without one. proposed [scheduled
    requests, drafts]: what it proposes on this rank; None without one, and for an idle step.
    draft_rows [scheduled requests]: the token of the global batch that each is drafted from.
    """

    rank: int
    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int
    input_ids: IntArray
    positions: IntArray
    is_padding: BoolArray
    query_start_loc: IntArray
    seq_lens: IntArray
    dcp_local_seq_lens: IntArray | None
    block_tables: tuple[IntArray, ...]
    slot_mappings: IntArray
    row_req_index: IntArray
    row_start: IntArray
    hidden_restore_idx: IntArray | None
    gathered_kv_write_mask: BoolArray | None
    gathered_is_padding: BoolArray | None = None
    descriptor: BatchExecutionDescriptor
    dispatch_num_reqs: int
    dispatch_num_tokens: int
    collectives: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...] = ()
    hidden: NDArray[np.float32] | None = None
    sampled: IntArray | None = None
    sampled_rows: IntArray | None = None
    num_accepted: IntArray | None = None
    num_computed_after: IntArray | None = None
    seq_lens_cpu_upper_bound: IntArray | None = None
    selected: IntArray | None = None
    microbatches: tuple[MicrobatchRecord, ...] = ()
    spans: tuple[BufferSpan, ...] = ()
    routing: tuple[RoutingRecord, ...] = ()
    draft_passes: tuple[DraftPassRecord, ...] = ()
    proposed: IntArray | None = None
    draft_rows: IntArray | None = None


@dataclass(frozen=True, kw_only=True)
class IndexTable:
    """What an indexer of one layer scores keys by, where each token id has whole numbers of its own
    (V ids, I heads of width E): query [V, I, E], key [V, E], weights [V, I], all float64.

    The score of a key is the sum over heads of weight * max(0, query . key).
    """

    query: NDArray[np.float64]
    key: NDArray[np.float64]
    weights: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class IndexTables:
    """How a sparse model chooses keys: topk a token, and a table a layer."""

    topk: int
    layers: tuple[IndexTable, ...]


@dataclass(frozen=True, kw_only=True)
class AddressChange:
    """A buffer that a captured graph reads or writes and that is no longer where it was."""

    graph: str
    name: str
    captured_address: int
    current_address: int | None
    op: str


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one arm.

    descriptor: what the step ran as. miss_reason: why no FULL graph served it ("" when one did or
    none was asked for). logits [num_sampled, vocab], widened to float32; sampled [num_sampled]
    tokens; sampled_req_ids: whose they are, 1 + drafts rows for a request with draft tokens.
    hidden: the restored hidden states [global tokens, hidden], widened to float32. Ranks in rank
    order.
    num_replays: graphs launched during the step, counted where they are launched: what was chosen
    and what ran are two things. None where the target cannot tell.
    draft_tokens: the step's draft tokens, request after request; None for a step without any, or
    where the target cannot tell.
    draft_logits [drafts, scheduled requests, vocab]: a draft model's, widened to float32. proposed:
    the first rank's. Both None without a draft model, and for an idle step.
    """

    arm: str
    scenario: str
    step: int
    descriptor: BatchExecutionDescriptor
    miss_reason: str
    ranks: tuple[RankRecord, ...]
    sampled_req_ids: tuple[str, ...]
    sampled: IntArray
    logits: NDArray[np.float32]
    hidden: NDArray[np.float32]
    address_changes: tuple[AddressChange, ...] = ()
    idle: bool = False
    num_replays: int | None = None
    draft_tokens: IntArray | None = None
    draft_logits: NDArray[np.float32] | None = None
    proposed: IntArray | None = None

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted, over all requests."""
        found = self.ranks[0].num_accepted if self.ranks else None
        return 0 if found is None else int(found.sum())

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the step added to its requests."""
        if self.draft_tokens is None:
            return len(self.sampled)
        return len(self.sampled) - len(self.draft_tokens) + self.num_accepted


@dataclass(frozen=True, kw_only=True)
class TapRecord:
    """What one tap point of the forward pass held on one rank after a step.

    layer: -1 before the first layer, the number of layers after the last. op, tensor: the operation
    and which of its results. values [rows, ...]: float32, float16, or uint16 holding bfloat16
    patterns; rows are this rank's tokens after padding, or with is_gathered those of all ranks of
    its PCP group, rank after rank. order: place in the forward pass.
    per_head: the axis after the rows is this TP rank's heads. is_partial: of this rank's share of
    the keys or slots only.
    """

    rank: int
    layer: int
    op: str
    tensor: str
    values: NDArray[Any]
    order: int = 0
    is_gathered: bool = False
    per_head: bool = False
    is_partial: bool = False


@dataclass(frozen=True)
class NonFinite:
    """The first NaN or inf among an arm's outputs; row: of the tensor in that step."""

    arm: str
    step: int
    tensor: str
    row: int


CONTRACT_IDS: Final = tuple(f"C{number}" for number in range(23))
"""Every contract of docs/contracts.md."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A contract that did not hold (SPEC 12); `contract` is its id, such as C1."""

    contract: str
    arm: str
    scenario: str
    step: int
    rank: int | None
    tensor: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far one tensor of one arm is from its twin.

    outcome: `bitwise`, `within_budget`, `exceeds_budget`, `non_finite` or `shape_mismatch`.
    relative: largest difference of a row over the root mean square of the twin's row; with cosine
    what a budget is on. All numbers: None where they cannot be formed.
    """

    kind: str
    tensor: str
    outcome: str
    num_elements: int
    num_mismatched: int
    max_abs: float | None
    max_rel: float | None
    max_ulp: float | None
    cosine: float | None
    relative: float | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where an arm left its twin."""

    kind: str
    arm: str
    twin: str
    scenario: str
    step: int
    rank: int | None
    layer: int | None
    tensor: str
    drift: Drift


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something that was left out or changed, told instead of done in silence."""

    setting: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a run was made."""

    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    device_name: str = ""
    num_threads: int = 1
    platform: str = ""
