"""`pcpbench modes` as it was asked: frozen, and checked before any engine exists. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pcpbench.engine_options import EngineOptions
from pcpbench.errors import UsageError
from pcpbench.model.presets import model_shape
from pcpbench.request import CHECKS, FEEDS
from pcpbench.scenarios.schema import Scenario
from pcpbench.scenarios.task_run import Span, task_scenario

MAX_REPETITIONS = 100


class ModesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One task run in four graph modes.

    prompt_len, output_len: lengths in tokens, `16` or `8-32`. inject: a fault of the catalogue to
    plant, by name.
    """

    options: EngineOptions
    num_prompts: int = 200
    prompt_len: str = "8-32"
    output_len: str = "4-16"
    feed: str = "free-running"
    repetitions: int = 2
    checks: str = "quick"
    inject: str | None = None
    json: bool = False
    out: Path | None = None

    def check(self) -> None:
        """Raise UsageError for what could not be run whatever the machine is."""
        for flag, value, allowed in (
            ("--feed", self.feed, FEEDS),
            ("--check", self.checks, CHECKS),
        ):
            if value not in allowed:
                raise UsageError(f"{flag} is {value!r}: use one of {', '.join(allowed)}.")
        if not 0 <= self.repetitions <= MAX_REPETITIONS:
            raise UsageError(
                f"--repetitions is {self.repetitions}: use 1 to {MAX_REPETITIONS}, or 0 to judge "
                "without timing."
            )
        self.options.check()
        self.scenario  # noqa: B018 - raises for lengths that cannot be run

    @property
    def scenario(self) -> Scenario:
        """The prompts."""
        return task_scenario(
            self.num_prompts,
            Span.parse("--prompt-len", self.prompt_len),
            Span.parse("--output-len", self.output_len),
            seed=self.options.seed,
            max_num_seqs=self.options.max_num_seqs,
            dcp_size=self.options.dcp,
            kv_groups=model_shape(self.options.preset).kv_groups,
            num_draft_tokens=2 * self.options.spec_tokens,  # verified, and drafted behind them
        )
