"""pcpbench's classes and functions, called as vLLM's are.

An adapter renames, reorders or repacks; it computes nothing that a test is about, else the test
would be of the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pcpbench import config, modes, pcp_config, pcp_manager, pcp_partition
from pcpbench.device.staging import HostStaging
from pcpbench.engine import block_table, dispatcher, microbatch
from pcpbench.errors import UsageError
from pcpbench.records import BoolArray, IntArray

# -- words ---------------------------------------------------------------------------------------


def our_mode(mode: Any) -> modes.CUDAGraphMode:
    """The graph mode of the same name: the two packages have an enum each."""
    return modes.CUDAGraphMode[mode.name]


def their_descriptor(ours: modes.BatchExecutionDescriptor) -> Any:
    """The same descriptor with vLLM's enum in it."""
    from vllm.config import CUDAGraphMode

    return replace(ours, cg_mode=CUDAGraphMode[ours.cg_mode.name])


def real_device(device: torch.device) -> torch.device:
    """The device that a tensor asked for on `device` lands on."""
    return torch.empty(0, device=device).device


@contextmanager
def their_error(kind: type[Exception], wording: dict[str, str]) -> Iterator[None]:
    """pcpbench's refusal as the exception that vLLM raises, with vLLM's catchwords before it.

    wording: what pcpbench's sentence must name -> the words that a test looks for. A refusal that
    names none of them passes through as it is.
    """
    try:
        yield
    except UsageError as error:
        for named, words in wording.items():
            if named in str(error):
                raise kind(f"{words}: {error}") from error
        raise


# -- PCP -----------------------------------------------------------------------------------------

REFUSALS = {
    "cudagraph_mode is FULL ": "decode-only routines",
    "a DSpark draft": "requires DCP=1 or DCP=PCP",
}


def our_config(theirs: Any) -> Any:
    """vLLM's configuration under the names by which pcpbench's check reads it."""
    parallel, model = theirs.parallel_config, theirs.model_config
    speculative = theirs.speculative_config
    if speculative is not None:
        dspark = speculative.use_dspark()
        speculative = SimpleNamespace(
            method="dspark" if dspark else speculative.method,
            use_multi_module_mtp=not dspark and speculative.use_multi_module_mtp(),
            draft_uses_mla=speculative.draft_model_config.use_mla,
        )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=parallel.prefill_context_parallel_size,
            decode_context_parallel_size=parallel.decode_context_parallel_size,
            dcp_comm_backend=parallel.dcp_comm_backend,
            world=SimpleNamespace(
                pcp_size=parallel.prefill_context_parallel_size,
                dcp_size=parallel.decode_context_parallel_size,
            ),
        ),
        model_config=SimpleNamespace(
            use_mla=model.use_mla,
            is_encoder_decoder=model.is_encoder_decoder,
            is_sparse=hasattr(model.hf_text_config, "index_topk"),
            model_type=getattr(model.hf_text_config, "model_type", None),
        ),
        lora_config=theirs.lora_config,
        speculative_config=speculative,
        compilation_config=SimpleNamespace(
            cudagraph_mode=our_mode(theirs.compilation_config.cudagraph_mode)
        ),
    )


class PCPManager(pcp_manager.PCPManager):
    """pcpbench's, with vLLM's spellings; the private ones are pcpbench's module functions."""

    _block_tables = property(lambda self: self.block_tables)
    _hidden_restore_idx = property(lambda self: self.hidden_restore_idx)
    _padded_gather_idx = property(lambda self: self.padded_gather_idx)
    _gathered_kv_write_mask = property(lambda self: self.gathered_kv_write_mask)
    prepare_inputs_for_capture_or_profile = pcp_manager.PCPManager.prepare_inputs_to_capture

    def __init__(
        self, pcp_world_size: int, pcp_rank: int, device: torch.device, *args: Any, **named: Any
    ) -> None:
        super().__init__(pcp_world_size, pcp_rank, real_device(device), *args, **named)

    @staticmethod
    def validate_config(vllm_config: Any, supports_mm_inputs: bool) -> None:
        """pcp_config.validate_config on the same settings."""
        with their_error(NotImplementedError, REFUSALS):
            pcp_config.validate_config(our_config(vllm_config), supports_mm_inputs)

    def set_block_tables(self, block_tables: Any) -> None:
        """The same; the tests' stand-ins for block tables get the method that pcpbench calls."""
        if isinstance(block_tables, SimpleNamespace):
            tables = block_tables.input_block_tables
            block_tables.make_tables = lambda rows: tuple(
                table.new_zeros(rows, table.shape[1]) for table in tables
            )
        super().set_block_tables(block_tables)

    def partition_batch(self, input_batch: Any, batch_desc: Any) -> Any:
        """The same, with pcpbench's enum in the descriptor."""
        batch_desc = replace(batch_desc, cg_mode=our_mode(batch_desc.cg_mode))
        return super().partition_batch(input_batch, batch_desc)

    def _build_batch_layout(
        self,
        num_scheduled_tokens: IntArray,
        num_computed_tokens: IntArray,
        is_prefilling: BoolArray,
        query_start_loc_np: IntArray,
        padded_num_tokens: int | None = None,
    ) -> tuple[list[list[pcp_partition.RankSegment]], list[int]]:
        grid = self._row_grid(num_scheduled_tokens, is_prefilling)
        layout = pcp_partition.build_layout(grid, query_start_loc_np, padded_num_tokens)
        for name in ("hidden_restore_idx", "padded_gather_idx", "gathered_kv_write_mask"):
            setattr(self, name, torch.from_numpy(getattr(layout, name).copy()))
        segments = [
            pcp_partition.rank_segments(layout, rank, query_start_loc_np)
            for rank in range(self.pcp_world_size)
        ]
        return segments, layout.tokens_per_rank.tolist()

    def _get_rank_segments(
        self,
        rank: int,
        num_scheduled_tokens: IntArray,
        is_prefilling: BoolArray,
        query_start_loc_np: IntArray,
    ) -> list[pcp_partition.RankSegment]:
        segments, _ = self._build_batch_layout(
            num_scheduled_tokens, num_scheduled_tokens, is_prefilling, query_start_loc_np
        )
        return segments[rank]

    def _iter_rank_chunks(
        self, rank: int, num_scheduled_tokens: IntArray, is_prefilling: BoolArray
    ) -> Iterator[tuple[int, int, int]]:
        grid = self._row_grid(num_scheduled_tokens, is_prefilling)
        for row in zip(grid.request[rank], grid.start[rank], grid.length[rank], strict=True):
            if row[2]:
                yield row

    def _convert_to_gathered_slot_mappings(self, slot_mappings: Tensor) -> Tensor:
        """`prepare_slot_mappings`, told what the tables answer and where to write."""
        self._global_batch = SimpleNamespace(  # type: ignore[assignment]
            num_tokens=slot_mappings.shape[1],
            idx_mapping=None,
            query_start_loc=None,
            positions=None,
        )
        self.block_tables = SimpleNamespace(  # type: ignore[assignment]
            compute_slot_mappings=lambda *_: slot_mappings
        )
        self.slot_mappings = slot_mappings.new_empty(
            len(slot_mappings), len(self.padded_gather_idx)
        )
        return self.prepare_slot_mappings()


def parallel_config(**settings: Any) -> config.ParallelConfig:
    """pcpbench's, checked as vLLM checks its own: when it is made. It has no executors."""
    settings.pop("distributed_executor_backend", None)
    made = config.ParallelConfig(**settings)
    with their_error(ValueError, {"token_threshold is": "number of microbatches"}):
        config.EngineConfig(parallel_config=made).check()
    return made


# -- tables --------------------------------------------------------------------------------------


class BlockTables(block_table.BlockTables):
    """pcpbench's, whose tables are plain tensors where vLLM's have host and device sides."""

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: torch.device,
        **named: Any,
    ) -> None:
        super().__init__(
            block_sizes,
            max_num_reqs,
            max_num_batched_tokens,
            max_num_blocks_per_group,
            real_device(device),
            **named,
        )
        for table in self.block_tables:
            table.gpu = table  # type: ignore[attr-defined]
        self.num_blocks = SimpleNamespace(np=self.num_blocks_np)

    def gather_block_tables(self, *args: Any, out_ptrs: Any = None, **named: Any) -> Any:
        """The same; pcpbench needs no table of addresses beside `out`."""
        return super().gather_block_tables(*args, **named)


# -- microbatches --------------------------------------------------------------------------------


def _cutter(
    buffers: list[Any], device: torch.device, dcp_size: int, dcp_rank: int, cp_interleave: int
) -> Any:
    """A Microbatches of these buffers, without the model, KV cache and groups of a worker."""
    cutter = object.__new__(microbatch.Microbatches)
    cutter.buffers, cutter.parts = buffers, []
    cutter.contexts = [SimpleNamespace() for _ in buffers]
    cutter.context = SimpleNamespace(
        dcp=SimpleNamespace(size=dcp_size, rank=dcp_rank),
        cp_interleave=cp_interleave,
        selected=None,
        taps=None,
    )
    cutter._staging = HostStaging(real_device(device))
    return cutter


def create_ubatch_slices(batch: Any, num_ubatches: int) -> list[Any]:
    """Where `Microbatches.cut` cuts a batch, as vLLM's pairs of slices.

    A batch that is padded in rows is one that a FULL graph reads, which pcpbench is told apart.
    """
    from vllm.v1.worker.ubatch_utils import UBatchSlice

    room = batch.num_tokens_after_padding + batch.num_reqs_after_padding + 1
    device = batch.query_start_loc.device
    buffers = [
        SimpleNamespace(
            query_start_loc=torch.zeros(room, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(room, dtype=torch.int32, device=device),
            dcp_local_seq_lens=None,
        )
        for _ in range(num_ubatches)
    ]
    cutter = _cutter(buffers, device, 1, 0, 1)
    cutter.cut(num_ubatches, batch, None, full=batch.num_reqs_after_padding > batch.num_reqs)
    slices = []
    for part in cutter.parts:
        row, token = int(part.rows[0]), part.first_token
        rows, tokens = part.batch.num_reqs_after_padding, part.batch.num_tokens_after_padding
        slices.append(UBatchSlice(slice(row, row + rows), slice(token, token + tokens)))
    return slices


def slice_input_batch(
    batch: Any,
    ubatch_slice: Any,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    dcp_local_seq_lens: Tensor | None = None,
    *,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    cp_interleave: int = 1,
) -> Any:
    """One microbatch of a batch in the caller's buffers, as `Microbatches.cut` makes each."""
    buffers = SimpleNamespace(
        query_start_loc=query_start_loc, seq_lens=seq_lens, dcp_local_seq_lens=dcp_local_seq_lens
    )
    cutter = _cutter([buffers], query_start_loc.device, dcp_size, dcp_rank, cp_interleave)
    tokens, rows = ubatch_slice.token_slice, ubatch_slice.request_slice
    cut = microbatch.cut_rows(batch.query_start_loc_np, batch.num_reqs, tokens.start, tokens.stop)
    return cutter._stage(batch, None, cut, rows.stop - rows.start, buffers).batch


# -- dispatch ------------------------------------------------------------------------------------


class _Candidates(dict[Any, Any]):
    """pcpbench's dispatcher looks through all descriptors, whatever the key."""

    def __init__(self, descriptors: list[Any]) -> None:
        self._descriptors = descriptors

    def __missing__(self, key: Any) -> list[Any]:
        return self._descriptors


def init_candidates(self: Any) -> None:
    """In the place of CudaGraphManager._init_candidates: pcpbench's candidates and dispatcher."""
    settings = self.vllm_config
    speculative = settings.speculative_config
    # vLLM's own condition: the target model's manager, not the draft model's.
    dynamic = (
        speculative is not None
        and speculative.uses_dynamic_speculative_decoding()
        and self.decode_query_len > settings.num_speculative_tokens
    )
    mode = our_mode(self.cudagraph_mode)
    sizes = self.compilation_config.cudagraph_capture_sizes or []
    found = dispatcher.build_candidates(
        mode,
        sizes,
        decode_query_len=self.decode_query_len,
        max_num_seqs=self.max_num_reqs,
        max_num_tokens=max(sizes, default=0),
        dynamic_drafts=dynamic or self.varlen_decode,
    ).descriptors
    if self.ubatch_runner is not None:
        found = microbatch.add_cut_twins(found, settings.parallel_config)
    self.pcpbench_dispatcher = dispatcher.Dispatcher(mode, found)
    for descriptor in map(their_descriptor, found):
        self._capture_descs.setdefault(descriptor.cg_mode, []).append(descriptor)
    self._candidates = _Candidates(
        [their_descriptor(d) for d in self.pcpbench_dispatcher.descriptors]
    )


def dispatch(
    self: Any,
    num_reqs: int,
    num_tokens: int,
    uniform_token_count: int | None,
    num_active_loras: int,
    max_query_len: int | None = None,
    num_ubatches: int = 1,
) -> Any:
    """In the place of CudaGraphManager.dispatch: pcpbench's dispatcher."""
    return their_descriptor(
        self.pcpbench_dispatcher.dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, num_ubatches
        )
    )
