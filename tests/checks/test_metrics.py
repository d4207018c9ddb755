import numpy as np
import pytest

from pcpbench.checks.metrics import arm_times, paired, request_times, samples_of
from pcpbench.plan import NewRequest, StepPlan
from pcpbench.timings import StepTiming


@pytest.fixture
def plan(kit):
    """r0 prefills in step 0 and decodes in 1, 3, 4; r1 arrives at 0.5, is admitted in step 1,
    prefills in two chunks (1 and 3) and decodes in step 4. Step 2 is a dummy step."""

    def new(name, length):
        return NewRequest(req_id=name, prompt_token_ids=tuple(range(length)), max_tokens=4)

    r0, r1 = "r0", "r1"
    share = kit.scheduled
    steps = [
        StepPlan(index=0, scheduled=(share(r0, 3),), new_requests=(new(r0, 3),)),
        StepPlan(
            index=1,
            scheduled=(share(r0, 1, 3, 3), share(r1, 4, 0, 6)),
            new_requests=(new(r1, 6),),
            time_s=1.0,
        ),
        StepPlan(index=2, scheduled=(), idle=True, time_s=2.0),
        StepPlan(index=3, scheduled=(share(r0, 1, 4, 3), share(r1, 2, 4, 6)), time_s=3.0),
        StepPlan(index=4, scheduled=(share(r0, 1, 5, 3), share(r1, 1, 6, 6)), time_s=4.0),
    ]
    return kit.plan_of(steps, arrivals={r0: 0.0, r1: 0.5})


WALLS = (2.0, 1.0, 0.5, 3.0, 1.0)  # ends at 2, 3, 3.5, 6.5, 7.5


def timings(arm, walls, repetition=0, kernel=None, submit=None):
    return [
        StepTiming(
            arm=arm,
            scenario="made-up",
            step=index,
            repetition=repetition,
            wall_s=wall,
            submit_s=wall if submit is None else submit,
            kernel_s=kernel,
        )
        for index, wall in enumerate(walls)
    ]


def test_token_times_by_hand(plan):
    times = request_times(plan, WALLS)
    assert times["r0"].token_s == (2.0, 3.0, 6.5, 7.5)
    assert times["r1"].token_s == (6.5, 7.5)
    assert (times["r0"].arrival_s, times["r1"].arrival_s) == (0.0, 2.0)


def test_tpot_itl_ttft_by_hand(plan):
    times = arm_times(plan, timings("full", WALLS), "full")
    assert times.tpot == {("r0", 0): pytest.approx(5.5 / 3), ("r1", 0): 1.0}
    assert times.itl == {("r0#1", 0): 1.0, ("r0#2", 0): 3.5, ("r0#3", 0): 1.0, ("r1#1", 0): 1.0}
    assert times.ttft == {("r0", 0): 2.0, ("r1", 0): 4.5}
    assert times.step == {("0", 0): 2.0, ("1", 0): 1.0, ("3", 0): 3.0, ("4", 0): 1.0}
    assert (times.launch, times.kernel) == ({}, {})
    assert times.stats()["launch"] is None
    assert times.stats()["tpot"].num_samples == 2


def test_waiting_for_a_place_counts_towards_ttft(kit, plan):
    early = kit.plan_of(plan.steps, arrivals={"r0": 0.0, "r1": -1.0})
    assert request_times(early, WALLS)["r1"].arrival_s == 0.0
    unknown = kit.plan_of(plan.steps)
    assert request_times(unknown, WALLS)["r1"].arrival_s == 2.0


def test_repetitions_pool_and_a_clock_with_a_hole_gives_no_request_times(plan):
    both = timings("full", WALLS) + timings("full", [2 * w for w in WALLS], 1)
    times = arm_times(plan, both, "full")
    assert len(times.tpot) == 4
    assert times.tpot[("r1", 1)] == 2.0
    holed = arm_times(plan, timings("full", WALLS) + timings("full", WALLS, 1)[:-1], "full")
    assert {repetition for _, repetition in holed.tpot} == {0}
    assert ("3", 1) in holed.step
    assert arm_times(plan, both, "eager").stats() == dict.fromkeys(
        ("tpot", "itl", "ttft", "step", "launch", "kernel")
    )


def test_launch_overhead_is_a_wall_less_the_kernel_floor_of_the_same_repetition(plan):
    fast, slow = timings("full", WALLS, kernel=0.5), timings("full", [9.0] * 5, 1, kernel=6.0)
    times = arm_times(plan, fast + slow, "full")
    assert (times.kernel[("0", 0)], times.kernel[("0", 1)]) == (0.5, 6.0)
    assert (times.launch[("0", 0)], times.launch[("0", 1)]) == (1.5, 3.0)
    assert ("2", 0) not in times.launch  # the dummy step


def test_a_step_without_a_floor_has_no_launch_overhead(plan):
    assert arm_times(plan, timings("full", WALLS), "full").launch == {}


def test_launch_overhead_of_a_device_that_runs_behind_is_its_submit_time(plan):
    both = timings("full", WALLS, submit=0.25) + timings("full", WALLS, 1, submit=0.75)
    times = arm_times(plan, both, "full", async_device=True)
    assert {key[1]: value for key, value in times.launch.items()} == {0: 0.25, 1: 0.75}


def test_pairs_are_of_the_same_thing_in_the_same_repetition():
    ratios, repetitions = paired(
        {("a", 0): 2.0, ("b", 0): 1.0, ("a", 1): 4.0}, {("a", 1): 2.0, ("a", 0): 3.0}
    )
    assert ratios.tolist() == [1.5, 0.5]
    assert repetitions.tolist() == [0, 1]


def test_a_base_that_is_not_positive_has_no_ratio():
    base = {(str(i), 0): value for i, value in enumerate((1.0, 2.0, -0.1))}
    ratios, _ = paired(base, dict.fromkeys(base, 1.0))
    assert ratios.tolist() == [1.0, 0.5]
    lost = {(str(i), 0): value for i, value in enumerate((1.0, 0.0, -0.1))}
    assert len(paired(lost, dict.fromkeys(lost, 1.0))[0]) == 0
    assert len(paired({}, {})[0]) == 0
    assert np.isfinite(paired(base, dict.fromkeys(base, 1.0))[0]).all()


def test_a_request_of_one_token_has_a_ttft_and_no_tpot(kit):
    plan = kit.make_plan([3], 0)
    times = arm_times(plan, timings("full", [2.0]), "full")
    assert (times.ttft, times.tpot, times.itl) == ({("r0", 0): 2.0}, {}, {})


def test_samples_are_what_the_statistics_are_made_of(plan):
    measured = timings("eager", WALLS, kernel=0.25) + timings("full", WALLS, repetition=1)
    samples = samples_of(plan, measured)
    times = arm_times(plan, measured, "eager")
    for measure, kind in (("tpot", "tpot"), ("itl", "itl"), ("ttft", "ttft"), ("step", "step"),
                          ("kernel", "kernel"), ("launch_overhead", "launch")):  # fmt: skip
        mine = [s.value_s for s in samples if (s.arm, s.measure) == ("eager", measure)]
        assert mine == list(getattr(times, kind).values())
        assert mine, measure
    assert {s.repetition for s in samples if s.arm == "full"} == {1}
    assert not [s for s in samples if s.arm == "full" and s.measure == "kernel"]


def test_a_gap_belongs_to_the_step_that_ended_it(plan):
    gaps = [s for s in samples_of(plan, timings("eager", WALLS)) if s.measure == "itl"]
    assert [(s.request, s.step, s.value_s) for s in gaps] == [
        ("r0", 1, 1.0),
        ("r0", 3, 3.5),
        ("r0", 4, 1.0),
        ("r1", 4, 1.0),
    ]
    assert {s.step for s in samples_of(plan, timings("eager", WALLS)) if s.measure == "tpot"} == {
        None
    }
