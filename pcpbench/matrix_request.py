"""`pcpbench matrix` as it was asked: frozen, and checked before anything runs. No torch.

Owns which options are settings of the run (a resumed run must have the same) and their defaults.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec

from pcpbench.config import DTYPES, MAX_SPECULATIVE_TOKENS
from pcpbench.errors import UsageError
from pcpbench.matrix_cells import (
    MICROBATCHES,
    MODELS,
    PARALLELS,
    SPEC_TOKENS,
    Cell,
    Parallel,
    all_cells,
)
from pcpbench.request import CHECKS
from pcpbench.scenarios.loader import choose_scenarios

MAX_JOBS = 64


class MatrixSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides a cell's verdict. scenarios: name -> digest of what it says."""

    parallel: tuple[str, ...]
    spec_tokens: tuple[int, ...]
    microbatch: tuple[str, ...]
    model: tuple[str, ...]
    scenario: tuple[str, ...]
    scenarios: dict[str, str]
    dtype: str
    checks: str
    seed: int
    device: str
    faults: bool
    inject: str | None

    @property
    def cells(self) -> list[Cell]:
        """The cells, in the order in which they run."""
        return all_cells(self.parallel, self.spec_tokens, self.microbatch, self.model)


class MatrixRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One `pcpbench matrix`. None and empty: not typed, so the default or the resumed run's.

    jobs: cells that run at once. max_time: seconds after which no cell goes on. resume: the
    directory of an earlier run.
    """

    parallel: tuple[str, ...] = ()
    spec_tokens: tuple[int, ...] = ()
    microbatch: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    scenario: tuple[str, ...] = ()
    dtype: str | None = None
    checks: str | None = None
    seed: int | None = None
    device: str | None = None
    faults: bool | None = None
    inject: str | None = None
    jobs: int = 1
    max_time: float | None = None
    resume: Path | None = None
    json: bool = False
    out: Path | None = None

    def check(self) -> None:
        """Raise UsageError or ScenarioError for values that are wrong whatever the machine is."""
        for name in self.parallel:
            Parallel.parse(name)
        for k in self.spec_tokens:
            if not 0 <= k <= MAX_SPECULATIVE_TOKENS:
                raise UsageError(f"--k is {k}: use 0 to {MAX_SPECULATIVE_TOKENS} draft tokens.")
        for flag, values, allowed in (
            ("--microbatch", self.microbatch, MICROBATCHES),
            ("--model", self.model, MODELS),
            ("--dtype", _given(self.dtype), DTYPES),
            ("--check", _given(self.checks), CHECKS),
        ):
            for value in values:
                if value not in allowed:
                    raise UsageError(f"{flag} is {value!r}: use one of {', '.join(allowed)}.")
        self._check_how()
        choose_scenarios(self.scenario or ("all",))

    def _check_how(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}: use a whole number from 0 to 2^63 - 1.")
        if not 1 <= self.jobs <= MAX_JOBS:
            raise UsageError(f"--jobs is {self.jobs}: use 1 to {MAX_JOBS} cells at once.")
        if self.max_time is not None and not (math.isfinite(self.max_time) and self.max_time > 0):
            raise UsageError(f"--max-time is {self.max_time:g}: use a number of seconds above 0.")
        if self.resume is not None and self.out is not None:
            raise UsageError(
                f"--out is {str(self.out)!r} with --resume {str(self.resume)!r}: a resumed run "
                "goes on in its own directory, so leave --out out."
            )

    @property
    def typed(self) -> dict[str, Any]:
        """The settings that were typed."""
        names = [name for name in MatrixSettings.__struct_fields__ if name != "scenarios"]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value not in (None, ())}

    def settings(self) -> MatrixSettings:
        """The settings of a new run."""
        defaults = {
            "parallel": PARALLELS,
            "spec_tokens": SPEC_TOKENS,
            "microbatch": MICROBATCHES,
            "model": MODELS,
            "scenario": ("all",),
            "dtype": "float32",
            "checks": "quick",
            "seed": 0,
            "device": "auto",
            "faults": False,
            "inject": None,
        }
        chosen = {**defaults, **self.typed}
        return MatrixSettings(**chosen, scenarios=scenario_digests(chosen["scenario"]))


def scenario_digests(names_or_files: tuple[str, ...]) -> dict[str, str]:
    """What each scenario says, as a digest by name; raises ScenarioError."""
    encoder = msgspec.json.Encoder(order="deterministic")
    return {
        scenario.name: hashlib.sha256(encoder.encode(scenario)).hexdigest()[:16]
        for scenario in choose_scenarios(names_or_files)
    }


def _given(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)
