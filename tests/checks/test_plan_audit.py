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
