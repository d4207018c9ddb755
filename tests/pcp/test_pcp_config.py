"""Every refusal of SPEC 3 that a configuration can express, and its nearest legal neighbour."""

import msgspec
import pytest

from pcpbench.config import (
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from pcpbench.errors import UsageError
from pcpbench.modes import CUDAGraphMode
from pcpbench.pcp_manager import PCPManager


def config(pcp=2, dcp=1, tp=1, backend="ag_rs", mode=CUDAGraphMode.NONE, lora=None, spec=None, **m):
    return EngineConfig(
        parallel_config=ParallelConfig(
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            tensor_parallel_size=tp,
            dcp_comm_backend=backend,
        ),
        model_config=ModelConfig(**m),
        compilation_config=CompilationConfig(cudagraph_mode=mode),
        speculative_config=spec,
        lora_config=lora,
    )


DSPARK = SpeculativeConfig(method="dspark")
REFUSED = {
    "plain full": (config(mode=CUDAGraphMode.FULL), ["cudagraph_mode is FULL", "FULL_DECODE_ONLY"]),
    "no mla": (config(use_mla=False), ["use_mla is false", "MLA model"]),
    "encoder-decoder": (config(is_encoder_decoder=True), ["is_encoder_decoder is true"]),
    "lora": (config(lora="adapters"), ["lora_config is 'adapters'", "leave LoRA off"]),
    "draft model": (
        config(spec=SpeculativeConfig(method="eagle")),
        ["method is 'eagle'", "'mtp' or 'dspark'"],
    ),
    "multi-module mtp": (
        config(spec=SpeculativeConfig(use_multi_module_mtp=True)),
        ["use_multi_module_mtp is true", "single module"],
    ),
    "dspark over tp": (
        config(dcp=4, tp=2, spec=DSPARK, is_sparse=True),
        ["decode_context_parallel_size is 4", "one of 1, 2"],
    ),
    "dense with dcp": (config(dcp=2), ["decode_context_parallel_size is 2", "sparse MLA"]),
    "a2a": (
        config(dcp=2, backend="a2a", is_sparse=True),
        ["dcp_comm_backend is 'a2a'", "use 'ag_rs'"],
    ),
    "sparse graph": (
        config(is_sparse=True, mode=CUDAGraphMode.FULL_DECODE_ONLY),
        ["cudagraph_mode is FULL_DECODE_ONLY", "use NONE", "deepseek_v32"],
    ),
    "sparse piecewise": (
        config(is_sparse=True, mode=CUDAGraphMode.PIECEWISE),
        ["cudagraph_mode is PIECEWISE"],
    ),
    "dcp 3": (config(dcp=3), ["--dcp is 3", "use one of 1, 2"]),
    "dcp 4 without tp": (config(dcp=4), ["--dcp is 4", "use one of 1, 2"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence_with_value_and_remedy(name):
    refused, needles = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        PCPManager.validate_config(refused)
    message = str(caught.value)
    for needle in needles:
        assert needle in message
    assert message.endswith(".")
    assert "\n" not in message


def test_multimodal_inputs_are_refused():
    with pytest.raises(UsageError, match="supports_mm_inputs is true"):
        PCPManager.validate_config(config(), supports_mm_inputs=True)


ACCEPTED = {
    "none": config(),
    "piecewise": config(mode=CUDAGraphMode.PIECEWISE),
    "full decode only": config(mode=CUDAGraphMode.FULL_DECODE_ONLY),
    "full and piecewise": config(mode=CUDAGraphMode.FULL_AND_PIECEWISE),
    "mtp": config(spec=SpeculativeConfig()),
    "dspark": config(spec=DSPARK),
    "dspark with dcp = pcp": config(dcp=2, tp=2, spec=DSPARK, is_sparse=True),
    "dspark without mla": config(
        dcp=4,
        tp=2,
        spec=SpeculativeConfig(method="dspark", draft_uses_mla=False),
        is_sparse=True,
    ),
    "sparse with dcp": config(dcp=2, is_sparse=True, mode=CUDAGraphMode.FULL_AND_PIECEWISE),
    "sparse eager": config(is_sparse=True),
    "deepseek_v32": config(
        is_sparse=True, model_type="deepseek_v32", mode=CUDAGraphMode.FULL_DECODE_ONLY
    ),
    "glm_moe_dsa": config(
        is_sparse=True, model_type="glm_moe_dsa", mode=CUDAGraphMode.FULL_AND_PIECEWISE
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    PCPManager.validate_config(ACCEPTED[name])


@pytest.mark.parametrize("name", [name for name in REFUSED if not name.startswith("dcp")])
def test_without_pcp_only_group_sizes_are_refused(name):
    refused, _ = REFUSED[name]
    alone = msgspec.structs.replace(refused, parallel_config=ParallelConfig(dcp_comm_backend="a2a"))
    PCPManager.validate_config(alone, supports_mm_inputs=True)


def test_dcp_sizes_are_refused_without_pcp_too():
    with pytest.raises(UsageError, match="--dcp is 3"):
        PCPManager.validate_config(config(pcp=1, tp=4, dcp=3))
