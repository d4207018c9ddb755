"""`pcpbench check partition` as it was asked: frozen, and checked before anything runs. No torch.

Owns which options are settings of the run (a resumed run has the earlier one's) and the pieces of
work that follow from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench.engine_options import PREPARING_TARGETS
from pcpbench.errors import UsageError
from pcpbench.partition_cases import PartitionCase, parse_case
from pcpbench.partition_enumeration import (
    INTERLEAVES,
    MAX_REQUESTS,
    PCP_SIZES,
    SIZES,
    Choice,
    Unit,
    cases_of,
    sample,
    units,
)

DEFAULT_BATCHES: Final = 300
MAX_BATCHES: Final = 1_000_000
MAX_JOBS: Final = 64


class PartitionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides which batches are compared, and between whom.

    batches: of a sample; 0 for the whole enumeration. batch: one batch as text, instead.
    """

    target: str = PREPARING_TARGETS[0]
    exhaustive: bool = False
    batches: int = DEFAULT_BATCHES
    seed: int = 0
    pcp: tuple[int, ...] = ()
    dcp: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    interleave: tuple[int, ...] = ()
    max_requests: int = MAX_REQUESTS
    batch: tuple[str, ...] = ()

    @property
    def choice(self) -> Choice:
        """The part of the enumeration that is asked for."""
        return Choice(
            pcp=self.pcp,
            dcp=self.dcp,
            tp=self.tp,
            interleave=self.interleave,
            max_requests=self.max_requests,
        )

    @property
    def parts(self) -> list[Part]:
        """The pieces of work, in order; each is of one world and interleave."""
        if self.batch:
            return list(_grouped([parse_case(text) for text in self.batch]))
        if self.exhaustive:
            found = units(self.choice)
            return [Part(u.name, unit=u, max_requests=self.max_requests) for u in found]
        return list(_grouped(sample(self.batches, self.seed, self.choice)))


class Part(msgspec.Struct, frozen=True):
    """A piece of work: a unit of the enumeration, or the cases themselves."""

    name: str
    unit: Unit | None = None
    cases: tuple[PartitionCase, ...] = ()
    max_requests: int = MAX_REQUESTS

    @property
    def ranks(self) -> tuple[int, int, int, int]:
        """PCP, DCP and TP size and interleave, which one maker is for."""
        known: Any = self.cases[0] if self.unit is None else self.unit
        return known.pcp, known.dcp, known.tp, known.interleave

    def all_cases(self) -> list[PartitionCase]:
        """The cases, those of one batch of requests behind each other."""
        if self.unit is None:
            return list(self.cases)
        return list(cases_of(self.unit, self.max_requests))


def _grouped(cases: list[PartitionCase]) -> Iterator[Part]:
    for key, group in groupby(cases, lambda case: (case.pcp, case.dcp, case.tp, case.interleave)):
        pcp, dcp, tp, interleave = key
        yield Part(f"pcp{pcp}-dcp{dcp}-tp{tp}-i{interleave}", cases=tuple(group))


class PartitionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench check partition`.

    jobs: processes. max_time: seconds after which no piece of work begins. resume: the directory of
    an earlier exhaustive run, whose finished pieces stand.
    """

    settings: PartitionSettings
    jobs: int = 1
    max_time: float | None = None
    resume: Path | None = None
    json: bool = False
    out: Path | None = None

    def check(self) -> None:
        """Raise UsageError for what could not be run whatever the machine is."""
        asked = self.settings
        if asked.target not in PREPARING_TARGETS:
            raise UsageError(
                f"--target is {asked.target!r}: use one of {', '.join(PREPARING_TARGETS)}."
            )
        if asked.batch and asked.exhaustive:
            raise UsageError("--batch names one batch and --exhaustive all of them: use one.")
        self._check_numbers()
        if self.resume is not None and self.out is not None:
            raise UsageError("--resume goes on in its own directory: leave --out out.")
        if self.resume is not None and not asked.exhaustive:
            raise UsageError("--resume takes up an exhaustive run: add --exhaustive.")
        for text in asked.batch:
            parse_case(text)
        self._check_sizes()

    def _check_numbers(self) -> None:
        asked = self.settings
        if not 1 <= asked.batches <= MAX_BATCHES:
            raise UsageError(f"--batches is {asked.batches}: use 1 to {MAX_BATCHES}.")
        if not 0 <= asked.seed < 2**63:
            raise UsageError(f"--seed is {asked.seed}: use a whole number from 0 to 2^63 - 1.")
        if not 1 <= asked.max_requests <= MAX_REQUESTS:
            raise UsageError(f"--max-requests is {asked.max_requests}: use 1 to {MAX_REQUESTS}.")
        if not 1 <= self.jobs <= MAX_JOBS:
            raise UsageError(f"--jobs is {self.jobs}: use 1 to {MAX_JOBS}.")
        if self.max_time is not None and not self.max_time > 0:
            raise UsageError(f"--max-time is {self.max_time}: use a number of seconds above 0.")

    def _check_sizes(self) -> None:
        asked = self.settings
        next_to = [sizes for known in SIZES.values() for sizes in known]
        for flag, values, known in (
            ("--pcp", asked.pcp, PCP_SIZES),
            ("--tp", asked.tp, tuple(sorted({tp for tp, _ in next_to}))),
            ("--dcp", asked.dcp, tuple(sorted({dcp for _, dcp in next_to}))),
            ("--interleave", asked.interleave, INTERLEAVES),
        ):
            for value in values:
                if value not in known:
                    told = ", ".join(map(str, known))
                    raise UsageError(
                        f"{flag} is {value}, which the enumeration does not have: use {told}, or "
                        "name a batch of your own with --batch."
                    )
        if not asked.batch and not units(msgspec.structs.replace(asked.choice, max_requests=1)):
            raise UsageError(
                "no batch of the enumeration has these --pcp, --tp, --dcp and --interleave "
                "together: leave one of them out."
            )
