"""What a forward pass needs to know beyond its tokens: one rank's step state.

Owns the words between engine and model. The decoder itself is stateless; whatever changes from step
to step or differs between ranks arrives here, so that ranks may share one module.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pcpbench.device.collectives import Group
from pcpbench.model.taps import Taps


@dataclass(frozen=True)
class PrefillKeys:
    """Keys that come to the queries: all keys of a step's prefills on every rank (SPEC 6, 9).

    Every rank of a DCP group has the same list of prefills, though other tokens of them; so it
    gathers the keys of all of them, K in number: prefill after prefill, position after position.
    num_rows, num_tokens: rank-local rows and tokens ahead of the prefill rows, those of decodes.
    has_decodes: whether the step has decodes, though this microbatch may have none: passes that
    take turns must come to the same meetings.
    index: int [K], where in what was gathered each key lies.
    slots: one int64 [S] a KV group, this rank's slots of its own share of each prefill, -1 up to
    the share of rank 0, which is the largest: all ranks gather equally much. None where context is
    skipped: then the keys are among the tokens that PCP has just gathered.
    table: int32 [prefill rows, longest], which of the K keys stands at each position of a row.
    """

    num_rows: int
    num_tokens: int
    has_decodes: bool
    index: Tensor
    slots: tuple[Tensor, ...] | None
    table: Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the rank-local tokens of one step stand (SPEC 9); R rows, T tokens after padding.

    query_start_loc: int32 [R+1]. seq_lens: int32 [R], global lengths through each row's last query
    token. dcp_local_seq_lens: int32 [R], this rank's share of them, or None without DCP.
    block_tables: one int32 [R, max_blocks] a KV group. slot_mappings: int64 [num_groups, T * pcp],
    the slots of all PCP ranks' tokens in group order, -1 (PAD) where nothing is to be written.
    prefill: where prefill rows find their keys when ranks hold other tokens of them *and* other
    shards of their KV (PCP with DCP); None without a prefill, and never None on some ranks only.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    dcp_local_seq_lens: Tensor | None
    block_tables: tuple[Tensor, ...]
    slot_mappings: Tensor
    prefill: PrefillKeys | None = None


@dataclass
class ForwardContext:
    """One rank's surroundings during forward passes; kept over steps, its fields are replaced.

    rank: global rank. pcp, tp, dcp: its groups; position and size in the DCP group come from `dcp`.
    cp_interleave: consecutive positions on one DCP rank. dcp_backend: how partial attention is
    merged, `ag_rs` or `a2a`.
    kv_caches: one [num_blocks, block_size, latent_dim] a layer; behind them, for sparse MLA, one
    [num_blocks, block_size, index_head_dim] a layer, which shares the layer's slots. kv_groups:
    each layer's KV group; empty means that all are in group 0.
    selected: int32 [layers, tokens, index_topk], where sparse MLA leaves the positions that each
    token attends to (-1 for none), from the first token of this context's batch on.
    metadata: this step's; None skips attention (a dummy run): its output is zeros, no KV is
    written and no collective of the attention is issued, so all ranks must agree on it.
    breaks: attention leaves the captured segment (PIECEWISE); only under a driver that serves
    graph breaks.
    takes_turns: this is the context of one microbatch, whose pass takes turns with the others'.
    taps: when set, is handed intermediate results at the tap points of model/taps.py. Under
    capture what it does with them becomes part of the graph.
    """

    rank: int
    pcp: Group
    tp: Group
    dcp: Group
    cp_interleave: int
    kv_caches: list[Tensor]
    kv_groups: tuple[int, ...] = ()
    metadata: AttentionMetadata | None = None
    breaks: bool = False
    takes_turns: bool = False
    dcp_backend: str = "ag_rs"
    selected: Tensor | None = None
    taps: Taps | None = field(default=None, repr=False)

    def kv_group(self, layer: int) -> int:
        """The KV group whose block tables and slots a layer uses.

        An index cache counts on from the last layer, and is in its layer's group.
        """
        return self.kv_groups[layer % len(self.kv_groups)] if self.kv_groups else 0

    def tap(self, layer: int, name: str, value: Tensor) -> None:
        """Hand on an intermediate result if anyone listens."""
        if self.taps is not None:
            self.taps.put(layer, name, value)
