"""What `compare --target engine` saw of each engine, and what it found: frozen values.

Owns the shape of the events that an engine's process tells, of one arm's run, and of the result.
Times are seconds. Knows neither vLLM nor how a process is run.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pcpbench.records import Environment, Notice
from pcpbench.results import Outcome, Ratio, Stat


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What an interpreter has. error: why vLLM cannot be imported there, "" where it can.

    platform: `cuda`, `cpu` or `other`, as vLLM chose it. has_pcp: whether its engine takes a
    prefill context parallel size and its V2 model runner has a PCP manager.
    """

    python: str
    versions: dict[str, str] = {}
    error: str = ""
    platform: str = "other"
    platform_class: str = ""
    num_devices: int = 0
    device_name: str = ""
    has_pcp: bool = False
    has_triton: bool = False


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process of an engine.

    runner: class of its model runner. cudagraph_mode: what its graph manager came up with.
    """

    rank: int
    runner: str
    pcp_manager: bool
    pcp_size: int
    dcp_size: int
    cudagraph_mode: str


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one worker over one generation.

    modes: steps by what dispatch chose for them. partitioned: steps that the PCP manager cut over
    its ranks; of these, mixed: with prefills and decodes; continued: with a prefill that had begun
    before; uneven: ranks with unequal tokens; empty: some rank without a token; faulted: in which
    the planted fault changed something.
    """

    rank: int
    steps: int = 0
    modes: dict[str, int] = {}
    partitioned: int = 0
    mixed: int = 0
    uneven: int = 0
    empty: int = 0
    continued: int = 0
    faulted: int = 0


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """One request's generation.

    logprobs: for each output token log-probabilities of the whole vocabulary, in natural logs, None
    for a token that the engine gave none for; None where they were not asked for. tpot_s: None for
    one token, ttft_s: from the request's arrival; both None where the engine kept no times.
    """

    request: str
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[float | None, ...], ...] | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Started(msgspec.Struct, frozen=True, tag_field="event", tag="started"):
    """The process runs. versions: of the packages that it has."""

    pid: int
    versions: dict[str, str]


class Ready(msgspec.Struct, frozen=True, tag_field="event", tag="ready"):
    """The engine has started, and its workers are watched."""

    init_s: float
    workers: tuple[WorkerInfo, ...]


class Generation(msgspec.Struct, frozen=True, tag_field="event", tag="generated"):
    """All prompts were run to their ends once. repetition 0 is judged, later ones are timed."""

    repetition: int
    wall_s: float
    requests: tuple[Generated, ...]
    workers: tuple[StepCounts, ...]


class Done(msgspec.Struct, frozen=True, tag_field="event", tag="done"):
    """Everything that was ordered has been told."""


class Broke(msgspec.Struct, frozen=True, tag_field="event", tag="error"):
    """An exception ended the run. kind: its class."""

    kind: str
    message: str


Event = Started | Ready | Generation | Done | Broke


class ArmRun(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's engine from start to end. generations: repetition 0 first."""

    arm: str
    init_s: float
    workers: tuple[WorkerInfo, ...]
    generations: tuple[Generation, ...]
    versions: dict[str, str] = {}

    @property
    def judged(self) -> Generation:
        """The generation with log-probabilities."""
        return self.generations[0]

    @property
    def timed(self) -> tuple[Generation, ...]:
        """The generations whose times count."""
        return self.generations[1:]


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of a request that differs from the twin's.

    gap: how much higher the twin held its own token's log-probability. drift: largest difference of
    a log-probability of that row; limit: what the budget allows. All None where a row is missing.
    why: why the drift does not explain it, "" where it does.
    """

    request: str
    token_index: int
    twin_token: int
    token: int
    gap: float | None = None
    drift: float | None = None
    limit: float | None = None
    why: str = ""


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One arm against its twin; twin None for the first arm of the ladder.

    num_equal: tokens equal to the twin's at the same place; num_requests_equal: whole generations.
    num_rows: rows of log-probabilities compared: of each request up to its first differing token.
    max_dlogprob: largest difference over them, limit: the budget of that row; dlogprob_at: where.
    median_dlogprob: largest difference of the middle row, median_limit: the budget of that row.
    top1_agreement: share of these rows whose likeliest token is the twin's. max_kl: largest
    KL(twin || arm) in nats. counts: of the judged generation, of rank 0. tpot, ttft: over requests
    and timed generations. tpot_ratio, ttft_ratio: to the base arm; None unless all passed.
    """

    arm: str
    twin: str | None
    kind: str | None
    num_ranks: int
    pcp_size: int
    cudagraph_mode: str
    num_requests: int
    num_tokens: int
    counts: StepCounts
    init_s: float
    num_equal: int = 0
    num_requests_equal: int = 0
    num_rows: int = 0
    max_dlogprob: float | None = None
    limit: float | None = None
    dlogprob_at: str = ""
    median_dlogprob: float | None = None
    median_limit: float | None = None
    top1_agreement: float | None = None
    max_kl: float | None = None
    flips: tuple[Flip, ...] = ()
    tpot: Stat | None = None
    ttft: Stat | None = None
    tpot_ratio: Ratio | None = None
    ttft_ratio: Ratio | None = None

    @property
    def agreement(self) -> float | None:
        """Share of tokens that equal the twin's; None where nothing was compared."""
        return self.num_equal / self.num_tokens if self.num_rows else None


class EngineResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench compare --target engine`. arms: in the order of the ladder."""

    base: str
    candidate: str
    outcome: Outcome
    reasons: tuple[str, ...]
    arms: tuple[ArmResult, ...]
    settings: dict[str, Any]
    environment: Environment
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    run_dir: str = ""
