"""Every name of vLLM that pcpbench uses, and the refusal of a version that has moved one.

Owns the tables and the looking-up. Knows no generation.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Final

from pcpbench.errors import CannotMeasure
from pcpbench.targets.vllm.host import INSTALL

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
    "model_runner": f"{WORKER}.model_runner",
    "sched_output": "vllm.v1.core.sched.output",
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
        "maybe_build_pcp_manager",
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
    "model_runner": ("GPUModelRunner.execute_model", "sort_batch_req_ids"),
    "sched_output": (
        "SchedulerOutput.make_empty",
        "NewRequestData",
        "CachedRequestData.make_empty",
    ),
    "ubatch_utils": ("create_ubatch_slices", "_slice_input_batch"),
    "worker_utils": ("get_uniform_decode_token_count",),
    "parallel_state": ("_PCP", "_DCP", "_PP"),
    "config": ("CUDAGraphMode",),
}
"""What every generation has, by module."""


def load_modules(version: str) -> dict[str, ModuleType]:
    """The modules of MODULES by their short names.

    Raises CannotMeasure, naming the version and what is missing, where one of them or of NAMES is
    not there.
    """
    modules = {short: _import(version, name) for short, name in MODULES.items()}
    for short, names in NAMES.items():
        for name in names:
            if not _has(modules[short], name):
                raise moved_on(version, f"{MODULES[short]}.{name}")
    return modules


def _import(version: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise moved_on(version, error.name) from error
        raise CannotMeasure(
            f"vllm {version} needs the module {error.name}, which is not installed: {INSTALL}."
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


def moved_on(version: str, missing: str) -> CannotMeasure:
    """The refusal of a version that lacks a name."""
    return CannotMeasure(
        f"vllm {version} has no {missing}: this version of pcpbench drives vllm {KNOWN}; install "
        "one of these, or use --target builtin."
    )
