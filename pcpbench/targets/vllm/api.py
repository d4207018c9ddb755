"""Which generation of vLLM's worker is installed, and one way to call each of them.

Owns the names: every class, function and parameter of vLLM that pcpbench uses is named here, and
`vllm_api` refuses an installed version that moved one of them. A generation is told by what is
there, never by its version number. Knows no step and no rank.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from pcpbench.errors import CannotMeasure
from pcpbench.modes import BatchExecutionDescriptor, CUDAGraphMode
from pcpbench.targets.vllm import host

KNOWN: Final = "0.31 to 0.33"
WORKER: Final = "vllm.v1.worker.gpu"
MODULES: Final = {
    "pcp_manager": f"{WORKER}.pcp_manager",
    "block_table": f"{WORKER}.block_table",
    "states": f"{WORKER}.states",
    "input_batch": f"{WORKER}.input_batch",
    "cp_utils": f"{WORKER}.cp_utils",
    "cudagraph_utils": f"{WORKER}.cudagraph_utils",
    "ubatch_utils": f"{WORKER}.ubatch_utils",
    "worker_utils": "vllm.v1.worker.utils",
    "parallel_state": "vllm.distributed.parallel_state",
    "config": "vllm.config",
}
NAMES: Final = {
    "pcp_manager": (
        "PCPManager.partition_batch",
        "PCPManager.prepare_attn",
        "PCPManager.prepare_slot_mappings",
        "PCPManager.get_dummy_block_tables",
        "PCPManager.get_dummy_slot_mappings",
        "PCPManager.get_num_tokens_for_dispatch",
        "PCPManager.restore_for_sampling",
        "PCPManager.replicated_requests",
        "PCPManager.validate_config",
    ),
    "block_table": (
        "BlockTables.append_block_ids",
        "BlockTables.apply_staged_writes",
        "BlockTables.gather_block_tables",
        "BlockTables.compute_slot_mappings",
        "BlockTables.get_dummy_block_tables",
        "BlockTables.get_dummy_slot_mappings",
    ),
    "states": (
        "RequestState.add_request",
        "RequestState.remove_request",
        "RequestState.apply_staged_writes",
    ),
    "input_batch": (
        "InputBuffers",
        "InputBatch.make_dummy",
        "set_dummy_context",
        "prepare_prefill_inputs",
        "prepare_pos_seq_lens",
        "combine_sampled_and_draft_tokens",
        "expand_idx_mapping",
        "get_num_sampled_and_rejected",
        "post_update",
    ),
    "cp_utils": ("prepare_dcp_local_seq_lens",),
    "cudagraph_utils": (
        "BatchExecutionDescriptor",
        "CudaGraphManager.dispatch",
        "prepare_inputs_to_capture",
    ),
    "ubatch_utils": ("create_ubatch_slices", "_slice_input_batch"),
    "worker_utils": ("get_uniform_decode_token_count",),
    "parallel_state": ("_PCP", "_DCP", "_PP"),
    "config": ("CUDAGraphMode",),
}
"""What every generation has, by module."""


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

    version: of the installed package. modules: by the short names of MODULES.
    """

    generation: ClassVar[str] = "0.33"
    pads_in_manager: ClassVar[str] = "prepare_inputs_for_capture_or_profile"

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


class VllmApi31(VllmApi32):
    """vLLM 0.31: PCP replicates every decode."""

    generation = "0.31"


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
    modules = {short: _import(version, name) for short, name in MODULES.items()}
    for short, names in NAMES.items():
        for name in names:
            if not _has(modules[short], name):
                raise _moved_on(version, f"{MODULES[short]}.{name}")
    if not is_dataclass(modules["input_batch"].InputBatch):
        raise _moved_on(version, f"{MODULES['input_batch']}.InputBatch as a dataclass")
    found = generation_of(modules["pcp_manager"].PCPManager)
    if isinstance(found, str):
        raise _moved_on(version, f"{MODULES['pcp_manager']}.{found}")
    return found(version, modules)


def _import(version: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise _moved_on(version, error.name) from error
        raise CannotMeasure(
            f"vllm {version} needs the module {error.name}, which is not installed: {host.INSTALL}."
        ) from error
    except ImportError as error:
        told = " ".join(str(error).split())
        raise CannotMeasure(f"vllm {version}: {name} cannot be imported ({told}).") from error


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def _moved_on(version: str, missing: str) -> CannotMeasure:
    return CannotMeasure(
        f"vllm {version} has no {missing}: this version of pcpbench drives vllm {KNOWN}; install "
        "one of these, or use --target builtin."
    )


def check_names(api: VllmApi, names: Sequence[tuple[Any, str]]) -> None:
    """Raise CannotMeasure for the first (object, attribute) that this vLLM lacks."""
    for owner, name in names:
        if not hasattr(owner, name):
            raise _moved_on(api.version, f"{type(owner).__name__}.{name}")
