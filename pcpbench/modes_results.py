"""What a task run in several graph modes found: frozen values that reports render.

Owns the shape of a result and what follows for the exit code. Times are seconds. Knows no engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pcpbench.records import Environment, Notice
from pcpbench.results import Outcome, Ratio, Stat


class TokenTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One token that a mode sampled differently from NONE, and where that comes from.

    request, token_index: whose token, and which of its outputs, from 0. step: of the plan.
    none_token, mode_token: what each sampled. gap: how much higher NONE held its own token's logit.
    drift: largest difference of a logit of that row between NONE and the eager arm that is padded
    like the mode, fed the same tokens up to there. own_drift: the same between NONE and the mode
    itself. limit: what the padding budget allows either. All None where they cannot be formed.
    why: why it is not explained, "" where it is.
    """

    mode: str
    request: str
    token_index: int
    step: int
    none_token: int
    mode_token: int
    gap: float | None = None
    drift: float | None = None
    own_drift: float | None = None
    limit: float | None = None
    why: str = ""

    @property
    def explained(self) -> bool:
        """Whether padding drift alone can have flipped the token."""
        return not self.why


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How many of something ran as each kind of step; idle steps are left out."""

    full: int = 0
    piecewise: int = 0
    none: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.full + self.piecewise + self.none

    def share(self, kind: str) -> float | None:
        """The part that ran as `full`, `piecewise` or `none`; None of nothing."""
        count: int = getattr(self, kind)
        return count / self.total if self.total else None


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one mode.

    tokens_per_s: output tokens over the time of all steps, one value a repetition. Ratios are
    mode / NONE, formed side by side in one run; None for NONE itself.
    """

    tpot: Stat | None = None
    ttft: Stat | None = None
    step: Stat | None = None
    launch: Stat | None = None
    tokens_per_s: tuple[float, ...] = ()
    tpot_ratio: Ratio | None = None
    ttft_ratio: Ratio | None = None
    step_ratio: Ratio | None = None
    launch_ratio: Ratio | None = None
    throughput_ratio: Ratio | None = None


class ModeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One graph mode.

    mode: by its name, such as `FULL_DECODE_ONLY`; arm: its label in records. num_tokens: outputs;
    num_equal: those equal to NONE's at the same place. num_requests, num_requests_equal: whole
    generations. first: the first token that differs, by step. steps, tokens: steps and scheduled
    tokens by what served them. speed: None where the mode's tokens were not judged sound, or
    nothing was timed.
    """

    mode: str
    arm: str
    num_tokens: int
    num_equal: int
    num_requests: int
    num_requests_equal: int
    steps: Served
    tokens: Served
    first: TokenTrace | None = None
    num_traced: int = 0
    num_unexplained: int = 0
    speed: Speed | None = None

    @property
    def agreement(self) -> float | None:
        """Share of tokens that equal NONE's; None without tokens."""
        return self.num_equal / self.num_tokens if self.num_tokens else None


class ModesResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench modes`. rows: NONE first. traces: of every mode, in the order of their steps.

    judged_reasons: what the contracts and drifts of the same run were accused of.
    """

    outcome: Outcome
    reasons: tuple[str, ...]
    rows: tuple[ModeRow, ...]
    traces: tuple[TokenTrace, ...]
    num_steps: int
    settings: dict[str, Any]
    environment: Environment
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    run_dir: str = ""
