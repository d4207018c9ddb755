"""A process that is stopped ends with its code and says nothing of the ranks it left."""

import signal
import subprocess
import sys

import pytest

STOPPED = """
import os, sys
from pcpbench.stops import guard_stops

async def rank():
    pass

guard_stops()
ranks = [rank(), rank()]
os.kill(os.getpid(), {signum})
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_coroutines_that_a_stop_leaves_unstarted_are_not_complained_of(signum):
    code = STOPPED.format(signum=int(signum))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "never awaited" not in ended.stderr
    by_interrupt = signum is signal.SIGINT
    assert ended.returncode == (-signal.SIGINT if by_interrupt else 128 + signum)
