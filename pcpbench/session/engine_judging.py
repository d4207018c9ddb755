"""From what engines told to rows and a verdict. Owns the order of judging and the arithmetic of
times; what is a fault is said in checks/engine_arms.py. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from pcpbench.checks.engine_arms import (
    Ordered,
    Tokens,
    compare_tokens,
    own_failures,
    unlike_again,
    why_not_as_asked,
)
from pcpbench.checks.stats import ratio_of, stat_of
from pcpbench.engine_request import EngineArm
from pcpbench.engine_results import ArmResult, ArmRun
from pcpbench.results import Outcome, Ratio

Samples = dict[tuple[str, int], float]
"""Seconds by (request, repetition)."""


class Verdict:
    """The outcome over all arms, with its reasons, and a row for each arm."""

    def __init__(
        self, arms: Sequence[EngineArm], output_lens: Mapping[str, int], dtype: str, fault: str = ""
    ) -> None:
        self._arms, self._lens, self._dtype, self._fault = arms, dict(output_lens), dtype, fault
        self.outcome = Outcome.NOT_COMPARED
        self.reasons: tuple[str, ...] = ()
        self.rows: tuple[ArmResult, ...] = ()

    def judge(self, runs: Mapping[str, ArmRun], base: str, candidate: str) -> None:
        """Judge the runs, by the arms' labels; afterwards the attributes hold what came of it."""
        unlike: list[str] = []
        failures: list[str] = []
        broken: set[str] = set()
        rows: list[ArmResult] = []
        for arm in self._arms:
            run = runs[arm.label]
            order = self._order(arm)
            unlike += why_not_as_asked(run, order)
            own = own_failures(run, order)
            failures += own[:1]
            broken |= {arm.label} if own else set()
            tokens = Tokens()
            if arm.twin is not None and not {arm.label, arm.twin} & broken:
                tokens = compare_tokens(runs[arm.twin], run, arm.kind, self._dtype)
                failures += _token_failures(tokens)
                if tokens.why_too_few:
                    unlike.append(f"{arm.label}: {tokens.why_too_few}")
            failures += [] if own else unlike_again(run, arm.kind, self._dtype)[:1]
            rows.append(_row(arm, run, tokens))
        self._conclude(failures, unlike, rows)
        if self.outcome is Outcome.PASS:
            rows = with_ratios(rows, runs, base, candidate)
        self.rows = tuple(rows)

    def _order(self, arm: EngineArm) -> Ordered:
        return Ordered(
            output_lens=self._lens,
            num_ranks=arm.num_ranks,
            pcp_size=arm.pcp,
            dcp_size=arm.dcp,
            cudagraph_mode=arm.cudagraph_mode,
            replays=arm.replays,
            fault=self._fault if arm.pcp > 1 else "",
        )

    def _conclude(
        self, failures: Sequence[str], unlike: Sequence[str], rows: Sequence[ArmResult]
    ) -> None:
        self.reasons = (*failures, *unlike)
        if failures:
            self.outcome = Outcome.FAIL
        elif unlike or not any(row.num_rows for row in rows):
            self.outcome = Outcome.NOT_COMPARED
            self.reasons = self.reasons or ("no two arms were compared",)
        elif self._fault:
            num_steps = sum(row.counts.faulted for row in rows)
            self.outcome = Outcome.NOT_COMPARED
            self.reasons = (
                f"the planted fault {self._fault} acted in {num_steps} steps and nothing was found "
                "of it",
            )
        else:
            self.outcome = Outcome.PASS


def _token_failures(tokens: Tokens) -> list[str]:
    """The first row over its budget, and how many tokens differ without an explanation."""
    if not tokens.failures:
        return [f"{flip.request} token {flip.token_index}: {flip.why}"
                for flip in tokens.flips if flip.why][:1]  # fmt: skip
    apart = [flip for flip in tokens.flips if flip.why]
    more = f"; {len(apart)} generations leave the twin's for it" if apart else ""
    return [tokens.failures[0] + more]


def _row(arm: EngineArm, run: ArmRun, tokens: Tokens) -> ArmResult:
    worker = run.workers[0] if run.workers else None
    requests = run.judged.requests
    return ArmResult(
        arm=arm.label,
        twin=arm.twin,
        kind=arm.kind if arm.twin else None,
        num_ranks=arm.num_ranks,
        pcp_size=arm.pcp,
        cudagraph_mode=arm.cudagraph_mode if worker is None else worker.cudagraph_mode,
        num_requests=len(requests),
        num_tokens=sum(len(each.tokens) for each in requests),
        counts=run.judged.workers[0],
        init_s=run.init_s,
        num_equal=tokens.num_equal,
        num_requests_equal=tokens.num_requests_equal,
        num_rows=tokens.num_rows,
        max_dlogprob=tokens.max_dlogprob,
        limit=tokens.limit,
        dlogprob_at=tokens.dlogprob_at,
        median_dlogprob=tokens.median_dlogprob,
        median_limit=tokens.median_limit,
        top1_agreement=tokens.top1_agreement,
        max_kl=tokens.max_kl,
        flips=tokens.flips,
        tpot=stat_of(list(_samples(run, "tpot_s").values())),
        ttft=stat_of(list(_samples(run, "ttft_s").values())),
    )


def with_ratios(
    rows: Sequence[ArmResult], runs: Mapping[str, ArmRun], base: str, candidate: str
) -> list[ArmResult]:
    """Rows with the candidate's times over the base's, paired by request and repetition."""
    return [
        replace(
            row,
            tpot_ratio=_ratio(runs[base], runs[candidate], "tpot_s"),
            ttft_ratio=_ratio(runs[base], runs[candidate], "ttft_s"),
        )
        if row.arm == candidate
        else row
        for row in rows
    ]


def _ratio(base: ArmRun, ours: ArmRun, name: str) -> Ratio | None:
    theirs, mine = _samples(base, name), _samples(ours, name)
    keys = [key for key in mine if theirs.get(key, 0.0) > 0.0]
    return ratio_of(
        np.array([mine[key] / theirs[key] for key in keys]),
        np.array([repetition for _, repetition in keys], dtype=np.int64),
    )


def _samples(run: ArmRun, name: str) -> Samples:
    return {
        (each.request, generation.repetition): value
        for generation in run.timed
        for each in generation.requests
        if (value := getattr(each, name)) is not None
    }
