"""A task run: some hundred prompts of drawn lengths, as a scenario that no file holds.

Owns the draw of lengths and arrivals: equal on every machine for one seed. Knows no mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from pcpbench.config import MAX_DIGITS
from pcpbench.errors import UsageError
from pcpbench.kv_groups import ONE_GROUP, KVGroup
from pcpbench.scenarios.limits import blocks_for, limits_problem, request_problem
from pcpbench.scenarios.schema import MAX_REQUESTS, Limits, RequestEntry, Scenario

NAME: Final = "task-run"
MAX_LENGTH: Final = 1 << 16
_FLAGS: Final = {
    "max_model_len": "--prompt-len and --output-len",
    "num_blocks": "--prompt-len and --output-len",
    "max_num_batched_tokens": "--max-num-seqs",
}


class Span(msgspec.Struct, frozen=True):
    """Lengths from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str) -> Span:
        """`8-32` or `16`; raises UsageError naming the flag for anything else."""
        low, dash, high = (part.strip() for part in text.partition("-"))
        parts = [low, high] if dash else [low]
        if all(part.isascii() and part.isdigit() and len(part) < MAX_DIGITS for part in parts):
            span = cls(int(parts[0]), int(parts[-1]))
            if 1 <= span.low <= span.high <= MAX_LENGTH:
                return span
        raise UsageError(
            f"{flag} is {text!r}: use a number of tokens from 1 to {MAX_LENGTH} such as 16, or a "
            "range of them such as 8-32, the smaller one first."
        )


def task_scenario(
    num_prompts: int,
    prompt_len: Span,
    output_len: Span,
    *,
    seed: int,
    max_num_seqs: int | None,
    dcp_size: int = 1,
    kv_groups: Sequence[KVGroup] = ONE_GROUP,
    num_draft_tokens: int = 0,
) -> Scenario:
    """The scenario of a task run; raises UsageError for one that no scheduler could run.

    Prompts arrive in waves of as many as can run together, the next one about when the last one is
    done: a batch fills, decodes, and shrinks as its shorter outputs end. The KV cache holds a whole
    wave, so nothing is preempted.
    """
    if not 1 <= num_prompts <= MAX_REQUESTS:
        raise UsageError(f"--prompts is {num_prompts}: use 1 to {MAX_REQUESTS}.")
    limits = _limits(
        prompt_len.high, output_len.high, max_num_seqs, dcp_size, kv_groups, num_draft_tokens
    )
    prompts = _draw(prompt_len, num_prompts, seed, 0)
    outputs = _draw(output_len, num_prompts, seed, 1)
    wave = limits.max_num_seqs
    num_tokens = wave * (prompt_len.low + prompt_len.high) // 2
    prefill_steps = -(-num_tokens // limits.max_num_batched_tokens)
    gap = prefill_steps + (output_len.low + output_len.high) // 2
    entries = tuple(
        RequestEntry(
            prompt_len=prompt, output_len=output, at_step=number // wave * gap, name=f"p{number}"
        )
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    )
    return Scenario(
        name=NAME,
        description=f"{num_prompts} prompts of drawn lengths, in waves of {wave}.",
        requests=entries,
        limits=limits,
    )


def _limits(
    prompt_len: int,
    output_len: int,
    max_num_seqs: int | None,
    dcp_size: int,
    kv_groups: Sequence[KVGroup],
    num_draft_tokens: int,
) -> Limits:
    """Room for as many requests at once as may run, in every KV group."""
    default = Limits()
    num_seqs = default.max_num_seqs if max_num_seqs is None else max_num_seqs
    longest = prompt_len + output_len
    spans = [group.span(default.block_size, dcp_size) for group in kv_groups]
    num_each = sum(blocks_for(longest + num_draft_tokens, span) + 1 for span in spans)
    limits = msgspec.structs.replace(
        default,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(default.max_num_batched_tokens, num_seqs),
        max_model_len=max(default.max_model_len, longest),
        num_blocks=1 + num_seqs * num_each,
    )
    problem = limits_problem(limits) or request_problem(
        prompt_len, output_len, limits, dcp_size, kv_groups, num_draft_tokens
    )
    if problem is not None:
        raise UsageError(
            f"{_FLAGS[problem.field]} are too large together: {problem.field} {problem.reason}."
        )
    return limits


def _draw(span: Span, count: int, seed: int, stream: int) -> list[int]:
    """`count` lengths of a span, every one as likely; the bias of the remainder is below 2**-47."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, stream]))
    raw = np.asarray(bits.random_raw(count), dtype=np.uint64)
    lengths = raw % np.uint64(span.high - span.low + 1) + np.uint64(span.low)
    return [int(length) for length in lengths]
