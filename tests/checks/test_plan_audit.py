"""C19: plans that cannot be, each named; near misses that can."""

import msgspec
import pytest

from pcpbench.checks.plan_audit import plan_violations
from pcpbench.engine.plan_steps import make_plan
from pcpbench.model.presets import TINY_SWA
from pcpbench.plan import NewRequest, StepPlan
from pcpbench.scenarios.loader import load_scenario, shipped_names
from pcpbench.scenarios.schema import Limits, RequestEntry, Scenario

PROMPTS = {"a": (1, 2, 3, 4, 5), "b": (6, 7)}
OUTPUTS = {"a": 3, "b": 2}


def change(struct, **fields):
    return msgspec.structs.replace(struct, **fields)


def entering(req_id, num_generated=0, **more):
    return NewRequest(
        req_id=req_id,
        **{
            "prompt_token_ids": PROMPTS[req_id],
            "max_tokens": OUTPUTS[req_id],
            "num_generated": num_generated,
            **more,
        },
    )


def step(index, *shares, new=(), blocks=None, finished=(), preempted=(), **more):
    return StepPlan(
        index=index,
        scheduled=shares,
        new_requests=tuple(new),
        new_block_ids={name: (ids,) for name, ids in (blocks or {}).items()},
        finished_req_ids=finished,
        preempted_req_ids=preempted,
        **{"idle": not shares, "time_s": float(index), **more},
    )


class Sound:
    """Two requests in blocks of 4: a decodes while b is admitted, preempted and admitted again."""

    def __init__(self, kit):
        self.kit = kit
        part = kit.scheduled
        self.steps = [
            step(0, part("a", 5), new=[entering("a")], blocks={"a": (1, 2)}),
            step(1, part("a", 1, 5, 5), part("b", 2), new=[entering("b")], blocks={"b": (3,)}),
            step(2, part("a", 1, 6, 5), preempted=("b",)),
            step(
                3,
                change(part("b", 3), prompt_len=2),
                new=[entering("b", 1)],
                blocks={"b": (2,)},
                finished=("a",),
            ),
            step(4, finished=("b",)),
        ]
        self.more = {"arrivals": {"a": 0.0, "b": 1.0}, "num_blocks": 4}
        self.requests = tuple(entering(name) for name in PROMPTS)

    def alter(self, place, **fields):
        self.steps[place] = change(self.steps[place], **fields)
        return self

    def share(self, index, place, **fields):
        shares = list(self.steps[index].scheduled)
        shares[place] = change(shares[place], **fields)
        return self.alter(index, scheduled=tuple(shares))

    def blocks(self, index, **blocks):
        return self.alter(index, new_block_ids={name: (ids,) for name, ids in blocks.items()})

    def plan(self, **fields):
        plan = self.kit.plan_of(self.steps, **self.more, requests=self.requests)
        return change(plan, **fields)

    def found(self, **fields):
        violations = list(plan_violations(self.plan(**fields)))
        assert {(v.contract, v.arm, v.rank) for v in violations} <= {("C19", "plan", None)}
        return [(v.step, v.tensor, v.message) for v in violations]


@pytest.fixture
def sound(kit):
    return Sound(kit)


def test_a_sound_plan_is_accepted(sound):
    assert sound.found() == []


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("limits", [
    {},
    {"dcp_size": 4},
    {"max_num_seqs": 3},
    {"kv_groups": TINY_SWA.kv_groups},
    {"kv_groups": TINY_SWA.kv_groups, "dcp_size": 2, "num_speculative_tokens": 3},
], ids=["plain", "dcp 4", "three", "window", "window dcp 2 drafts"])  # fmt: skip
def test_the_scheduler_makes_possible_plans(name, limits):
    plan = make_plan(load_scenario(name), vocab_size=64, **limits)
    assert list(plan_violations(plan)) == []


def test_a_request_may_preempt_itself_and_arrivals_may_lie_between_steps():
    scenario = Scenario(
        name="tight",
        description="Blocks run out; an arrival is no multiple of the step's time.",
        requests=(
            RequestEntry(prompt_len=7, output_len=9, count=3),
            RequestEntry(prompt_len=1, output_len=1, at_s=0.7),
        ),
        step_time_s=0.03,
        limits=Limits(max_num_seqs=3, max_num_batched_tokens=9, block_size=4, num_blocks=6),
    )
    plan = make_plan(scenario, vocab_size=64)
    assert sum(len(one.preempted_req_ids) for one in plan.steps) > 1
    assert list(plan_violations(plan)) == []


def verifying(kit):
    """One request in blocks of 4: two drafts a decode, the first step accepts one, the last two."""
    part = kit.scheduled
    request = NewRequest(req_id="a", prompt_token_ids=(1, 2, 3), max_tokens=6)
    drafted = {"num_draft_tokens": 2}
    steps = [
        step(0, part("a", 3), new=[request], blocks={"a": (1,)}),
        step(1, change(part("a", 3, 3, 3), num_accepted_tokens=1, **drafted), blocks={"a": (2,)}),
        # Positions 5 to 7: the block that came for rejected ones is still there.
        step(2, change(part("a", 3, 5, 3), num_accepted_tokens=2, **drafted)),
        step(3, finished=("a",)),
    ]
    return kit.plan_of(steps, requests=(request,))


def test_rejected_drafts_are_computed_again_and_keep_their_block(kit):
    assert list(plan_violations(verifying(kit))) == []


def test_more_drafts_accepted_than_there_are_is_named(kit):
    plan = verifying(kit)
    share = change(plan.steps[2].scheduled[0], num_accepted_tokens=3)
    steps = (*plan.steps[:2], change(plan.steps[2], scheduled=(share,)), plan.steps[3])
    messages = [found.message for found in plan_violations(change(plan, steps=steps))]
    assert messages == ["request a accepts 3 of 2 drafts", "request a generates token 7 of 6"]


def test_a_cursor_that_counts_rejected_drafts_is_named(kit):
    plan = verifying(kit)
    share = change(plan.steps[2].scheduled[0], num_computed_tokens=6)
    steps = (*plan.steps[:2], change(plan.steps[2], scheduled=(share,)), plan.steps[3])
    messages = [found.message for found in plan_violations(change(plan, steps=steps))]
    assert messages[0] == "request a is said to have 6 computed tokens and has 5"


@pytest.mark.parametrize("name", ["s1-grow-shrink", "preemption", "s11-long-kv"])
def test_the_scheduler_makes_possible_plans_with_drafts(name):
    for drafts in (1, 3):
        scenario = load_scenario(name)
        plan = make_plan(scenario, vocab_size=64, num_speculative_tokens=drafts)
        assert list(plan_violations(plan)) == []


# Blocks


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((0,), "block 0, the null block, is handed to request b"),
        ((4,), "block 4 is handed to request b, and the pool ends at 3"),
        ((2,), "block 2 is handed to request b while request a holds it"),
    ],
)
def test_a_block_that_is_not_free_is_named(sound, ids, words):
    assert (1, "new_block_ids", words) in sound.blocks(1, b=ids).found()


def test_a_block_twice_in_one_table_is_named(sound):
    messages = sound.blocks(0, a=(1, 1)).found()
    assert messages == [(0, "new_block_ids", "block 1 is handed to request a already")]


def test_blocks_of_a_request_that_finishes_a_step_later_are_not_free(sound):
    # a has its last output in step 2 and gives back in step 3.
    sound.steps[2] = change(sound.steps[2], preempted_req_ids=())
    sound.steps[1] = change(sound.steps[1], new_block_ids={"b": ((3,),)})
    sound.blocks(2, b=(2,))
    first = sound.found()[0]
    assert first[2] == "block 2 is handed to request b while request a holds it"


def test_blocks_of_who_leaves_in_the_same_step_are_free(sound):
    # Step 3 hands a's block 2 to b; block 3, which b gave back in step 2, would do as well.
    assert sound.blocks(3, b=(3,)).found() == []


def test_a_block_that_comes_late_and_one_that_comes_early_are_named(sound):
    sound.blocks(0, a=(1,)).blocks(1, a=(2,), b=(3,))
    assert sound.found() == [
        (0, "new_block_ids", "request a holds 1 blocks (1) for 5 positions: 2 of 4 are needed")
    ]
    early = Sound(sound.kit).blocks(1, b=(3,)).blocks(0, a=(1, 2, 3))
    assert early.found()[0] == (
        0,
        "new_block_ids",
        "request a holds 3 blocks (1, 2, 3) for 5 positions: only 2 of 4 are needed",
    )


def test_blocks_for_who_does_not_run_are_named(sound):
    assert sound.blocks(2, b=(3,)).found() == [
        (2, "new_block_ids", "blocks 3 go to request b, which does not run")
    ]


def test_kv_groups_do_not_share_a_block(sound):
    shared = {"new_block_ids": {"b": ((3,), (3,))}}
    sound.steps[0] = change(sound.steps[0], new_block_ids={"a": ((1, 2), (4, 5))})
    sound.steps[1] = change(sound.steps[1], **shared)
    sound.steps[3] = change(sound.steps[3], new_block_ids={"b": ((2,), (6,))})
    messages = sound.found(block_sizes=(4, 4), num_blocks=9)
    assert messages == [(1, "new_block_ids", "block 3 is handed to request b already")]
    sound.steps[1] = change(sound.steps[1], new_block_ids={"b": ((3,), (6,))})
    assert sound.found(block_sizes=(4, 4), num_blocks=9) == []
    sound.steps[1] = change(sound.steps[1], new_block_ids={"b": ((3,),)})
    messages = sound.found(block_sizes=(4, 4), num_blocks=9)
    assert messages[0][2] == "request b gets blocks for 1 of 2 groups"


# Windows


class Sliding(Sound):
    """One request in blocks of 2 that sees 3 positions: at 5 block 1 is back, at 6 block 2."""

    def __init__(self, kit):
        super().__init__(kit)
        self.requests = (entering("a"),)
        part = kit.scheduled
        self.steps = [
            step(0, part("a", 5), new=[entering("a")], blocks={"a": (1, 2, 3)}),
            step(1, part("a", 1, 5, 5), freed_block_ids={"a": ((1,),)}),
            step(2, part("a", 1, 6, 5), freed_block_ids={"a": ((2,),)}, blocks={"a": (1,)}),
            step(3, finished=("a",)),
        ]

    def found(self, **fields):
        return super().found(block_sizes=(2,), sliding_windows=(3,), **fields)


@pytest.fixture
def sliding(kit):
    return Sliding(kit)


def test_a_block_before_the_window_goes_back_and_may_come_again(sliding):
    assert sliding.found() == []


def test_a_block_that_goes_back_while_it_is_seen_is_named(sliding):
    early = sliding.alter(1, freed_block_ids={"a": ((1, 2),)}).alter(2, freed_block_ids={})
    assert early.found() == [
        (1, "freed_block_ids", "request a gives back block 2 with positions 2 to 3: a query at 5 "
         "sees 3 positions"),
    ]  # fmt: skip


def test_a_block_that_is_kept_past_its_use_is_named_once(sliding):
    message = (
        "request a keeps block 1 with positions up to 1, which no query from 5 on sees (window 3)"
    )
    late = sliding.alter(1, freed_block_ids={}).alter(2, freed_block_ids={}).blocks(2, a=(4,))
    assert late.found(num_blocks=9) == [(1, "freed_block_ids", message)]


def test_others_blocks_cannot_be_given_back(sliding):
    wrong = sliding.alter(1, freed_block_ids={"a": ((2,),)})
    message = "request a gives back blocks 2; its first ones are 1"
    assert wrong.found()[0] == (1, "freed_block_ids", message)


def test_who_does_not_run_gives_nothing_back(sliding):
    wrong = sliding.alter(1, freed_block_ids={"a": ((1,),), "b": ((3,),)})
    message = "request b gives back blocks 3 and does not run"
    assert wrong.found() == [(1, "freed_block_ids", message)]
    wrong = sliding.alter(1, freed_block_ids={"a": ((1,), ())})
    message = "request a gives back blocks of 2 of 1 groups"
    assert wrong.found() == [(1, "freed_block_ids", message)]


def test_without_a_window_nothing_goes_back(sound):
    sound.alter(1, freed_block_ids={"a": ((1,),)})
    message = "request a gives back block 1 with positions 0 to 3: a query at 5 sees all"
    assert sound.found()[0] == (1, "freed_block_ids", message)


# Requests


def test_a_request_of_the_scenario_that_never_comes_is_named(sound):
    third = NewRequest(req_id="c", prompt_token_ids=(1,), max_tokens=1)
    sound.requests += (third,)
    sound.more["arrivals"]["c"] = 3.5
    assert sound.found() == [(4, "new_requests", "request c of the scenario is never admitted")]
    assert sound.found(is_cut_short=True) == [], "it may come in a step that was cut off"


def test_a_plan_that_does_not_say_what_was_asked_is_not_taken_on_trust(sound):
    sound.requests = ()
    assert sound.found() == [
        (4, "requests", "the plan does not say which requests its scenario has")
    ]


def test_a_request_that_the_scenario_lacks_is_named(sound):
    sound.requests = sound.requests[:1]
    assert (1, "new_requests", "request b is admitted and not in the scenario") in sound.found()


def test_an_arrival_is_waited_for(sound):
    sound.more["arrivals"]["b"] = 1.5
    assert sound.found() == [
        (1, "new_requests", "request b is admitted at 1 s and arrives at 1.5 s")
    ]
    sound.more["arrivals"]["b"] = 1 + 1e-10
    assert sound.found() == [
        (1, "new_requests", "request b is admitted at 1 s and arrives at 1.0000000001 s")
    ]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt_token_ids": (6,)}, "enters with a prompt of 1 tokens, the scenario says 2"),
        ({"prompt_token_ids": (6, 8)}, "enters with another prompt than the scenario's"),
        ({"max_tokens": 3}, "is to generate 3 tokens, the scenario says 2"),
        ({"num_generated": 1}, "enters with 1 generated tokens and has generated 0"),
    ],
)
def test_a_request_enters_as_the_scenario_says(sound, changed, words):
    sound.alter(1, new_requests=(entering("b", **changed),))
    assert (1, "new_requests", f"request b {words}") in sound.found()


def test_a_readmission_counts_what_was_generated(sound):
    sound.alter(3, new_requests=(entering("b", 0),))
    assert sound.found() == [
        (3, "new_requests", "request b enters with 0 generated tokens and has generated 1")
    ]


def test_a_request_enters_once(sound):
    sound.alter(2, new_requests=(entering("a"),))
    assert sound.found()[0][2] == "request a is admitted and runs already"
    late = Sound(sound.kit).alter(4, new_requests=(entering("a", 3),))
    assert late.found()[0][2] == "request a is admitted and has finished"


def test_outputs_neither_more_nor_fewer(sound):
    sound.steps[3] = change(sound.steps[3], finished_req_ids=())
    shares = (sound.kit.scheduled("a", 1, 7, 5), *sound.steps[3].scheduled)
    sound.blocks(3, b=(3,)).alter(3, scheduled=shares)
    sound.alter(4, finished_req_ids=("a", "b"))
    assert sound.found() == [
        (3, "finished_req_ids", "request a has all its 3 outputs and keeps its place"),
        (3, "scheduled", "request a generates token 4 of 3"),
    ]
    few = Sound(sound.kit).alter(2, finished_req_ids=("a",), scheduled=(), idle=True)
    few.alter(3, finished_req_ids=())
    assert few.found() == [
        (2, "finished_req_ids", "request a leaves as finished with 2 of 3 outputs"),
        (4, "scheduled", "request a ends with 2 of its 3 outputs"),
    ]


def test_who_is_done_leaves_and_only_who_runs(sound):
    assert sound.alter(4, finished_req_ids=()).found() == [
        (4, "finished_req_ids", "request b has all its 2 outputs and keeps its place"),
        (4, "scheduled", "nothing is scheduled although request b runs"),
        (4, "finished_req_ids", "request b has all its outputs and never leaves"),
    ]
    twice = Sound(sound.kit).alter(4, finished_req_ids=("a", "b"))
    assert twice.found() == [(4, "finished_req_ids", "request a leaves and does not run")]
    late = Sound(sound.kit).alter(3, preempted_req_ids=("a",), finished_req_ids=())
    assert late.found()[0] == (3, "preempted_req_ids", "request a is preempted with 3 of 3 outputs")


# Shares


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_computed_tokens": 4}, "is said to have 4 computed tokens and has 5"),
        ({"prefill_len": 6}, "is said to have 6 prefill tokens and has 5"),
        ({"prompt_len": 4}, "is said to have 4 prompt tokens and has 5"),
        ({"num_scheduled_tokens": 2}, "decodes 2 tokens with 0 drafts"),
        ({"num_draft_tokens": 1}, "decodes 1 tokens with 1 drafts"),
    ],
)
def test_a_share_goes_on_where_the_request_is(sound, changed, words):
    assert (1, "scheduled", f"request a {words}") in sound.share(1, 0, **changed).found()


@pytest.mark.parametrize("count", [0, 6])
def test_a_prefill_takes_what_is_left_at_most(sound, count):
    words = f"request a prefills {count} tokens with 0 drafts, 5 are left"
    assert (0, "scheduled", words) in sound.share(0, 0, num_scheduled_tokens=count).found()


def test_only_who_runs_is_scheduled_and_once(sound):
    part = sound.kit.scheduled
    sound.alter(2, scheduled=(part("a", 1, 6, 5), part("b", 1, 2, 2)))
    assert sound.found()[0] == (2, "scheduled", "request b is scheduled and does not run")
    twice = Sound(sound.kit).alter(1, scheduled=(*sound.steps[1].scheduled, part("b", 2)))
    assert (1, "scheduled", "request b is scheduled twice") in twice.found()


def test_decodes_stand_before_prefills(sound):
    sound.alter(1, scheduled=sound.steps[1].scheduled[::-1])
    assert sound.found() == [(1, "scheduled", "request b prefills and stands before a decode")]


def test_limits_are_kept(sound):
    assert sound.found(max_num_batched_tokens=5, max_num_seqs=2, max_model_len=7) == []
    assert sound.found(max_num_batched_tokens=4)[0] == (
        0, "scheduled", "5 tokens are scheduled, at most 4",
    )  # fmt: skip
    assert sound.found(max_num_seqs=1) == [(1, "new_requests", "2 requests run, at most 1")]
    assert sound.found(max_model_len=6) == [
        (2, "scheduled", "request a reaches 7 tokens, at most 6")
    ]


# Steps


def test_steps_are_numbered_and_the_clock_runs_on(sound):
    assert sound.alter(2, index=3).found() == [(3, "index", "step 2 of the plan calls itself 3")]
    back = Sound(sound.kit).alter(3, time_s=1.0)
    assert back.found() == [(3, "time_s", "the clock runs back from 2 s to 1 s")]


def test_idle_says_what_the_step_is(sound):
    assert sound.alter(2, idle=True).found() == [
        (2, "idle", "idle is True in a step of 1 requests")
    ]
    assert Sound(sound.kit).alter(4, idle=False).found() == [
        (4, "idle", "idle is False in a step of 0 requests")
    ]


# Whose turn it is


def three(kit, **changes):
    """a decodes; b and c come at 1 s, are both preempted at 2 s and come back, b before c."""
    part = kit.scheduled
    requests = [
        NewRequest(req_id=name, prompt_token_ids=(1, 2), max_tokens=most)
        for name, most in (("a", 4), ("b", 2), ("c", 2))
    ]
    a, b, c = requests
    back = [change(b, num_generated=1), change(c, num_generated=1)]
    again = [change(part(name, 3), prompt_len=2) for name in ("b", "c")]
    steps = [
        step(0, part("a", 2), new=[a], blocks={"a": (1,)}),
        step(1, part("a", 1, 2, 2), part("b", 2), part("c", 2), new=[b, c],
             blocks={"b": (2,), "c": (3,)}),
        step(2, part("a", 1, 3, 2), preempted=("c", "b")),
        step(3, part("a", 1, 4, 2), *again, new=back,
             blocks={"a": (2,), "b": (3,), "c": (4,)}),
        step(4, finished=("a", "b", "c")),
    ]  # fmt: skip
    for place, fields in changes.items():
        at = int(place.removeprefix("at"))
        steps[at] = change(steps[at], **fields)
    return kit.plan_of(
        steps,
        arrivals={"a": 0.0, "b": 1.0, "c": 1.0},
        num_blocks=5,
        requests=tuple(requests),
    )


def told(plan):
    return [(v.step, v.tensor, v.message) for v in plan_violations(plan)]


def test_who_was_preempted_comes_back_in_the_order_of_admission(kit):
    assert told(three(kit)) == []


def test_who_came_first_is_admitted_first(kit):
    one = three(kit).steps[1]
    a, b, c = one.scheduled
    swapped = {"new_requests": one.new_requests[::-1], "scheduled": (a, c, b)}
    assert told(three(kit, at1=swapped)) == [
        (1, "new_requests", "request c is admitted before request b, which came first"),
        (2, "preempted_req_ids", "request c is preempted, and request b was admitted after it"),
    ]


def test_who_was_preempted_is_admitted_before_all_others(kit):
    back = three(kit).steps[3]
    a, b, c = back.scheduled
    swapped = {"new_requests": back.new_requests[::-1], "scheduled": (a, c, b)}
    assert told(three(kit, at3=swapped)) == [
        (3, "new_requests", "request c is admitted before request b, which was preempted and is "
         "first"),
    ]  # fmt: skip


def test_who_was_admitted_last_is_preempted_first(kit):
    wrong = three(kit, at2={"preempted_req_ids": ("b", "c")})
    assert told(wrong)[0] == (
        2, "preempted_req_ids", "request b is preempted, and request c was admitted after it",
    )  # fmt: skip


def test_nobody_is_admitted_in_a_step_that_preempts(kit, sound):
    sound.steps[3] = change(sound.steps[3], preempted_req_ids=("a",), finished_req_ids=())
    assert (3, "new_requests", "request b is admitted in a step that preempts request a") in (
        sound.found()
    )


def test_requests_of_a_step_stand_as_a_target_likes_them(kit):
    a, b, c = three(kit).steps[1].scheduled
    assert told(three(kit, at1={"scheduled": (a, c, b)})) == []


def test_a_decode_gets_its_token_in_every_step(kit):
    plan = three(kit)
    shares = plan.steps[1].scheduled
    found = told(three(kit, at1={"scheduled": shares[1:]}))
    assert found[0] == (1, "scheduled", "request a decodes and gets no token")


def test_a_prefill_may_wait_for_the_decodes_before_it(kit):
    """The budget of 2 tokens is the decodes'."""
    scenario = Scenario(
        name="narrow",
        description="Two decodes leave nothing to the prompt behind them.",
        requests=(
            RequestEntry(prompt_len=1, output_len=6, count=2),
            RequestEntry(prompt_len=5, output_len=2),
        ),
        limits=Limits(max_num_seqs=3, max_num_batched_tokens=3),
    )
    plan = make_plan(scenario, vocab_size=64)
    assert max(len(one.scheduled) for one in plan.steps) == 3
    assert told(plan) == []


# Drafts


def drafting(dynamic="off", **limits):
    """Requests that end at max_model_len 32, where a decode has no room for three drafts."""
    scenario = Scenario(
        name="drafts",
        description="Requests of all lengths up to the longest that there may be.",
        requests=tuple(
            RequestEntry(prompt_len=prompt, output_len=32 - prompt, at_step=prompt % 5)
            for prompt in (20, 23, 26, 28, 29, 30, 31)
        ),
        limits=Limits(max_num_seqs=4, max_model_len=32, block_size=4, **limits),
    )
    return make_plan(scenario, vocab_size=64, num_speculative_tokens=3, dynamic_spec=dynamic)


def decode_of(plan, count):
    """(step, place) of the first decode with that many drafts."""
    return next(
        (one.index, place)
        for one in plan.steps
        for place, share in enumerate(one.scheduled)
        if not share.is_prefilling and share.num_draft_tokens == count
    )


def with_count(plan, at, count):
    share = plan.steps[at[0]].scheduled[at[1]]
    fewer = change(
        share,
        num_draft_tokens=count,
        num_scheduled_tokens=1 + count,
        num_accepted_tokens=min(count, share.num_accepted_tokens),
    )
    shares = list(plan.steps[at[0]].scheduled)
    shares[at[1]] = fewer
    steps = list(plan.steps)
    steps[at[0]] = change(steps[at[0]], scheduled=tuple(shares))
    return share.req_id, change(plan, steps=tuple(steps))


@pytest.mark.parametrize("dynamic", ["off", "step", "request"])
@pytest.mark.parametrize("num_blocks", [257, 12])
def test_the_scheduler_gives_each_decode_the_drafts_that_are_due(dynamic, num_blocks):
    plan = drafting(dynamic, num_blocks=num_blocks)
    decodes = [s for one in plan.steps for s in one.scheduled if not s.is_prefilling]
    # The last output is never fed: the last decode stands one short of the end and has room.
    counts = {1, 2, 3} if dynamic == "off" else {0, 1, 2, 3}
    assert {share.num_draft_tokens for share in decodes} == counts
    assert told(plan) == []


@pytest.mark.parametrize(
    ("dynamic", "has", "wrong", "words"),
    [
        ("off", 3, 2, "verifies 2 drafts, 3 are due"),
        ("off", 3, 4, "verifies 4 drafts, 3 are due"),
        ("off", 1, 2, "verifies 2 drafts, 1 are due"),
        ("request", 3, 4, "verifies 4 drafts, at most 3"),
    ],
)
def test_another_number_of_drafts_is_named(dynamic, has, wrong, words):
    plan = drafting(dynamic)
    at = decode_of(plan, has)
    name, wrong_plan = with_count(plan, at, wrong)
    assert (at[0], "scheduled", f"request {name} {words}") in told(wrong_plan)
    unsaid = told(change(wrong_plan, num_speculative_tokens=None))
    assert not any(words in message for _, _, message in unsaid)


def test_decodes_of_a_step_have_the_same_number_of_drafts():
    plan = drafting("step")
    at = next(
        (one.index, place)
        for one in plan.steps
        for place, share in enumerate(one.scheduled)
        if [s.num_draft_tokens for s in one.scheduled if not s.is_prefilling].count(2) > 1
        and share.num_draft_tokens == 2
    )
    name, wrong = with_count(plan, at, 1)
    words = f"request {name} verifies 1 drafts in a step of 2 each"
    assert (at[0], "scheduled", words) in told(wrong)
    assert words not in {message for _, _, message in told(change(wrong, dynamic_spec="request"))}


# Arrivals


@pytest.mark.parametrize(
    ("at_s", "step_time_s", "first"),
    [(3e-6, 3600.0, 1), (0.14, 0.02, 7), (0.05, 0.02, 3), (0.0, 0.02, 0), (0.7, 0.03, 24)],
)
def test_an_arrival_is_seen_by_one_rule_of_plan_and_audit(at_s, step_time_s, first):
    scenario = Scenario(
        name="late",
        description="One request decodes while another arrives.",
        requests=(
            RequestEntry(prompt_len=1, output_len=30),
            RequestEntry(prompt_len=1, output_len=1, at_s=at_s),
        ),
        step_time_s=step_time_s,
    )
    plan = make_plan(scenario, vocab_size=64)
    (admitted,) = [one.index for one in plan.steps for new in one.new_requests
                   if new.req_id == "r1"]  # fmt: skip
    assert admitted == first
    assert told(plan) == []
