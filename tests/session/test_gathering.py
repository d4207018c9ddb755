"""The loop that starts processes: when it ends, and what becomes of those that break."""

import io

import pytest

from pcpbench.errors import MeasuredFailure
from pcpbench.gate_results import GateVerdict
from pcpbench.report.progress import make_progress
from pcpbench.session.gathering import (
    MAX_BROKEN,
    SLACK_S,
    START_S,
    Gathering,
    expected_of,
    finding_of,
)
from pcpbench.session.processes import WorkerCrash


class World:
    """Processes that take 2 s each on a clock of their own; some of them break."""

    def __init__(self, fake, broken=()):
        self.now, self.num, self.kept = 0.0, 0, []
        self.each_s, self.timeouts = 2.0, []
        self.broken = dict(broken)
        self.fake = fake
        self.gathering = Gathering(
            measured=fake.measured([]),
            progress=make_progress(io.StringIO()),
            write=self.kept.append,
            sample=self.sample,
            clock=lambda: self.now,
        )

    def sample(self, job, timeout_s):
        self.timeouts.append(self.now + timeout_s)
        self.now, self.num = self.now + self.each_s, self.num + 1
        if self.num in self.broken:
            raise self.broken[self.num]
        return self.fake.process()

    @property
    def taken(self):
        return len(self.gathering.measured.processes)


def test_it_stops_at_the_first_look_when_nothing_is_open(fake):
    world = World(fake)
    world.gathering.take_until(lambda run, at_look: at_look, 6, 100.0)
    assert world.taken == 6
    assert len(world.kept) == 6


def test_it_goes_on_while_something_is_open(fake):
    world = World(fake)
    world.gathering.take_until(lambda run, _: len(run.processes) >= 9, 6, 100.0)
    assert world.taken == 9


def test_it_stops_before_the_first_look_only_where_it_is_told_to(fake):
    world = World(fake)
    world.gathering.take_until(lambda run, at_look: len(run.processes) >= 2, 6, 100.0)
    assert world.taken == 2


def test_it_never_starts_what_would_end_past_the_deadline(fake):
    world = World(fake)
    world.gathering.take_until(lambda run, at_look: False, 6, 15.0)
    assert world.taken == 7
    assert world.now <= 15.0


def test_a_first_process_that_would_end_past_the_deadline_is_not_started(fake):
    for expected_s, taken in ((15.5, 0), (14.5, 7)):
        world = World(fake)
        world.gathering.take_until(lambda run, at_look: False, 6, 15.0, expected_s)
        assert world.taken == taken


def test_what_processes_took_before_is_what_one_more_takes(fake):
    processes = [fake.process(wall_s=seconds) for seconds in (7.0, 8.0, 60.0)]
    assert expected_of(processes) == 8.0 + START_S


def test_a_process_that_hangs_is_given_the_time_that_is_left_and_no_second_one(fake):
    world = World(fake, {1: WorkerCrash("a worker took more than 45 s")})
    world.each_s = 15.0 + SLACK_S
    world.gathering.take_until(lambda run, at_look: False, 6, 15.0)
    assert world.num == 1
    assert world.timeouts == [15.0 + SLACK_S]


def test_a_deadline_that_is_over_starts_nothing(fake):
    world = World(fake)
    world.now = 20.0
    world.gathering.take_until(lambda run, at_look: False, 6, 15.0)
    assert world.taken == 0


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (WorkerCrash("killed"), GateVerdict.CRASHED),
        (MeasuredFailure("C8 broke"), GateVerdict.REGRESSION),
    ],
)
def test_a_process_that_breaks_is_a_finding_and_the_others_go_on(fake, error, verdict):
    world = World(fake, {2: error})
    world.gathering.take(5)
    assert world.taken == 5
    (failure,) = map(finding_of, world.gathering.measured.failures)
    assert (failure.verdict, failure.why) == (verdict, str(error))


def test_after_two_that_break_no_more_are_started(fake):
    world = World(fake, {n: WorkerCrash("killed") for n in range(2, 99)})
    world.gathering.take_until(lambda run, at_look: False, 6, 1000.0)
    assert world.num == 1 + MAX_BROKEN
