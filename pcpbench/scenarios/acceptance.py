"""How many draft tokens a request's verification accepts, drawn from names alone (SPEC 10).

Owns the draw: equal on every machine, for every arm and world, and whatever step or preemption a
request has behind it. Knows no model: the drafts are made to fit.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

import numpy as np

HIT_RATE: Final = 0.7
"""Chance that a draft is right, given that all before it are."""


def num_accepted(
    scenario: str, req_id: str, num_output_tokens: int, num_draft_tokens: int, seed: int = 0
) -> int:
    """Draft tokens accepted by the step that begins behind `num_output_tokens` outputs.

    0 to num_draft_tokens; one draw a draft, the first miss ends it. With three drafts and a hit
    rate of 0.7 that is 0, 1, 2, 3 in 30, 21, 15 and 34 of 100 steps.
    """
    entropy = [seed, crc32(scenario.encode()), crc32(req_id.encode()), num_output_tokens]
    raw = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_draft_tokens)
    misses = np.flatnonzero(np.asarray(raw, dtype=np.uint64) >= HIT_RATE * 2.0**64)
    return int(misses[0]) if len(misses) else num_draft_tokens
