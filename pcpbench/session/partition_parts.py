"""One piece of `check partition`: every maker's outputs of its cases, held against each other.

Owns what a process of the run keeps from piece to piece: the targets, and the makers of the world
it is in. Knows no file and no console.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from pcpbench.checks.partition_compare import Tally
from pcpbench.checks.partition_known import explain, may_lack
from pcpbench.checks.partition_oracle import expected_outputs
from pcpbench.partition_cases import PartitionCase
from pcpbench.partition_request import Part
from pcpbench.partition_results import ORACLE, PartCount, PartitionOutputs


class Maker(Protocol):
    """Makes outputs of cases of one world and interleave; its buffers live on between them."""

    @property
    def kernels(self) -> dict[str, int]:
        """How often a target's kernels ran, by how."""

    def outputs(self, cases: Sequence[PartitionCase]) -> list[PartitionOutputs]:
        """One for each case, in order."""


class Makers(Protocol):
    """A target's makers, one for each world and interleave.

    version: of what makes them, "" where that is pcpbench itself.
    """

    name: str
    version: str

    def check(self, pcp: int, dcp: int) -> None:
        """Raise UsageError for sizes whose batches this target is not expected to cut alike."""

    def of(self, case: PartitionCase) -> Maker:
        """The maker for the world and interleave of this case."""


def makers_of(target: str, exhaustive: bool) -> list[Makers]:
    """Who is compared; raises CannotMeasure where the target is not here.

    Only where all batches are enumerated does vLLM put most of them together from rows that its
    kernels ran on before: a sample is run whole.
    """
    found: list[Makers] = []
    if target == "vllm":  # first: it has to be there before anything else imports Triton
        from pcpbench.targets.vllm.partition import VllmPartitions

        found.append(VllmPartitions() if exhaustive else VllmPartitions(whole_one_in=1))
    from pcpbench.targets.builtin_partition import BuiltinPartitions

    return [BuiltinPartitions(), *found]


class PartRunner:
    """Runs pieces one after the other; pieces of one world share their makers."""

    def __init__(self, makers: Sequence[Makers]) -> None:
        self._all = makers
        self._ranks: tuple[int, ...] = ()
        self._makers: dict[str, Maker] = {}
        self._kernels: dict[str, int] = {}

    def run(self, part: Part) -> PartCount:
        """What one piece comes to."""
        start = time.monotonic()
        cases = part.all_cases()
        if part.ranks != self._ranks:
            self._makers = {makers.name: makers.of(cases[0]) for makers in self._all}
            self._ranks, self._kernels = part.ranks, {}
        tally = Tally(part.name, explain, may_lack)
        made = [maker.outputs(cases) for maker in self._makers.values()]
        for case, outputs in zip(cases, zip(*made, strict=True), strict=True):
            named = {ORACLE: expected_outputs(case)}
            named |= dict(zip(self._makers, outputs, strict=True))
            tally.compare(str(case), case.group, named, case)
        return tally.result(self._new_kernels(), time.monotonic() - start)

    def _new_kernels(self) -> dict[str, int]:
        """Kernel calls since the piece before."""
        found: dict[str, int] = {}
        for maker in self._makers.values():
            for name, number in maker.kernels.items():
                found[name] = found.get(name, 0) + number
        new = {name: number - self._kernels.get(name, 0) for name, number in found.items()}
        self._kernels = found
        return new
