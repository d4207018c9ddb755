"""The order that an engine's process is given: vLLM's own settings, the prompts, what to tell.

Owns how an arm becomes arguments of `vllm.LLM`. Knows no process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench.engine_request import EngineArm
from pcpbench.engine_results import Probe
from pcpbench.errors import UsageError
from pcpbench.scenarios.prompts import prompt_token_ids
from pcpbench.scenarios.schema import Scenario
from pcpbench.targets.engine.checkpoint import MAX_MODEL_LEN, VOCAB_SIZE

KV_CACHE_BYTES: Final = 1 << 28


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of all arms. requests: their names, in order."""

    requests: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


def load_of(scenario: Scenario, seed: int) -> Load:
    """The requests of a scenario, all there from the start; raises UsageError for too long ones."""
    specs = scenario.expand()
    longest = max(spec.prompt_len + spec.output_len for spec in specs)
    if longest > MAX_MODEL_LEN:
        raise UsageError(
            f"scenario {scenario.name!r} has a request of {longest} tokens: the engine's "
            f"checkpoint goes up to {MAX_MODEL_LEN}."
        )
    limits = scenario.limits
    prompts = [
        prompt_token_ids(
            scenario.name, spec.prompt_key, spec.prompt_len, vocab_size=VOCAB_SIZE, seed=seed
        )
        for spec in specs
    ]
    return Load(
        requests=tuple(spec.req_id for spec in specs),
        prompts=tuple(prompts),
        output_lens=tuple(spec.output_len for spec in specs),
        max_num_seqs=limits.max_num_seqs,
        # A prompt is prefilled whole: vLLM's latent attention for CPUs does not cut prompts.
        max_num_batched_tokens=max(
            limits.max_num_batched_tokens, limits.max_num_seqs, *(len(p) for p in prompts)
        ),
        max_model_len=min(max(limits.max_model_len, longest), MAX_MODEL_LEN),
    )


def order_of(
    arm: EngineArm,
    load: Load,
    probe: Probe,
    *,
    checkpoint: Path,
    dtype: str,
    repetitions: int,
    capture_sizes: tuple[int, ...] | None = None,
    fault: str = "",
) -> dict[str, Any]:
    """What `child/engine_child.py` reads. fault: planted where the arm has a PCP manager."""
    engine: dict[str, Any] = {
        "model": str(checkpoint.resolve()),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": 0,  # nothing is drawn: the weights are on disk, and tokens are the likeliest
        "max_model_len": load.max_model_len,
        "max_num_seqs": load.max_num_seqs,
        "max_num_batched_tokens": load.max_num_batched_tokens,
        "prefill_context_parallel_size": arm.pcp,
        "decode_context_parallel_size": arm.dcp,
        "tensor_parallel_size": arm.tp,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "max_logprobs": -1,
        "disable_log_stats": False,
        # Workers are processes of their own in every arm, also where there is one.
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "engine_watch.EngineWatch",
    }
    return {
        "engine": engine | _graph_settings(arm, probe, capture_sizes),
        "fault": fault if arm.pcp > 1 else "",
        "repetitions": repetitions,
        "num_logprobs": VOCAB_SIZE,
        "requests": list(load.requests),
        "prompts": [list(prompt) for prompt in load.prompts],
        "output_lens": list(load.output_lens),
    }


def _graph_settings(
    arm: EngineArm, probe: Probe, capture_sizes: tuple[int, ...] | None
) -> dict[str, Any]:
    compilation: dict[str, Any] = {"cudagraph_mode": arm.cudagraph_mode}
    if probe.platform == "cpu":
        compilation["custom_ops"] = ["none"]
    if not arm.replays:
        return {"enforce_eager": True, "compilation_config": compilation}
    if capture_sizes is not None:
        compilation["cudagraph_capture_sizes"] = list(capture_sizes)
    return {"compilation_config": compilation}
