"""Ranks and groups (SPEC 2). Pure arithmetic on ints; knows no device and no collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pcpbench.errors import UsageError

MAX_RANKS: Final = 64
"""Ranks that one process runs."""


@dataclass(frozen=True)
class World:
    """Sizes of the parallel dimensions and the rank numbering they imply.

    Rank order is pcp-major, tp-minor: with pcp=2, tp=2 the ranks are
    (pcp 0, tp 0)=0, (pcp 0, tp 1)=1, (pcp 1, tp 0)=2, (pcp 1, tp 1)=3.
    DCP adds no ranks. Raises UsageError for sizes that SPEC 2 excludes, and for too many ranks.
    """

    pcp_size: int = 1
    tp_size: int = 1
    dcp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("pcp", "tp", "dcp"):
            size = getattr(self, f"{name}_size")
            if size < 1:
                raise UsageError(f"--{name} is {size}: it must be a whole number from 1 up.")
        if self.size > MAX_RANKS:
            raise UsageError(
                f"--pcp {self.pcp_size} --tp {self.tp_size} makes {self.size} ranks: one process "
                f"runs at most {MAX_RANKS}."
            )
        if self.dcp_size in self.legal_dcp_sizes(self.pcp_size, self.tp_size):
            return
        legal = ", ".join(str(s) for s in self.legal_dcp_sizes(self.pcp_size, self.tp_size))
        raise UsageError(
            f"--dcp is {self.dcp_size}, which --pcp {self.pcp_size} --tp {self.tp_size} "
            f"cannot form: use one of {legal}."
        )

    @staticmethod
    def legal_dcp_sizes(pcp_size: int, tp_size: int) -> list[int]:
        """DCP sizes that SPEC 2 allows: divisors of tp without PCP, else 1, pcp or tp*pcp."""
        if pcp_size == 1:
            return [size for size in range(1, tp_size + 1) if tp_size % size == 0]
        return sorted({1, pcp_size, tp_size * pcp_size})

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pcp_size * self.tp_size

    @property
    def shard_decode_requests(self) -> bool:
        """Whether each decode request needs one owner rank a step (PCP without DCP)."""
        return self.pcp_size > 1 and self.dcp_size == 1

    def rank(self, pcp_rank: int, tp_rank: int) -> int:
        """The global rank of a (pcp, tp) coordinate."""
        return pcp_rank * self.tp_size + tp_rank

    def pcp_rank(self, rank: int) -> int:
        """The PCP coordinate of a global rank."""
        return rank // self.tp_size

    def tp_rank(self, rank: int) -> int:
        """The TP coordinate of a global rank."""
        return rank % self.tp_size

    def tp_groups(self) -> list[list[int]]:
        """Ranks with the same pcp_rank."""
        return [[self.rank(p, t) for t in range(self.tp_size)] for p in range(self.pcp_size)]

    def pcp_groups(self) -> list[list[int]]:
        """Ranks with the same tp_rank."""
        return [[self.rank(p, t) for p in range(self.pcp_size)] for t in range(self.tp_size)]

    def dcp_groups(self) -> list[list[int]]:
        """Without PCP consecutive runs of TP ranks; with PCP over PCP first, then TP.

        pcp=2, tp=2, dcp=4 gives one group [0, 2, 1, 3]; dcp=2 gives the PCP groups [0, 2], [1, 3].
        """
        if self.pcp_size == 1:
            order = list(range(self.tp_size))
        else:
            order = [rank for group in self.pcp_groups() for rank in group]
        size = self.dcp_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def dcp_rank(self, rank: int) -> int:
        """Position of a global rank in its DCP group."""
        return next(group.index(rank) for group in self.dcp_groups() if rank in group)
