"""C14 on outputs: second runs and late reads. Broken records are named, near misses are not."""

from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks.findings import StepView
from pcpbench.checks.replays import compare_again, compare_held, compare_late, slots_of

BETWEEN = ("FULL[reqs=8,tokens=8]", "FULL[reqs=1,tokens=1]")


@pytest.fixture
def clean(kit):
    record = kit.Bench(kit.make_plan([3, 9], 2), kit.setup("full", pcp=2)).at(1, kit.full(4))[2]
    return replace(record, num_replays=1)


def changed(record, tensor):
    """The record with the smallest change there is in one value of one output."""
    values = getattr(record, tensor).copy()
    flat = values.reshape(-1)
    flat[1] = np.nextafter(flat[1], np.float32(9)) if tensor != "sampled" else flat[1] + 1
    return replace(record, **{tensor: values})


def test_a_second_look_at_the_same_is_no_finding(clean):
    assert list(compare_again(clean, clean, BETWEEN)) == []
    assert list(compare_late(clean, clean)) == []
    assert list(compare_late(clean, clean, BETWEEN)) == []


@pytest.mark.parametrize("tensor", ["hidden", "logits", "sampled"])
def test_a_second_replay_is_held_to_every_bit(clean, tensor):
    (found,) = compare_again(clean, changed(clean, tensor), BETWEEN)
    assert (found.contract, found.arm, found.step, found.tensor) == ("C14", "full", 1, tensor)
    assert found.message.startswith(
        "a second replay on the same inputs, after FULL[reqs=8,tokens=8], FULL[reqs=1,tokens=1] in "
        f"between, changed {tensor}: 1 of "
    )
    (alone,) = compare_again(clean, changed(clean, tensor))
    assert "in between" not in alone.message


def test_what_ran_eagerly_is_no_replay(clean):
    eager = replace(clean, num_replays=0)
    (found,) = compare_again(eager, changed(eager, "logits"))
    assert found.message.startswith("a second run on the same inputs changed logits")


@pytest.mark.parametrize("tensor", ["logits", "sampled"])
def test_tokens_and_logits_hold_whatever_replays(clean, tensor):
    (found,) = compare_late(clean, changed(clean, tensor), BETWEEN)
    assert (found.contract, found.step, found.tensor) == ("C14", 1, tensor)
    assert found.message.startswith("replaying FULL[reqs=8,tokens=8], FULL[reqs=1,tokens=1] after ")


def test_hidden_states_hold_until_the_next_forward_pass_and_no_longer(clean):
    later = changed(clean, "hidden")
    (found,) = compare_late(clean, later)
    assert (found.contract, found.tensor) == ("C14", "hidden")
    assert found.message.startswith("allocating and freeing memory after the step had handed it ")
    assert list(compare_late(clean, later, BETWEEN)) == []


def test_what_the_next_step_leaves_of_tokens_and_logits(kit, clean):
    held = [(clean.sampled, clean.logits), (clean.sampled, clean.logits)]
    assert list(compare_held(clean, held)) == []
    assert list(compare_held(clean, [])) == [], "an idle step hands out nothing"
    (found,) = compare_held(clean, [(clean.sampled, changed(clean, "logits").logits), held[1]])
    assert (found.contract, found.step, found.rank, found.tensor) == ("C14", 1, 0, "logits")
    assert found.message.startswith("the next step, after this one had handed it out, changed ")
    own = kit.change_rank(clean, 1, sampled=clean.sampled + 1)
    assert list(compare_held(own, [held[0], (clean.sampled + 1, clean.logits)])) == []
    (found,) = compare_held(own, held)
    assert (found.rank, found.tensor) == (1, "sampled")


def test_the_sign_of_zero_and_nan_are_bits_like_any_other(clean):
    zeros = replace(clean, logits=np.zeros_like(clean.logits))
    negative = replace(clean, logits=-np.zeros_like(clean.logits))
    assert len(list(compare_again(zeros, negative))) == 1
    nan = replace(clean, logits=np.full_like(clean.logits, np.nan))
    assert list(compare_again(nan, nan)) == []


def test_one_rank_is_enough(kit, clean):
    zeros = np.zeros((2, 3), np.float32)
    first = kit.change_rank(clean, 1, hidden=zeros)
    second = kit.change_rank(clean, 1, hidden=zeros + 1)
    assert [v.rank for v in compare_again(first, second)] == [1]
    assert [v.rank for v in compare_late(first, second)] == [1]


def test_slots_of_a_step_by_hand(kit):
    """r0 writes position 3 of block 1, r1 position 9 in block 4, on both ranks."""
    bench = kit.Bench(kit.make_plan([3, 9], 2), kit.setup("full", pcp=2))
    step, expected, record = bench.at(1, kit.full(4))
    view = StepView(plan=step, record=record, setup=bench.setup, expected=expected)
    assert [[s.tolist() for s in groups] for groups in slots_of(view)] == [[[7, 17]], [[7, 17]]]
    assert slots_of(replace(view, expected=None)) == []
