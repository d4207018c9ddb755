"""One rank's share of a step, its attention inputs, captures and the way back."""

import numpy as np
import pytest
import torch

from pcpbench.engine.input_batch import InputBatch, InputBuffers, set_dummy_context
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.pcp_manager import PCPManager, RankSegment, maybe_partition_pcp_batch

CPU = torch.device("cpu")


def full(num_reqs, num_tokens=None):
    return BatchExecutionDescriptor(
        CUDAGraphMode.FULL, num_tokens or num_reqs, num_reqs, uniform_token_count=1
    )


def piecewise(num_tokens):
    return BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, num_tokens, None)


def test_rank_local_batch_of_a_mixed_step(pcp_stand):
    stand = pcp_stand(2)
    stand.soil()
    batch = stand.batch([1, 1, 1, 7], [0, 0, 0, 1], [5, 6, 7, 2])
    local = stand.managers[0].partition_batch(batch, piecewise(8))
    assert local.req_ids == ["r0", "r2", "r3", "r3"]
    assert (local.num_reqs, local.num_reqs_after_padding) == (4, 4)
    assert (local.num_tokens, local.num_tokens_after_padding) == (5, 8)
    assert local.input_ids.tolist() == [1000, 1002, 1003, 1004, 1009, 0, 0, 0]
    assert local.positions.tolist() == [5, 7, 2, 3, 8, 0, 0, 0]
    assert local.is_padding.tolist() == [False] * 5 + [True] * 3
    assert local.query_start_loc.tolist() == [0, 1, 2, 4, 5]
    # A chunk's row ends with the chunk: 2 computed + 2, and 2 computed + 7.
    assert local.seq_lens.tolist() == [6, 8, 4, 9]
    assert local.seq_lens_cpu_upper_bound.tolist() == [6, 8, 4, 9]
    assert local.num_computed_tokens_np.tolist() == [5, 7, 2, 8]
    assert local.num_scheduled_tokens.tolist() == [1, 1, 2, 1]
    assert local.is_prefilling_np.tolist() == [False, False, True, True]
    assert local.has_prefill
    assert local.dcp_local_seq_lens is None
    slots = [stand.slot_of(row) for row in (0, 2, 3, 3)]
    assert local.idx_mapping.tolist() == local.idx_mapping_np.tolist() == slots


def test_rows_and_segments_are_shown(pcp_stand, none_desc):
    stand = pcp_stand(2)
    manager = stand.managers[0]
    manager.partition_batch(stand.batch([1, 1, 7], [0, 0, 1], [5, 6, 2]), none_desc)
    assert manager.row_req_index.tolist() == [0, 2, 2]
    assert manager.row_start.tolist() == [0, 0, 6]
    assert manager.rank_segments() == [
        RankSegment(0, slice(0, 1), slice(0, 1)),
        RankSegment(2, slice(2, 4), slice(1, 3)),
        RankSegment(2, slice(8, 9), slice(3, 4)),
    ]
    assert [segment.num_tokens for segment in manager.rank_segments()] == [1, 2, 1]


def test_rank_without_rows_holds_one_row_of_no_tokens(pcp_stand, none_desc):
    stand = pcp_stand(2)
    stand.soil()
    manager = stand.managers[1]
    local = manager.partition_batch(stand.batch([1], [0], [9]), none_desc)
    assert (local.num_reqs, local.num_tokens, local.num_tokens_after_padding) == (1, 0, 1)
    assert local.query_start_loc.tolist() == [0, 0]
    assert local.seq_lens.tolist() == local.seq_lens_cpu_upper_bound.tolist() == [0]
    assert local.is_padding.tolist() == [True]
    assert local.num_computed_tokens_np.tolist() == [9]
    assert manager.row_req_index.tolist() == [0]
    assert manager.row_start.tolist() == [-1]
    assert manager.rank_segments() == [RankSegment(0, slice(0, 0), slice(0, 0))]
    tables, slots = manager.prepare_attn(local)
    assert tables[0].shape[0] == 1
    assert slots.shape == (1, 2)


def test_full_pads_rows_and_tokens_every_time(pcp_stand):
    stand = pcp_stand(2)
    for num_decodes in (7, 3, 5, 1):
        stand.soil()
        batch = stand.batch([1] * num_decodes, [0] * num_decodes, range(num_decodes))
        for manager in stand.managers:
            local = manager.partition_batch(batch, full(6))
            real = (num_decodes - manager.pcp_rank + 1) // 2
            assert local.num_reqs == max(1, real)
            assert local.num_reqs_after_padding == len(local.seq_lens) == 6
            assert not local.seq_lens[local.num_reqs :].any()
            assert not local.seq_lens_cpu_upper_bound[local.num_reqs :].any()
            starts = [*range(real + 1), *[real] * (6 - real)]
            assert local.query_start_loc.tolist() == local.query_start_loc_np.tolist() == starts
            assert not local.input_ids[real:].any()
            assert not local.positions[real:].any()
            assert local.is_padding.tolist() == [t >= real for t in range(6)]
            tables, slots = manager.prepare_attn(local)
            assert tables[0].shape[0] == 6
            assert not tables[0][local.num_reqs :].any()
            mine = slots[0, manager.pcp_rank * 6 :][:6]
            assert (mine == -1).tolist() == local.is_padding.tolist()


def test_buffers_never_move_and_the_global_batch_is_not_touched(pcp_stand, none_desc):
    stand = pcp_stand(2)
    manager = stand.managers[0]
    batch = stand.batch([1, 1, 9], [0, 0, 1], [3, 4, 0])
    before = {
        name: value.clone() if isinstance(value, torch.Tensor) else np.copy(value)
        for name, value in vars(batch).items()
        if isinstance(value, torch.Tensor | np.ndarray)
    }
    addresses = []
    for desc in (none_desc, piecewise(12)):
        local = manager.partition_batch(batch, desc)
        tables, slots = manager.prepare_attn(local)
        tensors = (local.input_ids, local.positions, local.is_padding, local.query_start_loc)
        addresses.append([t.data_ptr() for t in (*tensors, local.seq_lens, *tables, slots)])
    assert addresses[0] == addresses[1]
    for name, value in before.items():
        assert (torch.as_tensor(getattr(batch, name)) == torch.as_tensor(value)).all(), name
    assert manager.global_batch is batch


def test_device_tensors_do_not_follow_the_host_arrays(pcp_stand, none_desc):
    stand = pcp_stand(2)
    manager = stand.managers[0]
    batch = stand.batch([1, 1, 9], [0, 0, 1], [3, 4, 0])
    local = manager.partition_batch(batch, none_desc)
    layout = manager.layout
    host = (local.idx_mapping_np, local.query_start_loc_np, local.num_scheduled_tokens)
    device = (
        local.idx_mapping,
        local.query_start_loc,
        manager.hidden_restore_idx,
        manager.padded_gather_idx,
        manager.gathered_kv_write_mask,
    )
    before = [tensor.clone() for tensor in device]
    for array in (*host, batch.idx_mapping_np, batch.query_start_loc_np):
        array += 5
    assert all(torch.equal(a, b) for a, b in zip(device, before, strict=True))
    # What a later step may be given again cannot be written to, nor seen through a tensor.
    for name in ("hidden_restore_idx", "padded_gather_idx", "gathered_kv_write_mask"):
        array = getattr(layout, name)
        assert not array.flags.writeable, name
        assert not np.shares_memory(array, getattr(manager, name).numpy()), name
    assert not manager.row_req_index.flags.writeable
    again = manager.partition_batch(stand.batch([1, 1, 9], [0, 0, 1], [3, 4, 0]), none_desc)
    assert again.query_start_loc_np.tolist() == again.query_start_loc.tolist() == [0, 1, 4]


STEPS = [
    ([1, 1, 1], [0, 0, 0], 4),
    ([1, 1, 1], [0, 0, 0], 4),  # again
    ([1, 1, 1], [0, 0, 1], 4),  # the same shape, another phase
    ([1, 1, 1], [0, 0, 1], 6),  # more padding
    ([2, 1], [0, 0], 6),  # the same tokens in fewer rows
    ([1, 2], [0, 0], 6),
    ([1, 1, 1], [0, 0, 0], 4),
]


def test_step_after_another_is_what_it_would_be_alone(pcp_stand):
    used = pcp_stand(2)
    for number, (lens, prefilling, padded) in enumerate(STEPS):
        computed = [number + row for row in range(len(lens))]
        fresh = pcp_stand(2)
        for rank in (0, 1):
            pair = []
            for stand in (used, fresh):
                stand.soil()
                batch = stand.batch(lens, prefilling, computed)
                manager = stand.managers[rank]
                local = manager.partition_batch(batch, piecewise(padded))
                _, slots = manager.prepare_attn(local)
                values = {**vars(local), "slots": slots, "restore": manager.hidden_restore_idx}
                pair.append({name: str(value) for name, value in values.items()})
            assert pair[0] == pair[1], (number, rank)


def test_lengths_follow_the_device_where_the_host_only_has_a_bound(pcp_stand, none_desc):
    # Two rejected draft tokens: the device's length is 2 below the host's belief.
    stand = pcp_stand(2)
    batch = stand.batch([3, 8], [0, 1], [10, 4])
    batch.seq_lens[0] -= 2
    batch.positions[:3] -= 2
    local = stand.managers[0].partition_batch(batch, none_desc)
    assert local.seq_lens.tolist() == [11, 6, 12]
    assert local.seq_lens_cpu_upper_bound.tolist() == [13, 6, 12]
    assert local.positions[:3].tolist() == [8, 9, 10]


def test_full_with_a_prefill_is_refused(pcp_stand):
    stand = pcp_stand(2)
    with pytest.raises(RuntimeError, match="prefill"):
        stand.managers[0].partition_batch(stand.batch([1, 4], [0, 1], [3, 0]), full(8))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_refuses_what_one_rank_cannot_hold(pcp_stand, rank):
    # Three decodes: rank 0 has two of them, rank 1 has one, and both must refuse.
    stand = pcp_stand(2)
    batch = stand.batch([1, 1, 1], [0, 0, 0], [1, 1, 1])
    with pytest.raises(ValueError, match="1 rows, and a PCP rank needs 2"):
        stand.managers[rank].partition_batch(batch, full(1, 2))
    with pytest.raises(ValueError, match="smaller than the largest"):
        stand.managers[rank].partition_batch(batch, full(2, 1))


def test_batch_past_the_buffers_is_refused(pcp_stand):
    stand = pcp_stand(2, max_num_tokens=8)
    with pytest.raises(ValueError, match="does not fit buffers"):
        stand.managers[0].partition_batch(stand.batch([1], [0], [1]), piecewise(9))


def test_counts_for_dispatch_are_the_largest_ranks(pcp_stand):
    manager = pcp_stand(4).managers[3]
    args = (np.array([1, 1, 1, 1, 1, 9]), np.array([0, 0, 0, 0, 0, 1], dtype=bool))
    # Rank 0 has decodes 0 and 4 and one chunk of 2 (chunks of ceil(9 / 8) are 2 2 2 2 1 0 0 0).
    assert manager.get_num_tokens_for_dispatch(*args) == 4
    assert manager.get_num_reqs_for_dispatch(*args) == 3
    assert manager.get_counts_for_dispatch(*args) == (3, 4)
    nothing = (np.zeros(1, dtype=int), np.zeros(1, dtype=bool))
    assert manager.get_counts_for_dispatch(*nothing) == (1, 0)


def test_restore_puts_gathered_states_into_global_order(pcp_stand):
    stand = pcp_stand(4)
    batch = stand.batch([1, 1, 1, 1, 1, 9], [0, 0, 0, 0, 0, 1], [3] * 6)
    locals_ = [m.partition_batch(batch, piecewise(6)) for m in stand.managers]
    gathered = torch.cat([local.input_ids for local in locals_])[:, None].float()
    for manager in stand.managers:
        restored, given_back = manager.restore_for_sampling(gathered)
        assert restored[:, 0].tolist() == [1000.0 + t for t in range(14)]
        assert given_back is batch
    with pytest.raises(ValueError, match="23 hidden states"):
        stand.managers[0].restore_hidden_states(gathered[1:])


def test_capture_inputs_are_slices_of_the_persistent_buffers(pcp_stand):
    stand = pcp_stand(2)
    stand.soil()
    manager = stand.managers[0]
    dummy = InputBatch.make_dummy(3, 7, stand.buffers)
    captured = manager.prepare_inputs_to_capture(dummy)
    for name in ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens"):
        tensor, source = getattr(captured, name), getattr(dummy, name)
        assert torch.equal(tensor, source), name
        assert tensor.data_ptr() == getattr(manager.input_buffers, name).data_ptr(), name
        assert tensor.data_ptr() != source.data_ptr(), name
    assert captured.num_reqs == 3
    assert captured is not dummy


def test_dummy_attention_inputs_touch_only_the_local_tables(pcp_stand):
    stand = pcp_stand(2, dcp_sharded=(True, True))
    stand.soil()
    manager = stand.managers[0]
    before = [t.clone() for t in manager.block_tables.persistent_buffers().values()]
    captured = manager.prepare_inputs_to_capture(InputBatch.make_dummy(3, 3, stand.buffers))
    tables = manager.get_dummy_block_tables(3)
    slots = manager.get_dummy_slot_mappings(3)
    set_dummy_context(captured, manager.block_tables, 4, 10, 100, input_block_tables=tables)
    assert [t.shape for t in tables] == [(3, 64), (3, 64)]
    assert not any(t.any() for t in tables)
    assert slots.shape == (2, 6)
    assert (slots == -1).all()
    assert captured.seq_lens.tolist() == manager.input_buffers.seq_lens[:3].tolist() == [5, 5, 5]
    after = manager.block_tables.persistent_buffers().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_interleave_is_that_of_the_tables_it_was_given_last(pcp_stand):
    manager = pcp_stand(2, interleave=1).managers[0]
    later = pcp_stand(2, dcp=2, interleave=4).managers[0].block_tables
    manager.set_block_tables(later)
    assert (manager.block_tables, manager.cp_interleave) == (later, 4)
    manager.set_block_tables(None)
    assert manager.cp_interleave == 4


def test_manager_without_capacities_still_partitions(none_desc, pcp_stand):
    stand = pcp_stand(2)
    manager = PCPManager(2, 1, CPU, True)
    local = manager.partition_batch(stand.batch([1, 1, 1], [0, 0, 0], [1, 2, 3]), none_desc)
    assert local.input_ids.tolist() == [1001, 0]
    with pytest.raises(RuntimeError, match="max_num_reqs"):
        _ = manager.input_buffers
    for needs_tables in (
        manager.prepare_slot_mappings,
        lambda: manager.get_dummy_block_tables(1),
        lambda: manager.get_dummy_slot_mappings(1),
    ):
        with pytest.raises(RuntimeError, match="set_block_tables"):
            needs_tables()


def test_nothing_partitioned_yet(pcp_stand):
    manager = pcp_stand(2).managers[0]
    for unready in (lambda: manager.global_batch, lambda: manager.layout):
        with pytest.raises(RuntimeError, match="no batch"):
            unready()


def test_local_buffers_hold_two_rows_a_request(pcp_stand):
    manager = pcp_stand(2).managers[0]
    assert manager.input_buffers.max_num_reqs == 2 * 24
    assert manager.persistent_buffers()["input_block_tables.0"].shape[0] == 2 * 24
    assert manager.persistent_buffers()["slot_mappings"].shape == (1, 2 * 512)


def test_no_manager_pads_in_place(pcp_stand, none_desc):
    stand = pcp_stand(2)
    batch = stand.batch([1, 1, 1], [0, 0, 0], [4, 5, 6])
    assert maybe_partition_pcp_batch(None, batch, none_desc) is batch
    stand.buffers.seq_lens[3:].fill_(77)
    stand.buffers.input_ids[3:].fill_(77)
    padded = maybe_partition_pcp_batch(None, batch, full(5), stand.buffers)
    assert padded.seq_lens.tolist() == [5, 6, 7, 0, 0]
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3]
    assert padded.query_start_loc_np.tolist() == [0, 1, 2, 3, 3, 3]
    assert padded.input_ids.tolist() == [1000, 1001, 1002, 0, 0]
    assert padded.is_padding.tolist() == [False] * 3 + [True] * 2
    assert padded.num_reqs == 3
    rows_kept = maybe_partition_pcp_batch(None, batch, piecewise(4), stand.buffers)
    assert (rows_kept.num_reqs_after_padding, rows_kept.num_tokens_after_padding) == (3, 4)
    with pytest.raises(ValueError, match="cannot be padded"):
        maybe_partition_pcp_batch(None, batch, full(2), stand.buffers)
    with pytest.raises(ValueError, match="needs the buffers"):
        maybe_partition_pcp_batch(None, batch, full(5))


def test_maybe_partition_uses_the_manager(pcp_stand):
    stand = pcp_stand(2)
    batch = stand.batch([1, 1, 1], [0, 0, 0], [4, 5, 6])
    local = maybe_partition_pcp_batch(stand.managers[1], batch, full(4), InputBuffers(1, 1, CPU))
    assert local.input_ids.tolist() == [1001, 0, 0, 0]
