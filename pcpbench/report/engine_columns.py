"""Columns of the `summary.csv` that a comparison of whole engines leaves. Owns their names."""

from __future__ import annotations

from typing import Final

from pcpbench.report.column import STAT_NAMES, Column


def _times(name: str, what: str) -> tuple[Column, ...]:
    ratio = f"candidate / base of {name}"
    where = "only in the candidate's row of a pass"
    return (
        *(Column(f"{stat}_{name}_ms", "ms", f"{stat} {what}") for stat in STAT_NAMES),
        Column(f"num_{name}_samples", "", f"samples behind {name}"),
        Column(f"{name}_ratio", "", f"{ratio}, median over pairs; {where}"),
        Column(f"{name}_ratio_low", "", "lower end of its 95 % interval"),
        Column(f"{name}_ratio_high", "", "upper end of its 95 % interval"),
    )


ENGINE: Final = (
    Column("scenario", "", "name of the load"),
    Column("arm", "", "arm"),
    Column("role", "", "`base`, `candidate`, or `rung` for an arm that is run only to judge"),
    Column("outcome", "", "of the whole run: `pass`, `fail` or `not compared`"),
    Column("cudagraph_mode", "", "graph mode that the engine came up with"),
    Column("prefill_context_parallel_size", "", "PCP ranks of the arm"),
    Column("decode_context_parallel_size", "", "DCP size of the arm"),
    Column("tensor_parallel_size", "", "TP size of the arm"),
    Column("model", "", "what the checkpoint is"),
    Column("dtype", "", "its dtype"),
    Column("device", "", "`cuda`, or `cpu`: the platform of vLLM"),
    Column("num_requests", "", "prompts"),
    Column("num_output_tokens", "", "tokens generated"),
    Column("twin", "", "arm that it is held against; empty for the first"),
    Column("drift_kind", "", "`partition` or `padding`: whose budget holds"),
    Column("num_tokens_equal", "", "tokens that equal the twin's at the same place"),
    Column("num_requests_equal", "", "generations that equal the twin's"),
    Column("num_rows_compared", "", "rows of log-probabilities compared: of each request up to its "
           "first differing token"),
    Column("max_dlogprob", "nat", "largest difference of a log-probability over them"),
    Column("dlogprob_limit", "nat", "what the budget allows in that row"),
    Column("dlogprob_at", "", "whose row it is"),
    Column("median_dlogprob", "nat", "largest difference of a log-probability of the middle row"),
    Column("median_dlogprob_limit", "nat", "what the budget allows in that row"),
    Column("top1_agreement", "", "share of these rows whose likeliest token is the twin's"),
    Column("max_kl", "nat", "largest KL divergence of the next-token distribution from the twin's"),
    Column("num_flips", "", "generations with a token that differs from the twin's"),
    Column("num_flips_unexplained", "", "of these, tokens that no drift within budget explains"),
    Column("num_steps", "", "steps that the engine executed, rank 0"),
    *(Column(f"steps_{name.lower()}", "", f"steps that dispatch sent to {name}, rank 0")
      for name in ("FULL", "PIECEWISE", "NONE")),
    Column("steps_partitioned", "", "steps that the PCP manager cut over the ranks"),
    Column("steps_mixed", "", "of these, steps with prefills and decodes"),
    Column("steps_uneven", "", "of these, steps in which ranks had unequal tokens"),
    Column("steps_empty", "", "of these, steps in which a rank had none"),
    Column("steps_continued", "", "of these, steps with a prefill that had begun before"),
    Column("steps_faulted", "", "of these, steps in which the planted fault changed something"),
    Column("init_s", "s", "time that the engine took to start"),
    *_times("tpot", "time per output token of a request after its first"),
    *_times("ttft", "time from a request's arrival to its first token"),
    Column("reasons", "", "why the run did not pass, `; ` between reasons; the same on every row"),
    Column("wall_s", "s", "time that the whole run took"),
)  # fmt: skip
