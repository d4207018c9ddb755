"""How a process of ours is stopped: Ctrl-C, and the signals that ask it to end.

Owns the handlers. What was running is left by an exception, so that files are finished and the run
says how it ended.
"""

from __future__ import annotations

import signal
import warnings
from typing import Final

STOPS: Final = (signal.SIGTERM, signal.SIGHUP)


def guard_stops() -> None:
    """Install the handlers; for a process of our own."""
    for signum in STOPS:
        signal.signal(signum, _stop)
    signal.signal(signal.SIGINT, _interrupt)


def _stop(signum: int, frame: object) -> None:
    """End as Ctrl-C does: whatever is being written is finished, and the run says how it ended."""
    _leave_ranks()
    raise SystemExit(128 + signum)


def _interrupt(signum: int, frame: object) -> None:
    """Ctrl-C."""
    _leave_ranks()
    raise KeyboardInterrupt


def _leave_ranks() -> None:
    """The ranks of a step are coroutines: that a stop leaves some unstarted is no mistake."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
