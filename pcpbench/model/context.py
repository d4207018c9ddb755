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
class AttentionMetadata:
    """Where the rank-local tokens of one step stand (SPEC 9); R rows, T tokens after padding.

    query_start_loc: int32 [R+1]. seq_lens: int32 [R], global lengths through each row's last query
    token. dcp_local_seq_lens: int32 [R], this rank's share of them, or None without DCP.
    block_tables: one int32 [R, max_blocks] a KV group. slot_mappings: int64 [num_groups, T * pcp],
    the slots of all PCP ranks' tokens in group order, -1 (PAD) where nothing is to be written.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    dcp_local_seq_lens: Tensor | None
    block_tables: tuple[Tensor, ...]
    slot_mappings: Tensor


@dataclass
class ForwardContext:
    """One rank's surroundings during forward passes; kept over steps, its fields are replaced.

    rank: global rank. pcp, tp, dcp: its groups; position and size in the DCP group come from `dcp`.
    cp_interleave: consecutive positions on one DCP rank.
    kv_caches: one [num_blocks, block_size, latent_dim] a layer. kv_groups: each layer's KV group;
    empty means that all are in group 0.
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
    taps: Taps | None = field(default=None, repr=False)

    def kv_group(self, layer: int) -> int:
        """The KV group whose block tables and slots a layer uses."""
        return self.kv_groups[layer] if self.kv_groups else 0

    def tap(self, layer: int, name: str, value: Tensor) -> None:
        """Hand on an intermediate result if anyone listens."""
        if self.taps is not None:
            self.taps.put(layer, name, value)
