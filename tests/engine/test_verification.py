"""Greedy verification against a loop, and drafts that come to a planned acceptance."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcpbench.engine.verification import count_accepted, planned_drafts
from pcpbench.plan import ScheduledRequest

ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=3, max_size=3),
        st.lists(st.integers(0, 2), min_size=4, max_size=4),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=6,
)


def by_hand(drafts, targets, num_drafts):
    count = 0
    while count < num_drafts and drafts[count] == targets[count]:
        count += 1
    return count


@settings(max_examples=200, deadline=None)
@given(rows=ROWS)
def test_accepted_is_the_longest_prefix_that_the_model_would_have_chosen(rows):
    found = count_accepted(
        torch.tensor([row[0] for row in rows]),
        torch.tensor([row[1] for row in rows]),
        torch.tensor([row[2] for row in rows]),
    )
    assert found.tolist() == [by_hand(*row) for row in rows]


def share(num_drafts, accepted, samples=True):
    return ScheduledRequest(
        req_id="r",
        num_scheduled_tokens=1 + num_drafts,
        num_computed_tokens=9,
        prefill_len=9 if samples else 99,
        prompt_len=9,
        num_draft_tokens=num_drafts,
        num_accepted_tokens=accepted,
    )


def test_planned_drafts_by_hand():
    # A chunk that samples nothing, a decode with 1 of 3 right, a last chunk, one with 2 of 2 right.
    scheduled = [share(0, 0, samples=False), share(3, 1), share(0, 0), share(2, 2)]
    targets = [5, 9, 7, 1, 40, 20, 21, 22]
    assert planned_drafts(scheduled, targets, 50) == [5, 10, 7, 20, 21]
    assert planned_drafts([share(1, 0)], [49, 3], 50) == [0]  # the next of the last is the first


@settings(max_examples=100, deadline=None)
@given(targets=st.lists(st.integers(0, 6), min_size=5, max_size=5), accepted=st.integers(0, 4))
def test_planned_drafts_are_verified_as_planned(targets, accepted):
    drafts = planned_drafts([share(4, accepted)], targets, 7)
    found = count_accepted(torch.tensor([drafts]), torch.tensor([targets]), torch.tensor([4]))
    assert found.tolist() == [accepted]
