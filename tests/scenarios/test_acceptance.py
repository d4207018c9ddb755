"""How many drafts are accepted: drawn from names, often but not always right."""

from collections import Counter

from pcpbench.scenarios.acceptance import HIT_RATE, num_accepted


def test_the_draw_depends_on_every_name_and_on_nothing_else():
    base = [num_accepted("s", "r", place, 3) for place in range(64)]
    assert base == [num_accepted("s", "r", place, 3) for place in range(64)]
    assert base != [num_accepted("t", "r", place, 3) for place in range(64)]
    assert base != [num_accepted("s", "q", place, 3) for place in range(64)]
    assert base != [num_accepted("s", "r", place, 3, seed=1) for place in range(64)]


def test_fewer_drafts_are_the_beginning_of_more():
    for place in range(100):
        most = num_accepted("s", "r", place, 5)
        assert [num_accepted("s", "r", place, count) for count in range(6)] == [
            min(most, count) for count in range(6)
        ]


def test_each_draft_is_right_at_the_hit_rate():
    draws = 4000
    counts = Counter(num_accepted("s", f"r{number}", 0, 3) for number in range(draws))
    share = HIT_RATE
    for accepted, expected in enumerate((1 - share, share * (1 - share), share**2 * (1 - share))):
        assert abs(counts[accepted] / draws - expected) < 0.03
    assert abs(counts[3] / draws - share**3) < 0.03
