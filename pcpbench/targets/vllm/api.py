"""Which generation of vLLM's worker is installed, and one way to call each of them.

Owns the adapters, one a generation, and the choice among them: a generation is told by what is
there, never by its version number. Which names that is, is in names.py. Knows no step and no rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.targets.vllm import host
from pcpbench.targets.vllm.names import MODULES, NAMES, load_modules, moved_on


class RankView:
    """One rank's place in a group, as vLLM asks for it; many such ranks live in one process.

    gathered: what this rank's next all_gather gives back. The ranks' tensors are brought together
    by the engine's own lockstep, before the rank's code is called.
    """

    def __init__(self, rank: int, size: int, gathered: Tensor | None = None) -> None:
        self.rank_in_group, self.world_size, self._gathered = rank, size, gathered
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1

    def all_gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """The tensors of all ranks of the group, which were gathered before."""
        gathered = self._gathered
        if gathered is None or dim != 0 or gathered.shape[0] != tensor.shape[0] * self.world_size:
            raise RuntimeError(
                f"rank {self.rank_in_group} of {self.world_size} gathers {list(tensor.shape)} "
                f"along {dim}, and nothing was gathered for that"
            )
        return gathered


class VllmApi:
    """vLLM 0.33's worker: classes as they are, and the calls whose shape differs by generation.

    version: of the installed package. modules: by the short names of MODULES. shards_decodes:
    whether each decode has one owner rank under PCP without DCP.
    """

    generation: ClassVar[str] = "0.33"
    pads_in_manager: ClassVar[str] = "prepare_inputs_for_capture_or_profile"
    shards_decodes: ClassVar[bool] = True

    def __init__(self, version: str, modules: dict[str, ModuleType]) -> None:
        self.version, self.modules = version, modules
        self.PCPManager: Any = modules["pcp_manager"].PCPManager
        self.BlockTables: Any = modules["block_table"].BlockTables
        self.RequestState: Any = modules["states"].RequestState
        self.InputBuffers: Any = modules["input_batch"].InputBuffers
        self.InputBatch: Any = modules["input_batch"].InputBatch
        self.CudaGraphManager: Any = modules["cudagraph_utils"].CudaGraphManager
        self.BatchExecutionDescriptor: Any = modules["cudagraph_utils"].BatchExecutionDescriptor
        self.CUDAGraphMode: Any = modules["config"].CUDAGraphMode

    def function(self, name: str) -> Any:
        """A module-level function of NAMES, such as `prepare_pos_seq_lens`."""
        for module, names in NAMES.items():
            if name in names:
                return getattr(self.modules[module], name)
        raise KeyError(name)

    # -- words ---------------------------------------------------------------------------------

    def mode(self, mode: CUDAGraphMode) -> Any:
        """vLLM's word for a graph mode."""
        return self.CUDAGraphMode[mode.name]

    def descriptor(self, ours: BatchExecutionDescriptor) -> Any:
        """vLLM's descriptor of the same shape."""
        return self.BatchExecutionDescriptor(
            cg_mode=self.mode(ours.cg_mode),
            num_tokens=ours.num_tokens,
            num_reqs=ours.num_reqs,
            uniform_token_count=ours.uniform_token_count,
            max_query_len=ours.max_query_len,
            num_active_loras=ours.num_active_loras,
            num_ubatches=ours.num_ubatches,
        )

    def our_descriptor(self, theirs: Any) -> BatchExecutionDescriptor:
        """Our descriptor of the same shape."""
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode[theirs.cg_mode.name],
            num_tokens=theirs.num_tokens,
            num_reqs=theirs.num_reqs,
            uniform_token_count=theirs.uniform_token_count,
            max_query_len=theirs.max_query_len,
            num_active_loras=theirs.num_active_loras,
            num_ubatches=theirs.num_ubatches,
        )

    # -- groups --------------------------------------------------------------------------------

    @contextmanager
    def groups(
        self,
        pcp: RankView | None = None,
        dcp: RankView | None = None,
        pp: RankView | None = None,
    ) -> Iterator[None]:
        """What get_pcp_group(), get_dcp_group() and get_pp_group() give inside the block."""
        state: Any = self.modules["parallel_state"]
        kept = (state._PCP, state._DCP, state._PP)
        state._PCP, state._DCP, state._PP = pcp, dcp, pp or RankView(0, 1)
        try:
            yield
        finally:
            state._PCP, state._DCP, state._PP = kept

    # -- construction --------------------------------------------------------------------------

    def block_tables(
        self,
        *,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: torch.device,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        dcp_sharded: list[bool] | None = None,
        sliding_window_reach: list[int] | None = None,
    ) -> Any:
        """BlockTables; what a generation does not know is left out.

        sliding_window_reach: vLLM's, the positions before a query that it can still read.
        """
        return self.BlockTables(
            block_sizes=block_sizes,
            max_num_reqs=max_num_reqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_blocks_per_group=max_num_blocks_per_group,
            device=device,
            cp_size=cp_size,
            cp_rank=cp_rank,
            cp_interleave=cp_interleave,
            dcp_sharded=dcp_sharded,
            **self._only(self.BlockTables, sliding_window_reach=sliding_window_reach),
            **self._only(self.BlockTables, kernel_block_sizes=block_sizes),
        )

    def request_state(
        self,
        *,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_speculative_steps: int,
        vocab_size: int,
        device: torch.device,
    ) -> Any:
        """RequestState."""
        return self.RequestState(
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            num_speculative_steps=num_speculative_steps,
            vocab_size=vocab_size,
            device=device,
        )

    def pcp_manager(
        self,
        *,
        pcp_world_size: int,
        pcp_rank: int,
        device: torch.device,
        shard_decode_requests: bool,
        max_num_reqs: int,
        max_num_tokens: int,
        block_tables: Any,
        dcp_world_size: int = 1,
        dcp_rank: int = 0,
        cp_interleave: int = 1,
        moe_gathers_tokens: bool = False,
    ) -> Any:
        """PCPManager. shard_decode_requests: 0.31 knows no such thing and replicates decodes."""
        more = {
            "shard_decode_requests": shard_decode_requests,
            "moe_gathers_tokens": moe_gathers_tokens,
        }
        return self.PCPManager(
            pcp_world_size=pcp_world_size,
            pcp_rank=pcp_rank,
            device=device,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            block_tables=block_tables,
            dcp_world_size=dcp_world_size,
            dcp_rank=dcp_rank,
            cp_interleave=cp_interleave,
            **self._only(self.PCPManager, **more),
        )

    def batch(self, **named: Any) -> Any:
        """An InputBatch. Fields that this generation lacks are left out, new ones get defaults."""
        known = {field.name for field in fields(self.InputBatch)}
        return self.InputBatch(**{name: value for name, value in named.items() if name in known})

    # -- calls ---------------------------------------------------------------------------------

    def partition(self, manager: Any, batch: Any, descriptor: BatchExecutionDescriptor) -> Any:
        """One rank's share of a global batch: PCPManager.partition_batch."""
        return manager.partition_batch(batch, self.descriptor(descriptor))

    def stage_for_capture(self, manager: Any, batch: Any) -> Any:
        """A dummy batch in the manager's persistent buffers."""
        return getattr(manager, self.pads_in_manager)(batch)

    def gather_block_tables(
        self, tables: Any, idx_mapping: Tensor, num_reqs_padded: int, num_computed_tokens: Tensor
    ) -> tuple[Tensor, ...]:
        """Tables of a step's rows without PCP: BlockTables.gather_block_tables."""
        gathered: tuple[Tensor, ...] = tables.gather_block_tables(
            idx_mapping, num_reqs_padded, num_computed_tokens=num_computed_tokens
        )
        return gathered

    def pcp_metadata(self, batch: Any) -> dict[str, Any]:
        """What a rank's batch carries of the whole requests behind its rows, by vLLM's names."""
        return {
            name: getattr(batch.pcp, name)
            for name in (
                "global_num_tokens",
                "global_query_lens_np",
                "global_seq_lens_cpu_upper_bound_np",
                "dcp_local_seq_lens_cpu_upper_bound",
            )
        }

    def restore(self, manager: Any, hidden: Tensor, view: RankView) -> tuple[Tensor, Any]:
        """Global hidden states and the batch that sampling sees: restore_for_sampling."""
        with self.groups(pcp=view):
            restored, _, batch = manager.restore_for_sampling(hidden, None)
        return restored, batch

    def dcp_local_seq_lens(
        self,
        out: Tensor,
        seq_lens: Tensor,
        num_reqs: int,
        dcp_size: int,
        dcp_rank: int,
        cp_interleave: int,
        *,
        num_reqs_padded: int | None = None,
    ) -> Tensor | None:
        """prepare_dcp_local_seq_lens; None without DCP, as its callers skip it."""
        if dcp_size == 1:
            return None
        lengths: Tensor | None = self.modules["cp_utils"].prepare_dcp_local_seq_lens(
            out,
            seq_lens,
            num_reqs,
            dcp_size,
            dcp_rank,
            cp_interleave,
            num_reqs_padded=num_reqs_padded,
        )
        return lengths

    def _only(self, function: Callable[..., Any], **named: Any) -> dict[str, Any]:
        """Those arguments that this generation's function takes."""
        known = inspect.signature(function).parameters
        return {name: value for name, value in named.items() if name in known}


class VllmApi32(VllmApi):
    """vLLM 0.32: another name for staging, no window in gathered tables."""

    generation = "0.32"
    pads_in_manager = "prepare_inputs_to_capture"

    def gather_block_tables(
        self, tables: Any, idx_mapping: Tensor, num_reqs_padded: int, num_computed_tokens: Tensor
    ) -> tuple[Tensor, ...]:
        """Without num_computed_tokens, which 0.32 does not take."""
        gathered: tuple[Tensor, ...] = tables.gather_block_tables(idx_mapping, num_reqs_padded)
        return gathered

    def pcp_metadata(self, batch: Any) -> dict[str, Any]:
        """The one of them that 0.32 has, on the batch itself; 0.31 has none."""
        name = "dcp_local_seq_lens_cpu_upper_bound"
        return {name: getattr(batch, name)} if hasattr(batch, name) else {}


class VllmApi31(VllmApi32):
    """vLLM 0.31: PCP replicates every decode."""

    generation = "0.31"
    shards_decodes = False


def generation_of(manager: Any) -> type[VllmApi] | str:
    """The adapter for a PCPManager class, or the attribute that tells that none of them fits."""
    if "batch_desc" not in inspect.signature(manager.partition_batch).parameters:
        return "PCPManager.partition_batch(batch_desc)"
    if hasattr(manager, VllmApi.pads_in_manager):
        return VllmApi
    if not hasattr(manager, VllmApi32.pads_in_manager):
        return f"PCPManager.{VllmApi.pads_in_manager}"
    sharding = "shard_decode_requests" in inspect.signature(manager).parameters
    return VllmApi32 if sharding else VllmApi31


@lru_cache(maxsize=1)
def vllm_api() -> VllmApi:
    """The adapter for the installed vLLM.

    Raises CannotMeasure where vLLM is missing, cannot be imported, or has moved on: the message
    names the version and what is missing.
    """
    host.prepare()
    version = host.installed_version() or "unknown"
    modules = load_modules(version)
    if not is_dataclass(modules["input_batch"].InputBatch):
        raise moved_on(version, f"{MODULES['input_batch']}.InputBatch as a dataclass")
    found = generation_of(modules["pcp_manager"].PCPManager)
    if isinstance(found, str):
        raise moved_on(version, f"{MODULES['pcp_manager']}.{found}")
    return found(version, modules)


def check_names(api: VllmApi, owner: Any, names: Sequence[str]) -> None:
    """Raise CannotMeasure for the first attribute that an object of this vLLM lacks."""
    for name in names:
        if not hasattr(owner, name):
            raise moved_on(api.version, f"{type(owner).__name__}.{name}")
