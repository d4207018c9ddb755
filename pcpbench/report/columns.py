"""Every column of every CSV file: name, unit, meaning. The one place; `docs/csv.md` comes from it.

Owns names and their order, which are stable: a column is added at the end of its group, and neither
renamed nor reused. Knows no result. `python -m pcpbench.report.columns` prints `docs/csv.md`.
"""

from __future__ import annotations

from typing import Final

from pcpbench.report.column import STAT_NAMES as STAT_NAMES
from pcpbench.report.column import Column as Column
from pcpbench.report.engine_columns import ENGINE
from pcpbench.report.gate_columns import GATE

STATS: Final = (
    ("tpot", "tpot", "time per output token of a request after its first"),
    ("itl", "itl", "gap between successive steps that gave a request tokens"),
    ("ttft", "ttft", "time from a request's arrival to its first token"),
    ("step", "step", "wall time of a step"),
    ("launch", "launch_overhead", "host time to issue a step"),
    ("kernel", "kernel", "kernel floor of a step: its kernels alone"),
)
"""Fields of ArmSummary that hold a Stat, the name each has in columns, and what it measures."""

RATIOS: Final = (("tpot", "tpot"), ("itl", "itl"), ("launch", "launch_overhead"))
"""Prefixes of ScenarioResult's ratios and the name each has in columns."""


def _stat_columns() -> tuple[Column, ...]:
    columns = []
    for _, name, what in STATS:
        columns += [Column(f"{stat}_{name}_ms", "ms", f"{stat} {what}") for stat in STAT_NAMES]
        columns.append(Column(f"num_{name}_samples", "", f"samples behind {name}"))
    return tuple(columns)


def _ratio_columns() -> tuple[Column, ...]:
    columns = []
    for _, name in RATIOS:
        what = f"candidate / base of {name}, median over pairs"
        columns += [
            Column(f"{name}_ratio", "", f"{what}; only in the candidate's row of a pass"),
            Column(f"{name}_ratio_low", "", "lower end of its 95 % interval"),
            Column(f"{name}_ratio_high", "", "upper end of its 95 % interval"),
        ]
    columns += [Column(f"num_{name}_pairs", "", f"pairs behind {name}_ratio") for _, name in RATIOS]
    return tuple(columns)


SETTINGS: Final = (
    Column("cudagraph_mode", "", "graph mode that the arm is configured with"),
    Column("prefill_context_parallel_size", "", "PCP ranks (the reference arm runs on one rank)"),
    Column("decode_context_parallel_size", "", "DCP size"),
    Column("tensor_parallel_size", "", "TP size"),
    Column("cp_kv_cache_interleave_size", "", "consecutive KV positions that a DCP rank owns"),
    Column("enable_expert_parallel", "", "whether whole experts are dealt out over all ranks"),
    Column("all2all_backend", "", "how rows then get to experts on other ranks"),
    Column("enable_dbo", "", "whether steps are cut into microbatches"),
    Column("model", "", "preset of the decoder"),
    Column("dtype", "", "its dtype"),
    Column("device", "", "device that all ranks share"),
    Column("num_speculative_tokens", "", "draft tokens that a decode verifies"),
    Column("dynamic_spec", "", "whether it verifies fewer: `off`, by `step` or by `request`"),
    Column("draft_model", "", "who drafts: `planned`, or an `mtp` module proposes drafts as well"),
)

SUMMARY: Final = (
    Column("scenario", "", "name of the scenario"),
    Column("arm", "", "arm: as asked, or the rung of the ladder such as `eager_padded[full]`"),
    Column("role", "", "`base`, `candidate`, or `rung` for an arm that is run only to judge"),
    Column("outcome", "", "of the scenario: `pass`, `fail` or `not compared`"),
    *SETTINGS,
    Column("num_steps", "", "steps run"),
    Column("num_requests", "", "requests that were scheduled"),
    Column("num_output_tokens", "", "tokens generated"),
    Column("steps_full", "", "steps served by a FULL graph"),
    Column("steps_piecewise", "", "steps served by PIECEWISE graphs"),
    Column("steps_none", "", "steps run eagerly"),
    Column("steps_idle", "", "dummy steps, in none of the three above"),
    Column("steps_cut", "", "of all steps, those that ran as two microbatches"),
    Column("decode_steps", "", "steps without a prefill"),
    Column("coverable", "", "decode steps that a captured FULL size covers; 0 for an arm that "
           "never replays"),
    Column("coverable_full", "", "of these, steps that FULL served"),
    Column("real_tokens", "", "rank-local tokens before padding, over all ranks and steps"),
    Column("padded_tokens", "", "rank-local tokens after padding, over all ranks and steps"),
    Column("padding_waste_percent", "%", "share of executed tokens that were padding"),
    Column("steps_ranks_disagree", "", "steps in which ranks chose different descriptors"),
    Column("steps_larger_than_needed", "", "steps that ran a graph though a smaller one of its "
           "mode covers them"),
    Column("excess_tokens", "", "padding tokens that this cost, over all ranks"),
    Column("never_served", "", "classes of batches of which no step ran as the arm's mode says, "
           "and why; `; ` between them"),
    Column("num_draft_tokens", "", "draft tokens verified"),
    Column("num_accepted_tokens", "", "of these, tokens accepted"),
    Column("num_graphs", "", "captured descriptors of the arm; 0 for one that never replays"),
    Column("capture_ms", "ms", "time to capture them all, warm-ups included; scenarios of equal "
           "limits share one capture"),
    *_stat_columns(),
    *_ratio_columns(),
    Column("drift_kind", "", "`partition`, `padding` or `capture`: drift of this arm"),
    Column("drift_twin", "", "arm that it is measured from"),
    Column("drift_ok", "", "whether the drift is allowed"),
    Column("drift_outcome", "", "worst outcome: `bitwise`, `within_budget`, `exceeds_budget`, "
           "`non_finite` or `shape_mismatch`"),
    Column("drift_tensor", "", "tensor that the next five columns are of"),
    Column("drift_num_mismatched", "", "values of it that differ"),
    Column("drift_max_abs", "", "largest absolute difference"),
    Column("drift_max_rel", "", "largest relative difference"),
    Column("drift_max_ulp", "ULP", "largest difference in units in the last place"),
    Column("drift_cosine", "", "cosine similarity"),
    Column("drift_steps_compared", "", "steps with common outputs"),
    Column("top1_agreement", "", "share of sampled rows whose most likely token agrees"),
    Column("token_mismatches", "", "sampled tokens that differ"),
    Column("max_kl", "nat", "largest KL divergence of the next-token distribution"),
    Column("drift_relative", "", "largest difference relative to its row's scale, over all tensors "
           "and steps"),
    Column("drift_relative_limit", "", "its budget; empty where every bit must be equal"),
    Column("drift_cosine_gap", "", "largest 1 - cosine similarity, over all tensors and steps"),
    Column("drift_cosine_gap_limit", "", "its budget; empty where every bit must be equal"),
    Column("violated_contracts", "", "contracts that the arm or the plan broke, `;` between them"),
    Column(
        "reasons",
        "",
        "why the scenario did not pass, `; ` between reasons; the same on the row of every arm",
    ),
    Column("wall_s", "s", "time that the whole scenario took, all arms"),
)  # fmt: skip

STEPS: Final = (
    Column("scenario", "", "name of the scenario"),
    Column("arm", "", "arm"),
    Column("step", "", "step of the scenario, from 0"),
    Column("idle", "", "whether it was a dummy step"),
    Column("has_prefill", "", "whether any request prefilled"),
    Column("num_reqs", "", "requests scheduled (global)"),
    Column("num_decodes", "", "of these, decodes"),
    Column("num_tokens", "", "tokens scheduled (global)"),
    Column("num_sampled", "", "tokens that the step added to its requests"),
    Column("served_as", "", "`FULL`, `PIECEWISE`, `NONE` (eager) or `IDLE`"),
    Column("miss_reason", "", "why no FULL graph served it"),
    Column("descriptor_mode", "", "mode of the descriptor: run as, or for an `eager_padded` arm "
           "padded to"),
    Column("descriptor_num_reqs", "", "its rows; empty where rows are not padded"),
    Column("descriptor_num_tokens", "", "its tokens"),
    Column("local_num_reqs", "", "largest rank-local row count, as dispatch saw it"),
    Column("local_num_tokens", "", "largest rank-local token count, as dispatch saw it"),
    Column("real_tokens", "", "rank-local tokens before padding, over all ranks"),
    Column("padded_tokens", "", "rank-local tokens after padding, over all ranks"),
    Column("smallest_descriptor", "", "smallest captured descriptor that covers the step; empty "
           "where none does"),
    Column("rank_descriptors", "", "what the ranks chose: one label where they agree, else "
           "`rank0=...;rank1=...`"),
    Column("excess_tokens", "", "padding tokens that a smaller graph of the same mode would have "
           "saved, over all ranks"),
    Column("max_query_len", "", "tokens of the step's longest query (global)"),
    Column("num_draft_tokens", "", "draft tokens verified"),
    Column("num_accepted_tokens", "", "of these, tokens accepted"),
    Column("num_repetitions", "", "timed repetitions; 0 for an arm that was not timed"),
    Column("median_step_ms", "ms", "wall time, median over repetitions"),
    Column("median_submit_ms", "ms", "time until the last launch call returned, median"),
    Column("kernel_ms", "ms", "kernel floor"),
    Column("launch_overhead_ms", "ms", "host time to issue the step"),
    Column("drift_kind", "", "drift of this arm"),
    Column("drift_twin", "", "arm that it is measured from"),
    Column("drift_outcome", "", "worst outcome over the step's tensors"),
    Column("drift_tensor", "", "tensor that the next three columns are of"),
    Column("drift_num_mismatched", "", "values of it that differ"),
    Column("drift_max_abs", "", "largest absolute difference"),
    Column("drift_max_ulp", "ULP", "largest difference in units in the last place"),
    Column("violated_contracts", "", "all contracts broken in this step, `;` between them"),
)  # fmt: skip

SAMPLES: Final = (
    Column("scenario", "", "name of the scenario"),
    Column("arm", "", "arm"),
    Column("repetition", "", "timed repetition, from 0"),
    Column("measure", "", "`tpot`, `itl`, `ttft`, `step`, `kernel` or `launch_overhead`"),
    Column("request", "", "whose time it is; empty for `step`, `kernel`, `launch_overhead`"),
    Column("step", "", "the step, for `itl` the one that ended the gap; empty for `tpot`, `ttft`"),
    Column("value_ms", "ms", "the time"),
)

DRIFT: Final = (
    Column("scenario", "", "name of the scenario"),
    Column("step", "", "step of the scenario, from 0"),
    Column("kind", "", "`partition`, `padding` or `capture`"),
    Column("arm", "", "arm that drifts"),
    Column("twin", "", "arm that it is measured from"),
    Column("layer", "", "of a cache; empty for what lies behind the last layer"),
    Column("tensor", "", "`kv_cache` (positions that the step wrote, in the last step all of its "
           "requests'; a capture pair: the whole cache), `index_cache` (index keys of sparse "
           "attention), `hidden`, `logits` or `sampled`; a draft model's: `draft_kv_cache`, "
           "`draft_index_cache`, `draft_logits`, `proposed`"),
    Column("outcome", "", "worst outcome over the ranks; the next columns are of that rank"),
    Column("num_elements", "", "values compared"),
    Column("num_mismatched", "", "values that differ"),
    Column("max_abs", "", "largest absolute difference"),
    Column("relative", "", "largest difference relative to its row's scale"),
    Column("cosine", "", "cosine similarity"),
)  # fmt: skip

PHASES: Final = (
    Column("scenario", "", "name of the scenario"),
    Column("arm", "", "arm"),
    Column("step", "", "step of the scenario, from 0"),
    Column("rank", "", "whose phase; empty for what is done for all ranks at once"),
    Column("phase", "", "`step`, or a part of it: `update_states`, `prepare_inputs`, `dispatch`, "
           "`prepare_attention`, `forward`, `replay`, `launch`, `sample`, `post_update`, "
           "`draft`"),
    Column("start_ms", "ms", "since the traced pass of the scenario began"),
    Column("duration_ms", "ms", "how long it took, clock reads included"),
)  # fmt: skip

CAPTURE: Final = (
    Column("descriptor", "", "label of the captured descriptor"),
    Column("mode", "", "`FULL` or `PIECEWISE`"),
    Column("num_tokens", "", "tokens after padding"),
    Column("num_reqs", "", "rows after padding; empty where rows are not padded"),
    Column("uniform_token_count", "", "tokens of every request, where they must be equal"),
    Column("max_query_len", "", "longest query, where they may differ"),
    Column("capture_ms", "ms", "time to capture it, warm-up aside"),
    Column("num_ops", "", "operations (host) or nodes (accelerator) of one replay"),
    Column("num_segments", "", "graphs that it was cut into"),
    Column("eager_breaks", "", "eager calls between them"),
    Column("pool_bytes_delta", "bytes", "growth of the shared pool by this capture"),
    Column("pool_bytes_after", "bytes", "size of the pool after it"),
    Column("num_reads", "", "buffers outside the pool that it reads"),
    Column("num_writes", "", "buffers outside the pool that it writes"),
)

ADDRESS_BOOK: Final = (
    Column("graph", "", "label of the captured descriptor"),
    Column("buffer", "", "persistent buffer; empty where nobody owns the memory (an error)"),
    Column("access", "", "`read`, `write` or `read+write`"),
    Column("address", "", "first byte of the storage, hexadecimal"),
    Column("shape", "", "of the tensor as the first op saw it, such as `4x64`"),
    Column("dtype", "", "of that tensor"),
    Column("num_bytes", "bytes", "size of the storage"),
    Column("op", "", "first op that touched it"),
    Column("source", "", "file and line of that op's call"),
)

MODE_RATIOS: Final = (
    ("tpot", "tpot"),
    ("ttft", "ttft"),
    ("step", "step"),
    ("launch", "launch_overhead"),
    ("throughput", "throughput"),
)
"""Prefixes of Speed's ratios and the name each has in columns."""

MODES: Final = (
    Column("mode", "", "graph mode that the prompts were run in"),
    Column("arm", "", "its arm in `compare`"),
    Column("outcome", "", "of the whole run: `pass`, `fail` or `not compared`"),
    *SETTINGS[1:],
    Column("feed", "", "`free-running` or `teacher-forced`"),
    Column("num_requests", "", "prompts"),
    Column("num_requests_equal", "", "of these, generations that equal those of NONE"),
    Column("num_output_tokens", "", "tokens generated"),
    Column("num_tokens_equal", "", "of these, tokens that equal those of NONE at the same place"),
    Column("num_traced", "", "differing tokens traced: the first of each generation, or all of "
           "them where every arm was fed the same tokens"),
    Column("num_unexplained", "", "of these, tokens that padding drift does not explain"),
    Column("first_request", "", "request of the first difference from NONE, by step"),
    Column("first_token_index", "", "which of its outputs, from 0"),
    Column("first_step", "", "its step"),
    Column("first_gap", "", "how much higher NONE held its own token's logit there"),
    Column("first_drift", "", "padding drift of the logits there, largest difference"),
    Column("steps_full", "", "steps served by a FULL graph"),
    Column("steps_piecewise", "", "steps served by PIECEWISE graphs"),
    Column("steps_none", "", "steps run eagerly"),
    Column("tokens_full", "", "scheduled tokens in steps served by a FULL graph"),
    Column("tokens_piecewise", "", "scheduled tokens in steps served by PIECEWISE graphs"),
    Column("tokens_none", "", "scheduled tokens in steps run eagerly"),
    *(column for column in _stat_columns()
      if any(f"_{name}_" in column.name for name in ("tpot", "ttft", "step", "launch_overhead"))),
    Column("mean_tokens_per_s", "1/s", "output tokens over the time of all steps, mean over "
           "repetitions"),
    Column("min_tokens_per_s", "1/s", "the least of a repetition"),
    Column("max_tokens_per_s", "1/s", "the most of a repetition"),
    *(Column(f"{name}_ratio{end}", "", f"mode / NONE of {name}, {what}; empty for NONE")
      for _, name in MODE_RATIOS
      for end, what in (("", "median over pairs"), ("_low", "lower end of its 95 % interval"),
                        ("_high", "upper end of its 95 % interval"))),
)  # fmt: skip

MATRIX: Final = (
    Column("cell", "", "name of the cell"),
    Column("outcome", "", "`pass`, `fail`, `not compared`, `refused`, `could not measure`, "
           "`crashed` or `not run`"),
    *(column for column in SETTINGS if column.name.endswith("_size")),
    Column("enable_dbo", "", "whether steps are cut into microbatches"),
    Column("model", "", "preset of the decoder"),
    Column("model_kind", "", "`dense` or `moe`"),
    Column("num_speculative_tokens", "", "draft tokens that a decode verifies"),
    Column("capture_is_zero", "", "whether every replay was bitwise equal to its padded "
           "eager twin"),
    Column("num_capture_steps", "", "replayed steps behind that, of both graph arms"),
    Column("violated_contracts", "", "contracts broken, `;` between them"),
    Column("num_scenarios", "", "scenarios run"),
    Column("num_passed", "", "of these, scenarios that passed"),
    Column("num_steps", "", "steps of their plans"),
    Column("steps_full", "", "of these, steps that FULL served under full_and_piecewise"),
    Column("steps_piecewise", "", "of these, steps that PIECEWISE served under "
           "full_and_piecewise"),
    Column("num_faults", "", "faults injected in the cell's world (`--faults`)"),
    Column("num_faults_caught", "", "of these, faults that the judge caught"),
    Column("num_faults_without_verdict", "", "faults that never acted there"),
    Column("exit_code", "", "of the cell's process; negative for a signal"),
    Column("wall_s", "s", "time of the cell's processes"),
    Column("attempt", "", "which run of the cell it is, from 1"),
    Column("run", "", "directory of the cell's files, within the run's"),
    Column("reason", "", "why the cell is no pass, or what was left out"),
)  # fmt: skip

PARTITION: Final = (
    Column("group", "", "ranks, interleave and mode (`check partition`), or the scenario "
           "(`compare builtin vllm`)"),
    Column("num_batches", "", "batches (steps) compared"),
    Column("num_refused", "", "of these, batches that have to be refused"),
    Column("num_compared", "", "fields compared, over all ranks and pairs of makers"),
    Column("num_different", "", "of these, fields that differ and nobody can say why"),
    Column("num_explained", "", "fields that differ for a known reason"),
)  # fmt: skip

PARTITION_FIELDS: Final = (
    Column("left", "", "who has the field as expected"),
    Column("right", "", "who is held against it"),
    Column("field", "", "the field"),
    Column("num_compared", "", "how often it was compared, over batches and ranks"),
    Column("num_different", "", "of these, times that it differed and nobody can say why"),
    Column("num_explained", "", "times that it differed for a known reason"),
    Column("num_missing", "", "times that one of the two says nothing of it"),
)  # fmt: skip

FILES: Final = (
    ("summary.csv", "One row for each scenario and arm (`compare`).", SUMMARY),
    ("steps.csv", "One row for each scenario, arm and step (`compare`).", STEPS),
    ("samples.csv", "One row for each measured time of a scenario that passed (`compare`).",
     SAMPLES),
    ("drift.csv", "One row for each scenario, step, pair of arms, tensor and layer (`compare`).",
     DRIFT),
    ("phases.csv", "One row for each phase of the first 16 steps of the two arms, in a run of its "
     "own after the timed ones, of a scenario that passed (`compare`).", PHASES),
    ("capture.csv", "One row for each captured descriptor (`capture`).", CAPTURE),
    ("address_book.csv", "One row for each captured descriptor and buffer (`capture`).",
     ADDRESS_BOOK),
    ("modes.csv", "One row for each graph mode (`modes`).", MODES),
    ("summary.csv of whole engines", "One row for each arm (`compare --target engine`).", ENGINE),
    ("matrix.csv", "One row for each cell (`matrix`).", MATRIX),
    ("partition.csv", "One row for each world, interleave and mode (`check partition`) or scenario "
     "(`compare builtin vllm`).", PARTITION),
    ("fields.csv", "One row for each field and pair of makers (`check partition`, "
     "`compare builtin vllm`).", PARTITION_FIELDS),
    ("gate.csv", "One row for each rule and scenario (`gate`).", GATE),
)  # fmt: skip

_INTRODUCTION = """\
# Columns of the CSV files

Made from `pcpbench/report/columns.py` by `python -m pcpbench.report.columns > docs/csv.md`; edit
that file, not this one.

- UTF-8, comma, one header line, `.` as the decimal point. `pandas.read_csv(file)` needs no options.
- Units are in the names and never change. Times of the CSV files are in milliseconds.
- An empty cell means that there is no value; it never means 0. A number that is not finite is
  written `inf`, `-inf` or `nan`, and an outcome beside it says `non_finite`.
- `std` divides by the number of samples (ddof 0); `p99` interpolates linearly.
- Booleans are `true` and `false`.
- Columns and their order are stable: new ones are added, none is renamed or reused.
- Rows of a scenario (or of a captured graph) are on disk as soon as it ends; a run that was killed
  leaves complete lines.
- All ranks share one device and run one after the other, so times are sums over the ranks. They are
  the worker's own (scope = worker): compare arms with each other, not with a served system.
"""


def markdown() -> str:
    """The whole of `docs/csv.md`."""
    parts = [_INTRODUCTION]
    for name, what, columns in FILES:
        rows = [f"| `{c.name}` | {c.unit} | {c.meaning} |" for c in columns]
        parts.append("\n".join([f"## {name}", "", what, "", "| column | unit | meaning |",
                                "|---|---|---|", *rows, ""]))  # fmt: skip
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
