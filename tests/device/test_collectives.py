import pytest
import torch

from pcpbench.device.collectives import InProcessGroup, graph_break, lockstep, run_lockstep
from pcpbench.errors import CollectiveMismatch


def groups_of(ranks, log=None):
    return {rank: InProcessGroup(ranks, rank, log) for rank in ranks}


def test_collectives_move_real_data_in_group_order():
    groups = groups_of((2, 0, 1))

    async def rank_work(rank):
        group, own = groups[rank], torch.full((3, 2), float(rank + 1))
        gathered = await group.all_gather(own[:1])
        wide = await group.all_gather(own[:1], dim=1)
        total = await group.all_reduce(own)
        share = await group.reduce_scatter(own + torch.arange(3.0)[:, None])
        return gathered, wide, total, share, group.rank

    results = run_lockstep([rank_work(rank) for rank in range(3)])
    for rank, (gathered, wide, total, share, position) in enumerate(results):
        assert gathered[:, 0].tolist() == [3.0, 1.0, 2.0]
        assert wide.tolist() == [[3.0, 3.0, 1.0, 1.0, 2.0, 2.0]]
        assert total.tolist() == [[6.0, 6.0]] * 3
        assert position == (2, 0, 1).index(rank)
        assert share.tolist() == [[6.0 + 3 * position] * 2]
    assert results[0][0].data_ptr() != results[1][0].data_ptr()


def test_disjoint_groups_proceed_on_their_own():
    left, right = groups_of((0, 1)), groups_of((2, 3))

    async def rank_work(rank, times):
        value = torch.ones(1)
        for _ in range(times):
            value = await (left | right)[rank].all_reduce(value)
        return value.item()

    works = [rank_work(0, 1), rank_work(1, 1), rank_work(2, 3), rank_work(3, 3)]
    assert run_lockstep(works) == [2.0, 2.0, 8.0, 8.0]


def test_a_rank_that_stays_away_is_named():
    groups = groups_of((0, 1))

    async def rank_work(rank):
        if rank == 0:
            await groups[rank].all_gather(torch.ones(2))

    with pytest.raises(CollectiveMismatch, match=r"rank 0 in all_gather over \[0, 1\]"):
        run_lockstep([rank_work(0), rank_work(1)])


@pytest.mark.parametrize("other", ["shape", "kind"])
def test_ranks_that_meet_in_different_calls_are_named(other):
    groups = groups_of((0, 1))

    async def rank_work(rank):
        if rank == 1 and other == "kind":
            await groups[rank].all_reduce(torch.ones(2))
        else:
            await groups[rank].all_gather(torch.ones(2 + rank * (other == "shape")))

    with pytest.raises(CollectiveMismatch, match=r"rank 0 in all_gather.*rank 1 in all_"):
        run_lockstep([rank_work(0), rank_work(1)])


def test_the_log_has_every_call_even_of_a_group_of_one():
    log = []
    alone = InProcessGroup((5,), 5, log)

    async def rank_work():
        await alone.all_gather(torch.ones(2, 3))

    run_lockstep([rank_work()])
    assert log == [("all_gather", (5,), (2, 3), "torch.float32")]


def test_an_exchange_hands_each_rank_its_share_of_all():
    groups = [InProcessGroup((4, 2, 7), rank) for rank in (4, 2, 7)]
    sent = [torch.arange(12.0).view(2, 6) + 100 * place for place in range(3)]

    async def rank_work(place):
        return await groups[place].all_to_all(sent[place], dim=1)

    received = run_lockstep([rank_work(place) for place in range(3)])
    for place, found in enumerate(received):
        own = slice(2 * place, 2 * place + 2)
        assert torch.equal(found, torch.stack([tensor[:, own] for tensor in sent]))


def test_an_exchange_with_nobody_is_the_tensor_itself():
    alone = InProcessGroup((5,), 5)

    async def rank_work():
        return await alone.all_to_all(torch.ones(2, 3), dim=1)

    (found,) = run_lockstep([rank_work()])
    assert found.shape == (1, 2, 3)


def test_breaks_hand_out_the_work_of_all_ranks_together():
    done = []

    async def eager(rank):
        done.append(rank)

    async def rank_work(rank):
        await graph_break(rank, lambda: eager(rank))
        return rank

    steps = lockstep([rank_work(0), rank_work(1)])
    works = next(steps)
    assert done == []
    run_lockstep([work() for work in works])
    assert done == [0, 1]
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == [0, 1]


def test_a_break_outside_a_capture_is_a_mistake():
    async def rank_work():
        await graph_break(0, lambda: None)

    with pytest.raises(RuntimeError, match="broke out of a graph"):
        run_lockstep([rank_work()])
