"""The scheduler against a slow replay of its own plans, and against hand-made cases."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcpbench.checks.plan_audit import plan_violations
from pcpbench.engine.block_pool import BlockPool
from pcpbench.engine.plan_steps import make_plan
from pcpbench.engine.scheduler import Scheduler
from pcpbench.errors import UsageError
from pcpbench.kv_groups import ONE_GROUP, KVGroup
from pcpbench.plan import ScenarioPlan
from pcpbench.scenarios.schema import Limits, RequestEntry, Scenario


def scenario(*requests: RequestEntry, **settings_: Any) -> Scenario:
    return Scenario(name="made", description="made by a test", requests=requests, **settings_)


def entry(prompt_len: int, output_len: int, **more: Any) -> RequestEntry:
    return RequestEntry(prompt_len=prompt_len, output_len=output_len, **more)


class Replay:
    """A worker's view of a plan, in dicts; asserts what a plan promises."""

    def __init__(self, plan: ScenarioPlan, num_drafts: int = 0) -> None:
        self.plan, self.num_drafts = plan, num_drafts
        self.tables: dict[str, list[list[int]]] = {}
        self.computed: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.max_tokens: dict[str, int] = {}
        self.ever_used: set[int] = set()
        self.num_reused = 0
        self.num_preempted = 0
        self.num_freed = 0
        for index, step in enumerate(plan.steps):
            assert step.index == index
            self.step(step)
        assert not self.tables, "the worker does not end empty"
        assert self.outputs == self.max_tokens

    def step(self, step: Any) -> None:
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            del self.tables[req_id]
        self.num_preempted += len(step.preempted_req_ids)
        self.recycle(step.freed_block_ids)
        assert not (step.preempted_req_ids and step.new_requests), "in and out in one step"
        for req_id in step.finished_req_ids:
            assert self.outputs[req_id] == self.max_tokens[req_id]
        for new in step.new_requests:
            assert new.req_id not in self.tables
            assert new.num_generated == self.outputs.setdefault(new.req_id, 0)
            self.max_tokens[new.req_id] = new.max_tokens
            self.tables[new.req_id] = [[] for _ in self.plan.block_sizes]
            self.computed[new.req_id] = 0
            self.known[new.req_id] = len(new.prompt_token_ids) + new.num_generated
        self.extend_tables(step.new_block_ids)
        assert len(self.tables) == len(step.scheduled) or step.num_tokens == self.budget
        assert step.num_tokens <= self.budget
        assert len(step.scheduled) <= self.plan.max_num_seqs
        assert step.idle is (not step.scheduled)
        phases = [share.is_prefilling for share in step.scheduled]
        assert phases == sorted(phases), "a prefill before a decode"
        for share in step.scheduled:
            self.run(share)

    @property
    def budget(self) -> int:
        return self.plan.max_num_batched_tokens

    def recycle(self, freed_block_ids: dict[str, tuple[tuple[int, ...], ...]]) -> None:
        """Columns before a window lose their block, 0 stands for that."""
        assert not set(freed_block_ids) - set(self.tables)
        for req_id, tables in self.tables.items():
            freed = freed_block_ids.get(req_id, ((),) * len(tables))
            for group, (table, ids) in enumerate(zip(tables, freed, strict=True)):
                first = next((i for i, block in enumerate(table) if block), len(table))
                assert tuple(table[first : first + len(ids)]) == ids
                table[first : first + len(ids)] = [0] * len(ids)
                self.num_freed += len(ids)
                window = self.plan.sliding_window(group)
                span, position = self.plan.block_sizes[group], self.computed[req_id]
                for column, block in enumerate(table):
                    last = (column + 1) * span - 1
                    is_seen = not window or last > position - window
                    assert bool(block) is is_seen, "a block is back before or after its time"

    def extend_tables(self, new_block_ids: dict[str, tuple[tuple[int, ...], ...]]) -> None:
        for req_id, groups in new_block_ids.items():
            assert len(groups) == len(self.plan.block_sizes)
            assert any(groups)
            for table, ids in zip(self.tables[req_id], groups, strict=True):
                table.extend(ids)
                self.num_reused += len(self.ever_used & set(ids))
                self.ever_used |= set(ids)
        tables = [table for groups in self.tables.values() for table in groups]
        held = [block for table in tables for block in table if block]
        assert len(held) == len(set(held)), "two live tables share a block"
        assert all(0 < block < self.plan.num_blocks for block in held)

    def run(self, share: Any) -> None:
        req_id = share.req_id
        assert share.num_computed_tokens == self.computed[req_id]
        assert share.prefill_len == self.known[req_id]
        assert share.num_scheduled_tokens > 0
        if share.is_prefilling:
            assert share.num_draft_tokens == 0
        else:
            room = self.plan.max_model_len - share.num_computed_tokens
            assert share.num_scheduled_tokens == min(1 + self.num_drafts, room)
            assert share.num_draft_tokens == share.num_scheduled_tokens - 1
        assert 0 <= share.num_accepted_tokens <= share.num_draft_tokens
        end = self.computed[req_id] + share.num_scheduled_tokens
        assert end <= self.plan.max_model_len
        for table, span in zip(self.tables[req_id], self.plan.block_sizes, strict=True):
            assert len(table) == -(-end // span), "table and tokens disagree"
        self.computed[req_id] = end - share.num_draft_tokens + share.num_accepted_tokens
        if share.samples:
            self.outputs[req_id] += 1 + share.num_accepted_tokens
            assert self.outputs[req_id] <= self.max_tokens[req_id]
            assert self.computed[req_id] < self.plan.max_model_len
            if not share.is_prefilling:  # all tokens but the last one have their KV
                prompt_len = share.prompt_len
                assert self.computed[req_id] == prompt_len + self.outputs[req_id] - 1


GROUPS = (
    ONE_GROUP,
    (KVGroup(), KVGroup()),
    (KVGroup(), KVGroup(sliding_window=5, dcp_sharded=False)),
    (KVGroup(sliding_window=1), KVGroup(sliding_window=24, dcp_sharded=False)),
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    block_size = draw(st.sampled_from([1, 4, 16]))
    max_num_seqs = draw(st.integers(1, 8))
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 24)),
        max_model_len=48,
        block_size=block_size,
        num_blocks=1 + -(-48 // block_size) * 2 + draw(st.integers(0, 8)),
    )
    requests = draw(
        st.lists(
            st.builds(
                RequestEntry,
                prompt_len=st.integers(1, 30),
                output_len=st.integers(1, 18),
                at_step=st.integers(0, 40),
                count=st.integers(1, 3),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return scenario(*requests, limits=limits, max_idle_steps=draw(st.integers(0, 3)))


@settings(max_examples=150, deadline=None)
@given(
    made=scenarios(),
    dcp_size=st.sampled_from([1, 2, 4]),
    kv_groups=st.sampled_from(GROUPS),
    num_drafts=st.sampled_from([0, 0, 1, 3]),
)
def test_every_plan_keeps_its_promises(
    made: Scenario, dcp_size: int, kv_groups: tuple[KVGroup, ...], num_drafts: int
) -> None:
    plan = make_plan(
        made,
        vocab_size=50,
        dcp_size=dcp_size,
        kv_groups=kv_groups,
        num_speculative_tokens=num_drafts,
    )
    Replay(plan, num_drafts)
    size = made.limits.block_size
    sizes = [size * dcp_size if group.dcp_sharded else size for group in kv_groups]
    assert plan.block_sizes == tuple(sizes)
    assert set(plan.arrivals_s) == {spec.req_id for spec in made.expand()}


@settings(max_examples=50, deadline=None)
@given(made=scenarios())
def test_dcp_changes_no_step_while_blocks_are_plenty(made: Scenario) -> None:
    shapes = []
    for dcp_size in (1, 2, 4):
        plan = make_plan(made, vocab_size=50, dcp_size=dcp_size, num_blocks=4096)
        shapes.append([step.scheduled for step in plan.steps])
    assert shapes[0] == shapes[1] == shapes[2]


def shapes(plan: ScenarioPlan) -> list[list[int]]:
    return [[share.num_scheduled_tokens for share in step.scheduled] for step in plan.steps]


def test_a_prompt_is_cut_to_the_budget_and_decodes_go_first() -> None:
    made = scenario(
        entry(2, 4), entry(9, 2), limits=Limits(max_num_seqs=4, max_num_batched_tokens=6)
    )
    plan = make_plan(made, vocab_size=50)
    # The first takes 2 of 6 and decodes from then on; the second has 4, then 5 of the 9 tokens.
    assert shapes(plan) == [[2, 4], [1, 5], [1, 1], [1], []]
    assert [share.req_id for share in plan.steps[1].scheduled] == ["r0", "r1"]
    assert [share.samples for share in plan.steps[1].scheduled] == [True, True]


def test_one_output_needs_no_decode_step() -> None:
    plan = make_plan(scenario(entry(5, 1)), vocab_size=50)
    assert shapes(plan) == [[5], []]
    assert plan.steps[1].finished_req_ids == ("r0",)
    assert plan.steps[1].idle


def test_freed_blocks_are_the_next_to_be_handed_out() -> None:
    made = scenario(entry(20, 2), entry(40, 6), entry(20, 2, at_step=3))
    plan = make_plan(made, vocab_size=50)
    first = plan.steps[0].new_block_ids["r0"]
    assert plan.steps[3].new_block_ids["r2"] == first
    assert first == ((1, 2),)


def test_the_latest_admitted_is_preempted_and_prefilled_again() -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, num_blocks=6)
    plan = make_plan(scenario(entry(7, 6), entry(7, 4), limits=limits), vocab_size=50)
    assert plan.steps[2].preempted_req_ids == ("r1",)
    again = next(step for step in plan.steps[3:] if step.new_requests)
    assert again.new_requests[0].num_generated == 2
    assert again.scheduled[-1].prefill_len == 9
    assert again.scheduled[-1].prompt_len == 7
    assert Replay(plan).num_preempted == 1


def test_nobody_enters_in_a_step_that_preempts() -> None:
    # r1's first chunk of 3 tokens would fit the free blocks again as soon as it has lost its own.
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=4, block_size=2, num_blocks=9)
    plan = make_plan(scenario(entry(3, 10), entry(9, 5), limits=limits), vocab_size=50)
    assert Replay(plan).num_preempted >= 1


WINDOW = (KVGroup(), KVGroup(sliding_window=5, dcp_sharded=False))


def test_a_block_before_the_window_goes_to_the_next_request_in_the_same_step() -> None:
    """Blocks of 4, window 5: the query at 8 sees 4 .. 8, so that positions 0 .. 3 are free."""
    limits = Limits(max_num_seqs=4, block_size=4, num_blocks=20)
    made = scenario(entry(7, 6), entry(2, 2, at_step=2), limits=limits)
    plan = make_plan(made, vocab_size=50, kv_groups=WINDOW)
    assert plan.sliding_windows == (0, 5)
    assert plan.steps[0].new_block_ids["r0"] == ((1, 2), (3, 4))
    assert [step.freed_block_ids for step in plan.steps[:3]] == [{}, {}, {"r0": ((), (3,))}]
    assert 3 in [block for ids in plan.steps[2].new_block_ids.values() for g in ids for block in g]
    assert Replay(plan).num_freed == 1


def test_a_rejected_draft_keeps_its_window() -> None:
    """What is freed follows the kept tokens, not those that were computed."""
    limits = Limits(max_num_seqs=4, max_model_len=64, block_size=1, num_blocks=99)
    plan = make_plan(
        scenario(entry(6, 30), limits=limits),
        vocab_size=50,
        kv_groups=(KVGroup(sliding_window=4),),
        num_speculative_tokens=3,
    )
    assert sum(s.num_rejected_tokens for step in plan.steps for s in step.scheduled) > 3
    assert Replay(plan, 3).num_freed > 20


def decode_lens(plan: ScenarioPlan) -> list[set[int]]:
    steps = [
        {s.num_scheduled_tokens for s in step.scheduled if not s.is_prefilling}
        for step in plan.steps
    ]
    return [found for found in steps if found]


def test_drafts_vary_by_step_or_by_request_and_never_exceed_the_most() -> None:
    made = scenario(entry(5, 30), entry(9, 40), entry(2, 25, at_step=3))
    plans = {
        dynamic: make_plan(made, vocab_size=50, num_speculative_tokens=3, dynamic_spec=dynamic)
        for dynamic in ("off", "step", "request")
    }
    assert decode_lens(plans["off"]) == [{4}] * len(decode_lens(plans["off"]))
    by_step, by_request = decode_lens(plans["step"]), decode_lens(plans["request"])
    assert all(len(found) == 1 for found in by_step)
    assert any(len(found) > 1 for found in by_request)
    assert set().union(*by_step) == set().union(*by_request) == {1, 2, 3, 4}
    for plan in plans.values():
        assert list(plan_violations(plan)) == []


def test_a_window_needs_fewer_blocks_than_the_whole_length() -> None:
    """Of 59 positions a query sees 5 and a step adds 4: 8 at once, in 3 blocks of 4 at worst."""
    request = entry(40, 20)
    more = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "max_model_len": 64, "block_size": 4}
    kv_groups = (KVGroup(sliding_window=5),)
    tight = scenario(request, limits=Limits(**more, num_blocks=4))
    assert not any(
        step.preempted_req_ids
        for step in make_plan(tight, vocab_size=50, kv_groups=kv_groups).steps
    )
    with pytest.raises(UsageError, match="take 15 of 4 each: use 16 blocks or more"):
        make_plan(tight, vocab_size=50)
    less = scenario(request, limits=Limits(**more, num_blocks=3))
    with pytest.raises(UsageError, match="take 3 of 4 each: use 4 blocks or more"):
        make_plan(less, vocab_size=50, kv_groups=kv_groups)


def test_idle_gaps_are_dummy_steps_and_long_ones_are_cut_short() -> None:
    made = scenario(entry(3, 1), entry(3, 1, at_step=1000), max_idle_steps=3, step_time_s=0.5)
    plan = make_plan(made, vocab_size=50)
    assert [step.idle for step in plan.steps] == [False, True, True, True, False, True]
    assert [step.time_s for step in plan.steps] == [0.0, 0.5, 1.0, 1.5, 500.0, 500.5]
    assert plan.arrivals_s == {"r0": 0.0, "r1": 500.0}


def test_a_short_gap_keeps_the_clock() -> None:
    plan = make_plan(scenario(entry(3, 1), entry(3, 1, at_step=2), max_idle_steps=3), vocab_size=50)
    assert [step.idle for step in plan.steps] == [False, True, False, True]


def test_arrivals_in_seconds_are_seen_by_the_first_step_that_does_not_start_earlier() -> None:
    made = scenario(
        entry(1, 30), entry(1, 1, at_s=0.05), entry(1, 1, at_s=0.06), entry(1, 1, at_s=0.061)
    )
    plan = make_plan(made, vocab_size=50)
    seen = {new.req_id: step.index for step in plan.steps for new in step.new_requests}
    assert seen == {"r0": 0, "r1": 3, "r2": 3, "r3": 4}


def test_an_arrival_on_the_start_of_a_step_is_seen_by_that_step() -> None:
    made = scenario(entry(1, 30), entry(1, 1, at_s=0.14))
    assert 0.14 / 0.02 > 7
    plan = make_plan(made, vocab_size=50)
    assert [new.req_id for new in plan.steps[7].new_requests] == ["r1"]


def test_a_request_that_fills_its_last_block_exactly_can_run() -> None:
    limits = Limits(max_num_seqs=1, block_size=16, num_blocks=2)
    plan = make_plan(scenario(entry(10, 7), limits=limits), vocab_size=50)
    assert Replay(plan).outputs == {"r0": 7}
    with pytest.raises(UsageError, match="use 3 blocks or more"):
        make_plan(scenario(entry(10, 8), limits=limits), vocab_size=50)


def test_preempted_requests_go_ahead_of_the_queue() -> None:
    # Blocks of 4, eight usable: two requests of 3 blocks each, two left.
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=24, block_size=4, num_blocks=9)
    made = scenario(entry(12, 9), entry(12, 9), entry(1, 2, at_step=2), limits=limits)
    plan = make_plan(made, vocab_size=50)
    Replay(plan)
    step = next(step for step in plan.steps if step.preempted_req_ids)
    # r1 gave four blocks back and r0 took one of them: three are free for r2, which waits, but it
    # comes after r1, and r1 needs five.
    assert step.index == 5
    assert step.preempted_req_ids == ("r1",)
    entered = [new.req_id for later in plan.steps[step.index :] for new in later.new_requests]
    assert not step.new_requests
    assert entered == ["r1", "r2"]


def test_prompts_depend_on_names_and_seed_only() -> None:
    made = scenario(entry(8, 1, prompt_seed=5), entry(5, 1, prompt_seed=5), entry(8, 1))
    plan = make_plan(made, vocab_size=100)
    prompts = [new.prompt_token_ids for new in plan.steps[0].new_requests]
    assert prompts[0][:5] == prompts[1]
    assert prompts[0] != prompts[2]
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)
    assert plan == make_plan(made, vocab_size=100)
    assert plan != make_plan(made, vocab_size=100, seed=1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_model_len": 20}, ["--max-model-len is 20", "'big'", "raise max_model_len to 42"]),
        ({"num_blocks": 3}, ["--num-blocks is 3", "'big'", "use 4 blocks"]),
        ({"max_num_seqs": 0}, ["--max-num-seqs is 0", "from 1 to"]),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ["-batched-tokens is 8", "use 9 or"]),
        ({"block_size": -1}, ["--block-size is -1"]),
        ({"block_size": True}, ["--block-size is true"]),
        ({"num_blocks": 4_000_000}, ["--num-blocks is 4000000", "use at most"]),
        (
            {"num_speculative_tokens": 2, "max_num_batched_tokens": 40},
            ["--max-num-batched-tokens is 40", "16 decodes of 3 tokens need 48"],
        ),
        (
            {"num_speculative_tokens": 7, "max_model_len": 48, "num_blocks": 4, "block_size": 15},
            ["--num-blocks is 4", "48 KV positions", "use 5 blocks"],
        ),
    ],
)
def test_limits_that_cannot_work_are_refused_by_name(
    overrides: dict[str, int], words: list[str]
) -> None:
    made = scenario(entry(2, 2), entry(30, 12, name="big"))
    with pytest.raises(UsageError) as caught:
        make_plan(made, vocab_size=50, **overrides)
    for word in words:
        assert word in str(caught.value)


def test_more_seqs_alone_raise_the_budget_that_would_starve_them() -> None:
    plan = make_plan(scenario(entry(2, 4, count=70)), vocab_size=50, max_num_seqs=70)
    assert (plan.max_num_seqs, plan.max_num_batched_tokens) == (70, 70)
    assert make_plan(scenario(entry(2, 4)), vocab_size=50, max_num_seqs=8).max_num_seqs == 8


def test_a_plan_without_end_is_refused() -> None:
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1)
    made = scenario(entry(128, 128, count=300), limits=limits)
    with pytest.raises(UsageError, match="more than 50,000 steps"):
        make_plan(made, vocab_size=50)


def test_the_pool_never_hands_out_the_null_block_and_reuses_the_last_freed() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == (1, 2, 3)
    assert pool.num_free == 0
    pool.give_back([3])
    pool.give_back([1, 2])
    assert pool.take(3) == (1, 2, 3)


def test_a_verification_by_hand() -> None:
    """Three drafts a step: what is accepted moves the cursor, what is rejected comes again."""
    plan = make_plan(scenario(entry(4, 9)), vocab_size=50, num_speculative_tokens=3)
    Replay(plan, 3)
    prefill, *decodes = [step.scheduled[0] for step in plan.steps[:-1]]
    # A prompt of 1 + k tokens is a prefill: no drafts, one token sampled.
    assert prefill.is_prefilling
    assert (prefill.num_draft_tokens, prefill.num_logits, prefill.num_output_tokens) == (0, 1, 1)
    cursor = 4
    for share in decodes:
        assert (share.num_computed_tokens, share.num_scheduled_tokens) == (cursor, 4)
        assert share.num_logits == 4
        cursor += share.num_output_tokens
    assert sum(share.num_output_tokens for share in decodes) == 8
    assert decodes[-1].num_accepted_tokens <= 9 - (decodes[-1].num_computed_tokens - 4 + 1) - 1


def test_drafts_do_not_run_past_the_longest_length() -> None:
    limits = Limits(max_model_len=16, block_size=4, num_blocks=9, max_num_seqs=2)
    made = scenario(entry(4, 12), limits=limits)
    plan = make_plan(made, vocab_size=50, num_speculative_tokens=6)
    Replay(plan, 6)
    shares = [step.scheduled[0] for step in plan.steps[1:-1]]
    assert shares[0].num_draft_tokens == 6
    assert shares[-1].num_computed_tokens + shares[-1].num_scheduled_tokens == 16
    assert shares[-1].num_draft_tokens < 6


def test_acceptance_is_the_same_whatever_the_world_and_varies_with_the_seed() -> None:
    made = scenario(entry(4, 30, count=3))

    def accepted(**settings_: int) -> list[int]:
        plan = make_plan(made, vocab_size=50, num_speculative_tokens=3, **settings_)
        return [share.num_accepted_tokens for step in plan.steps for share in step.scheduled]

    assert accepted() == accepted(dcp_size=2) == accepted(num_blocks=4096)
    assert accepted() != accepted(seed=1)
    assert set(accepted()) == {0, 1, 2, 3}


def test_the_budget_is_raised_for_drafts_and_only_then() -> None:
    made = scenario(entry(2, 4, count=20), limits=Limits(max_num_seqs=20))
    for num_drafts, budget in ((0, 64), (2, 64), (3, 80)):
        plan = make_plan(made, vocab_size=50, num_speculative_tokens=num_drafts)
        assert plan.max_num_batched_tokens == budget


def test_a_plan_says_what_its_scenario_asks_for_whatever_became_of_it(monkeypatch):
    made = scenario(entry(7, 3, count=2), entry(5, 2, at_step=4, prompt_seed=1))
    wanted = [("r0.0", 7, 3), ("r0.1", 7, 3), ("r1", 5, 2)]
    plan = make_plan(made, vocab_size=64)
    asked = [(r.req_id, len(r.prompt_token_ids), r.max_tokens) for r in plan.requests]
    assert asked == wanted
    entered = {new.req_id: new for step in plan.steps for new in step.new_requests}
    assert [entered[r.req_id] for r in plan.requests] == list(plan.requests)
    monkeypatch.setattr(Scheduler, "add", lambda self, request: None)
    lost = make_plan(made, vocab_size=64)
    assert lost.requests == plan.requests
    assert not any(step.new_requests for step in lost.steps)


def test_blocks_for_a_draft_model_are_there_before_it_writes_and_not_past_the_limit() -> None:
    made = scenario(entry(14, 12), entry(5, 9), limits=Limits(max_model_len=30, block_size=4))
    plan = make_plan(made, vocab_size=50, num_speculative_tokens=3, num_lookahead_tokens=2)
    assert plan.num_lookahead_tokens == 2
    assert list(plan_violations(plan)) == []
    held: dict[str, int] = {}
    for step in plan.steps:
        for req_id, (ids,) in step.new_block_ids.items():
            held[req_id] = held.get(req_id, 0) + len(ids)
        for share in step.scheduled:
            end = share.num_computed_tokens + share.num_scheduled_tokens
            assert held[share.req_id] == -(-min(end + 2, 30) // 4)
    without = msgspec.structs.replace(plan, num_lookahead_tokens=0)
    assert "only" in next(plan_violations(without)).message
