"""Shapes of the decoders that can be built. Pure numbers: no torch, no weights.

Field names are those of Hugging Face's deepseek configurations, so that a shape can be compared
with a published `config.json` line by line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from pcpbench.errors import UsageError
from pcpbench.kv_groups import ONE_GROUP, KVGroup

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with multi-head latent attention (MLA) and no query compression.

    kv_lora_rank: width of the latent that stands for all heads' keys and values.
    qk_nope_head_dim, qk_rope_head_dim: the parts of a head's query and key without and with a
    rotary position. v_head_dim: a head's value. index_topk: keys that a token attends to, chosen by
    an indexer of index_n_heads heads of index_head_dim (sparse MLA); 0 for dense attention.
    n_routed_experts: 0 for a dense model. num_experts_per_tok: of them for one token.
    n_shared_experts: that see every token. moe_intermediate_size: inner width of each expert.
    first_k_dense_replace: layers before the first with experts.
    layer_types: each layer's attention, all full where empty; a `sliding_attention` layer's queries
    see sliding_window positions, their own among them. The other names speak for themselves.
    """

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    n_shared_experts: int = 0
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers by KV group: those with full attention first, then the sliding ones.

        Only the first is sharded by DCP: a window's few positions are not worth a merge over ranks.
        """
        if not self.layer_types:
            return ONE_GROUP
        full, sliding = (
            tuple(i for i, found in enumerate(self.layer_types) if found == kind)
            for kind in (FULL, SLIDING)
        )
        return KVGroup(full), KVGroup(sliding, self.sliding_window, dcp_sharded=False)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The KV group of each layer; empty where all are in group 0."""
        return tuple(int(kind == SLIDING) for kind in self.layer_types)

    def group_of(self, layer: int) -> KVGroup:
        """The KV group of a layer."""
        return self.kv_groups[self.layer_groups[layer] if self.layer_groups else 0]

    @property
    def is_sparse(self) -> bool:
        """Whether an indexer chooses the keys that a token attends to."""
        return self.index_topk > 0

    @property
    def model_type(self) -> str:
        """The family whose attention this is, as start-up checks know it."""
        return "deepseek_v32" if self.is_sparse else "deepseek_v2"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        first = self.first_k_dense_replace if self.n_routed_experts else self.num_hidden_layers
        return tuple(range(first, self.num_hidden_layers))

    @property
    def latent_dim(self) -> int:
        """Width of one cached token: the latent and the rotary part of the key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def check_tp(self, tp_size: int) -> None:
        """Raise UsageError for a TP size that does not divide heads and MLP."""
        divided = ["num_attention_heads", "intermediate_size"]
        divided += ["moe_intermediate_size"] if self.n_routed_experts else []
        common = math.gcd(*(getattr(self, what) for what in divided))
        for what in divided:
            if getattr(self, what) % tp_size:
                sizes = [str(size) for size in range(1, common + 1) if common % size == 0]
                raise UsageError(
                    f"--tp is {tp_size}, which does not divide the {what} of {self.name}, "
                    f"{getattr(self, what)}: use one of {', '.join(sizes)}."
                )

    def check_ep(self, world_size: int) -> None:
        """Raise UsageError where the experts cannot be dealt out evenly over so many ranks."""
        count = self.n_routed_experts
        if not count:
            raise UsageError(
                f"--expert-parallel is set with --model {self.name}, which has no experts: use a "
                f"model with experts, {', '.join(_moe_names())}, or leave it out."
            )
        if count % world_size:
            sizes = [str(size) for size in range(1, count + 1) if count % size == 0]
            raise UsageError(
                f"--expert-parallel is set over {world_size} ranks (pcp x tp), which do not divide "
                f"the n_routed_experts of {self.name}, {count}: use {', '.join(sizes)} ranks."
            )

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied with; absorption does not change it."""
        return float(self.qk_head_dim**-0.5)


TINY: Final = ModelShape(
    name="tiny",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    intermediate_size=128,
    vocab_size=256,
    max_position_embeddings=8192,
)

# Two KV groups, and a window that is no multiple of a block. Layers of one group are no neighbours,
# and layer 0 is not in group 0.
TINY_SWA: Final = replace(
    TINY,
    name="tiny-swa",
    num_hidden_layers=3,
    sliding_window=24,
    layer_types=(SLIDING, FULL, SLIDING),
)

SMALL: Final = ModelShape(
    name="small",
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    kv_lora_rank=64,
    qk_rope_head_dim=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    intermediate_size=512,
    vocab_size=1024,
    max_position_embeddings=8192,
)

# `tiny` weight for weight, with an indexer in each layer: contexts past 16 tokens are chosen from.
TINY_SPARSE: Final = replace(
    TINY, name="tiny-sparse", index_n_heads=2, index_head_dim=16, index_topk=16
)

# The true sizes of layer 0 (the dense one) of DeepSeek-V2-Lite, four times over. Three things are
# not the original's: the vocabulary (102,400 there; embedding and head would outweigh the layers
# that are measured), the position limit (163,840 there), and the missing YaRN stretch of the
# rotary frequencies, which changes values but neither shapes nor ops.
V2_LITE_LAYER: Final = ModelShape(
    name="v2-lite-layer",
    hidden_size=2048,
    num_hidden_layers=4,
    num_attention_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    intermediate_size=10944,
    vocab_size=4096,
    max_position_embeddings=32768,
)


def _with_experts(shape: ModelShape, name: str) -> ModelShape:
    """The same shape with experts in all layers but the first."""
    return replace(
        shape,
        name=name,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=shape.intermediate_size // 2,
        first_k_dense_replace=1,
    )


TINY_MOE: Final = _with_experts(TINY, "tiny-moe")
TINY_SPARSE_MOE: Final = _with_experts(TINY_SPARSE, "tiny-sparse-moe")

MODEL_SHAPES: Final[dict[str, ModelShape]] = {
    shape.name: shape
    for shape in (TINY, TINY_SWA, SMALL, V2_LITE_LAYER, TINY_SPARSE, TINY_MOE, TINY_SPARSE_MOE)
}


def _moe_names() -> list[str]:
    return [name for name, shape in MODEL_SHAPES.items() if shape.n_routed_experts]


def model_shape(name: str) -> ModelShape:
    """The shape of a preset; raises UsageError for a name that there is not."""
    if name not in MODEL_SHAPES:
        raise UsageError(f"--model is {name!r}: use one of {', '.join(MODEL_SHAPES)}.")
    return MODEL_SHAPES[name]
