"""Columns of `gate.csv`. Owns their names."""

from __future__ import annotations

from typing import Final

from pcpbench.report.column import Column

GATE: Final = (
    Column("rule", "", "the rule as it was written"),
    Column("metric", "", "what it is about"),
    Column("stat", "", "`median`, `mean` or `p99`"),
    Column("scenario", "", "scenario; empty where the rule is about all of them"),
    Column("verdict", "", "`pass`, `accepted`, `undecided`, `not comparable`, `crashed` or "
           "`regression`"),
    Column("baseline_ratio", "", "candidate / base in the baseline, median over processes"),
    Column("run_ratio", "", "the same in the run"),
    Column("change_percent", "%", "how much more the run has"),
    Column("change_low_percent", "%", "lower end of its interval; empty where there is none"),
    Column("change_high_percent", "%", "upper end of its interval; empty where there is none"),
    Column("limit_percent", "%", "the limit that applied, for rules in %"),
    Column("baseline_ms", "ms", "time of the candidate in the baseline (rules in us or ms)"),
    Column("run_ms", "ms", "the same in the run"),
    Column("change_ms", "ms", "how much more the run has"),
    Column("change_low_ms", "ms", "lower end of its interval"),
    Column("change_high_ms", "ms", "upper end of its interval"),
    Column("limit_ms", "ms", "the limit that applied, for rules in us or ms"),
    Column("baseline_percent", "%", "share in the baseline (full_share)"),
    Column("run_percent", "%", "the same in the run"),
    Column("baseline_count", "", "count in the baseline (drift, contracts)"),
    Column("run_count", "", "the same in the run"),
    Column("limit_count", "", "the largest count allowed"),
    Column("confidence", "", "of the interval, as a fraction"),
    Column("num_baseline_processes", "", "processes behind the baseline's number"),
    Column("num_run_processes", "", "processes behind the run's number"),
    Column("num_needed_processes", "", "of an undecided finding: processes that would decide it"),
    Column("num_needed_of_both", "", "of one that the baseline is too small for: processes of each "
           "side"),
    Column("accepted_until", "", "last day of the acceptance that applied"),
    Column("accepted_reason", "", "its reason"),
    Column("why", "", "the facts in one sentence"),
    Column("next_step", "", "the command that shows where numbers went wrong"),
)  # fmt: skip
