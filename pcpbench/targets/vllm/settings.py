"""An EngineConfig as vLLM's code reads its own: the same values under the names it asks for.

Owns the settings that the runner, the PCP manager and the graph manager look at. What a newer vLLM
asks for besides ends the run as unmeasurable, by name, and is no fault of vLLM's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pcpbench.config import EngineConfig
from pcpbench.errors import CannotMeasure
from pcpbench.model.presets import model_shape
from pcpbench.targets.vllm.api import VllmApi
from pcpbench.targets.vllm.names import KNOWN


class MissingSetting(CannotMeasure, AttributeError):
    """vLLM asked for something that the stand does not have."""


class Settings:
    """Named values; reading another name raises MissingSetting (and so `hasattr` works)."""

    def __init__(self, what: str, version: str, **named: Any) -> None:
        self.__dict__.update(named)
        self.__dict__["_what"], self.__dict__["_version"] = what, version

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingSetting(asked_for(self._version, f"{self._what}.{name}"))


def asked_for(version: str, name: str) -> str:
    """The sentence for a name that the stand lacks."""
    return (
        f"vllm {version} asks for {name}, which this version of pcpbench does not know: it drives "
        f"vllm {KNOWN}."
    )


def vllm_config(api: VllmApi, config: EngineConfig) -> Any:
    """What stands for a VllmConfig."""
    parallel, model = config.parallel_config, config.model_config
    scheduler, compilation = config.scheduler_config, config.compilation_config
    sizes = _usable_sizes(config)

    def settings(what: str, **named: Any) -> Settings:
        return Settings(what, api.version, **named)

    theirs = settings(
        "parallel_config",
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        cp_kv_cache_interleave_size=parallel.cp_kv_cache_interleave_size,
        dcp_comm_backend=parallel.dcp_comm_backend,
        enable_expert_parallel=parallel.enable_expert_parallel,
        data_parallel_size=1,
        data_parallel_rank=0,
        pipeline_parallel_size=1,
        enable_dbo=False,
        use_ubatching=False,
        num_ubatches=1,
    )
    sharding = getattr(api.modules["config"].ParallelConfig, "pcp_shard_decode_requests", None)
    shards = False if sharding is None else sharding.fget(theirs)
    theirs.__dict__["pcp_shard_decode_requests"] = shards
    sparse = {"index_topk": model_shape(model.preset).index_topk} if model.is_sparse else {}
    hf_text_config = SimpleNamespace(model_type=model.model_type, **sparse)
    return settings(
        "vllm_config",
        parallel_config=theirs,
        model_config=settings(
            "model_config",
            use_mla=model.use_mla,
            is_encoder_decoder=model.is_encoder_decoder,
            hf_text_config=hf_text_config,
            rswa_window=None,
            max_model_len=model.max_model_len,
        ),
        scheduler_config=settings(
            "scheduler_config",
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        ),
        compilation_config=settings(
            "compilation_config",
            cudagraph_mode=api.mode(compilation.cudagraph_mode),
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=max(sizes, default=0),
        ),
        cache_config=settings("cache_config", use_kda_recoverssm=False),
        observability_config=settings("observability_config", cudagraph_metrics=False),
        speculative_config=None,
        num_speculative_tokens=config.num_speculative_tokens,
        lora_config=None,
    )


def _usable_sizes(config: EngineConfig) -> list[int]:
    """Capture sizes that a step has room for, as a VllmConfig leaves them.

    It drops what is past max_num_batched_tokens and takes the largest of the rest as the limit of
    rounding. Why a size is not used is told by pcpbench's notices, the same for both targets.
    """
    room = config.scheduler_config.max_num_batched_tokens
    return sorted({n for n in config.compilation_config.cudagraph_capture_sizes if n <= room})
