"""What context parallelism cannot run, refused at start-up (SPEC 2, 3). Knows settings only."""

from __future__ import annotations

from pcpbench.config import EngineConfig
from pcpbench.errors import UsageError
from pcpbench.modes import CUDAGraphMode

SPARSE_GRAPH_MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Sparse MLA families whose graphs can be captured without DCP."""

FLAGS = {"decode_context_parallel_size": "--dcp", "cudagraph_mode": "--mode"}
"""Settings that a command line names otherwise."""


def validate_config(config: EngineConfig, supports_mm_inputs: bool = False) -> None:
    """Refuse settings that PCP cannot run; without PCP only sizes that cannot form groups.

    supports_mm_inputs: whether the model takes multimodal inputs. Raises UsageError with one
    sentence that names the setting, its value and what would work.
    """
    world = config.parallel_config.world
    if world.pcp_size == 1:
        return
    _check_model(config, supports_mm_inputs)
    _check_speculation(config)
    if world.dcp_size > 1:
        _check_dcp(config)
    _check_graph_mode(config)


def _refuse(config: EngineConfig, setting: str, value: object, why: str, remedy: str) -> None:
    pcp = config.parallel_config.prefill_context_parallel_size
    flags = " and ".join(flag for flag in (FLAGS.get(setting), "--pcp") if flag is not None)
    raise UsageError(
        f"{setting} is {value} with prefill_context_parallel_size {pcp} ({flags}): {why}; {remedy}."
    )


def _check_model(config: EngineConfig, supports_mm_inputs: bool) -> None:
    model = config.model_config
    if not model.use_mla:
        _refuse(
            config,
            "use_mla",
            "false",
            "only a model with latent attention (MLA) can share its KV between ranks",
            "use an MLA model, or prefill_context_parallel_size 1",
        )
    if model.is_encoder_decoder:
        _refuse(
            config,
            "is_encoder_decoder",
            "true",
            "cross attention is not cut over ranks",
            "use a decoder-only model, or prefill_context_parallel_size 1",
        )
    if supports_mm_inputs:
        _refuse(
            config,
            "supports_mm_inputs",
            "true",
            "multimodal inputs are not cut over ranks",
            "use a text-only model, or prefill_context_parallel_size 1",
        )
    if config.lora_config is not None:
        _refuse(
            config,
            "lora_config",
            repr(config.lora_config),
            "adapters are chosen by global token, and ranks see local ones",
            "leave LoRA off, or use prefill_context_parallel_size 1",
        )


def _check_speculation(config: EngineConfig) -> None:
    speculative, world = config.speculative_config, config.parallel_config.world
    if speculative is None:
        return
    if speculative.method not in ("mtp", "dspark"):
        _refuse(
            config,
            "speculative method",
            repr(speculative.method),
            "its draft model does not follow the ranks' cut",
            "use 'mtp' or 'dspark', or no speculative decoding",
        )
    if speculative.method == "mtp" and speculative.use_multi_module_mtp:
        _refuse(
            config,
            "use_multi_module_mtp",
            "true",
            "only a single MTP module follows the ranks' cut",
            "use a single module, or no speculative decoding",
        )
    allowed = sorted({1, world.pcp_size})
    if (
        speculative.method == "dspark"
        and speculative.draft_uses_mla
        and world.dcp_size not in allowed
    ):
        _refuse(
            config,
            "decode_context_parallel_size",
            world.dcp_size,
            "a DSpark draft with latent attention needs its DCP group to be the PCP group",
            f"use one of {', '.join(map(str, allowed))}",
        )


def _check_dcp(config: EngineConfig) -> None:
    parallel = config.parallel_config
    if not config.model_config.is_sparse:
        _refuse(
            config,
            "decode_context_parallel_size",
            parallel.decode_context_parallel_size,
            "with dense latent attention the ranks would gather unequal amounts",
            "use decode_context_parallel_size 1, or a sparse MLA model",
        )
    if parallel.dcp_comm_backend != "ag_rs":
        _refuse(
            config,
            "dcp_comm_backend",
            repr(parallel.dcp_comm_backend),
            "PCP and DCP together are built for gather and reduce-scatter only",
            "use 'ag_rs'",
        )


def _check_graph_mode(config: EngineConfig) -> None:
    mode, model = config.compilation_config.cudagraph_mode, config.model_config
    if mode is CUDAGraphMode.FULL:
        _refuse(
            config,
            "cudagraph_mode",
            mode.name,
            "a prefill that is cut over ranks cannot be captured whole",
            "use FULL_DECODE_ONLY, FULL_AND_PIECEWISE, PIECEWISE or NONE",
        )
    if (
        mode is not CUDAGraphMode.NONE
        and model.is_sparse
        and config.parallel_config.decode_context_parallel_size == 1
        and model.model_type not in SPARSE_GRAPH_MODEL_TYPES
    ):
        _refuse(
            config,
            "cudagraph_mode",
            mode.name,
            f"sparse MLA of model type {model.model_type!r} without DCP cannot be captured",
            f"use NONE, a DCP size above 1, or one of {', '.join(SPARSE_GRAPH_MODEL_TYPES)}",
        )
