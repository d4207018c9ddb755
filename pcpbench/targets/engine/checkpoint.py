"""A small random DeepSeek-V2 checkpoint on disk: what every arm's engine loads.

Owns its shape, its draw and its bytes. The same seed gives the same bytes. vLLM's own dummy weights
will not do: they are some 1e-3, all logits are equal, and a comparison over them sees nothing.

File layout of safetensors (https://github.com/huggingface/safetensors): eight bytes with the size
of the header, little-endian; the header as JSON, `{name: {dtype, shape, data_offsets}}`; then the
data, its offsets counted from the end of the header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE: Final = 256
MAX_MODEL_LEN: Final = 512
Array = NDArray[np.float32]

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    # 512 + 64 is one of the head sizes that vLLM's MLA kernels are built for.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}

LOGIT_RMS: Final = 3.0
"""Of the logits of a normed hidden state: some tokens stand out, as in a trained model."""


def write_checkpoint(directory: Path, seed: int) -> str:
    """Write config.json and model.safetensors into an existing directory; returns their SHA-256.

    Raises OSError where it cannot be written.
    """
    config = json.dumps(CONFIG, indent=1, sort_keys=True).encode() + b"\n"
    weights = _safetensors(dict(_tensors(seed)))
    for name, data in (("config.json", config), ("model.safetensors", weights)):
        (directory / name).write_bytes(data)
    return hashlib.sha256(config + weights).hexdigest()


def _safetensors(tensors: dict[str, Array]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    data = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    return len(text).to_bytes(8, "little") + text + data


def _tensors(seed: int) -> Iterator[tuple[str, Array]]:
    """All tensors in a fixed order, each [out, in] as torch's Linear has it."""
    rng = np.random.default_rng(seed)
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    lora, rope = CONFIG["kv_lora_rank"], CONFIG["qk_rope_head_dim"]
    nope, value = CONFIG["qk_nope_head_dim"], CONFIG["v_head_dim"]

    def linear(num_out: int, num_in: int, rms: float = 1.0) -> Array:
        scale = np.float32(rms / np.sqrt(num_in))
        return rng.standard_normal((num_out, num_in), dtype=np.float32) * scale

    def norm(size: int) -> Array:
        return np.float32(1.0) + np.float32(0.1) * rng.standard_normal(size, dtype=np.float32)

    def mlp(prefix: str, size: int) -> Iterator[tuple[str, Array]]:
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}.{name}.weight", linear(size, hidden)
        yield f"{prefix}.down_proj.weight", linear(hidden, size)

    yield "model.embed_tokens.weight", linear(VOCAB_SIZE, hidden, np.sqrt(hidden))
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", norm(hidden)
        yield f"{at}.self_attn.q_proj.weight", linear(heads * (nope + rope), hidden, 2.0)
        yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", linear(lora + rope, hidden, 2.0)
        yield f"{at}.self_attn.kv_a_layernorm.weight", norm(lora)
        yield f"{at}.self_attn.kv_b_proj.weight", linear(heads * (nope + value), lora, 2.0)
        yield f"{at}.self_attn.o_proj.weight", linear(hidden, heads * value)
        yield f"{at}.post_attention_layernorm.weight", norm(hidden)
        if layer < CONFIG["first_k_dense_replace"]:
            yield from mlp(f"{at}.mlp", CONFIG["intermediate_size"])
            continue
        yield f"{at}.mlp.gate.weight", linear(CONFIG["n_routed_experts"], hidden)
        for expert in range(CONFIG["n_routed_experts"]):
            yield from mlp(f"{at}.mlp.experts.{expert}", CONFIG["moe_intermediate_size"])
        yield from mlp(f"{at}.mlp.shared_experts", CONFIG["moe_intermediate_size"])
    yield "model.norm.weight", norm(hidden)
    yield "lm_head.weight", linear(VOCAB_SIZE, hidden, LOGIT_RMS)
