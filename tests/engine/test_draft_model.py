"""The draft model on one rank: what a pass is fed, and which shapes it has."""

from types import SimpleNamespace

import pytest
import torch

from pcpbench.config import (
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from pcpbench.engine.draft_model import fill_next_token_ids
from pcpbench.engine.draft_runner import decode_descriptors
from pcpbench.engine.engine import Engine
from pcpbench.model.mtp import draft_shape
from pcpbench.model.presets import MODEL_SHAPES
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode

CPU = torch.device("cpu")
FULL = CUDAGraphMode.FULL


def config(mode=CUDAGraphMode.FULL_DECODE_ONLY, sizes=(4, 8, 16), k=3, **parallel):
    return EngineConfig(
        parallel_config=ParallelConfig(**parallel),
        model_config=ModelConfig(preset="tiny", max_model_len=32),
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
        compilation_config=CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=sizes),
        speculative_config=SpeculativeConfig(num_speculative_tokens=k, draft_model="mtp"),
    )


def test_the_token_behind_each_position_and_none_behind_a_rejected_draft():
    state = SimpleNamespace(
        all_token_ids=torch.arange(40, dtype=torch.int32).view(2, 20) + 100,
        total_len=torch.tensor([13, 6], dtype=torch.int32),
    )
    ids = torch.full((8,), 7, dtype=torch.int32)
    positions = torch.tensor([10, 11, 12, 13, 3, 4, 0, 0])
    starts = torch.tensor([0, 4, 6, 6], dtype=torch.int32)
    fill_next_token_ids(ids, positions, torch.tensor([0, 1], dtype=torch.int32), starts, state)
    # Tokens 13 and on are targets of rejected drafts; the last two are padding.
    assert ids.tolist() == [111, 112, 0, 0, 124, 125, 0, 0]


def test_one_token_passes_have_a_graph_for_each_size_that_is_a_number_of_requests():
    assert [d.num_reqs for d in decode_descriptors(config())] == [8, 4]
    assert {d.uniform_token_count for d in decode_descriptors(config())} == {1}
    assert decode_descriptors(config(CUDAGraphMode.PIECEWISE)) == ()
    assert decode_descriptors(config(CUDAGraphMode.NONE)) == ()


@pytest.fixture(scope="module")
def engine():
    return Engine(config(tensor_parallel_size=2, decode_context_parallel_size=2), CPU, None)


def test_dummy_passes_under_dcp_have_context_and_write_nothing(engine):
    rank = engine.drafts.ranks[1]
    rank.stage_dummy(BatchExecutionDescriptor(FULL, 4, 4, 1))
    given = rank.context.metadata
    assert given.seq_lens.tolist() == [3] * 4  # the token, and dcp x interleave of context
    assert given.dcp_local_seq_lens.tolist() == [1] * 4
    assert given.slot_mappings.tolist() == [[-1] * 4]
    assert rank.context.pcp.size == 1
    rank.stage_dummy(BatchExecutionDescriptor(CUDAGraphMode.NONE, 1, 1))
    assert rank.context.metadata is None


def test_passes_end_at_max_model_len(engine):
    rank = engine.drafts.ranks[0]
    worker = rank.worker
    worker.request_state.num_computed_tokens[:2] = torch.tensor([30, 7], dtype=torch.int32)
    worker.global_batch = SimpleNamespace(num_reqs=2, idx_mapping=torch.tensor([0, 1]))
    rank.stage_second(BatchExecutionDescriptor(FULL, 4, 4, 1))
    seen = []
    for _ in range(3):
        buffers = rank.input_buffers
        seen.append((buffers.positions[:4].tolist(), buffers.seq_lens[:4].tolist()))
        rank.advance()
    assert seen == [
        ([30, 7, 0, 0], [31, 8, 0, 0]),
        ([31, 8, 0, 0], [32, 9, 0, 0]),
        ([31, 9, 0, 0], [32, 10, 0, 0]),
    ]
    assert rank.input_buffers.is_padding[:4].tolist() == [False, False, True, True]
    assert rank.input_buffers.query_start_loc[:5].tolist() == [0, 1, 2, 2, 2]


def test_buffers_and_caches_are_its_own_and_registered(engine):
    names = set(engine.address_book.names().values())
    assert {"rank0.draft.dcp_local_seq_lens", "rank1.draft.hidden_states"} <= names
    assert {"rank0.draft.slot_mappings", "rank0.kv_cache.2", "tp1.draft.proj"} <= names
    rank = engine.drafts.ranks[0]
    assert rank.worker.kv_caches[-1] is rank.kv_caches[0]
    assert rank.context.kv_caches == rank.kv_caches


@pytest.mark.parametrize("name", ["tiny", "tiny-sparse", "tiny-moe"])
def test_the_module_is_one_dense_layer_of_the_targets_attention(name):
    target, shape = MODEL_SHAPES[name], draft_shape(MODEL_SHAPES[name])
    assert (shape.num_hidden_layers, shape.moe_layers) == (1, ())
    assert shape.is_sparse == target.is_sparse
    assert shape.latent_dim == target.latent_dim
