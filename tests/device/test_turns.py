"""Passes of one rank in turn: order, answers, common breaks, errors."""

import pytest
import torch

from pcpbench.device.collectives import InProcessGroup, graph_break, lockstep, run_lockstep
from pcpbench.device.turns import hand_over, take_turns


def test_turns_end_at_meetings_and_go_round_in_order():
    said = []

    async def one(name, group):
        said.append(f"{name} starts")
        await group.all_gather(torch.zeros(1))
        said.append(f"{name} hands over")
        await hand_over(group.global_rank)
        said.append(f"{name} ends")
        return name

    async def rank(number):
        group = InProcessGroup((0, 1), number)
        return await take_turns([one(f"{number}a", group), one(f"{number}b", group)])

    assert run_lockstep([rank(0), rank(1)]) == [["0a", "0b"], ["1a", "1b"]]
    mine = [what for what in said if what.startswith("0")]
    assert mine == [
        "0a starts", "0b starts", "0a hands over", "0b hands over", "0a ends", "0b ends",
    ]  # fmt: skip


def test_each_pass_gets_its_own_answer():
    async def one(value, group):
        return await group.all_gather(torch.tensor([value]))

    async def rank(number):
        group = InProcessGroup((0, 1), number)
        return await take_turns([one(10 * number, group), one(10 * number + 1, group)])

    first, second = run_lockstep([rank(0), rank(1)])
    assert [t.tolist() for t in first] == [t.tolist() for t in second] == [[0, 10], [1, 11]]


def test_passes_break_together_and_their_work_takes_turns_at_every_replay():
    said = []

    async def work(name):
        said.append(f"{name} writes")
        await hand_over(0)
        said.append(f"{name} reads")

    async def one(name):
        await graph_break(0, lambda: work(name))
        said.append(f"{name} goes on")

    steps = lockstep([take_turns([one("a"), one("b")])])
    (both,) = next(steps)
    assert said == []
    for _ in range(2):
        run_lockstep([both()])
    assert said == 2 * ["a writes", "b writes", "a reads", "b reads"]
    with pytest.raises(StopIteration):
        next(steps)
    assert said[-2:] == ["a goes on", "b goes on"]


def test_an_error_in_one_pass_closes_the_other():
    closed = []

    async def breaks():
        await hand_over(0)
        raise ValueError("this one broke")

    async def waits():
        try:
            await hand_over(0)
            await hand_over(0)
        finally:
            closed.append(True)

    with pytest.raises(ValueError, match="this one broke"):
        run_lockstep([take_turns([breaks(), waits()])])
    assert closed == [True]
