"""Buffers, batches of a plan, dummies and what they are padded with."""

import numpy as np
import pytest
import torch

from pcpbench.engine.block_table import BlockTables
from pcpbench.engine.input_batch import (
    InputBatch,
    InputBuffers,
    fill_input_ids,
    pad_batch,
    prepare_pos_seq_lens,
    set_dummy_context,
)
from pcpbench.engine.request_state import RequestState
from pcpbench.plan import ScheduledRequest

CPU = torch.device("cpu")
FIELDS = ("input_ids", "positions", "is_padding", "query_start_loc", "seq_lens")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def dirty_buffers(max_num_reqs=6, max_num_tokens=16):
    buffers = InputBuffers(max_num_reqs, max_num_tokens, CPU)
    for name in (*FIELDS, "dcp_local_seq_lens"):
        getattr(buffers, name).fill_(77)
    return buffers


def state(drafts=0, max_model_len=32):
    return RequestState(5, max_model_len, 16, drafts, 1000, CPU)


def share(req_id, tokens, computed, prefill_len, drafts=0):
    return ScheduledRequest(
        req_id=req_id,
        num_scheduled_tokens=tokens,
        num_computed_tokens=computed,
        prefill_len=prefill_len,
        prompt_len=prefill_len,
        num_draft_tokens=drafts,
    )


def test_buffers_have_the_contracts_shapes_and_dtypes():
    buffers = InputBuffers(6, 16, CPU)
    assert {
        name: (t.dtype, t.shape[0]) for name, t in vars(buffers).items() if torch.is_tensor(t)
    } == {
        "input_ids": (torch.int32, 16),
        "positions": (torch.int64, 16),
        "is_padding": (torch.bool, 16),
        "query_start_loc": (torch.int32, 7),
        "seq_lens": (torch.int32, 6),
        "dcp_local_seq_lens": (torch.int32, 6),
    }


@pytest.fixture
def mixed_step():
    """A prompt's second chunk of 3, a decode, and a prompt of one token, in slots 4, 2 and 3."""
    requests = state()
    requests.free_indices = [0, 1, 3, 2, 4]
    requests.add_request("chunk", 9, list(range(100, 109)), 4, 5)
    requests.add_request("decode", 2, [200, 201], 2, 5)
    requests.add_request("short", 1, [300], 0, 5)
    requests.apply_staged_writes()
    requests.last_sampled_tokens[2, 0] = 250
    requests.last_sampled_tokens[4, 0] = requests.last_sampled_tokens[3, 0] = 999
    return requests, [share("chunk", 3, 4, 9), share("decode", 1, 2, 2), share("short", 1, 0, 1)]


def test_batch_of_a_plan(mixed_step):
    requests, scheduled = mixed_step
    buffers = dirty_buffers()
    batch = InputBatch.from_plan(scheduled, requests, buffers)
    assert batch.req_ids == ["chunk", "decode", "short"]
    assert batch.idx_mapping.tolist() == batch.idx_mapping_np.tolist() == [4, 2, 3]
    assert batch.input_ids.tolist() == [104, 105, 106, 250, 300]
    assert batch.positions.tolist() == [4, 5, 6, 2, 0]
    assert batch.is_padding.tolist() == [False] * 5
    assert batch.query_start_loc.tolist() == batch.query_start_loc_np.tolist() == [0, 3, 4, 5]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu_upper_bound.tolist() == [7, 3, 1]
    # A prompt of one token has a decode's shape, and is none.
    assert batch.is_prefilling_np.tolist() == [True, False, True]
    assert batch.has_prefill
    assert batch.num_computed_tokens_np.tolist() == [4, 2, 0]
    assert batch.num_computed_prefill_tokens_np.tolist() == [4, 2, 0]
    assert batch.prefill_len_np.tolist() == [9, 2, 1]
    assert batch.logits_indices.tolist() == [2, 3, 4]
    assert (batch.num_reqs, batch.num_reqs_after_padding) == (3, 3)
    assert (batch.num_tokens, batch.num_tokens_after_padding) == (5, 5)
    assert batch.max_query_len == 3
    # Past the batch the buffers are neutral where a longer view would read them.
    assert buffers.seq_lens.tolist() == [7, 3, 1, 0, 0, 0]
    assert buffers.query_start_loc.tolist() == [0, 3, 4, 5, 5, 5, 5]
    for name in FIELDS:
        assert getattr(batch, name).data_ptr() == getattr(buffers, name).data_ptr()


def test_positions_come_from_the_device_and_phases_from_the_plan(mixed_step):
    # One rejected draft token: the device's cursor of "decode" is 1, the plan's is 2.
    requests, scheduled = mixed_step
    requests.num_computed_tokens[2] = 1
    batch = InputBatch.from_plan(scheduled, requests, dirty_buffers())
    assert batch.positions.tolist() == [4, 5, 6, 1, 0]
    assert batch.seq_lens.tolist() == [7, 2, 1]
    assert batch.seq_lens_cpu_upper_bound.tolist() == [7, 3, 1]
    assert batch.is_prefilling_np.tolist() == [True, False, True]


def test_draft_tokens_follow_the_sampled_one():
    requests = state(drafts=2)
    requests.add_request("a", 2, [10, 11], 2, 9)
    requests.add_request("b", 6, [20, 21, 22, 23, 24, 25], 3, 9)
    requests.apply_staged_writes()
    requests.last_sampled_tokens[:, 0] = torch.tensor([50, 60, 0, 0, 0])
    requests.draft_tokens[:2] = torch.tensor([[51, 52], [61, 62]])
    scheduled = [share("b", 3, 3, 6), share("a", 3, 2, 2, drafts=2)]
    batch = InputBatch.from_plan(scheduled, requests, dirty_buffers())
    assert batch.input_ids.tolist() == [23, 24, 25, 50, 51, 52]
    assert batch.num_draft_tokens == 2
    assert batch.num_draft_tokens_per_req.tolist() == [0, 2]


def test_the_hosts_cursor_may_be_ahead_and_only_bounds(mixed_step):
    # Two drafts of "decode" were rejected; the host does not know yet.
    requests, scheduled = mixed_step
    requests.num_computed_tokens_np[2] = 4
    batch = InputBatch.from_plan(scheduled, requests, dirty_buffers())
    assert batch.positions.tolist() == [4, 5, 6, 2, 0]
    assert batch.seq_lens.tolist() == [7, 3, 1]
    assert batch.num_computed_tokens_np.tolist() == [4, 4, 0]
    assert batch.seq_lens_cpu_upper_bound.tolist() == [7, 5, 1]
    assert batch.is_prefilling_np.tolist() == [True, False, True]


def test_step_that_does_not_fit_or_is_empty_is_refused(mixed_step):
    requests, scheduled = mixed_step
    for buffers in (dirty_buffers(max_num_reqs=2), dirty_buffers(max_num_tokens=4)):
        with pytest.raises(ValueError, match="does not fit buffers"):
            InputBatch.from_plan(scheduled, requests, buffers)
    with pytest.raises(ValueError, match="without requests"):
        InputBatch.from_plan([], requests, dirty_buffers())


def test_positions_and_lengths_of_the_worked_example():
    pos, seq_lens = torch.full((5,), 77), torch.full((4,), 77, dtype=torch.int32)
    prepare_pos_seq_lens(
        torch.tensor([5, 2], dtype=torch.int32),
        torch.tensor([0, 1, 3], dtype=torch.int32),
        torch.tensor([0, 0, 3, 0, 0, 10], dtype=torch.int32),
        pos,
        seq_lens,
    )
    assert pos.tolist() == [10, 3, 4, 77, 77]
    assert seq_lens.tolist() == [11, 5, 0, 0]


def test_empty_rows_and_no_rows_have_positions_too():
    pos, seq_lens = torch.full((3,), 77), torch.full((4,), 77, dtype=torch.int32)
    cursors = torch.tensor([4, 5, 6], dtype=torch.int32)
    starts = torch.tensor([0, 0, 2, 2], dtype=torch.int32)
    prepare_pos_seq_lens(torch.tensor([0, 1, 2]).int(), starts, cursors, pos, seq_lens)
    assert pos.tolist() == [5, 6, 77]
    assert seq_lens.tolist() == [4, 7, 6, 0]
    prepare_pos_seq_lens(torch.zeros(0).int(), starts[:1], cursors, pos, seq_lens)
    assert seq_lens.tolist() == [0, 0, 0, 0]


def test_input_ids_of_a_request_at_its_longest():
    requests = state(max_model_len=4)
    requests.add_request("full", 4, [1, 2, 3, 4], 4, 1)
    requests.apply_staged_writes()
    requests.last_sampled_tokens[0, 0] = 9
    ids = torch.zeros(1, dtype=torch.int32)
    one = torch.tensor([0, 1], dtype=torch.int32)
    fill_input_ids(ids, torch.tensor([4]), torch.zeros(1).int(), one, requests)
    assert ids.tolist() == [9]


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "lens"),
    [(3, 7, [2, 2, 3]), (4, 4, [1] * 4), (1, 7, [7]), (5, 13, [2, 2, 3, 3, 3])],
)
def test_dummy_spreads_tokens_with_the_remainder_last(num_reqs, num_tokens, lens):
    buffers = dirty_buffers()
    batch = InputBatch.make_dummy(num_reqs, num_tokens, buffers)
    assert batch.num_scheduled_tokens.tolist() == lens
    starts = [0, *np.cumsum(lens).tolist()]
    assert batch.query_start_loc.tolist() == batch.query_start_loc_np.tolist() == starts
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu_upper_bound.tolist() == lens
    assert batch.input_ids.tolist() == batch.positions.tolist() == [0] * num_tokens
    assert batch.is_padding.all()
    assert len(set(batch.req_ids)) == num_reqs
    assert not batch.has_prefill
    assert not buffers.seq_lens[num_reqs:].any()
    assert (buffers.query_start_loc[num_reqs:] == num_tokens).all()
    for name in FIELDS:
        assert getattr(batch, name).data_ptr() == getattr(buffers, name).data_ptr()


def test_dummy_tokens_are_padding_unless_told_otherwise():
    assert not InputBatch.make_dummy(2, 4, dirty_buffers(), is_padding=False).is_padding.any()
    assert InputBatch.make_dummy(2, 4, dirty_buffers(), max_query_len=2).max_query_len == 2


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "longest", "message"),
    [
        (0, 0, None, "needs a row"),
        (3, 2, None, "needs a row"),
        (7, 8, None, "does not fit buffers of 6 rows"),
        (1, 17, None, "does not fit buffers of 6 rows and 16 tokens"),
        (2, 5, 2, "queries longer than 2"),
    ],
)
def test_impossible_dummies_are_refused(num_reqs, num_tokens, longest, message):
    with pytest.raises(ValueError, match=message):
        InputBatch.make_dummy(num_reqs, num_tokens, dirty_buffers(), max_query_len=longest)


def test_dummy_context_is_in_the_null_block():
    tables = BlockTables([4], 6, 16, [5], CPU)
    tables.input_block_tables[0].fill_(77)
    tables.block_tables[0].fill_(55)
    batch = InputBatch.make_dummy(3, 4, dirty_buffers())
    set_dummy_context(batch, tables, 8, 10, max_model_len=9)
    # The last row has 2 query tokens and so room for 7 of context.
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu_upper_bound.tolist() == [9, 9, 9]
    assert batch.num_computed_tokens_np.tolist() == [8, 8, 7]
    assert tables.input_block_tables[0].tolist() == [[0] * 5] * 3 + [[77] * 5] * 3
    assert (tables.block_tables[0] == 55).all()


def test_dummy_context_writes_only_the_tables_it_is_handed():
    tables = BlockTables([4], 6, 16, [5], CPU)
    tables.input_block_tables[0].fill_(77)
    own = torch.full((4, 5), 66, dtype=torch.int32)
    batch = InputBatch.make_dummy(3, 3, dirty_buffers())
    set_dummy_context(batch, tables, 8, 10, 100, input_block_tables=[own])
    assert own.tolist() == [[0] * 5] * 3 + [[66] * 5]
    assert (tables.input_block_tables[0] == 77).all()


def test_no_context_changes_nothing_and_no_cache_is_refused():
    tables = BlockTables([4], 6, 16, [5], CPU)
    tables.input_block_tables[0].fill_(77)
    batch = InputBatch.make_dummy(3, 3, dirty_buffers())
    set_dummy_context(batch, tables, 0, 10, 100)
    assert batch.seq_lens.tolist() == [1, 1, 1]
    assert (tables.input_block_tables[0] == 77).all()
    with pytest.raises(ValueError, match="no null block"):
        set_dummy_context(batch, tables, 4, 0, 100)


def test_padding_is_neutral_whatever_the_buffers_held(mixed_step):
    requests, scheduled = mixed_step
    buffers = dirty_buffers()
    batch = InputBatch.from_plan(scheduled, requests, buffers)
    buffers.seq_lens[3:].fill_(77)
    buffers.query_start_loc[4:].fill_(77)
    padded = pad_batch(batch, 8, 5, buffers)
    assert padded.input_ids.tolist() == [104, 105, 106, 250, 300, 0, 0, 0]
    assert padded.positions.tolist() == [4, 5, 6, 2, 0, 0, 0, 0]
    assert padded.is_padding.tolist() == [False] * 5 + [True] * 3
    assert padded.query_start_loc.tolist() == padded.query_start_loc_np.tolist()
    assert padded.query_start_loc.tolist() == [0, 3, 4, 5, 5, 5]
    assert padded.seq_lens.tolist() == padded.seq_lens_cpu_upper_bound.tolist() == [7, 3, 1, 0, 0]
    assert (padded.num_reqs, padded.num_reqs_after_padding) == (3, 5)
    assert (padded.num_tokens, padded.num_tokens_after_padding) == (5, 8)
    assert batch.num_tokens_after_padding == 5
    with pytest.raises(ValueError, match="does not fit buffers"):
        pad_batch(batch, 17, 3, buffers)
    for tokens, rows in ((4, 3), (5, 2)):
        with pytest.raises(ValueError, match="cannot be padded"):
            pad_batch(batch, tokens, rows, buffers)


def test_device_tensors_do_not_follow_the_host_arrays(mixed_step):
    requests, scheduled = mixed_step
    batch = InputBatch.from_plan(scheduled, requests, dirty_buffers())
    tensors = (batch.idx_mapping, batch.query_start_loc, batch.seq_lens)
    before = [tensor.clone() for tensor in tensors]
    arrays = (batch.idx_mapping_np, batch.query_start_loc_np, batch.num_scheduled_tokens)
    for array in (*arrays, batch.num_computed_tokens_np):
        array += 5
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
