"""C18 from arrays: which requests, which tokens and positions, what breaks it and what does not."""

from dataclasses import replace

import numpy as np
import pytest

from pcpbench.checks import dense
from pcpbench.checks.dense import DenseCheck, choose_requests
from pcpbench.plan import NewRequest, StepPlan


def records_of(kit, plan):
    """Good records of every step, with logits that are as good as any."""
    bench, records = kit.Bench(plan, kit.setup("reference")), []
    for step in plan.steps:
        bench.oracle.advance(step)
        expected = bench.oracle.expect(step, bench.setup, kit.NONE, bench.feed)
        records.append(kit.good_record(plan, step, bench.setup, expected))
    return records


def dense_of(check, plan, records):
    """What a dense forward would give if the records were right: their rows, by position."""
    prompts = {new.req_id: len(new.prompt_token_ids) for new in plan.steps[0].new_requests}
    return [
        np.stack([records[p - prompts[name] + 1].logits[row] for p in places])
        for row, (name, places) in enumerate(zip(prompts, check.positions, strict=True))
    ]


@pytest.fixture
def case(kit, monkeypatch):
    plan = kit.make_plan([3, 9], 4)
    monkeypatch.setattr(dense, "choose_requests", lambda plan: ("r0", "r1"))
    records = records_of(kit, plan)
    check = DenseCheck(plan, records, "float32")
    return plan, records, check, dense_of(check, plan, records)


def test_sequences_are_prompt_and_tokens_fed_up_to_the_last_position(kit, case):
    _, records, check, _ = case
    assert check.positions == [[2, 3, 4, 5, 6], [8, 9, 10, 11, 12]]
    fed = [int(record.sampled[1]) for record in records]
    assert check.token_ids[1] == [*kit.prompt_of(1, 9), *fed[:4]]
    assert len(check.token_ids[0]) == 7


def test_equal_logits_and_a_near_miss_are_no_finding(case):
    _, _, check, right = case
    assert check.compare(right) == []
    near = [part.copy() for part in right]
    near[1][2, 4] += 0.9e-4 * np.sqrt(np.square(near[1][2]).mean())
    assert check.compare(near) == []


def test_a_position_beyond_the_limit_is_named(case):
    _, _, check, right = case
    off = [part.copy() for part in right]
    off[1][2, 4] += 0.125
    (found,) = check.compare(off)
    assert (found.contract, found.arm, found.step) == ("C18", "reference", 2)
    assert (found.rank, found.tensor) == (None, "logits")
    assert found.message.startswith(
        "logits of request r1 at position 10 are not those of a dense forward over its 11 tokens: "
        "off by "
    )
    assert found.message.endswith("(max abs 0.125), the limit is 0.0001")


def test_each_position_beyond_the_limit_is_named_once(case):
    _, _, check, right = case
    off = [part.copy() for part in right]
    off[0][[1, 4], 0] += (0.001, 9.0)
    off[1][0, 0] += 1.0
    found = check.compare(off)
    assert [one.step for one in found] == [0, 1, 4]
    places = ("r1 at position 8", "r0 at position 3", "r0 at position 6")
    assert all(place in one.message for place, one in zip(places, found, strict=True))


def test_many_small_errors_break_the_cosine_and_the_worst_is_named(case):
    """Each row within its limit, and all together off: in half precision that is a wrong key."""
    plan, records, _, right = case
    check = DenseCheck(plan, records, "bfloat16")
    rng = np.random.default_rng(0)
    off = []
    for part in right:
        scale = np.sqrt(np.square(part).mean(1, keepdims=True))
        off.append((part + 0.2 * scale * rng.choice([-1, 1], part.shape)).astype(np.float32))
    found = check.compare(off)
    assert len(found) == 2
    assert all("the limit is 0.3" in one.message for one in found)


def test_a_value_that_is_not_finite_is_named(case):
    _, _, check, right = case
    off = [part.copy() for part in right]
    off[0][3, 0] = np.nan
    (found,) = check.compare(off)
    assert found.step == 3
    assert "off by inf" in found.message


def test_another_vocabulary_is_a_finding(case):
    _, _, check, right = case
    found = check.compare([part[:, :-1] for part in right])
    assert [one.contract for one in found] == ["C18", "C18"]
    assert "shape [5, 11], the dense ones [5, 10]" in found[0].message


def test_a_request_that_comes_back_goes_on_in_one_sequence(kit):
    """Preempted after two tokens; the plan takes it back with both."""
    prompt = kit.prompt_of(0, 4)
    new = NewRequest(req_id="r0", prompt_token_ids=prompt, max_tokens=4)
    back = NewRequest(req_id="r0", prompt_token_ids=prompt, max_tokens=4, num_generated=2)
    steps = [
        StepPlan(index=0, scheduled=(kit.scheduled("r0", 4),), new_requests=(new,)),
        StepPlan(index=1, scheduled=(kit.scheduled("r0", 1, 4, 4),)),
        StepPlan(index=2, scheduled=(), preempted_req_ids=("r0",), idle=True),
        StepPlan(index=3, scheduled=(kit.scheduled("r0", 6),), new_requests=(back,)),
        StepPlan(index=4, scheduled=(kit.scheduled("r0", 1, 6, 6),)),
    ]
    plan = kit.plan_of(steps)
    records = records_of(kit, plan)
    check = DenseCheck(plan, records, "float32")
    assert check.positions == [[3, 4, 5, 6]]
    fed = [int(records[i].sampled[0]) for i in (0, 1, 3)]
    assert check.token_ids == [[*prompt, *fed]]


def test_positions_that_a_request_comes_back_without_are_left_out(kit):
    """It had three tokens, is taken back with one, and the plan ends before it samples again."""
    prompt = kit.prompt_of(0, 4)
    new = NewRequest(req_id="r0", prompt_token_ids=prompt, max_tokens=9)
    back = NewRequest(req_id="r0", prompt_token_ids=prompt, max_tokens=9, num_generated=1)
    steps = [
        StepPlan(index=0, scheduled=(kit.scheduled("r0", 4),), new_requests=(new,)),
        StepPlan(index=1, scheduled=(kit.scheduled("r0", 1, 4, 4),)),
        StepPlan(index=2, scheduled=(kit.scheduled("r0", 1, 5, 4),)),
        StepPlan(index=3, scheduled=(kit.scheduled("r0", 2, 0, 5),), new_requests=(back,),
                 preempted_req_ids=("r0",)),
    ]  # fmt: skip
    plan = kit.plan_of(steps)
    assert DenseCheck(plan, records_of(kit, plan), "float32").positions == [[3, 4]]


def test_a_token_that_there_is_not_ends_a_sequence(case):
    plan, records, _, _ = case
    bad = replace(records[1], sampled=np.array([-1, 5]))
    check = DenseCheck(plan, [records[0], bad, *records[2:]], "float32")
    assert check.positions == [[2, 3], [8, 9, 10, 11, 12]]
    assert all(token >= 0 for tokens in check.token_ids for token in tokens)


def step_of(kit, index, shares, new=(), blocks=None, **left):
    news = [NewRequest(req_id=n, prompt_token_ids=(1,) * 4, max_tokens=9) for n in new]
    return StepPlan(
        index=index,
        scheduled=tuple(kit.scheduled(n, count, done) for n, count, done in shares),
        new_requests=tuple(news),
        new_block_ids={name: (ids,) for name, ids in (blocks or {}).items()},
        **left,
    )


def lives(kit, steps):
    return kit.plan_of([step_of(kit, i, *rest[:-1], **rest[-1]) for i, rest in enumerate(steps)])


def test_the_longest_the_resumed_the_heirs_and_the_last_are_always_looked_at(kit, monkeypatch):
    monkeypatch.setattr(dense, "MAX_TOKENS", 0)
    plan = lives(kit, [
        ([("plain", 4, 0), ("long", 30, 0)], ("plain", "long"), {"plain": (1,), "long": (2,)}, {}),
        ([("had", 4, 0), ("gone", 4, 0)], ("had", "gone"), {"had": (3,), "gone": (4,)}, {}),
        ([("idle", 4, 0)], ("idle",), {"idle": (9,)}, {"finished_req_ids": ("gone",)}),
        ([("got", 4, 0)], ("got",), {"got": (3,)}, {"finished_req_ids": ("had",)}),
        ([("late", 4, 0)], ("late",), {"late": (4,)}, {"preempted_req_ids": ("idle",)}),
        ([("idle", 4, 0), ("end", 4, 0)], ("idle", "end"), {"idle": (11,), "end": (10,)}, {}),
        ([("end", 1, 4)], (), {}, {}),
    ])  # fmt: skip
    assert choose_requests(plan) == ("long", "idle", "got", "had", "end")


def test_two_owners_of_a_block_come_before_any_reuse(kit, monkeypatch):
    monkeypatch.setattr(dense, "MAX_TOKENS", 0)
    plan = lives(kit, [
        ([("a", 4, 0), ("b", 4, 0)], ("a", "b"), {"a": (1,), "b": (2,)}, {}),
        ([("c", 4, 0), ("b", 1, 4)], ("c",), {"c": (1,)}, {"finished_req_ids": ("a",)}),
        ([("d", 4, 0), ("b", 1, 5)], ("d",), {"d": (2,)}, {}),
        ([("d", 1, 4)], (), {}, {"finished_req_ids": ("b",)}),
    ])  # fmt: skip
    assert choose_requests(plan) == ("b", "d")


def test_who_came_back_owns_its_blocks_again(kit, monkeypatch):
    monkeypatch.setattr(dense, "MAX_TOKENS", 0)
    plan = lives(kit, [
        ([("a", 4, 0), ("b", 9, 0)], ("a", "b"), {"a": (1,), "b": (2,)}, {}),
        ([("c", 4, 0)], ("c",), {"c": (1,)}, {"preempted_req_ids": ("a",)}),
        ([("a", 4, 0)], ("a",), {"a": (3,)}, {}),
        ([("d", 4, 0), ("a", 1, 4)], ("d",), {"d": (3,)}, {}),
        ([("b", 1, 9)], (), {}, {}),
    ])  # fmt: skip
    assert choose_requests(plan) == ("b", "a", "d")


def test_others_are_looked_at_while_their_tokens_last(kit, monkeypatch):
    plan = kit.make_plan([40, 3, 3, 3], 2)
    assert len(choose_requests(plan)) == 4
    monkeypatch.setattr(dense, "MAX_TOKENS", 42 + 2 * 5)
    assert choose_requests(plan) == ("r0", "r1", "r2")
    monkeypatch.setattr(dense, "MAX_TOKENS", 0)
    assert choose_requests(plan) == ("r0",)


def test_a_plan_without_requests_has_nothing_to_look_at(kit):
    plan = kit.plan_of([StepPlan(index=0, scheduled=(), idle=True)])
    assert choose_requests(plan) == ()
    check = DenseCheck(plan, [], "float32")
    assert check.compare([]) == []
