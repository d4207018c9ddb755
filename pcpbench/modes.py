"""Graph modes and descriptors of captured shapes (SPEC 3). Pure words: no torch, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class CUDAGraphMode(Enum):
    """How a step runs, or how a runner is configured.

    `NONE`, `PIECEWISE` and `FULL` are what one step runs as. The two with separate routines hold
    a pair (decode batches, every other batch) and are only ever configured.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    @property
    def separate_routine(self) -> bool:
        """Whether decode batches run differently from all others."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> CUDAGraphMode:
        """The runtime mode of a decode batch that a captured shape covers."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The runtime mode of a batch with a prefill that a captured shape covers."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def has_full_cudagraphs(self) -> bool:
        """Whether any batch can run as FULL."""
        return self.decode_mode() is CUDAGraphMode.FULL or self.mixed_mode() is CUDAGraphMode.FULL

    def has_piecewise_cudagraphs(self) -> bool:
        """Whether any batch can run as PIECEWISE."""
        modes = (self.decode_mode(), self.mixed_mode())
        return CUDAGraphMode.PIECEWISE in modes


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    """One captured (or, with cg_mode NONE, one executed) rank-local batch shape.

    num_tokens: tokens after padding.
    num_reqs: rows after padding; None means that requests are not padded (PIECEWISE).
    uniform_token_count: tokens of every request, when a graph demands that they are equal.
    max_query_len: longest query of a varlen decode graph.
    num_ubatches: microbatches that the shape is cut into; 1 where it runs whole.
    """

    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1

    @property
    def label(self) -> str:
        """A short name for tables, such as `FULL[reqs=4,tokens=4]`.

        A varlen graph has `,queries<=4`, one that is cut ends in `,ubatches=2`.
        """
        cut = [f"ubatches={self.num_ubatches}"] if self.num_ubatches > 1 else []
        if self.cg_mode is CUDAGraphMode.NONE:
            return f"NONE[{cut[0]}]" if cut else "NONE"
        parts = [] if self.num_reqs is None else [f"reqs={self.num_reqs}"]
        parts.append(f"tokens={self.num_tokens}")
        if self.max_query_len is not None:
            parts.append(f"queries<={self.max_query_len}")
        parts += cut
        return f"{self.cg_mode.name}[{','.join(parts)}]"


ARM_MODES: Final[dict[str, CUDAGraphMode]] = {
    "reference": CUDAGraphMode.NONE,
    "eager": CUDAGraphMode.NONE,
    "eager_padded": CUDAGraphMode.NONE,
    "piecewise": CUDAGraphMode.PIECEWISE,
    "full": CUDAGraphMode.FULL_DECODE_ONLY,
    "full_and_piecewise": CUDAGraphMode.FULL_AND_PIECEWISE,
}
"""Arms of a comparison (SPEC 11) and the graph mode each is configured with."""
