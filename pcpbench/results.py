"""What a comparison found: the frozen result that session builds and every report renders.

Owns the shape of a result and its outcome. Times are seconds. Knows neither engine nor report.
A speed-up can only be read from a scenario whose outcome is PASS (HOUSE rule 9): `Ratio` values are
None otherwise.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from pcpbench.divergence import Divergence
from pcpbench.records import Difference, Drift, Environment, NonFinite, Notice, Violation


class Outcome(Enum):
    """Of a scenario or a whole comparison; `exit_code` is the process's."""

    PASS = "pass"
    FAIL = "fail"
    NOT_COMPARED = "not compared"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 a broken contract, 3 could not measure."""
        return {"pass": 0, "fail": 1, "not compared": 3}[self.value]


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """A sample in seconds: mean, median, population std, p99 (linear), and its size."""

    mean: float
    median: float
    std: float
    p99: float
    num_samples: int


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """candidate / base, measured side by side: the median over pairs with a 95 % interval."""

    median: float
    low: float
    high: float
    num_pairs: int


class BatchClass(msgspec.Struct, frozen=True, kw_only=True):
    """Batches that are alike for dispatch and of which none ran as the arm was configured.

    name: such as `decode with 9 requests`. wanted: `FULL` or `PIECEWISE`, what the arm's mode has
    for such batches. ran_as: what they ran as instead, `eager` or a mode, most frequent first.
    """

    name: str
    wanted: str
    ran_as: tuple[str, ...]
    num_steps: int
    why: str


class DispatchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps of one arm ran as, counted.

    modes: `FULL`, `PIECEWISE`, `NONE` (eager) and `IDLE`. reasons: why FULL did not serve steps.
    steps_ranks_disagree: steps in which ranks chose different descriptors.
    steps_larger_than_needed: steps that ran a graph though a smaller one of its mode covers them;
    excess_tokens: padding tokens that this cost, over all ranks. never_served: see BatchClass.
    """

    modes: dict[str, int]
    reasons: dict[str, int]
    steps_ranks_disagree: int
    steps_larger_than_needed: int
    excess_tokens: int
    never_served: tuple[BatchClass, ...] = ()


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of one scenario.

    arm: as asked (`full`), or `eager_padded[full]` for the twin padded like that arm.
    steps_full, steps_piecewise, steps_none: steps served as each. steps_idle: dummy steps.
    steps_cut: steps that ran as two microbatches.
    decode_steps: steps without prefill. coverable: decode steps that a captured size covers,
    0 for an arm that never replays; coverable_full: those that FULL served. miss_reasons: why FULL
    did not serve steps, counted. real_tokens, padded_tokens: rank-local tokens summed over ranks
    and steps, before and after padding. num_draft_tokens, num_accepted_tokens: drafts verified, and
    those of them accepted. tpot, itl, ttft, step, launch, kernel: times in seconds, None where not
    measured. dispatch: the audit of its dispatch, None where nobody made one. num_graphs: captured
    descriptors. capture_s: what capturing them took, warm-ups included; None for an arm with none.
    """

    arm: str
    num_steps: int
    num_requests: int
    num_output_tokens: int
    steps_full: int
    steps_piecewise: int
    steps_none: int
    steps_idle: int
    decode_steps: int
    coverable: int
    coverable_full: int
    miss_reasons: dict[str, int]
    real_tokens: int
    padded_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    steps_cut: int = 0
    tpot: Stat | None = None
    itl: Stat | None = None
    ttft: Stat | None = None
    step: Stat | None = None
    launch: Stat | None = None
    kernel: Stat | None = None
    dispatch: DispatchSummary | None = None
    num_graphs: int = 0
    capture_s: float | None = None

    @property
    def padding_waste(self) -> float | None:
        """Share of executed tokens that were padding."""
        if not self.padded_tokens:
            return None
        return 1.0 - self.real_tokens / self.padded_tokens


class DriftSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Worst drift of one kind (`partition`, `padding`, `capture`) between two arms.

    num_steps_compared: steps with common outputs; 0 makes the scenario NOT_COMPARED.
    top1_agreement, kl: of the next-token distribution; None where nothing was sampled.
    max_relative, max_cosine_gap: the two measures that a budget is on, each the largest over all
    tensors and steps for which it can be formed. limit_relative, limit_cosine_gap: the
    budget; None for capture drift, which must be bit for bit.
    """

    kind: str
    arm: str
    twin: str
    num_steps_compared: int
    worst: Drift
    top1_agreement: float | None
    token_mismatches: int
    max_kl: float | None
    ok: bool
    max_relative: float | None = None
    max_cosine_gap: float | None = None
    limit_relative: float | None = None
    limit_cosine_gap: float | None = None


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything found on one scenario.

    violations: the first few of each contract and arm. num_violations: contract id -> all of them,
    counted over the arms; empty where nobody counted. non_finite: the first of each arm.
    """

    scenario: str
    outcome: Outcome
    reasons: tuple[str, ...]
    arms: tuple[ArmSummary, ...]
    drifts: tuple[DriftSummary, ...]
    violations: tuple[Violation, ...]
    first_differences: tuple[Difference, ...]
    tpot_ratio: Ratio | None = None
    itl_ratio: Ratio | None = None
    launch_ratio: Ratio | None = None
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    num_violations: dict[str, int] = {}
    non_finite: tuple[NonFinite, ...] = ()


class StepDrift(msgspec.Struct, frozen=True, kw_only=True):
    """Worst drift of one step of one arm against its twin; rows of steps.csv."""

    kind: str
    arm: str
    twin: str
    step: int
    worst: Drift


class PlaceDrift(msgspec.Struct, frozen=True, kw_only=True):
    """Worst drift of one tensor of one step over all ranks; rows of drift.csv.

    layer: of a `kv_cache`, None for what lies behind the last layer.
    """

    kind: str
    arm: str
    twin: str
    step: int
    layer: int | None
    worst: Drift


class StepAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one arm as dispatch and contracts see it; rows of steps.csv.

    smallest: label of the smallest captured descriptor that serves it, None where none does.
    rank_choices: label of each rank's choice, in rank order. excess_tokens: padding tokens over
    all ranks that a smaller graph would have saved. violated_contracts: all that broke in it.
    """

    arm: str
    step: int
    smallest: str | None
    rank_choices: tuple[str, ...]
    excess_tokens: int
    violated_contracts: tuple[str, ...] = ()


class CompareResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench compare`: base against candidate over scenarios.

    divergence: the first difference of the first scenario that failed, if it could be looked for.
    """

    base: str
    candidate: str
    outcome: Outcome
    reasons: tuple[str, ...]
    scenarios: tuple[ScenarioResult, ...]
    settings: dict[str, Any]
    environment: Environment
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    run_dir: str = ""
    divergence: Divergence | None = None


def overall(scenarios: tuple[ScenarioResult, ...]) -> tuple[Outcome, tuple[str, ...]]:
    """The outcome over scenarios: any FAIL fails; nothing compared is never a pass."""
    if not scenarios:
        return Outcome.NOT_COMPARED, ("no scenario was run",)
    for outcome in (Outcome.FAIL, Outcome.NOT_COMPARED):
        hit = [s for s in scenarios if s.outcome is outcome]
        if hit:
            return outcome, tuple(f"{s.scenario}: {r}" for s in hit for r in s.reasons)
    return Outcome.PASS, ()


class CapturedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """One captured descriptor.

    descriptor: its label. mode: `FULL` or `PIECEWISE`. num_reqs: None without request padding.
    num_ops: operations (host) or nodes (accelerator) of one replay. num_segments: graphs it was
    cut into; eager_breaks: eager calls between them. pool_bytes_after: size of the shared pool once
    it was captured. num_reads, num_writes: storages outside the pool that it reads and writes.
    """

    descriptor: str
    mode: str
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None
    capture_s: float
    num_ops: int
    num_segments: int
    eager_breaks: int
    pool_bytes_after: int
    num_reads: int
    num_writes: int
    max_query_len: int | None = None


class AddressUse(msgspec.Struct, frozen=True, kw_only=True):
    """One storage outside the pool that one captured descriptor touches.

    graph: the descriptor's label. name: the persistent buffer that owns it, None when nobody does.
    address, num_bytes: of the storage. shape, dtype: of the tensor as the first op saw it.
    op, source: the first op that touched it and its `file.py:line`.
    """

    graph: str
    name: str | None
    address: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    reads: bool
    writes: bool
    op: str
    source: str


class CaptureResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench capture`. mode: the configured graph mode, such as `full_decode_only`."""

    mode: str
    graphs: tuple[CapturedGraph, ...]
    addresses: tuple[AddressUse, ...]
    pool_bytes: int
    settings: dict[str, Any]
    environment: Environment
    notices: tuple[Notice, ...] = ()
    wall_s: float = 0.0
    run_dir: str = ""

    @property
    def unowned(self) -> tuple[AddressUse, ...]:
        """Uses of memory that no persistent buffer owns."""
        return tuple(use for use in self.addresses if use.name is None)

    @property
    def outcome(self) -> Outcome:
        """FAIL if a graph touches what nobody owns; capturing nothing is never a pass."""
        if self.unowned:
            return Outcome.FAIL
        return Outcome.PASS if self.graphs else Outcome.NOT_COMPARED

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the outcome is not PASS."""
        if self.unowned:
            graphs = len({use.graph for use in self.unowned})
            spots = len({(use.op, use.source, use.address) for use in self.unowned})
            return (f"{graphs} of {len(self.graphs)} graphs touch {spots} unowned buffers",)
        return () if self.graphs else ("no graph was captured",)


class Ability(Enum):
    """Whether something can run on this machine."""

    OK = "ok"
    LIMITED = "limited"
    NO = "no"


class DoctorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can or cannot run here, and why (with what would change it)."""

    what: str
    status: Ability
    why: str


class HostChange(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is set or changed around vLLM where there is no accelerator, and why."""

    name: str
    how: str
    what: str
    why: str


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `pcpbench doctor` found. devices: one line each, the default first.

    changes: what the vLLM target needs here; nothing on a GPU, or without vLLM.
    """

    environment: Environment
    devices: tuple[str, ...]
    rows: tuple[DoctorRow, ...]
    changes: tuple[HostChange, ...] = ()
