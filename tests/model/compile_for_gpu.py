"""Compile the Triton kernels for compute capability 9.0 and print the name of each.

A program, not a test: it must run without TRITON_INTERPRET. Sizes of the `tiny` preset.
"""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pcpbench.model import attention_kernels, sparse_attention_kernels

ATTENTION = {
    "rank_c": 32, "rope": 16, "block_size": 16, "SHARDED": True, "dcp_size": 2, "dcp_rank": 1,
    "interleave": 2, "WINDOW": 24, "BLOCK_R": 32, "BLOCK_H": 16, "BLOCK_C": 32, "BLOCK_P": 16,
    "BLOCK_N": 64,
}  # fmt: skip
TYPES = {
    "q": "*bf16", "kv": "*bf16", "cache": "*bf16", "out": "*fp32", "lse": "*fp32", "slots": "*i64",
    "table": "*i32", "starts": "*i32", "seq_lens": "*i32", "local_lens": "*i32", "scale": "fp32",
    "weights": "*bf16",
}  # fmt: skip
INDEX = {
    "width": 16, "block_size": 16, "max_score": 2**30, "SHARDED": True, "dcp_size": 2,
    "dcp_rank": 1, "interleave": 2, "BLOCK_R": 32, "BLOCK_E": 16, "BLOCK_K": 16,
}  # fmt: skip
SPARSE = {"rank_c": 32, "rope": 16, "BLOCK_H": 16, "BLOCK_C": 32, "BLOCK_P": 16, "BLOCK_N": 64}

for kernel, constants in (
    (attention_kernels._mla_attention_kernel, ATTENTION),
    (attention_kernels._kv_cache_write_kernel, {"width": 48, "BLOCK": 64}),
    (sparse_attention_kernels._index_topk_kernel, INDEX),
    (sparse_attention_kernels._sparse_mla_attention_kernel, SPARSE),
):
    types = TYPES
    if kernel is sparse_attention_kernels._index_topk_kernel:
        types = {**TYPES, "out": "*i64"}
    elif kernel is sparse_attention_kernels._sparse_mla_attention_kernel:
        types = {**TYPES, "slots": "*i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    print(kernel.fn.__name__)
