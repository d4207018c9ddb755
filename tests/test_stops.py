"""A process that is stopped ends with its code, whatever swallows the first exception."""

import signal
import subprocess
import sys

import pytest

BEGIN = """
import os, signal, sys, time
from pcpbench.stops import end_guard, guard_stops

signum = {signum}
signal.signal(signum, signal.SIG_DFL)  # whoever runs the tests may have it ignored
"""
UNSTARTED = """
async def rank():
    pass

guard_stops()
ranks = [rank(), rank()]
os.kill(os.getpid(), signum)
"""
SWALLOWED = """
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signum)
        time.sleep(0.01)

guard_stops()
dropped = Dropped()
del dropped
print("went on", flush=True)
time.sleep(60)
"""
FINISHING = """
guard_stops()
try:
    os.kill(os.getpid(), signum)
    time.sleep(60)
finally:
    try:
        {{}}["no such file"]
    except KeyError:
        time.sleep(1)
    print("finished", flush=True)
"""
IGNORED = """
signal.signal(signum, signal.SIG_IGN)
guard_stops()
os.kill(os.getpid(), signum)
time.sleep(0.5)
print("went on")
"""
ENDED = """
guard_stops()
try:
    os.kill(os.getpid(), signum)
    time.sleep(60)
except BaseException:
    end_guard()
time.sleep(1)
print("ended")
"""
STOPS = pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])


def ended(code, signum):
    code = (BEGIN + code).format(signum=int(signum))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)


def code_of(signum):
    return -signal.SIGINT if signum is signal.SIGINT else 128 + signum


@STOPS
def test_coroutines_that_a_stop_leaves_unstarted_are_not_complained_of(signum):
    process = ended(UNSTARTED, signum)
    assert "never awaited" not in process.stderr
    assert process.returncode == code_of(signum)


@STOPS
def test_a_stop_that_a_destructor_swallows_is_asked_again(signum):
    process = ended(SWALLOWED, signum)
    assert process.stdout == "went on\n"
    assert process.returncode == code_of(signum)


@STOPS
def test_what_is_finished_because_of_a_stop_is_not_stopped_again(signum):
    process = ended(FINISHING, signum)
    assert process.stdout == "finished\n"
    assert process.returncode == code_of(signum)


@STOPS
def test_a_signal_that_the_starter_has_ignored_stays_ignored(signum):
    process = ended(IGNORED, signum)
    assert (process.stdout, process.returncode) == ("went on\n", 0)


def test_after_the_end_nothing_is_asked_again():
    process = ended(ENDED, signal.SIGTERM)
    assert (process.stdout, process.returncode) == ("ended\n", 0)
