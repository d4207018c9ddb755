"""The shape of a scenario file: frozen structs, the range of every value, the JSON Schema.

Owns what a scenario may say and how its entries expand into requests. Knows neither YAML (yaml_doc,
loader) nor what a scheduler makes of it. The arithmetic that ties several values together is in
`limits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pcpbench.plan import has_arrived

MAX_MODEL_LEN = 1 << 20
MAX_REQUESTS = 10_000
DEFAULT_STEP_TIME_S = 0.02


def _whole(low: int, high: int, description: str) -> Meta:
    rule = f"a whole number from {low} to {high}"
    return Meta(ge=low, le=high, description=description, extra={"rule": rule})


def _seconds(low: float, high: float, description: str) -> Meta:
    rule = f"a number of seconds from {low:g} to {high:g}"
    return Meta(ge=low, le=high, description=description, extra={"rule": rule})


def _text(max_length: int, description: str) -> Meta:
    rule = f"text of 1 to {max_length} characters (quote it if it looks like a number)"
    return Meta(min_length=1, max_length=max_length, description=description, extra={"rule": rule})


_SLUG = r"^[a-z0-9][a-z0-9.-]{0,63}$(?!\n)"
_SLUG_RULE = "at most 64 of a-z, 0-9, dot and hyphen, with a letter or digit first"
Slug = Annotated[str, Meta(pattern=_SLUG, extra={"rule": _SLUG_RULE})]
CoverId = Annotated[
    str,
    Meta(
        pattern=r"^[SK][0-9]{1,2}$(?!\n)",
        extra={"rule": "the id of a sequence or of a fault class, such as S1 or K03"},
    ),
]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the scheduler and the size of the KV cache."""

    max_num_seqs: Annotated[int, _whole(1, 4096, "Most requests in one step.")] = 16
    max_num_batched_tokens: Annotated[
        int, _whole(1, 1 << 17, "Most tokens in one step; at least max_num_seqs.")
    ] = 64
    max_model_len: Annotated[
        int, _whole(2, MAX_MODEL_LEN, "Most tokens of one request, prompt and output together.")
    ] = 256
    block_size: Annotated[
        int, _whole(1, 1024, "Token positions of one KV block on one rank (times dcp in a plan).")
    ] = 16
    num_blocks: Annotated[
        int, _whole(2, 1 << 22, "KV blocks of the pool, the null block 0 among them.")
    ] = 257


class RequestEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request, or `count` equal ones."""

    prompt_len: Annotated[int, _whole(1, MAX_MODEL_LEN, "Tokens of the prompt.")]
    output_len: Annotated[
        int, _whole(1, MAX_MODEL_LEN, "Tokens to generate; the last one is never fed back.")
    ]
    at_step: (
        Annotated[
            int, _whole(0, 1_000_000, "Arrival in nominal steps of the scenario; 0 is the start.")
        ]
        | None
    ) = None
    at_s: (
        Annotated[
            float,
            _seconds(0.0, 1e7, "Arrival in seconds of the scenario's clock, instead of at_step."),
        ]
        | None
    ) = None
    count: Annotated[int, _whole(1, MAX_REQUESTS, "How many requests this entry stands for.")] = 1
    name: (
        Annotated[Slug, Meta(description="Name of the request; r<its position> if left out.")]
        | None
    ) = None
    prompt_seed: (
        Annotated[int, _whole(0, (1 << 31) - 1, "Requests with equal seeds have the same prompt.")]
        | None
    ) = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scenario: who arrives when, with how many tokens, and under which limits."""

    name: Annotated[Slug, Meta(description="Name of the scenario, as printed in reports.")]
    description: Annotated[str, _text(2000, "What the scenario does, in a sentence or two.")]
    requests: Annotated[
        tuple[RequestEntry, ...],
        Meta(min_length=1, max_length=MAX_REQUESTS, description="Requests, in order of admission."),
    ]
    covers: Annotated[
        tuple[CoverId, ...],
        Meta(description="Sequences (S..) and fault classes (K..) that the scenario triggers."),
    ] = ()
    core: Annotated[
        bool,
        Meta(
            description="Whether a comparison that names no scenario runs this shipped one.",
            extra={"rule": "true or false"},
        ),
    ] = False
    source: Annotated[str, Meta(max_length=2000, description="Where the lengths come from.")] = ""
    limits: Limits = Limits()
    step_time_s: Annotated[
        float, _seconds(1e-6, 3600.0, "Nominal seconds of one step: turns at_s into steps.")
    ] = DEFAULT_STEP_TIME_S
    max_idle_steps: Annotated[
        int, _whole(0, 64, "Dummy steps run in one gap before the clock jumps to the next arrival.")
    ] = 2

    @property
    def num_requests(self) -> int:
        """Requests after `count` is written out."""
        return sum(entry.count for entry in self.requests)

    def expand(self) -> list[RequestSpec]:
        """One RequestSpec a request, in the order of the file (not yet of arrival)."""
        specs = []
        for position, entry in enumerate(self.requests):
            name = entry.name or f"r{position}"
            arrival_step, arrival_s = self._arrival(entry)
            for copy in range(entry.count):
                req_id = name if entry.count == 1 else f"{name}.{copy}"
                specs.append(
                    RequestSpec(
                        req_id=req_id,
                        prompt_len=entry.prompt_len,
                        output_len=entry.output_len,
                        arrival_step=arrival_step,
                        arrival_s=arrival_s,
                        prompt_key=req_id
                        if entry.prompt_seed is None
                        else f"seed {entry.prompt_seed}",
                    )
                )
        return specs

    def _arrival(self, entry: RequestEntry) -> tuple[int, float]:
        """Step and second of an arrival.

        at_s 0.05 with step_time_s 0.02 is seen by step 3 (it starts at 0.06 s), the first step
        that does not start before it.
        """
        if entry.at_s is None:
            step = entry.at_step or 0
            return step, step * self.step_time_s
        # The quotient is a step off at most, as 0.14 / 0.02 = 7.000000000000001 is.
        step = max(0, ceil(entry.at_s / self.step_time_s) - 1)
        while not has_arrived(entry.at_s, step * self.step_time_s):
            step += 1
        return step, entry.at_s


@dataclass(frozen=True)
class RequestSpec:
    """One request of a scenario, written out.

    arrival_step: the first nominal step that can see it. arrival_s: the same on the scenario's
    clock, unrounded. prompt_key: requests with equal keys have the same prompt (a shorter one is
    the beginning of a longer one).
    """

    req_id: str
    prompt_len: int
    output_len: int
    arrival_step: int
    arrival_s: float
    prompt_key: str


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a scenario file, for editors and other tools."""
    return msgspec.json.schema(Scenario)
