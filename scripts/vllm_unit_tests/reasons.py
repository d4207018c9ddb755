"""Why a test of vLLM's says nothing of pcpbench, or is right to fail on it.

Owns the list, by test. A test that ran pcpbench's code and failed must stand here, or it is a
failure. One that stands here as different and passes is a reason that has gone stale. Written for
vLLM 0.33.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

INTERNALS = "no counterpart"
DEVICE = "needs a GPU"
DIFFERENCE = "different on purpose"

KINDS = {
    INTERNALS: "tests code of vLLM that pcpbench has no counterpart of",
    DEVICE: "needs a GPU's own graphs",
    DIFFERENCE: "pcpbench's contract says otherwise; documented",
}


@dataclass(frozen=True)
class Reason:
    """Why tests whose names match a pattern (file::test, parameters left out) do not pass."""

    pattern: str
    kind: str
    text: str


_PCP, _UBATCH, _TABLE = "test_gpu_pcp_manager", "test_gpu_ubatch_slicing", "test_gpu_block_table"
_GRAPHS, _DYNAMIC = "test_cudagraph_manager", "test_dynamic_sd_cug"

REASONS = (
    Reason(f"{_PCP}::test_dummy_draft_does_not_reuse_previous_graph_batch", INTERNALS,
           "where vLLM's manager keeps the draft model's inputs; pcpbench's keeps none"),
    Reason(f"{_PCP}::test_replicated_draft_cache_inputs_*", INTERNALS,
           "the draft model's KV inputs in vLLM's attention"),
    Reason(f"{_PCP}::test_partition_defers_dcp_metadata_*", INTERNALS,
           "passes up to `batch.pcp`, host bounds that vLLM's sparse backends size a gather by"),
    Reason(f"{_PCP}::test_moe_padding_matches_pcp_all_gather", INTERNALS,
           "moe_gathers_tokens: one padding mask over all PCP ranks' rows; in pcpbench each rank "
           "routes its own rows by its own mask"),
    Reason(f"{_PCP}::test_dummy_context_updates_pcp_local_block_tables", DIFFERENCE,
           "a dummy's context lies in the null block alone (contract C9), not in blocks "
           "0, 1, 2, ..."),
    Reason(f"{_PCP}::test_decode_sharding_allows_ranks_with_no_owned_request", DIFFERENCE,
           "a rank with nothing to do has its row of zero tokens in rank_segments already; vLLM "
           "adds it in partition_batch"),
    Reason(f"{_UBATCH}::test_microbatched_graphs_are_only_offered_to_uniform_batches", DIFFERENCE,
           "rows of a microbatch are staged in buffers of its own, padded to a number that the "
           "shape decides, so that a cut graph serves any split (docs/microbatches.md)"),
    Reason(f"{_UBATCH}::test_*dp_rank*", INTERNALS, "data parallelism"),
    Reason(f"{_UBATCH}::test_decode_threshold_only_applies_*", INTERNALS, "data parallelism"),
    Reason(f"{_UBATCH}::test_microbatching_*", INTERNALS, "data parallelism"),
    Reason(f"{_UBATCH}::test_slice_model_inputs_*", INTERNALS, "M-RoPE's inputs"),
    Reason(f"{_UBATCH}::test_legacy_ubatch_contexts_*", INTERNALS, "the V1 runner's wrapper"),
    Reason(f"{_UBATCH}::test_*runner*", INTERNALS,
           "vLLM's microbatch threads; pcpbench's microbatches are coroutines"),
    Reason(f"{_UBATCH}::test_capturable_run_*", DEVICE, "captures vLLM's microbatch threads"),
    Reason("test_ubatch_offsets::*", INTERNALS, "the V1 runner's microbatch threads and slices"),
    Reason(f"{_TABLE}::test_block_tables_apply_staged_writes_fuses_kv_groups", INTERNALS,
           "vLLM's staged writer and its fused kernel"),
    Reason(f"{_TABLE}::test_v1_*", INTERNALS, "the V1 runner's block table"),
    Reason(f"{_TABLE}::test_larger_draft_batch_uses_null_kpool_slots[[]True]", DEVICE,
           "captures vLLM's slot kernel; [False] runs it eagerly on pcpbench's tables"),
    Reason("test_gpu_input_batch_v2::test_prepare_dcp_local_seq_lens_uses_shared_buffer", INTERNALS,
           "mocks vLLM's Triton kernel and expects what the mock wrote"),
    Reason("test_cp_utils::test_cp_checks_*", INTERNALS, "vLLM's check of attention backends"),
    Reason("test_cp_utils::test_skip_gate_*", INTERNALS,
           "vLLM's gate over a tensor; pcpbench decides from the plan's lengths (prefill_keys)"),
    Reason(f"{_GRAPHS}::test_full_capture_sets_graph_pool_id_*", INTERNALS, "NCCL's memory pool"),
    Reason(f"{_GRAPHS}::test_uniform_decode_pads_up_to_full_graph", INTERNALS,
           "reads vLLM's list of candidates for one token count; pcpbench's dispatcher has one "
           "list for all"),
    Reason(f"{_GRAPHS}::test_dynamic_spec_decode_shared_token_count_*", DIFFERENCE,
           "where drafts vary pcpbench captures a varlen graph, too, which only a batch with a "
           "bound on its queries can get (docs/speculative.md)"),
    Reason("test_cudagraph_dispatch::test_[cn]*", DEVICE, "captures a torch module"),
    Reason("test_cudagraph_dispatch::TestCUDAGraphWrapper::test_capture_and_replay", DEVICE,
           "captures a torch module"),
    Reason("test_cudagraph_dispatch::*", INTERNALS, "the V1 runner's dispatcher and wrapper"),
    *(
        Reason(f"{_DYNAMIC}::test_dynamic_sd_{name}", DIFFERENCE,
               "drafts of any length up to the longest may come, so all are captured: pcpbench has "
               "no schedule of draft lengths by batch size (docs/speculative.md)")
        for name in (
            "cudagraphs_use_clamped_query_length", "only_captures_scheduled_query_lengths",
        )
    ),
)  # fmt: skip


def reason_for(test: str) -> Reason | None:
    """The first reason that a test's name matches, or None."""
    plain = test.split("[")[0]
    return next(
        (r for r in REASONS if fnmatchcase(test, r.pattern) or fnmatchcase(plain, r.pattern)), None
    )
