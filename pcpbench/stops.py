"""How a process of ours is stopped: Ctrl-C, and the signals that ask it to end.

Owns the handlers. What was running is left by an exception, so that files are finished and the run
says how it ended. An exception can get lost in a library (whatever is raised in a destructor, in a
callback of the garbage collector, in an attribute that native code only tries), and the run would
go on to a verdict: so a stop is raised again until nothing runs that has not seen it.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Final

STOPS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ASK_AGAIN_S: Final = 0.25


def guard_stops() -> None:
    """Install the handlers; for a process of our own.

    A signal that whoever started the process ignores (`nohup`, `&` in a script) stays ignored.
    """
    stop = _Stop()
    signal.signal(signal.SIGALRM, stop.ask_again)
    for signum in STOPS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, stop.ask)


def end_guard() -> None:
    """What ran has come to its end: nothing is asked again."""
    signal.setitimer(signal.ITIMER_REAL, 0)


class _Stop:
    """The exceptions that are on their way: a second one, where the first seemed lost."""

    def __init__(self) -> None:
        self._signum = 0
        self._raised: list[BaseException] = []

    def ask(self, signum: int, frame: object) -> None:
        """Leave what is running."""
        # The ranks of a step are coroutines: that a stop leaves some unstarted is no mistake.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        self._signum = signum
        by_hand = signum == signal.SIGINT
        self._raised.append(KeyboardInterrupt() if by_hand else SystemExit(128 + signum))
        signal.setitimer(signal.ITIMER_REAL, ASK_AGAIN_S, ASK_AGAIN_S)
        raise self._raised[-1]

    def ask_again(self, signum: int, frame: object) -> None:
        """Unless files are being finished because of it, the stop got lost."""
        if self._raised and not _is_handled(self._raised):
            self.ask(self._signum, frame)


def _is_handled(stops: Sequence[BaseException]) -> bool:
    """Whether what was interrupted runs in an `except`, `finally` or `with` that a stop leaves."""
    handled = sys.exception()
    while handled is not None and not any(handled is stop for stop in stops):
        handled = handled.__context__
    return handled is not None
