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


class CleanOutcome(Enum):
    """Of a comparison of sound engines.

    CLEAN: it passed. ACCUSED: something was found, which is a false alarm. NOT_COMPARED: an arm
    never ran as asked, so that there was nothing to judge. NO_MEMORY: the machine had none left.
    """

    CLEAN = "clean"
    ACCUSED = "accused"
    NOT_COMPARED = "not compared"
    NO_MEMORY = "no memory"


class CleanRun(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of sound engines; accused: what was found all the same.

    detail: the first finding, or why there is no verdict. arms, dtype, command: of a run that was
    drawn by chance; the command repeats it.
    """

    world: str
    scenario: str
    outcome: CleanOutcome
    accused: tuple[str, ...] = ()
    detail: str = ""
    arms: str = ""
    dtype: str = ""
    command: str = ""
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        assert bool(self.accused) == (self.outcome is CleanOutcome.ACCUSED)

    @property
    def has_verdict(self) -> bool:
        """Whether anything is known of the judge: it was quiet, or it was not."""
        return self.outcome in (CleanOutcome.CLEAN, CleanOutcome.ACCUSED)


class CleanResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench faults clean`, in the order of its runs."""

    runs: tuple[CleanRun, ...]
    wall_s: float = 0.0

    @property
    def num_false_alarms(self) -> int:
        """Runs that were accused."""
        return sum(bool(run.accused) for run in self.runs)

    @property
    def num_judged(self) -> int:
        """Runs that ended in a verdict."""
        return sum(run.has_verdict for run in self.runs)

    @property
    def exit_code(self) -> int:
        """1 one accused; 3 one without a verdict, or no run at all; 0 otherwise."""
        if self.num_false_alarms:
            return 1
        return 0 if self.runs and self.num_judged == len(self.runs) else 3


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
        """Judged runs in which nothing was to be found."""
        noise = len(self.judged) - self.num_faults
        return noise + sum(run.has_verdict for run in self.clean)

    @property
    def exit_code(self) -> int:
        """1 for one not caught or a sound engine accused, else 3 where that is not known, else 0.

        It is not known without any judged fault, where memory ran out for one, and where a clean
        run has no verdict.
        """
        if self.num_false_alarms or any(run.verdict not in GOOD for run in self.judged):
            return 1
        unknown = any(run.verdict is Verdict.NO_MEMORY for run in self.runs)
        unknown = unknown or not all(run.has_verdict for run in self.clean)
        return 3 if unknown or not self.judged else 0
