"""A watched step computes what an unwatched one does, and afterwards nobody watches."""

import itertools

import pytest
import torch

from pcpbench.engine.phases import PhaseWatch


@pytest.fixture
def stand(bench):
    made = bench("s2-capture-edges", candidate="full_and_piecewise")
    for arm in made.stand.arms.values():
        arm.start(made.plan)
    return made


def run(arm, plan, watched):
    arm.start(plan)
    ticks = itertools.count()
    found = []
    for step in plan.steps[:12]:
        if watched:
            arm.execute_watched(step, None, None, lambda: float(next(ticks)))
        else:
            arm.execute(step)
        found.append([part.logits.clone() for part in arm._output.sampled])
    return found


@pytest.mark.parametrize("label", ["eager", "full_and_piecewise"])
def test_watching_changes_no_bit_and_leaves_nothing(stand, label):
    arm = stand.stand.arms[label]
    engine = arm.engine
    before = (engine.workers, engine.dispatcher, engine.graphs)
    plain = run(arm, stand.plan, watched=False)
    watched = run(arm, stand.plan, watched=True)
    assert all(torch.equal(a, b) for one, two in zip(plain, watched, strict=True)
               for a, b in zip(one, two, strict=True))  # fmt: skip
    assert (engine.workers, engine.dispatcher, engine.graphs) == before
    assert all(type(worker).__name__ == "Worker" for worker in engine.workers)


def test_phases_are_of_the_ranks_that_had_them(stand):
    arm = stand.stand.arms["full_and_piecewise"]
    arm.start(stand.plan)
    ticks = itertools.count()
    for step in stand.plan.steps[:6]:
        found = arm.execute_watched(step, None, None, lambda: float(next(ticks)))
    ranks = {(name, rank) for name, rank, _, _ in found}
    assert {("prepare_inputs", 0), ("prepare_inputs", 1), ("sample", 0), ("sample", 1)} <= ranks
    assert {("dispatch", None), ("replay", None), ("launch", None)} <= ranks
    assert all(start < end for _, _, start, end in found)
    launches = [one for one in found if one[0] == "launch"]
    assert len(launches) == arm._output.num_replays


def test_a_step_that_fails_is_not_watched_any_longer(stand):
    arm = stand.stand.arms["eager"]
    workers = arm.engine.workers
    watch = PhaseWatch(arm.engine, lambda: 0.0)

    def fail():
        with watch:
            assert arm.engine.workers is not workers
            watch.timed("forward", 0, lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        fail()
    assert arm.engine.workers is workers
    assert [one.name for one in watch.stretches] == ["forward"]
