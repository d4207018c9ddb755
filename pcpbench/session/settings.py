"""The effective settings of a run, flat and by vLLM's names, for manifests and reports.

Owns which of them have no effect, and which defaults follow from others, too.
"""

from __future__ import annotations

from typing import Any

from pcpbench.engine_options import AUTO, EngineOptions
from pcpbench.model.presets import model_shape
from pcpbench.records import Notice
from pcpbench.targets.protocol import Target
from pcpbench.traits import Traits


def settings_of(options: EngineOptions, *, device: str, backend: str) -> dict[str, Any]:
    """What the options came to on a device; lists are lists, as JSON will show them."""
    parallel, sizes = options.parallel_config, options.requested_sizes
    return {
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "cp_kv_cache_interleave_size": parallel.cp_kv_cache_interleave_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "all2all_backend": parallel.all2all_backend,
        "enable_dbo": parallel.enable_dbo,
        "dbo_decode_token_threshold": parallel.dbo_decode_token_threshold,
        "dbo_prefill_token_threshold": parallel.dbo_prefill_token_threshold,
        "dcp_comm_backend": parallel.dcp_comm_backend,
        "model": options.preset,
        "dtype": options.dtype,
        "cudagraph_capture_sizes": "default" if sizes is None else list(sizes),
        "max_num_seqs": options.max_num_seqs,
        "num_speculative_tokens": options.spec_tokens,
        "dynamic_spec": options.dynamic_spec,
        "draft_model": options.draft_model,
        "device": device,
        "backend": backend,
        "launcher": options.launcher,
        "seed": options.seed,
    }


def target_settings(target: Target) -> dict[str, Any]:
    """What is on the stand: its name, and its version where it is not pcpbench's own engine."""
    version = {"target_version": target.version} if target.version else {}
    return {"target": target.name, **version}


def chosen_settings(options: EngineOptions) -> tuple[Notice, ...]:
    """Defaults that follow from other options."""
    if options.model != AUTO or options.pcp == 1 or options.dcp == 1:
        return ()
    message = (
        f"{options.preset} is the default with --pcp and --dcp above 1: ranks that hold other "
        "tokens and other shards gather equal amounts only where attention is sparse."
    )
    return (Notice(setting="model", message=message),)


def known_differences(traits: Traits, options: EngineOptions) -> tuple[Notice, ...]:
    """What a run of these options says of where its target is known to differ."""
    groups = model_shape(options.preset).kv_groups
    has_window = any(group.sliding_window for group in groups)
    return traits.notices_for(options.pcp, options.dcp, has_window)


def idle_settings(options: EngineOptions) -> tuple[Notice, ...]:
    """Options that were asked for and change nothing: those of DCP without DCP."""
    if options.dcp > 1:
        return ()
    notices = []
    if options.interleave != 1:
        message = (
            f"--interleave {options.interleave} changes nothing with --dcp 1, which leaves every "
            "KV position where it is: set --dcp above 1, or leave --interleave at 1."
        )
        notices.append(Notice(setting="interleave", message=message))
    if options.dcp_backend != "ag_rs":
        message = (
            f"--dcp-backend {options.dcp_backend} changes nothing with --dcp 1, under which no "
            "rank merges another's attention: set --dcp above 1, or leave it out."
        )
        notices.append(Notice(setting="dcp_backend", message=message))
    return tuple(notices)
