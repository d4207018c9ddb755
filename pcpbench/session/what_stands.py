"""A run in which something was seen to fail has failed, whatever goes wrong after it.

Owns how that is said of a run that could not go on, or could not write or show its report. Knows no
command: who has a result asks here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pcpbench.errors import CannotMeasure, MeasuredFailure, NoMemory, PcpbenchError
from pcpbench.records import Notice
from pcpbench.report.printable import printable
from pcpbench.results import Outcome


def told_of(error: Exception) -> str:
    """One line; what pcpbench did not raise on purpose with its type."""
    said = " ".join(str(error).split())
    if isinstance(error, PcpbenchError):
        return said
    return f"pcpbench itself failed with {type(error).__name__}: {said}"


def notice_of(error: Exception, doing: str) -> Notice:
    """What kept the rest from being looked at. doing: what was on its way, such as a step."""
    setting = "memory" if isinstance(error, NoMemory) else "run"
    return Notice(setting=setting, message=f"{doing}: {told_of(error)}")


def write_end(write: Callable[[], None], outcome: Outcome) -> None:
    """Write what a run came to; where that cannot be, its manifest must not say less than FAIL.

    Raises MeasuredFailure then, which a manifest takes for one.
    """
    try:
        write()
    except CannotMeasure as error:
        if outcome is not Outcome.FAIL:
            raise
        told = f"the comparison failed, and its files are not whole: {error}"
        raise MeasuredFailure(told) from error


def complain(error: Exception, outcome: Outcome | None) -> None:
    """Only say what came after a FAIL; of any other run it is raised again."""
    if outcome is not Outcome.FAIL:
        raise error
    print(f"pcpbench: {printable(told_of(error))}", file=sys.stderr)
