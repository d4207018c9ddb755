"""Compile the Triton kernels of the experts for compute capability 9.0 and print their names.

A program, not a test: it must run without TRITON_INTERPRET. Sizes of the `tiny-moe` preset.
"""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pcpbench.model import experts_kernels

TYPES = {
    "x": "*bf16", "ids": "*i32", "weight": "*bf16", "inner": "*bf16", "topk_weights": "*fp32",
    "out": "*fp32", "num_rows": "*i32",
}  # fmt: skip

for kernel, constants in (
    (experts_kernels._gate_up_kernel, {"BLOCK_H": 64, "BLOCK_I": 64}),
    (experts_kernels._down_kernel, {"TOP_K": 2, "BLOCK_I": 64, "BLOCK_H": 64}),
    (experts_kernels._num_rows_kernel, {"BLOCK": 64}),
):
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "i32")
        for name in kernel.arg_names
    }
    compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    print(kernel.fn.__name__)
