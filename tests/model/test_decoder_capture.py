"""The decoder holds in a graph: no host sync, one forward of all ranks, and eager's bits."""

import pytest
import torch

from pcpbench.device.host_graph import HostGraphBackend
from pcpbench.world import World

WORLDS = {
    "one": (World(), 1),
    "pcp 2": (World(pcp_size=2), 1),
    "tp 2": (World(tp_size=2), 1),
    "tp 4 dcp 4": (World(tp_size=4, dcp_size=4), 2),
}


def into(target, source):
    """Copy another step's tensors into the first step's, as persistent buffers would be filled."""
    (ids, positions, old), (new_ids, new_positions, new) = target, source
    ids.copy_(new_ids)
    positions.copy_(new_positions)
    for name in ("query_start_loc", "seq_lens", "dcp_local_seq_lens", "slot_mappings"):
        if getattr(old, name) is not None:
            getattr(old, name).copy_(getattr(new, name))
    old.block_tables[0].copy_(new.block_tables[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "interleave"), WORLDS.values(), ids=WORLDS)
def test_replay_has_the_bits_of_padded_eager(make_stand, tokens, world, interleave, dtype):
    eager, replayed = (make_stand(world, interleave=interleave, dtype=dtype) for _ in range(2))
    sharded = world.shard_decode_requests

    def rows(position):
        """Two decodes: one on each PCP rank, or both on every rank."""
        both = [(0, position, 1), (1, position + 3, 1)]
        return [[row] for row in both] if sharded else [both] * world.size

    for stand in (eager, replayed):
        prefill = [(0, 0, 5), (1, 0, 8)]
        stand.run(
            stand.prepare(tokens, [prefill[:1], prefill[1:]] if sharded else [prefill] * world.size)
        )
    padding = {"extra_tokens": 2, "extra_rows": 2}
    inputs = replayed.prepare(tokens, rows(5), **padding)
    metadata = [context.metadata for context in replayed.contexts]
    backend = HostGraphBackend()
    graph, hidden = backend.capture(lambda: replayed.run(inputs), backend.new_pool())
    for position in range(5, 21):  # past the first block, and past one block of every DCP rank
        expected = eager.run(eager.prepare(tokens, rows(position), **padding))
        fresh = replayed.prepare(tokens, rows(position), **padding)
        for rank, context in enumerate(replayed.contexts):
            into((*inputs[rank], metadata[rank]), (*fresh[rank], context.metadata))
            context.metadata = None  # a replay must not look at the context again
        graph.replay()
        for got, want in zip(hidden, expected, strict=True):
            assert torch.equal(got, want)
        for left, right in zip(eager.contexts, replayed.contexts, strict=True):
            assert all(map(torch.equal, left.kv_caches, right.kv_caches))
