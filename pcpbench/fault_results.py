"""What a run of the fault catalogue found: frozen values that session builds and a report renders.

Owns the verdicts and the exit code that follows from them. Knows no engine and no injection.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Verdict(Enum):
    """Of one fault.

    CAUGHT: an expected finding was there. MISNAMED: the run failed, by other findings only.
    ESCAPED: the run passed. QUIET, ACCUSED: of an entry that must not be reported, and was not, or
    was. CRASHED: the engine raised what is no finding. NOT_TRIGGERED: the injection never acted.
    NOT_RUN: the world or scenario asked for, or the installed code, lacks what the fault needs.
    UNUSABLE: an installed package brings an entry that cannot be run. NO_MEMORY: the machine had
    none left, so that nobody knows.
    """

    CAUGHT = "caught"
    MISNAMED = "misnamed"
    ESCAPED = "escaped"
    QUIET = "quiet"
    ACCUSED = "accused"
    CRASHED = "crashed"
    NOT_TRIGGERED = "not triggered"
    NOT_RUN = "not run"
    UNUSABLE = "unusable"
    NO_MEMORY = "no memory"


GOOD = frozenset({Verdict.CAUGHT, Verdict.QUIET})
NO_VERDICT = frozenset(
    {Verdict.NOT_TRIGGERED, Verdict.NOT_RUN, Verdict.UNUSABLE, Verdict.NO_MEMORY}
)


class FaultInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the catalogue in words.

    class_id: such as `K01`. contracts: findings of which at least one must be there, sorted; empty
    for an entry that must not be reported. world, scenario: where it is run by default; "" for one
    that cannot be used. is_usable: False where `description` says why it cannot.
    """

    name: str
    class_id: str
    description: str
    reports: tuple[str, ...]
    contracts: tuple[str, ...]
    world: str
    scenario: str
    is_usable: bool = True


class FaultRun(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in one world and scenario.

    fired: contract ids, and `partition drift` or `padding drift` where these left their budget.
    detail: the first finding, or why there is no verdict.
    """

    fault: FaultInfo
    world: str
    scenario: str
    fired: tuple[str, ...]
    verdict: Verdict
    detail: str
    wall_s: float = 0.0


class CleanRun(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of sound engines; accused: what was found all the same.

    arms, dtype, command: of a run that was drawn by chance; the command repeats it.
    """

    world: str
    scenario: str
    accused: tuple[str, ...]
    detail: str = ""
    arms: str = ""
    dtype: str = ""
    command: str = ""
    wall_s: float = 0.0


class CleanResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench faults clean`, in the order of its runs."""

    runs: tuple[CleanRun, ...]
    wall_s: float = 0.0

    @property
    def num_false_alarms(self) -> int:
        """Runs that were accused."""
        return sum(bool(run.accused) for run in self.runs)

    @property
    def exit_code(self) -> int:
        """0 none accused, 1 otherwise, 3 without any run."""
        if not self.runs:
            return 3
        return 1 if self.num_false_alarms else 0


class FaultsResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench faults run`, in the order of the catalogue. target: whose code was damaged."""

    runs: tuple[FaultRun, ...]
    clean: tuple[CleanRun, ...]
    wall_s: float = 0.0
    target: str = "builtin"

    @property
    def judged(self) -> tuple[FaultRun, ...]:
        """Runs that ended in a verdict."""
        return tuple(run for run in self.runs if run.verdict not in NO_VERDICT)

    @property
    def num_faults(self) -> int:
        """Judged entries that should have been caught."""
        return sum(bool(run.fault.contracts) for run in self.judged)

    @property
    def num_caught(self) -> int:
        """Those of them that were."""
        return sum(run.verdict is Verdict.CAUGHT for run in self.judged)

    @property
    def num_false_alarms(self) -> int:
        """Clean runs that were accused, noise-floor entries included."""
        noise = sum(run.verdict is Verdict.ACCUSED for run in self.judged)
        return noise + sum(bool(run.accused) for run in self.clean)

    @property
    def num_clean(self) -> int:
        """Runs in which nothing was to be found."""
        return len(self.clean) + len(self.judged) - self.num_faults

    @property
    def exit_code(self) -> int:
        """0 all caught and no clean run accused, 1 otherwise, 3 without any verdict or memory."""
        if not self.judged:
            return 3
        bad = any(run.verdict not in GOOD for run in self.judged) or self.num_false_alarms
        if bad:
            return 1
        return 3 if any(run.verdict is Verdict.NO_MEMORY for run in self.runs) else 0
