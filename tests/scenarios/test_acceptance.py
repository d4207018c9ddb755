"""How many drafts there are and are accepted: drawn from names."""

from collections import Counter

from pcpbench.scenarios.acceptance import HIT_RATE, num_accepted, num_drafts


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


def test_every_number_of_drafts_comes_as_often():
    by_step = [num_drafts("s", "r", 0, 3, "step", step, 0) for step in range(2000)]
    by_request = [num_drafts("s", f"r{place}", 4, 3, "request", 0, 0) for place in range(2000)]
    for found in (by_step, by_request):
        counts = Counter(found)
        assert set(counts) == {0, 1, 2, 3}
        assert max(counts.values()) - min(counts.values()) < 150
    assert [num_drafts("s", "r", place, 3, "off", place, 0) for place in range(3)] == [3, 3, 3]


def test_by_step_all_requests_agree_and_by_request_no_step_matters():
    for step in range(20):
        assert len({num_drafts("s", f"r{n}", n, 3, "step", step, 7) for n in range(8)}) == 1
    own = [num_drafts("s", "r", place, 3, "request", 0, 7) for place in range(50)]
    assert own == [num_drafts("s", "r", place, 3, "request", 99 - place, 7) for place in range(50)]
    assert own != [num_drafts("s", "r", place, 3, "request", 0, 8) for place in range(50)]
