"""Rules that tie several values of a scenario together; one place for file and command line.

Owns the arithmetic. Does not know where a value came from: the caller turns a `Problem` into the
sentence that names the file or the flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pcpbench.kv_groups import ONE_GROUP, KVGroup
from pcpbench.scenarios.schema import Limits

MAX_KV_POSITIONS = 1 << 23


@dataclass(frozen=True)
class Problem:
    """A value that cannot be used. field: its name. reason: what is wrong and what would work."""

    field: str
    reason: str


def limits_problem(limits: Limits) -> Problem | None:
    """What is wrong among the limits themselves, or None."""
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        return Problem(
            "max_num_batched_tokens",
            f"is {limits.max_num_batched_tokens}, below max_num_seqs {limits.max_num_seqs}: every "
            f"request must get its decode token, so use {limits.max_num_seqs} or more",
        )
    positions = limits.num_blocks * limits.block_size
    if positions > MAX_KV_POSITIONS:
        return Problem(
            "num_blocks",
            f"is {limits.num_blocks} with block_size {limits.block_size}, a KV cache of "
            f"{positions:,} positions: use at most {MAX_KV_POSITIONS // limits.block_size} blocks",
        )
    return None


def request_problem(
    prompt_len: int,
    output_len: int,
    limits: Limits,
    dcp_size: int = 1,
    kv_groups: Sequence[KVGroup] = ONE_GROUP,
    num_draft_tokens: int = 0,
) -> Problem | None:
    """Why a request of these lengths could never finish under the limits, or None.

    The last output is sampled and never fed back, so a request of 10 + 7 tokens fills 16 positions:
    one block of 16. Its last step may write num_draft_tokens more, as far as max_model_len allows.
    A group with a sliding window holds the blocks of the largest step and of what this step sees.
    """
    length = prompt_len + output_len
    if length > limits.max_model_len:
        return Problem(
            "max_model_len",
            f"is {limits.max_model_len}, but the prompt of {prompt_len} and the output of "
            f"{output_len} tokens make {length}: shorten one, or raise max_model_len to {length}",
        )
    positions = min(length - 1 + num_draft_tokens, limits.max_model_len)
    num_needed, spans = 0, []
    for group in kv_groups:
        spans.append(group.span(limits.block_size, dcp_size))
        whole = blocks_for(positions, spans[-1])
        if group.sliding_window:
            # One more than these positions fill: they need not begin where a block does.
            at_once = group.sliding_window - 1 + min(length, limits.max_num_batched_tokens)
            whole = min(whole, blocks_for(at_once, spans[-1]) + 1)
        num_needed += whole
    if num_needed > limits.num_blocks - 1:
        sizes = " and ".join(str(span) for span in dict.fromkeys(spans))
        return Problem(
            "num_blocks",
            f"is {limits.num_blocks} with the null block, but the {positions} KV positions of the "
            f"request take {num_needed} of {sizes} each: use {num_needed + 1} blocks or more",
        )
    return None


def blocks_for(num_positions: int, block_span: int) -> int:
    """Blocks that hold that many positions: 33 positions in blocks of 16 take 3."""
    return -(-num_positions // block_span)
