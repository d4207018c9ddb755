"""pytest plugin: pcpbench's classes under vLLM's names.

Owns the list of what stands in whose place, and puts it there; where the spellings differ it is an
adapter (adapters.py). Must be loaded after the plugin that brings up vLLM.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from pcpbench import dcp, modes, pcp_partition
from pcpbench.engine import input_batch
from vllm_unit_tests import adapters

WORKER = "vllm.v1.worker.gpu"


@dataclass(frozen=True)
class Alias:
    """What stands under a name of vLLM's. adapts: why not pcpbench's own object; "" where it is."""

    name: str
    ours: Any
    adapts: str = ""


ALIASES = (
    Alias(f"{WORKER}.input_batch.InputBuffers", input_batch.InputBuffers),
    Alias(f"{WORKER}.input_batch.InputBatch", input_batch.InputBatch),
    Alias(f"{WORKER}.input_batch.set_dummy_context", input_batch.set_dummy_context),
    Alias(f"{WORKER}.input_batch.prepare_pos_seq_lens", input_batch.prepare_pos_seq_lens),
    Alias(f"{WORKER}.cp_utils.prepare_dcp_local_seq_lens", dcp.maybe_prepare_dcp_local_seq_lens),
    Alias(f"{WORKER}.cudagraph_utils.BatchExecutionDescriptor", modes.BatchExecutionDescriptor),
    Alias(f"{WORKER}.pcp_manager.RankSegment", pcp_partition.RankSegment),
    Alias(
        f"{WORKER}.pcp_manager.PCPManager",
        adapters.PCPManager,
        "the capture hook, configuration, enum and private methods have other names",
    ),
    Alias(
        f"{WORKER}.block_table.BlockTables",
        adapters.BlockTables,
        "tables and counts are plain arrays, without .gpu, .np and out_ptrs",
    ),
    Alias(
        f"{WORKER}.ubatch_utils.create_ubatch_slices",
        adapters.create_ubatch_slices,
        "Microbatches.cut finds the cut and stages it in one call",
    ),
    Alias(
        f"{WORKER}.ubatch_utils._slice_input_batch",
        adapters.slice_input_batch,
        "a method of Microbatches, on buffers that it owns",
    ),
    Alias(
        f"{WORKER}.cudagraph_utils.CudaGraphManager._init_candidates",
        adapters.init_candidates,
        "build_candidates and add_cut_twins are functions of the settings; subclasses inherit it",
    ),
    Alias(
        f"{WORKER}.cudagraph_utils.CudaGraphManager.dispatch",
        adapters.dispatch,
        "Dispatcher.dispatch, with vLLM's enum in what it returns",
    ),
)
"""Put in place in every module of vLLM that holds the name."""

IN_TESTS = {
    "test_parallel_config_manages_decode_sharding": Alias(
        "ParallelConfig",
        adapters.parallel_config,
        "pcpbench's knows no executor, which is left out",
    ),
    "test_thresholds_below_the_microbatch_count_are_rejected": Alias(
        "ParallelConfig",
        adapters.parallel_config,
        "pcpbench's is checked when an engine is configured",
    ),
}
"""Put in place in the test's own module while that test runs: elsewhere vLLM builds on its own."""


def install(aliases: tuple[Alias, ...] = ALIASES) -> None:
    """Replace each name, in its module and wherever a module has imported it."""
    for alias in aliases:
        owner, name = _owner_of(alias.name)
        theirs = getattr(owner, name)
        for module in list(sys.modules.values()):
            held = getattr(module, "__dict__", {})
            for known in [known for known, value in held.items() if value is theirs]:
                held[known] = alias.ours
        setattr(owner, name, alias.ours)


def _owner_of(dotted: str) -> tuple[Any, str]:
    """The module, or the class in it, that holds a dotted name, and the name in it."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ModuleNotFoundError(dotted)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Put in place what a single test needs."""
    alias = IN_TESTS.get(pyfuncitem.originalname)
    if alias is None:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyfuncitem.module, alias.name, alias.ours)
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Put everything in place before a test file is read."""
    install()
