"""Is an engine's generation that of its twin, and did the engine run as its arm says?

Owns the comparison of tokens and log-probabilities of whole engines, and its verdict. Reads what
engines told; knows no engine.

Both sides generate greedily, each from its own tokens. Up to a request's first differing token both
stand on the same context, so up to and including that token's row their log-probabilities can be
compared; behind it they cannot.

A log-probability is a logit less the log of the row's sum of exponentials. Where no logit moves by
more than d, that log does not either, so a log-probability moves by at most 2 d: with the budget
of 1e-4 x rms and an rms of 3 that is 6e-4. The rms is that of the twin's row about its mean, which
is not larger than the logits' own. A token may flip within that: two candidates 5e-4 apart can
change places, two that are 0.3 apart cannot.

In 16 bits that is wide: 1.8 in bfloat16, below which most rows have their two likeliest tokens. So
the middle row, too, has a limit (budgets.py), 0.37: noise that lets it through flips one token in
17, where noise within the worst row's limit alone flips one in five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pcpbench.checks.budgets import logit_gap_allowed, typical_gap_allowed
from pcpbench.engine_results import ArmRun, Flip, Generated, WorkerInfo

Row = NDArray[np.float64]

MIN_COMPARED = 0.5
"""Share of the output tokens that must be compared for an arm to count as compared."""


@dataclass(frozen=True)
class Ordered:
    """What an arm was to do.

    output_lens: tokens to generate, by request. num_ranks, pcp_size, dcp_size: of its world.
    cudagraph_mode: vLLM's name. replays: runtime modes, such as FULL, of which each must have
    served a step. fault: name of what was planted.
    """

    output_lens: dict[str, int]
    num_ranks: int
    pcp_size: int
    dcp_size: int = 1
    cudagraph_mode: str = "NONE"
    replays: tuple[str, ...] = ()
    fault: str = ""


@dataclass
class Tokens:
    """How an arm's judged generation compares with its twin's."""

    num_equal: int = 0
    num_requests_equal: int = 0
    num_tokens: int = 0
    num_rows: int = 0
    max_dlogprob: float | None = None
    limit: float | None = None
    dlogprob_at: str = ""
    median_dlogprob: float | None = None
    median_limit: float | None = None
    num_same_top: int = 0
    max_kl: float | None = None
    flips: tuple[Flip, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def top1_agreement(self) -> float | None:
        """Share of compared rows whose likeliest token is the twin's."""
        return self.num_same_top / self.num_rows if self.num_rows else None

    @property
    def why_too_few(self) -> str:
        """Why this is too little to be called a comparison, "" where it is not."""
        if not self.num_rows:
            return "nothing of it could be compared"
        if self.num_rows >= MIN_COMPARED * self.num_tokens:
            return ""
        return (
            f"only {self.num_rows} of {self.num_tokens} output tokens were compared, less than "
            f"{MIN_COMPARED:.0%}, since the others lie behind their request's first differing "
            "token: use --dtype float32, in which fewer tokens differ, or another --seed"
        )


def why_not_as_asked(run: ArmRun, order: Ordered) -> list[str]:
    """Why an arm's run is no run of that arm, so that nothing may be concluded from it."""
    arm = run.arm
    if len(run.workers) != order.num_ranks:
        return [f"{arm}: {len(run.workers)} workers told of themselves, not {order.num_ranks}"]
    found = [f"{arm}: {why}" for worker in run.workers for why in _unlike_ordered(worker, order)]
    for counts in run.judged.workers:
        if not counts.steps:
            found.append(f"{arm}: rank {counts.rank} executed no step")
        elif order.pcp_size > 1 and counts.partitioned < counts.steps:
            found.append(
                f"{arm}: rank {counts.rank} cut {counts.partitioned} of {counts.steps} steps over "
                "the PCP ranks"
            )
        found += [
            f"{arm}: no step of rank {counts.rank} ran as {mode}: {_in_words(counts.modes)}"
            for mode in order.replays
            if counts.steps and not counts.modes.get(mode)
        ]
        if not order.replays and any(m != "NONE" for m in counts.modes):
            found.append(f"{arm}: ran graphs though it is eager: {_in_words(counts.modes)}")
    if order.fault and not sum(counts.faulted for counts in run.judged.workers):
        found.append(f"{arm}: the planted fault {order.fault} never acted, so this proves nothing")
    return found


def _unlike_ordered(worker: WorkerInfo, order: Ordered) -> list[str]:
    """What a worker is that the arm is not."""
    found = []
    if worker.pcp_size != order.pcp_size or worker.pcp_manager != (order.pcp_size > 1):
        found.append(
            f"rank {worker.rank} runs with PCP size {worker.pcp_size} "
            f"({'a' if worker.pcp_manager else 'no'} PCP manager), not {order.pcp_size}"
        )
    if worker.dcp_size != order.dcp_size:
        found.append(f"rank {worker.rank} runs with DCP size {worker.dcp_size}, not "
                     f"{order.dcp_size}")  # fmt: skip
    if worker.cudagraph_mode != order.cudagraph_mode:
        found.append(
            f"rank {worker.rank} came up with cudagraph_mode {worker.cudagraph_mode}, not "
            f"{order.cudagraph_mode}"
        )
    return found


def _in_words(modes: dict[str, int]) -> str:
    return ", ".join(f"{count} {mode}" for mode, count in modes.items()) or "nothing dispatched"


def own_failures(run: ArmRun, order: Ordered) -> list[str]:
    """What an arm did wrong by itself, so that it cannot be held against its twin.

    Tokens missing, rows missing or not finite, a token that is not its own row's likeliest.
    """
    judged = {each.request: each for each in run.judged.requests}
    found = []
    for name, length in order.output_lens.items():
        mine = judged.get(name)
        if mine is None or len(mine.tokens) != length:
            got = "no output" if mine is None else f"{len(mine.tokens)} tokens"
            found.append(f"{run.arm}: {name} has {got}, not the {length} tokens ordered")
            continue
        found += _row_failures(run.arm, mine)
    return found


def unlike_again(run: ArmRun, kind: str, dtype: str) -> list[str]:
    """Where a later generation of one engine left the judged one for more than a tie.

    The scheduler may form other batches each time, so drifts of a budget are allowed here, too.
    """
    judged = {each.request: each for each in run.judged.requests}
    found = []
    for later in run.timed:
        for each in later.requests:
            mine = judged.get(each.request)
            if mine is None or each.tokens == mine.tokens:
                continue
            found += _again(run.arm, mine, each.tokens, later.repetition, kind, dtype)
    return found


def _row_failures(arm: str, mine: Generated) -> list[str]:
    if mine.logprobs is None or len(mine.logprobs) != len(mine.tokens):
        return [f"{arm}: {mine.request} has no log-probabilities for each of its tokens"]
    for index, token in enumerate(mine.tokens):
        row = _row(mine, index)
        if not np.isfinite(row).all():
            return [
                f"{arm}: {mine.request} token {index}: a log-probability is missing or not finite"
            ]
        if not 0 <= token < len(row) or row[token] < row.max():
            return [
                f"{arm}: {mine.request} token {index} is {token}, not the likeliest of its own "
                f"row, {int(row.argmax())}"
            ]
    return []


def _again(
    arm: str, mine: Generated, tokens: Sequence[int], repetition: int, kind: str, dtype: str
) -> list[str]:
    where = f"{arm}: {mine.request}, run again (generation {repetition})"
    index = _first_difference(mine.tokens, tokens)
    if index is None:
        return [f"{where}, has {len(tokens)} tokens, not {len(mine.tokens)}"]
    row = _row(mine, index)
    if not 0 <= tokens[index] < len(row):
        return [f"{where}, sampled {tokens[index]}, which is outside the vocabulary"]
    gap = float(row[mine.tokens[index]] - row[tokens[index]])
    allowed = logit_gap_allowed(kind, dtype, _rms(row))
    if gap <= allowed:
        return []
    return [
        f"{where}, sampled {tokens[index]} for {mine.tokens[index]} as token {index}, {gap:.3g} "
        f"less likely (at most {allowed:.3g})"
    ]


def compare_tokens(twin: ArmRun, run: ArmRun, kind: str, dtype: str) -> Tokens:
    """Hold an arm's judged generation against its twin's; kind: the drift's, for its budget.

    Both must be without failures of their own: `own_failures`.
    """
    told = Tokens()
    flips: list[Flip] = []
    failures: list[str] = []
    rows: list[tuple[float, float, float]] = []
    theirs = {each.request: each for each in twin.judged.requests}
    for mine in run.judged.requests:
        told.num_tokens += len(mine.tokens)
        other = theirs[mine.request]
        told.num_equal += sum(a == b for a, b in zip(other.tokens, mine.tokens, strict=True))
        flip_at = _first_difference(other.tokens, mine.tokens)
        told.num_requests_equal += flip_at is None
        sizes = [{len(row) for row in each.logprobs or ()} for each in (other, mine)]
        if sizes[0] != sizes[1] or len(sizes[0]) > 1:
            failures.append(f"{run.arm}: {mine.request}: rows are not as long as the twin's")
            continue
        last = len(mine.tokens) - 1 if flip_at is None else flip_at
        for index in range(last + 1):
            why = _add_row(told, other, mine, index, kind, dtype)
            rows.append(_typical(_row(other, index), _row(mine, index), kind, dtype))
            if why and not failures:
                failures.append(f"{run.arm}: {why}")
        if flip_at is not None:
            flips.append(_flip(other, mine, flip_at, kind, dtype))
    if rows:
        _, drift, limit = sorted(rows)[len(rows) // 2]
        told.median_dlogprob, told.median_limit = drift, limit
        if drift > limit and not failures:
            failures.append(
                f"{run.arm}: half of the {len(rows)} rows have a log-probability that is as far "
                f"from the twin's as {drift:.3g} (at most {limit:.3g} in the middle row)"
            )
    told.flips, told.failures = tuple(flips), tuple(failures)
    return told


def _add_row(
    told: Tokens, other: Generated, mine: Generated, index: int, kind: str, dtype: str
) -> str:
    """Count one row; returns why its drift is not allowed, "" where it is."""
    twin, own = _row(other, index), _row(mine, index)
    told.num_rows += 1
    told.num_same_top += int(twin.argmax() == own.argmax())
    drift, limit = _drift(twin, own), logit_gap_allowed(kind, dtype, _rms(twin))
    kl = float((np.exp(twin) * (twin - own)).sum())
    told.max_kl = kl if told.max_kl is None else max(told.max_kl, kl)
    where = f"{mine.request} token {index}"
    if told.max_dlogprob is None or drift > told.max_dlogprob:
        told.max_dlogprob, told.limit, told.dlogprob_at = drift, limit, where
    if drift <= limit:
        return ""
    return f"{where}: a log-probability is {drift:.3g} from the twin's (at most {limit:.3g})"


def _typical(twin: Row, own: Row, kind: str, dtype: str) -> tuple[float, float, float]:
    """(drift / limit, drift, limit) of one row, its limit that of the middle row."""
    drift, limit = _drift(twin, own), typical_gap_allowed(kind, dtype, _rms(twin))
    return (drift / limit if limit else float(drift > 0.0), drift, limit)


def _flip(other: Generated, mine: Generated, index: int, kind: str, dtype: str) -> Flip:
    twin, own = _row(other, index), _row(mine, index)
    drift, limit = _drift(twin, own), logit_gap_allowed(kind, dtype, _rms(twin))
    gap = float(twin[other.tokens[index]] - twin[mine.tokens[index]])
    why = ""
    if drift > limit:
        why = f"the row's drift {drift:.3g} is over its budget {limit:.3g}"
    elif gap > limit:
        why = f"the gap {gap:.3g} is wider than the {limit:.3g} that the budget can close"
    return Flip(
        request=mine.request,
        token_index=index,
        twin_token=other.tokens[index],
        token=mine.tokens[index],
        gap=gap,
        drift=drift,
        limit=limit,
        why=why,
    )


def _row(of: Generated, index: int) -> Row:
    assert of.logprobs is not None  # own_failures has seen to it
    return np.array(of.logprobs[index], dtype=np.float64)  # None becomes nan


def _rms(row: Row) -> float:
    return float(np.sqrt(np.square(row - row.mean()).mean()))


def _drift(twin: Row, own: Row) -> float:
    return float(np.abs(own - twin).max())


def _first_difference(twin: Sequence[int], own: Sequence[int]) -> int | None:
    """Index of the first unequal token; None where the common part is equal."""
    pairs = zip(twin, own, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), None)
