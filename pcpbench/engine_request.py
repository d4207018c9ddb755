"""`compare --target engine` as it was asked: frozen, checked before any process is started.

Owns which arms whole engines can be, what each is held against, and which settings they take. Knows
neither vLLM nor a machine: what a machine cannot run is told by targets/engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pcpbench.errors import CannotMeasure, UsageError
from pcpbench.modes import ARM_MODES
from pcpbench.scenarios.loader import load_scenario
from pcpbench.scenarios.schema import Scenario
from pcpbench.scenarios.task_run import Span, task_scenario

LADDER: Final = ("reference", "eager", "piecewise", "full", "full_and_piecewise")
GRAPHS: Final = LADDER[2:]
FAULTS: Final = ("hidden-restore", "kv-writer")
"""Faults that child/engine_watch.py can plant."""

DEFAULT_TIMEOUT_S: Final = 600.0
MAX_TIMEOUT_S: Final = 86_400.0
MAX_RANKS: Final = 64
NUM_PROMPTS: Final = 12
PROMPT_LEN: Final = Span(1, 24)
OUTPUT_LEN: Final = Span(8, 14)
MAX_NUM_SEQS: Final = 4


class EngineArm(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. pcp, tp, dcp: its world. twin: the arm that it is held against.

    kind: the drift between them, by which its budget goes. cudagraph_mode: vLLM's name. replays:
    runtime modes that must each have served a step.
    """

    label: str
    pcp: int
    tp: int
    dcp: int
    cudagraph_mode: str
    twin: str | None
    kind: str
    replays: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """Processes of its world."""
        return self.pcp * self.tp


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Two arms of whole engines.

    python: the interpreter that has vLLM; None for this one. timeout_s: the longest that an engine
    may be silent. idle: flags given that whole engines have no use for, with their values.
    """

    base: str
    candidate: str
    pcp: int = 2
    tp: int = 1
    dcp: int = 1
    dtype: str = "float32"
    capture_sizes: tuple[int, ...] | None = None
    max_num_seqs: int | None = None
    scenarios: tuple[str, ...] = ()
    repetitions: int = 3
    seed: int = 0
    inject: str | None = None
    python: Path | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    idle: dict[str, Any] = {}
    json: bool = False
    out: Path | None = None

    def check(self) -> None:
        """Raise UsageError for what is wrong on any machine, CannotMeasure for what vLLM lacks."""
        for arm in (self.base, self.candidate):
            self._check_arm(arm)
        if self.base == self.candidate:
            raise UsageError(f"both arms are {self.base!r}: name two different arms.")
        self._check_idle()
        self._check_sizes()
        if not 0.0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise UsageError(
                f"--engine-timeout is {self.timeout_s:g}: use seconds above 0, up to "
                f"{MAX_TIMEOUT_S:.0f}."
            )
        self._check_fault()
        self.scenario  # noqa: B018 - raises for one that cannot be used

    def _check_idle(self) -> None:
        if "sparse" in str(self.idle.get("--model", "")):
            raise CannotMeasure(
                f"--model is {self.idle['--model']!r} with --target engine: the engine's "
                "checkpoint has dense latent attention, and vLLM's CPU platform has no sparse one: "
                "leave it out."
            )
        for flag, value in self.idle.items():
            raise UsageError(
                f"{flag} is {value!r} with --target engine: whole engines run one checkpoint, each "
                "from its own tokens, and take no such setting: leave it out."
            )

    def _check_sizes(self) -> None:
        if self.pcp > 1 and self.dcp > 1:
            raise CannotMeasure(
                f"--pcp {self.pcp} with --dcp {self.dcp} cannot run with --target engine: vLLM has "
                "both together for sparse attention only, and the engine's checkpoint is dense: "
                "use --dcp 1."
            )
        if self.pcp * self.tp > MAX_RANKS:
            raise UsageError(
                f"--pcp {self.pcp} --tp {self.tp} makes {self.pcp * self.tp} ranks: use at most "
                f"{MAX_RANKS}."
            )
        if self.pcp == 1 and self.tp == 1 and "reference" in (self.base, self.candidate):
            raise UsageError(
                "with --pcp 1 and --tp 1 the arm 'reference' is the arm 'eager': set --pcp above "
                "1, or compare eager with an arm of graphs."
            )

    def _check_fault(self) -> None:
        if self.inject is None:
            return
        if self.inject not in FAULTS:
            raise UsageError(
                f"--inject is {self.inject!r}: with --target engine use {' or '.join(FAULTS)}."
            )
        if self.pcp == 1:
            raise UsageError(
                f"--inject is {self.inject!r} with --pcp 1: these faults are in the PCP manager: "
                "set --pcp above 1."
            )

    def _check_arm(self, arm: str) -> None:
        if arm == "eager_padded":
            raise UsageError(
                "arm 'eager_padded' is none of --target engine: vLLM pads a batch only where it "
                f"replays a graph: use one of {', '.join(LADDER)}."
            )
        if arm not in LADDER:
            raise UsageError(f"arm {arm!r} is unknown: use one of {', '.join(LADDER)}.")

    @property
    def scenario(self) -> Scenario:
        """The prompts: those of the one scenario named, or a dozen short ones drawn by the seed."""
        if len(self.scenarios) > 1 or self.scenarios == ("all",):
            raise UsageError(
                f"--scenario is {', '.join(self.scenarios)} with --target engine: its engines run "
                "one load: name one scenario, or none."
            )
        if self.scenarios:
            found = load_scenario(self.scenarios[0])
            if self.max_num_seqs is None:
                return found
            limits = msgspec.structs.replace(found.limits, max_num_seqs=self.max_num_seqs)
            return msgspec.structs.replace(found, limits=limits)
        num_seqs = MAX_NUM_SEQS if self.max_num_seqs is None else self.max_num_seqs
        return task_scenario(
            NUM_PROMPTS, PROMPT_LEN, OUTPUT_LEN, seed=self.seed, max_num_seqs=num_seqs
        )

    @property
    def arms(self) -> tuple[EngineArm, ...]:
        """The ladder: one rank, all ranks eager, then graphs; those that nobody needs left out."""
        asked = {self.base, self.candidate}
        if self.pcp * self.tp > 1:
            asked.add("reference")
        if asked & set(GRAPHS):
            asked.add("eager")
        return tuple(self._arm(label, asked) for label in LADDER if label in asked)

    def _arm(self, label: str, asked: set[str]) -> EngineArm:
        alone = label == "reference"
        mode = ARM_MODES[label]
        twin = None if alone else "eager" if label in GRAPHS else "reference"
        return EngineArm(
            label=label,
            pcp=1 if alone else self.pcp,
            tp=1 if alone else self.tp,
            dcp=1 if alone else self.dcp,
            cudagraph_mode=mode.name,
            twin=twin if twin in asked else None,
            kind="padding" if label in GRAPHS else "partition",
            replays=tuple(
                name
                for name, held in (
                    ("FULL", mode.has_full_cudagraphs()),
                    ("PIECEWISE", mode.has_piecewise_cudagraphs()),
                )
                if held
            ),
        )


TAKEN: Final = ("target", "pcp", "tp", "dcp", "dtype", "capture_sizes", "max_num_seqs", "seed")
"""Options of an engine that whole engines take, too."""


def engine_request_of(
    request: Mapping[str, Any],
    options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    capture_sizes: tuple[int, ...] | None,
    repetitions: int,
) -> EngineRequest:
    """A `CompareRequest` for whole engines; options: its EngineOptions; defaults: plain ones."""
    idle = {
        name: value
        for name, value in options.items()
        if name not in TAKEN and value != defaults[name]
    }
    idle |= {"feed": request["feed"]} if request["feed"] != "teacher-forced" else {}
    idle |= {"check": request["checks"]} if request["checks"] != "quick" else {}
    for name in ("save_baseline", "baseline"):
        idle |= {name: str(request[name])} if request[name] is not None else {}
    timeout_s = request["engine_timeout"]
    return EngineRequest(
        **{name: request[name] for name in ("base", "candidate", "scenarios", "inject", "json")},
        **{name: options[name] for name in ("pcp", "tp", "dcp", "dtype", "max_num_seqs", "seed")},
        capture_sizes=capture_sizes,
        repetitions=repetitions,
        python=request["engine_python"],
        timeout_s=DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s,
        idle={f"--{name.replace('_', '-')}": value for name, value in idle.items()},
        out=request["out"],
    )
