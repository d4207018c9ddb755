"""Which graphs replay between a step and its second replay: every pair, varied, bounded."""

from pcpbench.session.replay_order import PER_STEP, ReplayOrder

CAPTURED = ("g16", "g8", "g4", "g2", "g1")


def visits(own, count, captured=CAPTURED):
    order = ReplayOrder()
    return [order.between("full", own, captured) for _ in range(count)]


def test_the_first_step_meets_every_other_graph_in_reverse_of_capture():
    (first,) = visits("g4", 1)
    assert first == ("g4", "g1", "g2", "g8", "g16")


def test_later_steps_are_bounded_and_every_graph_comes_last_some_time():
    later = visits("g4", 9)[1:]
    assert all(len(between) == 1 + PER_STEP for between in later)
    assert all(between[0] == "g4" and "g4" not in between[1:] for between in later)
    assert {between[-1] for between in later} == set(CAPTURED) - {"g4"}
    assert {between[1] for between in later} == set(CAPTURED) - {"g4"}


def test_a_step_that_replayed_nothing_is_followed_by_all_graphs_and_then_some():
    first, second = visits("NONE", 2)
    assert first == CAPTURED[::-1]
    assert len(second) == PER_STEP


def test_few_graphs_alternate():
    assert visits("a", 2, ("c", "b", "a")) == [("a", "b", "c"), ("a", "c", "b")]
    assert visits("a", 1, ("a",)) == [("a",)]
    assert visits("NONE", 1, ()) == [()]


def test_arms_and_graphs_are_counted_apart_and_the_order_is_always_the_same():
    order = ReplayOrder()
    first = order.between("full", "g4", CAPTURED)
    assert order.between("piecewise", "g4", CAPTURED) == first
    assert len(order.between("full", "g2", CAPTURED)) == len(CAPTURED)
    assert visits("g8", 7) == visits("g8", 7)
