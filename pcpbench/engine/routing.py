"""What MoE layers routed in the last step: persistent memory that the forward pass copies into.

Owns the memory of one rank (one set for each microbatch), its names for the address book, and host
copies of it. A copy into such a buffer is an operation like any other, so that a captured graph
makes it in each replay.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pcpbench.config import ParallelConfig
from pcpbench.model.presets import ModelShape
from pcpbench.records import RoutingRecord


class RoutingBuffers:
    """The latest routing of every MoE layer; see `model.context.RoutingLog`.

    max_num_tokens: the most rows of a pass. `allgather_reducescatter` routes the rows of all ranks,
    `all_to_all` a TP rank's part of its own, and a rank without expert parallelism all its own.
    """

    def __init__(
        self, shape: ModelShape, parallel: ParallelConfig, max_num_tokens: int, device: torch.device
    ) -> None:
        self._shape, self._parallel, self._device = shape, parallel, device
        num_experts = shape.n_routed_experts
        if parallel.enable_expert_parallel:
            num_experts //= parallel.world.size
        rows, width = self.num_rows(max_num_tokens), shape.num_experts_per_tok
        self.chosen = {
            layer: torch.zeros((rows, width), dtype=torch.int32, device=device)
            for layer in shape.moe_layers
        }
        self.received = {
            layer: torch.zeros(num_experts, dtype=torch.int32, device=device)
            for layer in shape.moe_layers
        }

    def of_size(self, max_num_tokens: int) -> RoutingBuffers:
        """Buffers of their own for passes of at most so many rows."""
        return RoutingBuffers(self._shape, self._parallel, max_num_tokens, self._device)

    def num_rows(self, num_tokens: int) -> int:
        """Rows that a rank routes when each rank has num_tokens, padding included."""
        parallel = self._parallel
        if not parallel.enable_expert_parallel:
            return num_tokens
        mine = -(-num_tokens // parallel.tensor_parallel_size)
        return mine if parallel.all2all_backend == "all_to_all" else mine * parallel.world.size

    def put(self, layer: int, chosen: Tensor, num_rows: Tensor) -> None:
        """Copy both to the front of their buffers."""
        self.chosen[layer][: chosen.shape[0]].copy_(chosen)
        self.received[layer].copy_(num_rows)

    def named(self) -> dict[str, Tensor]:
        """The buffers by name, such as `moe.1.chosen`, for the address book."""
        named = {f"moe.{layer}.chosen": buffer for layer, buffer in self.chosen.items()}
        return named | {f"moe.{layer}.received": buffer for layer, buffer in self.received.items()}

    def records(self, num_tokens: int, part: int) -> Iterator[RoutingRecord]:
        """Host copies after a pass of num_tokens, padding included; part: which microbatch."""
        rows = self.num_rows(num_tokens)
        for layer, chosen in self.chosen.items():
            yield RoutingRecord(
                layer=layer,
                part=part,
                chosen=chosen[:rows].cpu().numpy().copy(),
                num_rows=self.received[layer].cpu().numpy().copy(),
            )
