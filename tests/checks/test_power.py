"""Gates cut from processes in order of time: false alarms are found where there are some."""

import numpy as np
import pytest

from pcpbench.checks.power import MAX_GATES, GateSize, Table, simulate, smallest_called

SIZE = GateSize(num_baseline=12, num_first=5, num_most=8)


def table(num=40, sd=0.004, drift=(), slowed=True):
    """One finding with a limit of 2.5 %. drift: what is added to the last processes."""
    values = np.random.default_rng(3).normal(0.0, sd, num)
    values[num - len(drift) :] += drift
    return Table(values=[[value] for value in values], limits=[0.025], slowed=[slowed])


def test_a_steady_machine_raises_no_alarm_and_sees_a_slowdown():
    assert simulate(table(), 0.0, SIZE).passed == 1.0
    rates = [simulate(table(), slowdown, SIZE) for slowdown in (0.01, 0.025, 0.05, 0.1)]
    assert rates[0].regression == 0.0
    assert rates[1].undecided > 0.9
    assert smallest_called(rates).slowdown == 0.05
    assert rates[2].num_run == SIZE.num_first


def test_a_machine_that_drifts_raises_alarms():
    """After 12 processes it is 5 % slower for good: gates in order of time are wrong there."""
    rates = simulate(table(drift=np.full(28, 0.05)), 0.0, SIZE)
    assert rates.regression > 0.2
    slowly = simulate(table(drift=np.linspace(0, 0.1, 40)), 0.0, SIZE)
    assert slowly.regression > 0.5
    faster = simulate(table(drift=np.full(28, -0.05)), 0.0, SIZE)
    assert faster.regression == 0.0


def test_a_slowdown_is_planted_only_where_it_shows():
    assert simulate(table(slowed=False), 0.5, SIZE).passed == 1.0


def test_every_gate_has_its_baseline_before_its_run():
    small = GateSize(num_baseline=2, num_first=2, num_most=2)
    assert small.places(5) == [(0, 2), (0, 3), (1, 3)]
    assert small.places(4) == [(0, 2)]
    assert small.places(3) == []
    assert [small.num_apart(num) for num in (3, 4, 7, 8)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="too few"):
        simulate(table(num=19), 0.0, SIZE)


def test_of_very_many_gates_as_many_as_are_enough_are_chosen_evenly():
    places = SIZE.places(200)
    assert len(places) == len(set(places)) == MAX_GATES
    assert (places[0], places[-1]) == ((0, 12), (180, 192))
    assert all(run >= baseline + 12 for baseline, run in places)
