"""One rank's model runner of vLLM, up to its forward pass.

Owns what stands around `GPUModelRunner.execute_model`: the runner is vLLM's class with its own
methods, and an `__init__` that makes only the state which those methods touch before the forward
pass. A step is vLLM's `execute_model` itself, which is left at the point where it hands batch,
tables and slots to the model's attention metadata. Whatever the runner does on the way, in which
order and with which counts, is vLLM's: finishing and adding requests, dispatch, preparing inputs,
the partition, tables, slots, DCP lengths. What the stub of a part that is not on the stand is asked
is answered with nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from pcpbench.config import EngineConfig
from pcpbench.kv_groups import KVGroup
from pcpbench.targets.vllm.api import RankView, VllmApi, check_names
from pcpbench.targets.vllm.settings import MissingSetting, asked_for, vllm_config
from pcpbench.targets.vllm.views import check_flags, gathers_flags

MANAGER_STATE = (
    "_global_batch",
    "_local_batch",
    "_hidden_restore_idx",
    "_gathered_kv_write_mask",
    "_local_block_tables",
    "_gathered_kv_slot_mappings",
    "_global_batch_slot_mappings",
)
"""What views.py reads of a PCPManager and has no public name."""


@dataclass(frozen=True)
class Dispatched:
    """What the runner asked its graph manager, and what it got (vLLM's descriptor)."""

    num_reqs: int
    num_tokens: int
    uniform_token_count: int | None
    max_query_len: int | None
    descriptor: Any


@dataclass(frozen=True)
class Ready:
    """A batch that is ready for its forward pass, all of it vLLM's.

    batch: rank-local. tables: one int32 [rows after padding, columns] a KV group. slots: int64
    [groups, tokens after padding x pcp].
    """

    batch: Any
    tables: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    dispatched: Dispatched | None = None


class _Reached(Exception):
    """Thrown through execute_model where it would go on to the forward pass."""

    def __init__(self, ready: Ready) -> None:
        super().__init__("ready for the forward pass")
        self.ready = ready


class _NoTokens(Exception):
    """Thrown through execute_model where a step without tokens would go on to its connectors."""


class Nothing:
    """A part of the runner that is not on the stand: any method does nothing and gives None."""

    def __init__(self, **named: Any) -> None:
        self.__dict__.update(named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: Any, **named: Any) -> None:
    return None


class ModelState(Nothing):
    """The model's side of the runner: where its attention metadata would be built, we take over."""

    num_new_sampled_tokens_per_step = 1

    def __init__(self, max_model_len: int) -> None:
        super().__init__(max_model_len=max_model_len)

    def prepare_attn(
        self,
        input_batch: Any,
        cg_mode: Any,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> None:
        """Everything is there."""
        raise _Reached(Ready(input_batch, tuple(block_tables), slot_mappings))


class _Connector(Nothing):
    """The KV connector: what a step without tokens asks after its states are up to date."""

    def no_forward(self, *args: Any, **named: Any) -> None:
        """There is nothing more to do."""
        raise _NoTokens


@lru_cache(maxsize=1)
def _classes(api: VllmApi) -> tuple[Any, Any]:
    """vLLM's runner with an __init__ of ours, and its graph manager with a note of what it said."""
    base: Any = api.modules["model_runner"].GPUModelRunner
    manager: Any = api.CudaGraphManager

    class Runner(base):  # type: ignore[misc]
        def __init__(self, **state: Any) -> None:
            self.__dict__.update(state)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise MissingSetting(asked_for(api.version, f"the runner's {name}"))

    class Manager(manager):  # type: ignore[misc]
        dispatched: Dispatched | None = None

        def dispatch(
            self,
            num_reqs: int,
            num_tokens: int,
            uniform_token_count: int | None,
            num_active_loras: int = 0,
            max_query_len: int | None = None,
            num_ubatches: int = 1,
        ) -> Any:
            chosen = super().dispatch(
                num_reqs,
                num_tokens,
                uniform_token_count,
                num_active_loras=num_active_loras,
                max_query_len=max_query_len,
                num_ubatches=num_ubatches,
            )
            self.dispatched = Dispatched(
                num_reqs, num_tokens, uniform_token_count, max_query_len, chosen
            )
            return chosen

    return Runner, Manager


class RankRunner:
    """The runner of one rank of a world that lives in one process."""

    def __init__(
        self,
        api: VllmApi,
        config: EngineConfig,
        rank: int,
        device: torch.device,
        vocab_size: int,
        groups: tuple[KVGroup, ...],
    ) -> None:
        self.api, self.config = api, config
        world = config.parallel_config.world
        self.pcp = RankView(world.pcp_rank(rank), world.pcp_size)
        self.dcp = RankView(world.dcp_rank(rank), world.dcp_size)
        settings = vllm_config(api, config)
        self.settings = settings
        scheduler, parallel = config.scheduler_config, config.parallel_config
        sizes = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        max_model_len = config.model_config.max_model_len
        block_sizes = config.cache_config.block_sizes(len(groups))
        self.request_state = api.request_state(
            max_num_reqs=sizes[0],
            max_model_len=max_model_len,
            max_num_batched_tokens=sizes[1],
            num_speculative_steps=config.num_speculative_tokens,
            vocab_size=vocab_size,
            device=device,
        )
        self.block_tables = api.block_tables(
            block_sizes=block_sizes,
            max_num_reqs=sizes[0],
            max_num_batched_tokens=sizes[1],
            max_num_blocks_per_group=[
                math.ceil(max_model_len / group.span(size, world.dcp_size))
                for group, size in zip(groups, block_sizes, strict=True)
            ],
            device=device,
            cp_size=world.dcp_size,
            cp_rank=self.dcp.rank_in_group,
            cp_interleave=parallel.cp_kv_cache_interleave_size,
            dcp_sharded=[group.dcp_sharded for group in groups],
            # vLLM counts the positions before a query that it can still read, pcpbench all of them.
            sliding_window_reach=[max(0, group.sliding_window - 1) for group in groups],
        )
        self.input_buffers = api.InputBuffers(*sizes, device)
        runner_class, manager_class = _classes(api)
        with self._groups():
            self.pcp_manager = api.modules["pcp_manager"].maybe_build_pcp_manager(
                settings, device, False, self.block_tables
            )
            mode = settings.compilation_config.cudagraph_mode
            self.graphs = manager_class(settings, device, mode, config.decode_query_len)
        if self.pcp_manager is not None:
            check_names(api, self.pcp_manager, MANAGER_STATE)
            check_flags(self.pcp_manager, not parallel.enable_expert_parallel, api.version)
        check_names(api, self.graphs, ("_capture_descs", "_graphs_captured"))
        self.graphs._graphs_captured = True
        self.model_state = ModelState(max_model_len)
        layers = [SimpleNamespace(layer_names=[f"layer.{i}"]) for i in range(len(groups))]
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=layers, num_blocks=config.cache_config.num_gpu_blocks
        )
        self.runner = runner_class(
            vllm_config=settings,
            **{name: getattr(settings, name) for name in CONFIGS},
            **dict.fromkeys(ABSENT),
            **{name: Nothing() for name in SILENT},
            **dict.fromkeys(FALSE, False),
            kv_connector=_Connector(),
            sampler=Nothing(penalties_state=SimpleNamespace(output_bin_counts=None)),
            device=device,
            max_num_reqs=sizes[0],
            max_num_tokens=sizes[1],
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            decode_query_len=config.decode_query_len,
            num_speculative_steps=config.num_speculative_tokens,
            dp_size=1,
            dp_rank=0,
            is_first_pp_rank=True,
            is_last_pp_rank=True,
            input_buffers=self.input_buffers,
            req_states=self.request_state,
            block_tables=self.block_tables,
            pcp_manager=self.pcp_manager,
            cudagraph_manager=self.graphs,
            model_state=self.model_state,
            kv_cache_config=self.kv_cache_config,
            attn_groups=[],
            dcp_size=world.dcp_size,
            dcp_rank=self.dcp.rank_in_group,
            cp_interleave=parallel.cp_kv_cache_interleave_size,
        )

    def _groups(self) -> Any:
        return self.api.groups(pcp=self.pcp, dcp=self.dcp)

    def step(self, scheduler_output: Any) -> Ready | None:
        """Run execute_model up to the forward pass; None for a step without tokens."""
        return self._execute(scheduler_output)

    def dummy_step(self) -> Ready:
        """What a rank without work runs beside the others: one decode of padding."""
        output_module: Any = self.api.modules["sched_output"]
        output = output_module.SchedulerOutput.make_empty()
        length = self.config.decode_query_len
        output.num_scheduled_tokens = {"_dummy_req_0": length}
        output.total_num_scheduled_tokens = length
        ready = self._execute(output, dummy_run=True)
        if ready is None:
            raise RuntimeError("a dummy run ended before its forward pass")
        return ready

    def _execute(self, scheduler_output: Any, **named: Any) -> Ready | None:
        self.graphs.dispatched = None
        try:
            with self._groups():
                self.runner.execute_model(scheduler_output, **named)
        except _Reached as reached:
            ready = reached.ready
            return Ready(ready.batch, ready.tables, ready.slots, self.graphs.dispatched)
        except _NoTokens:
            pass
        return None

    def stage_for_capture(self, descriptor: Any) -> Ready:
        """A dummy batch of a captured shape, staged by vLLM's prepare_inputs_to_capture.

        descriptor: vLLM's.
        """
        buffers = self.input_buffers
        if self.pcp_manager is not None:
            buffers = self.pcp_manager.input_buffers
        num_reqs = descriptor.num_reqs or min(descriptor.num_tokens, self.runner.max_num_reqs)
        full = descriptor.cg_mode == self.api.CUDAGraphMode.FULL
        try:
            with self._groups():
                self.api.function("prepare_inputs_to_capture")(
                    num_reqs,
                    descriptor.num_tokens,
                    self.model_state,
                    buffers,
                    self.block_tables,
                    [],
                    self.kv_cache_config,
                    full_cudagraph=full,
                    max_query_len=descriptor.max_query_len or descriptor.uniform_token_count,
                    pcp_manager=self.pcp_manager,
                )
        except _Reached as reached:
            buffers.is_padding.fill_(True)  # as ModelCudaGraphManager.capture does
            if self.pcp_manager is not None and gathers_flags(self.pcp_manager):
                self.pcp_manager.moe_is_padding(buffers.is_padding[: descriptor.num_tokens])
            return reached.ready
        raise RuntimeError("inputs to capture were prepared without attention metadata")

    def descriptors(self) -> list[Any]:
        """vLLM's descriptors in its order of capture."""
        mode = self.api.CUDAGraphMode
        captured = self.graphs._capture_descs
        return [d for kind in (mode.PIECEWISE, mode.FULL) for d in captured.get(kind, ())]


CONFIGS = (
    "parallel_config",
    "model_config",
    "scheduler_config",
    "compilation_config",
    "cache_config",
    "observability_config",
    "speculative_config",
    "lora_config",
)
"""Settings that the runner keeps under their own names."""

ABSENT = (
    "adaptive_verification",
    "aux_output_connector",
    "encoder_cache",
    "fast_prefill",
    "intermediate_tensors",
    "kv_block_zeroer",
    "pooling_runner",
    "pp_handler",
    "speculator",
    "ubatch_runner",
)
"""Parts that the runner asks for and takes None for an answer."""

SILENT = ("ec_connector", "lora_state", "prompt_logprobs_worker", "step_timing")
"""Parts that it calls."""

FALSE = ("is_encoder_decoder", "use_aux_hidden_state_outputs", "use_pp", "uses_inputs_embeds")
"""Questions that it asks."""
